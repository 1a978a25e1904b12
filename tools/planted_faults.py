"""Plant every fault of speculation many times, and count how often the judge finds it.

edgespec export builtin:shakespeare --format int8 --method speculative --draft builtin:shakespeare-draft -o demo
python -m tools.planted_faults demo --tries 20
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
from tests.judge.faults import FAULTS, PLAIN, SPECULATIVE, serving

PLAN = Plan(draws=11000, prompts=1, seconds=600, length=2, lanes=2)
# sampled is the first, where the draft of this model is too sure: by a power analysis of the two distributions
GREEDY = ("a row of the cache read from the wrong place", "the bonus token off by one")  # need no sampled texts
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
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    kinds: dict[str, Any] = {**FAULTS, "none": nullcontext}
    kinds = {name: kind for name, kind in kinds.items() if args.only in name}
    found: dict[str, list[tuple[bool, float, int]]] = {name: [] for name in kinds}
    with serving(args.bundle) as url:
        for number in range(args.tries):
            for name, kind in kinds.items():
                start = time.perf_counter()
                last = one(url, kind(), None if name in GREEDY else PLAN)
                took = time.perf_counter() - start
                texts = sum(sampled.texts for sampled in last.sampled)
                found[name].append((last.verdict == "wrong", took, texts))
                print(f"{number + 1} {name}: {last.line}; {texts} texts, {took:.0f} s", flush=True)
                if name == "none":
                    power = [(one.temperature, one.excess, one.temperature_error) for one in last.sampled]
                    print(f"  power .95: temperature, excess, error of the temperature: {power}", flush=True)
    for name, tries in found.items():
        wrong, seconds, counts = zip(*tries, strict=True)
        print(f"{name}: wrong in {sum(wrong)} of {len(tries)}; {max(seconds):.0f} s and {max(counts)} texts at most")


if __name__ == "__main__":
    main()
