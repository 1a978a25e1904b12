"""Which drafter gains how much on a CPU: costs that are measured, acceptance that is published.

    python -m benchmarks.which_drafter --model qwen3-4b [--draft qwen3-0.6b] [--folder BUILT] [--threads 2]

The weights are random: passes of the target and of each kind of drafter are timed in the shape of a real model, int4,
LM heads of drafters int8 and cut to 32,768 rows, as exports cut them.  Acceptance by position is imposed from published
figures (``DSPARK_PAPER``), and a round with n guesses is

    tokens = 1 + a1 + a1 a2 + ...,  milliseconds = verifying pass of n + 1 rows + drafting n

``best`` is the number of guesses that is fastest.  ``control`` is what the loop reaches with adaptive control: it
writes a text with guesses that are right that often, for which a drafter's passes run.  ``--folder`` keeps what is
built, so that a second run only measures.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import alternate, conditions, show
from benchmarks.drafter_cost import DEPTH, SHAPES, Measured, described, roof
from benchmarks.planes import write
from edgespec.control.adaptive import Adaptive
from edgespec.decoding.drafter import AUX_HIDDEN, Drafter, Proposal
from edgespec.decoding.stats import Stats
from edgespec.drafters.plain import Plain
from edgespec.export.architectures import Architecture
from edgespec.export.drafters.dflash import assumed_blocks
from edgespec.export.drafters.dspark import DSpark
from edgespec.export.drafters.heads import MARKOV_OUT, MARKOV_TOKENS, HeadPlan
from edgespec.export.drafters.mtp import mtp_of
from edgespec.export.measuring.planned_heads import assumed_drafter
from edgespec.export.source.source import ConfigOnly
from edgespec.formulas.cost import CostModel
from edgespec.runtimes.files.manifest import MARKOV, HeadGroup
from edgespec.runtimes.slots.slot import Slot

HEAD, MOST, RANK, OWED = 32768, 7, 256, 3
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 22)
# DSpark's paper (arXiv 2607.05147), Table 1, Qwen3-4B, temperature 1, chains of 7: tokens a round on mathematics (mean
# of GSM8K, MATH500, AIME25), code (MBPP, HumanEval, LiveCodeBench) and chat (MT-bench, Alpaca, Arena-Hard)
DSPARK_PAPER = {
    "eagle": {"math": 4.56, "code": 3.87, "chat": 2.40},
    "dflash": {"math": 4.80, "code": 4.44, "chat": 2.95},
    "dspark": {"math": 5.57, "code": 5.12, "chat": 3.49},
}
# the same paper, section 4.3: the chance of the first guess, where its text says it; else all are the same
FIRST = {
    ("eagle", "math"): 0.81, ("eagle", "chat"): 0.53, ("dflash", "math"): 0.88, ("dflash", "chat"): 0.72,
    ("dspark", "math"): 0.88, ("dspark", "chat"): 0.72,
}  # fmt: skip
# llama.cpp's and vLLM's threads on Qwen3.6's own layer: 83 to 88 % of guesses
MTP = 0.85
# two candidates along the first choices, and a tree by depth, of EAGLE-3 on stories260K (docs/dev/measurements.md):
# tokens a round beside those of the chain as deep
TREES = {"branch=2, 4 deep": (9, 4, 3.02 / 2.69), "branch=3,2,1,1": (22, 4, 3.26 / 2.69)}  # rows, depth, tokens
Times = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b", choices=SHAPES)
    parser.add_argument("--draft", choices=SHAPES, help="a draft model of this shape, too")
    parser.add_argument("--folder", type=Path, help="keeps what is built")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9, help="turns; 0 = only build")
    parser.add_argument("--new", type=int, default=64, help="tokens that control writes")
    parser.add_argument("--repeats", type=int, default=2, help="of that; 0 = without")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        measured = Measured(folder, asked.threads)
        slot = _target(measured, asked.model)
        _heads(measured, asked.model)
        if asked.draft:
            _draft(measured, asked.draft)
        if not asked.pairs:
            return
        roofs = [roof(asked.threads)]
        times = {name: median(ms) for name, ms in alternate(measured.runs, asked.pairs, warm=1).items()}
        roofs.append(roof(asked.threads))
        control = controlled(slot, measured.runs, times, asked.new, asked.repeats) if asked.repeats else {}
    said = conditions(model=asked.model, draft=asked.draft, format="int4", depth=DEPTH, threads=asked.threads)
    passes = {name: {"ms": round(ms, 2), "mb": round(measured.bytes[name] / 1e6, 1)} for name, ms in times.items()}
    show(
        said
        | {
            "bandwidth_gb_s": [round(each, 1) for each in roofs],
            "passes": passes,
            "speed": speeds(times),
            "control": control,
        }
    )


# -- passes ------------------------------------------------------------------------------------------------------------


def _opened(measured: Measured, name: str, arch: Architecture, plan: HeadPlan, rows: int | None) -> tuple[Slot, int]:
    slot, sizes = measured.opened(name, arch, plan, rows)
    return slot, sum(sizes.values())


def _target(measured: Measured, model: str) -> Slot:
    """Add verifying passes: plain, and with hidden states taken."""
    arch = described(measured.folder, model)
    slot, size = _opened(measured, "target", arch, HeadPlan(tapped=assumed_drafter(arch)[1]), None)

    def verify(rows: int) -> None:
        slot.keep_aux_hidden = rows > 1
        slot.forward_best(np.arange(rows) + 100)  # type: ignore[attr-defined]

    for rows in ROWS:
        measured.add(f"target {rows}", size, partial(verify, rows))
    return slot


def _heads(measured: Measured, model: str) -> None:
    """Add passes of drafters over hidden states."""

    def target() -> Architecture:
        return described(measured.folder, model)

    chains = {"eagle": assumed_drafter(target())[0], "mtp": mtp_of(target(), ConfigOnly(measured.folder, {}))}
    for kind, arch in chains.items():
        slot, size = _opened(measured, kind, arch, HeadPlan(), HEAD)
        given = np.ones((OWED, arch.input_width), np.float32)
        measured.add(f"{kind} first", size, partial(slot.forward_inputs, given, False, True))
        measured.add(f"{kind} step", size, partial(slot.forward_inputs, given[:1], True, True))
    arch, _ = assumed_blocks(DSpark, target(), {"block_size": MOST, "markov_rank": RANK})
    arch.beside = (HeadGroup(name=MARKOV, kind="markov", count=1, inner=RANK, own=True),)
    arch.scored, vocab = (MARKOV_OUT,), arch.facts.vocab
    extra = {MARKOV_TOKENS: (vocab, RANK), MARKOV_OUT: (HEAD, RANK)}
    slot, sizes = measured.opened("dspark", arch, HeadPlan(arch.beside, cut=True, only=True), HEAD, extra)
    given = np.ones((MOST + 1, arch.input_width), np.float32)

    def entries() -> None:
        slot.absorb_inputs(given[:OWED])
        del slot.tokens[DEPTH:]

    size = sum(sizes.values())
    measured.add("block entries", size, entries)
    measured.add("dspark block", size, partial(slot.forward_block, given[:MOST], False))
    measured.add("dspark correct", HEAD * RANK, partial(slot.forward_markov, np.array([5])))
    for rows in range(2, MOST + 2):
        measured.add(f"dflash block {rows}", size, partial(slot.forward_block, given[:rows], True))


def _draft(measured: Measured, model: str) -> None:
    """Add a step of a draft model."""
    slot, size = _opened(measured, "draft", described(measured.folder, model), HeadPlan(), HEAD)

    def step() -> None:
        slot.forward_best(np.array([5]))  # type: ignore[attr-defined]

    measured.add("draft step", size, step)


# -- rounds ------------------------------------------------------------------------------------------------------------


def chances(first: float | None, tokens: float) -> list[float]:
    """Chances of guesses 1 to ``MOST``, each after right ones, which give so many tokens a round.

    The first is given, and the others follow each other by one ratio; or all are the same.
    """
    low, high = 0.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        found = [min(0.99, first * middle**at) for at in range(MOST)] if first else [min(0.99, middle)] * MOST
        low, high = (middle, high) if expected(found, MOST) < tokens else (low, middle)
    return found


def expected(found: list[float], guesses: int) -> float:
    """Tokens of a round with so many guesses."""
    return 1 + sum(itertools.accumulate(found[:guesses], lambda a, b: a * b))


def verified_ms(times: Times, rows: int) -> float:
    """Milliseconds of a verifying pass; between two row counts that were measured, by a line."""
    known = [int(name.split()[1]) for name in times if name.startswith("target ")]
    return float(np.interp(rows, known, [times[f"target {each}"] for each in known]))


def drafting(kind: str, guesses: int) -> list[str]:
    """Name the passes that draft so many guesses."""
    if kind == "draft":
        return ["draft step"] * (guesses + 1)  # it also reads its own last guess
    if kind == "dflash":
        return ["block entries", f"dflash block {guesses + 1}"]
    if kind == "dspark":
        return ["block entries", "dspark block", *["dspark correct"] * guesses]
    return [f"{kind} first", *[f"{kind} step"] * (guesses - 1)]


def drafting_ms(times: Times, kind: str, guesses: int) -> float:
    """Milliseconds of drafting so many guesses."""
    return sum(times[name] for name in drafting(kind, guesses))


def imposed(times: Mapping[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Kind and text -> the chance of each guess, of the kinds that were timed."""
    found = {(kind, text): chances(FIRST.get((kind, text)), tokens)
             for kind, texts in DSPARK_PAPER.items() for text, tokens in texts.items()}  # fmt: skip
    found["mtp", "all"] = [MTP] * MOST
    if "draft step" in times:
        found |= {("draft", f"{each:.1f} each"): [each] * MOST for each in (0.6, 0.7, 0.8)}
    return found


