"""An encoder-decoder with a draft model that agrees with it as often as it is told, beside plain decoding.

    python -m benchmarks.shapes t5-large INT8 --format int8 --draft t5-small --context 512
    python -m benchmarks.shapes whisper-medium INT8 --format int8 --draft distil-medium --context 448
    python -m benchmarks.told_drafts INT8 [INT4 ...] [--agreement .7,.8,.9] [--source 128] [--new 96] [--repeats 7]

Weights are random, so the draft's steps run and their result is replaced: by the model's own next token with the
probability that is asked for, else by another one.  Everything else is what a request does: control decides how many
guesses there are, by passes that it times.  The figures are of the decoder; ``whole`` is of a request with the encoders
and the memories of both models; a draft whose encoder is the target's does not run one.  ``formula`` is the speed that
c, v and the agreement give at the best number of guesses (``formulas.cost.speedup``), ``share`` what was reached of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.common import conditions, ratio, show
from benchmarks.planes import LONGEST, ROWS, known_costs, write
from edgespec.control.adaptive import Adaptive
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Pass
from edgespec.drafters.plain import Plain
from edgespec.drafters.speculative import Speculative
from edgespec.engine.encoding import Encoding, Source
from edgespec.formulas.cost import CostModel, speedup
from edgespec.runtimes.audio.features import encoder_rows
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import SourcePart
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_draft, open_slot, open_target
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Ids, Slot


class Told(NativeSlot):
    """A draft's slot whose likeliest tokens are those of a text, each with a given probability."""

    text: list[int]
    agreement = 1.0

    def __init__(self, model: Model) -> None:
        super().__init__(model, reserve=512)
        self.random = np.random.default_rng(1)

    def forward_best(self, tokens: Ids, parents: Ids | None = None) -> Pass:
        found = super().forward_best(tokens, parents)
        assert found.best is not None
        at = len(self.tokens) + len(tokens)
        known = self.text[at] if at < len(self.text) else 0
        wrong = self.random.random() >= self.agreement
        found.best[0][-1] = (known + wrong) % self.model.facts.vocab
        return found


