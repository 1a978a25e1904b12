"""Time control and method auto against every fixed draft length and plain decoding.

    python -m benchmarks.control BUNDLE [--methods speculative,self-spec] [--lengths 1,2,3,4,5] [--data FOLDER]
        [--each 1] [--tokens 128] [--repeats 5] [--minutes 4]

Prompts are of four kinds (``tools.record_traces``): chat, code, summary and free text.  All ways take turns on each
prompt, greedily; the order is reversed every other time, and the first turn does not count.  The engine stays: control
is what a user of a running program has.  Figures are medians over repeats of tokens per second.

``over_plain``: of each way, by kind of prompt.  ``over_fixed``: control over the best single fixed length of its
method, over all prompts.  ``tail``: from token 65 on, auto over the fastest method under control, per prompt.
``switches``: how often auto changed its method in an answer.  ``setup_ms``: what the first request of
the engine took to begin.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

from benchmarks.common import conditions, show
from edgespec.drafters.registry import AR, AUTO
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from tools.record_traces import EACH, prompts

TAIL = 64  # tokens before the tail
FIXED = "{method}, {length} fixed"
Speeds = dict[str, list[list[float]]]  # by way, by prompt: of each repeat


def run(engine: Engine, prompt: list[int], tokens: int, how: Mapping[str, Any]) -> tuple[list[int], float, float, Any]:
    """Decode -> (tokens, tokens per second, the same from token ``TAIL`` on, statistics)."""
    begun = late = 0.0
    count = before = 0
    made = engine.stream(prompt, max_new_tokens=tokens, ignore_eos=True, temperature=0.0, repetition_penalty=1.0, **how)
    for chunk in made:
        if chunk.round is None:
            continue
        now = perf_counter()
        count += len(chunk.round.tokens)
        if not begun:
            begun, first = now, count
        if not late and count >= TAIL:
            late, before = now, count
        end = now
    result = made.result
    tail = (count - before) / (end - late) if late and end > late else 0.0
    return result.tokens, (count - first) / (end - begun), tail, result.stats


def prompt_of(engine: Engine, words: str, chat: bool, new: int) -> list[int]:
    """Make a prompt that leaves room for ``new`` tokens; a model without a chat template gets the bare words."""
    as_chat = chat and engine.codec.chat_template is not None
    tokens = engine.chat_prompt([{"role": "user", "content": words}]) if as_chat else engine.encode(words)
    assert isinstance(tokens, list)
    return tokens[: engine.context - new - 1]


def ways_of(methods: Sequence[str], lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Name the ways to decode, with the settings of each."""
    ways: dict[str, dict[str, Any]] = {AR: {"method": AR}, AUTO: {"method": AUTO}}
    for method in methods:
        ways[method] = {"method": method}
        for length in lengths:
            ways[FIXED.format(method=method, length=length)] = {"method": method, "gamma": length, "adaptive": False}
    return ways


def middle(found: Speeds, way: str) -> list[float]:
    """Take the median of each prompt."""
    return [median(each) for each in found[way]]


def ratios(over: Sequence[float], under: Sequence[float]) -> float:
    """Take the geometric mean of the ratios prompt by prompt."""
    return round(geometric_mean([a / b for a, b in zip(over, under, strict=True)]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--methods", default="speculative")
    parser.add_argument("--lengths", default="1,2,3,4,5")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--each", type=int, default=1, help="prompts of each kind, at most 10")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=4.0, help="after which no further repeat begins")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    methods = arguments.methods.split(",")
    ways = ways_of(methods, [int(length) for length in arguments.lengths.split(",")])
    with load(arguments.bundle, threads=arguments.threads) as engine:
        texts = [
            (kind, prompt_of(engine, words, chat, arguments.tokens))
            for at, (kind, words, chat) in enumerate(prompts(arguments.data))
            if at % EACH < arguments.each
        ]
        speeds: Speeds = {way: [[] for _ in texts] for way in ways}
        tails: Speeds = {way: [[] for _ in texts] for way in ways}
        switches, setup, begun = list[int](), list[float](), perf_counter()
        for repeat in range(arguments.repeats + 1):
            if repeat > 1 and perf_counter() - begun > 60 * arguments.minutes:
                break
            for at, (_, prompt) in enumerate(texts):
                expected: list[int] | None = None
                for way in list(ways)[:: 1 if (repeat + at) % 2 else -1]:
                    tokens, speed, tail, stats = run(engine, prompt, arguments.tokens, ways[way])
                    assert expected is None or tokens == expected or not engine.exact_rows
                    expected = tokens
                    if stats.setup_ms > 1:
                        setup.append(stats.setup_ms)
                    if repeat:
                        speeds[way][at].append(speed)
                        tails[way][at].append(tail)
                        switches += [len(stats.switches)] if way == AUTO else []
        figures = summary(speeds, tails, [kind for kind, _ in texts], methods)
        more = {"switches": sum(switches) / max(len(switches), 1), "setup_ms": [round(ms) for ms in setup[:4]]}
        show(conditions(threads=engine.model.threads) | figures | more)


def summary(speeds: Speeds, tails: Speeds, kinds: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
    """Sum up; see the module."""
    plain = middle(speeds, AR)

    def by_kind(way: str) -> dict[str, float]:
        found = middle(speeds, way)
        each = {kind: [at for at, one in enumerate(kinds) if one == kind] for kind in dict.fromkeys(kinds)}
        parts = {kind: ratios([found[i] for i in at], [plain[i] for i in at]) for kind, at in each.items()}
        return parts | {"all": ratios(found, plain)}

    over_fixed = {}
    for method in methods:
        fixed = [way for way in speeds if way.startswith(f"{method}, ")]
        best = max(fixed, key=lambda way: ratios(middle(speeds, way), plain))
        over_fixed[method] = {"best": best, "ratio": ratios(middle(speeds, method), middle(speeds, best))}
    auto, under = middle(tails, AUTO), [middle(tails, way) for way in (AR, *methods)]
    best_tails = [max(column) for column in zip(*under, strict=True)]
    tail = [round(a / b, 3) for a, b in zip(auto, best_tails, strict=True) if b]
    return {
        "repeats": len(speeds[AR][0]),
        "plain": [round(speed, 1) for speed in plain],
        "over_plain": {way: by_kind(way) for way in speeds if way != AR},
        "over_fixed": over_fixed,
        "tail": {"each": tail, "mean": round(sum(tail) / max(len(tail), 1), 3)},
    }


if __name__ == "__main__":
    main()