def speeds(times: Times) -> dict[str, Any]:
    """Kind and text -> speed over plain decoding at 3 and 7 guesses and at the best number, and of trees."""
    plain, every = times["target 1"], imposed(times)
    found: dict[str, Any] = {}
    for (kind, text), each in every.items():

        def speed(n: int, kind: str = kind, each: list[float] = each) -> float:
            return round(expected(each, n) * plain / (drafting_ms(times, kind, n) + verified_ms(times, n + 1)), 2)

        best = max(range(1, MOST + 1), key=speed)
        found[f"{kind}, {text}"] = {
            "tokens_of_7": round(expected(each, MOST), 2),
            "chances": [round(a, 2) for a in each],
            "guesses_3": speed(3),
            "guesses_7": speed(MOST),
            "best": best,
            "best_speed": speed(best),
        }
    for name, (rows, depth, more) in TREES.items():
        for text in ("math", "chat"):
            tokens = expected(every["eagle", text], depth) * more
            ms = drafting_ms(times, "eagle", depth) + verified_ms(times, rows)
            found[f"eagle, {name}, {text}"] = {"tokens": round(tokens, 2), "speed": round(tokens * plain / ms, 2)}
    return found


# -- control -----------------------------------------------------------------------------------------------------------


class Told(Drafter):
    """Runs a drafter's passes and offers the text that plain decoding writes, each guess right with its chance."""

    wants = AUX_HIDDEN

    def __init__(self, kind: str, runs: Mapping[str, Callable[[], None]], found: list[float], text: list[int]) -> None:
        self.name, self.steps_at_once = kind, kind in ("dflash", "dspark")
        self.runs, self.chances, self.text, self.random = runs, found, text, np.random.default_rng(1)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        guesses = self.text[len(tokens) : len(tokens) + min(budget, MOST)]
        for name in drafting(self.name, len(guesses)) if guesses else ():
            self.runs[name]()
        right = np.logical_and.accumulate(self.random.random(len(guesses)) < self.chances[: len(guesses)])
        return Proposal(np.where(right, guesses, 7).astype(np.int64))


