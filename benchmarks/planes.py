"""Self-speculation by the high planes of int8, beside plain int8 and int4, and what the cost formula gives.

    python -m benchmarks.planes INT8 [--int4 INT4] [--agreement .9,.95,.97] [--head-rows 32768] [--new 96] [--repeats 7]

Without ``--agreement`` the bundle guesses by itself.  With it a guess is the model's own next token with that
probability, else another one, so that bundles of random weights (``benchmarks.shapes``) can be timed: the draft steps
run all the same, and the figures say ``imposed``.  All runs take turns, and passes are timed between them.

``formula`` is the speed that c, v and the measured agreement give at the best number of guesses
(``formulas.cost.speedup``), and ``share`` what was reached of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.common import conditions, ratio, show
from edgespec.control.adaptive import Adaptive
from edgespec.decoding.drafter import Drafter, Proposal
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import SkipSet
from edgespec.drafters.draw import Weak
from edgespec.drafters.plain import Plain
from edgespec.drafters.self_spec import SelfSpec, known_confidence, skip_set
from edgespec.engine.engine import Engine
from edgespec.formulas.confidence import Confidence
from edgespec.formulas.cost import ENOUGH, CostModel, speedup
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import MethodPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.slots.slot import Slot

ROWS = (1, 2, 3, 4, 5, 6, 8)
LONGEST = 8
PROMPT = "1. The harbour was quiet, and the people of the town"


class Imposed(SelfSpec):
    """Runs its draft steps, and guesses what it is told: tokens of a known text, each with a given probability."""

    def __init__(self, target: Slot, skip: SkipSet, text: list[int], agreement: float) -> None:
        super().__init__(target, skip, Confidence([agreement] * 8, agreement))
        self.text, self.agreement, self.random = text, agreement, np.random.default_rng(1)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        found = super().propose(tokens, budget)
        right = self.random.random(len(found)) < self.agreement
        known = np.array(self.text[len(tokens) : len(tokens) + len(found)], np.int64)
        found.tokens[: len(known)] = np.where(right[: len(known)], known, (known + 1) % self.vocab)
        return found

    def _weak(self) -> Weak | None:
        """Be equally sure of all guesses."""
        weak = super()._weak()
        return None if weak is None else lambda probability: weak(0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("int8", type=Path)
    parser.add_argument("--int4", type=Path, help="the same model or shape in int4")
    parser.add_argument("--agreement", help="imposed: probabilities, by commas")
    parser.add_argument("--head-rows", type=int, help="tokens that the draft's LM head scores; 0 = all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    options = LoadOptions(threads=arguments.threads, operators="native", budget="off")
    engine = Engine(Bundle.open(arguments.int8, check=False), options)
    slot = open_slot(engine.model, reserve=512)
    if not slot.planes:
        parser.error(f"{arguments.int8}: expected int8 in two planes, got {engine.bundle.manifest.target.format}")
    prompt = [token % slot.vocab_size for token in engine.codec.encode(PROMPT)]
    part = engine.bundle.manifest.methods.get("self-spec", MethodPart())
    skip = skip_set(part.skip) if part.skip else SkipSet.all_high(slot.layers)
    skip = replace(skip, head_rows=skip.head_rows if arguments.head_rows is None else arguments.head_rows)
    told = write(slot, Plain, prompt, arguments.new)[0]
    drafters: dict[str, Callable[[], Drafter]] = {"own": lambda: SelfSpec(slot, skip, known_confidence(part))}
    if arguments.agreement:
        drafters = {
            text: partial(Imposed, slot, skip, [*prompt, *told], float(text)) for text in arguments.agreement.split(",")
        }
    runs: dict[str, tuple[Slot, Callable[[], Drafter]]] = {"int8": (slot, Plain)}
    costs = _costs(slot, skip)
    for name, make in drafters.items():
        control = Adaptive(make(), costs, LONGEST, prior=float(name) if arguments.agreement else 0.8)
        runs[name] = slot, lambda control=control: control  # type: ignore[misc]  # it keeps what it learned
    if arguments.int4:
        other = Engine(Bundle.open(arguments.int4, check=False), options)
        runs["int4"] = open_slot(other.model, reserve=512), Plain
    figures = _measured(runs, slot, skip, prompt, told, arguments)
    how = {"imposed": bool(arguments.agreement), "head_rows": skip.head_rows}
    show(conditions(threads=arguments.threads, new_tokens=arguments.new, **how) | figures)


def _measured(
    runs: dict[str, tuple[Slot, Callable[[], Drafter]]],
    slot: Slot,
    skip: SkipSet,
    prompt: list[int],
    told: list[int],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Let all runs take turns, and passes of each size with them -> figures by run, c and v."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    counts: dict[str, list[Stats]] = {name: [] for name in runs}
    passes: dict[int, list[float]] = {rows: [] for rows in (0, *ROWS)}  # 0 = a draft step
    for turn in range(1 + arguments.repeats):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            target, make = runs[name]
            tokens, stats = write(target, make, prompt, arguments.new)
            if name != "int4" and tokens != told:
                raise SystemExit(f"{name}: another text than plain decoding's")
            if turn:
                times[name].append(stats.decode_ms / stats.tokens)
                counts[name].append(stats)
        for rows, ms in _passes(slot, skip).items():
            passes[rows] += ms
    one = median(passes[1])
    c, v = median(passes[0]) / one, {rows: median(passes[rows]) / one for rows in ROWS}
    curve = CostModel(v, c).v
    found: dict[str, Any] = {}
    for name, ms in times.items():
        found[name] = {"ms_per_token": round(median(ms), 2), "speedup": ratio(times["int8"], ms)}
        drafted = sum(stats.drafted for stats in counts[name])
        if drafted:
            accepted, offered = (sum(s.accepted for s in counts[name]), sum(sum(s.offered) for s in counts[name]))
            best = max(speedup(accepted / offered, guesses, c, curve) for guesses in range(1, LONGEST + 1))
            found[name] |= {
                "agreement": round(accepted / offered, 3),
                "formula": round(best, 3),
                "share": round(found[name]["speedup"]["ratio"] / best, 3),
                "guesses_per_round": round(drafted / sum(stats.rounds for stats in counts[name]), 2),
            }
    return {"c": round(c, 3), "v": {str(rows): round(share, 3) for rows, share in v.items()}, "runs": found}


def write(slot: Slot, make: Callable[[], Drafter], prompt: list[int], new: int) -> tuple[list[int], Stats]:
    """Decode greedily -> the text and its statistics."""
    stats = Stats()
    slot.follow([])
    rounds = list(decode(slot, make(), prompt, DecodeOptions(new, LONGEST), stats))
    if stats.dropped_reason:
        raise SystemExit(str(stats.dropped_reason))
    return [token for one in rounds for token in one.tokens], stats


def _passes(slot: Slot, skip: SkipSet, repeats: int = 3) -> dict[int, list[float]]:
    """Milliseconds of passes by rows, where the slot is; 0 = a draft step."""
    found: dict[int, list[float]] = {rows: [] for rows in (0, *ROWS)}
    for _ in range(repeats):
        for rows in found:
            start = perf_counter()
            if rows:
                slot.forward_best(np.arange(rows))  # type: ignore[attr-defined]
            else:
                slot.forward_skipped(np.zeros(1, np.int64), 0, skip)
            found[rows].append(1000 * (perf_counter() - start))
    return found


def _costs(slot: Slot, skip: SkipSet) -> CostModel:
    """Begin control with passes timed here, as a session does."""
    slot.prefill([0] * 16)
    return known_costs(_passes(slot, skip))


def known_costs(timed: Mapping[int, Sequence[float]]) -> CostModel:
    """Know what passes and draft steps (0 rows) take, from milliseconds."""
    costs = CostModel()
    for rows, ms in timed.items():
        for one in ms:
            if rows:
                costs.observe_verify(rows, one)
            else:
                costs.observe_draft(1, one, ENOUGH // len(ms))
    return costs


if __name__ == "__main__":
    main()