@dataclass
class Runs:
    """What takes turns: plain decoding, and a draft at each agreement.

    Attributes:
        target: slot that all use.
        draft: likewise.
        control: by agreement; it keeps what it learned.
        begin: tokens that a text begins with.
        told: plain decoding's text.
    """

    target: Slot
    draft: Told
    control: dict[str, Adaptive]
    begin: list[int]
    told: list[int]
    ms: dict[str, list[float]] = field(default_factory=dict)  # a token, of each turn
    counts: dict[str, list[Stats]] = field(default_factory=dict)
    passes: dict[int, list[float]] = field(default_factory=dict)  # by rows; 0 = a draft step

    @classmethod
    def over(cls, target: Slot, draft: Told, agreements: list[str], begin: list[int], new: int) -> Runs:
        """Decode a text, time passes, and make what is to be compared."""
        told = write(target, Plain, begin, new)[0]
        draft.text = [*begin, *told]
        found = cls(target, draft, {}, begin, told)
        timed = found.timed()
        for text in agreements:
            drafter = Speculative(draft, target.vocab_size)
            found.control[text] = Adaptive(drafter, known_costs(timed), LONGEST, prior=float(text))
        return found

    def turn(self, keep: bool) -> None:
        """Let each write the text once."""
        makers: dict[str, Callable[[], Drafter]] = {"plain": Plain}
        makers |= {name: (lambda control=control: control) for name, control in self.control.items()}  # type: ignore[misc]
        for name, make in makers.items():
            self.draft.agreement = 0.0 if name == "plain" else float(name)
            self.draft.follow([])
            tokens, stats = write(self.target, make, self.begin, len(self.told))
            if tokens != self.told:
                raise SystemExit(f"{name}: another text than plain decoding's")
            if keep:
                self.ms.setdefault(name, []).append(stats.decode_ms / stats.tokens)
                self.counts.setdefault(name, []).append(stats)
        for rows, ms in self.timed().items():
            self.passes.setdefault(rows, []).extend(ms)

    def timed(self, repeats: int = 3) -> dict[int, list[float]]:
        """Milliseconds of passes by rows, where the slots are; 0 = a draft step."""
        found: dict[int, list[float]] = {rows: [] for rows in (0, *ROWS)}
        for _ in range(repeats):
            for rows in found:
                start = perf_counter()
                if rows:
                    self.target.forward_best(np.arange(rows))  # type: ignore[attr-defined]
                else:
                    self.draft.forward_best(np.zeros(1, np.int64))
                found[rows].append(1000 * (perf_counter() - start))
        return found

    def figures(self, reading: Mapping[str, float]) -> dict[str, Any]:
        """Give what was measured; ``reading``: milliseconds of ``target`` and ``draft`` to read the source."""
        one = median(self.passes[1])
        c, v = median(self.passes[0]) / one, {rows: median(self.passes[rows]) / one for rows in ROWS}
        curve, tokens = CostModel(v, c).v, len(self.told)
        found: dict[str, Any] = {}
        whole = {name: [reading["target"] + reading["draft"] * (name != "plain") + tokens * each for each in ms]
                 for name, ms in self.ms.items()}  # fmt: skip
        for name, ms in self.ms.items():
            found[name] = {"ms_per_token": round(median(ms), 2), "whole_ms": round(median(whole[name]), 1)}
            if name == "plain":
                continue
            gain, counts = ratio(self.ms["plain"], ms), self.counts[name]
            found[name] |= {"speedup": gain, "whole": ratio(whole["plain"], whole[name])}
            if not (offered := sum(sum(stats.offered) for stats in counts)):
                continue
            agreement = sum(stats.accepted for stats in counts) / offered
            best = max(speedup(agreement, guesses, c, curve) for guesses in range(1, LONGEST + 1))
            guessed = sum(stats.drafted for stats in counts) / sum(stats.rounds for stats in counts)
            found[name] |= {
                "agreement": round(agreement, 3),
                "formula": round(best, 3),
                "share": round(gain["ratio"] / best, 3),
                "guesses_per_round": round(guessed, 2),
            }
        return {"c": round(c, 3), "v": {str(rows): round(share, 3) for rows, share in v.items()},
                "reading_ms": {name: round(ms, 1) for name, ms in reading.items()}, "runs": found}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--agreement", default=".7,.8,.9", help="probabilities, by commas")
    parser.add_argument("--source", type=int, default=128, help="tokens of the source; sound is 30 s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    options = LoadOptions(threads=arguments.threads, operators="native", budget="off")
    every: dict[str, Runs] = {}
    reading: dict[str, dict[str, float]] = {}
    for path in arguments.bundles:
        bundle = Bundle.open(path, check=False)
        part = bundle.manifest.target
        if part.source is None or bundle.manifest.draft is None:
            parser.error(f"{path}: expected an encoder-decoder with a draft model")
        operators = choose_operators("native", part)
        graph, source = operators.graph(part, True), made_source(part.source, arguments.source)
        target = open_slot(open_target(bundle, "cpu", None, graph, True, arguments.threads, None), reserve=512)
        draft = Told(open_draft(bundle, "draft", options, operators))
        encoding = Encoding(bundle, arguments.threads)
        reading[part.format] = read(encoding, {"target": target, "draft": draft}, source, arguments.repeats)
        every[part.format] = Runs.over(target, draft, arguments.agreement.split(","), list(source.begin), arguments.new)
    for turn in range(1 + arguments.repeats):
        for name in list(every)[:: 1 if turn % 2 else -1]:
            every[name].turn(keep=turn > 0)
    shown = conditions(threads=arguments.threads, new_tokens=arguments.new, source=arguments.source, imposed=True)
    show(shown | {name: runs.figures(reading[name]) for name, runs in every.items()})


def made_source(part: SourcePart, length: int) -> Source:
    """Make a random source of so many tokens, or of a whole window of sound."""
    random, told = np.random.default_rng(0), part.features
    if told is None:
        return Source.of(random.integers(3, 5000, length), [0])
    return Source.of(encoder_rows(random.standard_normal((told.frames, told.bands), np.float32), told), [0])


def read(encoding: Encoding, slots: Mapping[str, Slot], source: Source, repeats: int) -> dict[str, float]:
    """Let both slots attend over the source -> the usual milliseconds of an encoder and its memory, of each."""
    times: dict[str, list[float]] = {name: [] for name in slots}
    for number in range(repeats, -1, -1):
        other = Source.of(np.roll(source.content, number), source.begin)  # the last one is the source itself
        for name, slot in slots.items():
            start = perf_counter()
            encoding.attend(name, slot, other)
            times[name].append(1000 * (perf_counter() - start))
    return {name: median(ms[1:]) for name, ms in times.items()}


if __name__ == "__main__":
    main()