def controlled(
    slot: Slot, runs: Mapping[str, Callable[[], None]], times: Times, new: int, repeats: int
) -> dict[str, Any]:
    """Give the speed over plain decoding that control reaches, which is told what passes cost, and tokens a round."""
    begin = list(range(100, 116))
    text = [*begin, *write(slot, Plain, begin, new)[0]]
    curve = {rows: verified_ms(times, rows) for rows in range(1, MOST + 2)}
    control: dict[str, Drafter] = {"plain": Plain()}
    for (kind, of), found in imposed(times).items():
        steps = [drafting_ms(times, kind, guesses) / times["target 1"] for guesses in (1, 2)]
        told = Told(kind, runs, found, text)
        costs = CostModel(curve, steps[0] if told.steps_at_once else steps[1] - steps[0], steps[0])
        control[f"{kind}, {of}"] = Adaptive(told, costs, MOST, prior=found[0])
    seen: dict[str, list[Stats]] = {name: [] for name in control}
    for turn in range(repeats):
        for name in list(control)[:: 1 if turn % 2 else -1]:
            again, stats = write(slot, lambda name=name: control[name], begin, new)  # type: ignore[misc]
            if [*begin, *again] != text:
                raise SystemExit(f"{name}: another text than plain decoding's")
            seen[name].append(stats)
    ms = {name: median(each.decode_ms / each.tokens for each in found) for name, found in seen.items()}
    tokens = {name: new * repeats / sum(each.rounds for each in found) for name, found in seen.items()}
    return {name: {"speed": round(ms["plain"] / ms[name], 2), "tokens": round(tokens[name], 2)} for name in seen}


if __name__ == "__main__":
    main()
