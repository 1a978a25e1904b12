"""Plant every fault of speculation many times, and count how often the judge finds it.

edgespec export builtin:shakespeare --format int8 --method speculative --draft builtin:shakespeare-draft -o demo
python -m tools.planted_faults demo --tries 20
python -m tools.planted_faults PAIR --greedy --prompts 3    # a larger model: the faults that greedy texts show
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from edgespec.judge.client import Server
from edgespec.judge.judging import PROMPTS, Judgement, Options, judge
from edgespec.judge.sampled import Plan
from tests.judge.faults import FAULTS, PLAIN, SPECULATIVE, rounded, serving

PLAN = Plan(draws=9000, prompts=1, seconds=600, length=2, lanes=2)
# sampled is the first, where the draft of this model is too sure: by a power analysis of the two distributions
GREEDY = ("a row of the cache read from the wrong place", "the bonus token off by one")  # need no sampled texts
HONEST: dict[str, Any] = {"no fault": nullcontext, "honest, but rows with guesses rounded otherwise": rounded}
CHOSEN = (PROMPTS[7], *PROMPTS[:7])


def one(url: str, fault: Any, plan: Plan | None = PLAN, prompts: int = 8) -> Judgement:
    """Judge once, while a fault is active."""
    server, plain = Server(url, fields=SPECULATIVE), Server(url, fields=PLAIN)
    with fault:
        return judge(server, plain, CHOSEN[:prompts], Options(32, 2, 1, plan=plan), lambda *_: None, PLAIN)


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description="Count how often the judge finds planted faults.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[""], help="words in the names of the faults")
    parser.add_argument("--greedy", action="store_true", help="greedy texts alone, and the faults that they show")
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    kinds: dict[str, Any] = {**FAULTS, **HONEST}
    if args.greedy:
        kinds = {name: kinds[name] for name in (*GREEDY, *HONEST)}
    kinds = {name: kind for name, kind in kinds.items() if any(word in name for word in args.only)}
    found: dict[str, list[tuple[bool, float, float, int]]] = {name: [] for name in kinds}
    with serving(args.bundle) as url:
        for number in range(args.tries):
            for name, kind in kinds.items():
                start, used = time.perf_counter(), time.process_time()
                last = one(url, kind(), None if args.greedy or name in GREEDY else PLAN, args.prompts)
                took, used = time.perf_counter() - start, time.process_time() - used
                texts = sum(sampled.texts for sampled in last.sampled)
                found[name].append((last.verdict == "wrong", took, used, texts))
                print(
                    f"{number + 1} {name}: {last.line}; {texts} texts, {took:.0f} s, {used:.0f} s of a core", flush=True
                )
                if last.sampled and name in HONEST:
                    power = [(one.temperature, one.excess, one.temperature_error) for one in last.sampled]
                    print(f"  power .95: temperature, excess, error of the temperature: {power}", flush=True)
    for name, tries in found.items():
        wrong, seconds, cores, counts = zip(*tries, strict=True)
        print(f"{name}: wrong in {sum(wrong)} of {len(tries)}; {max(seconds):.0f} s, {max(cores):.0f} s of a core "
              f"and {max(counts)} texts at most")  # fmt: skip


if __name__ == "__main__":
    main()
