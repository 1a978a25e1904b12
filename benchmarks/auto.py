"""What method auto costs on text where nothing can be gained.

    python -m benchmarks.auto BUNDLE [--requests 12] [--tokens 256]

Every guess is replaced by its neighbour in the vocabulary, after all the work of making it: nothing can be gained, by
construction, and looking costs what it costs.  (A high temperature would not do: a draft's distribution is as flat as
the target's then, and its draws are accepted.)  Prompts are random tokens; decoding is greedy, so auto and plain
decoding write the same text, pair by pair, in turns.

``time``: auto's time a token over plain decoding's, prefill apart: the median with its 95 % interval.  ``counted``: the
same from counters: rows through the verify curve and draft steps times their cost, as this engine measured them, over
the tokens written.  ``first``: each request is the first of its session.  ``later``: sessions have learned from others.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.common import conditions, ratio, show
from edgespec.decoding.drafter import Drafter, Proposal
from edgespec.decoding.settings import DraftOptions, Settings
from edgespec.decoding.stats import PLAIN, Stats
from edgespec.drafters.registry import AUTO
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.methods import MethodChoice
from edgespec.engine.result import Result
from edgespec.engine.sessions import Session
from edgespec.formulas.cost import CostModel

AT_ONCE = ("medusa", "blockwise")  # one draft step, however many guesses


@dataclass
class Counter:
    """Rounds of a request by who guessed: (method, rows, guesses)."""

    rounds: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(self, stats: Stats) -> None:
        if stats.rounds > len(self.rounds):
            seen = stats.recent[-1]
            self.rounds.append((seen.method, round(seen.work), seen.drafted))

    def steps(self, engine: Engine) -> float:
        """Plain steps that they take, by what this engine has measured."""
        times = engine.experience.times
        verify = CostModel(times["verify"], 0.0)
        total = 0.0
        for method, rows, drafted in self.rounds:
            total += verify.v(rows)
            if method != PLAIN and method in times:
                steps = 1 if method in AT_ONCE else drafted
                total += steps * times[method][1] / times["verify"][1]
        return total


def falsify(vocab: int) -> None:
    """Let every drafter of the sessions made from now on guess wrong."""
    bare = Session._bare

    def wrong(self: Session, choice: MethodChoice, options: DraftOptions) -> Drafter:
        drafter: Any = bare(self, choice, options)
        if "propose" not in vars(drafter):
            right = drafter.propose
            drafter.propose = lambda tokens, budget: _neighbours(right(tokens, budget), vocab)
        return cast("Drafter", drafter)

    Session._bare = wrong  # type: ignore[method-assign]


def _neighbours(proposal: Proposal, vocab: int) -> Proposal:
    return replace(proposal, tokens=(proposal.tokens + 1) % vocab) if len(proposal) else proposal


def measure(engine: Engine, prompts: list[list[int]], settings: Settings, fresh: bool) -> dict[str, Any]:
    """Auto beside plain decoding on every prompt; the order changes from pair to pair.

    Args:
        engine: the loaded bundle.
        prompts: token ids.
        settings: of every request.
        fresh: forget after each pair what was learned.
    """
    times: dict[str, list[float]] = {AUTO: [], "ar": []}
    counted: list[float] = []
    results: list[Result] = []
    for number, prompt in enumerate(prompts):
        texts = []
        if fresh:
            engine.sessions.clear()
        for method in (AUTO, "ar")[:: 1 if number % 2 else -1]:
            count = Counter()
            result = engine.generate(prompt, settings, method=method, on_stats=count, stats_every=1)
            times[method].append(result.stats.decode_ms / result.stats.tokens)
            texts.append(result.tokens)
            if method == AUTO:
                counted.append(count.steps(engine) / result.stats.tokens)
                results.append(result)
        assert texts[0] == texts[1], "greedy text is plain decoding's"
    stats = [result.stats for result in results]
    return {
        "time": ratio(times[AUTO], times["ar"]),
        "counted": {"median": round(median(counted), 4), "most": round(max(counted), 4)},
        "tokens": sum(one.tokens for one in stats),
        "drafted": sum(one.drafted for one in stats),
        "accepted": sum(one.accepted for one in stats),
        "switches": sum(len(one.switches) for one in stats),
        "method_used": sorted({result.method_used for result in results}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--operators", choices=("auto", "native", "stock"), default="auto")
    arguments = parser.parse_args()
    how: dict[str, Any] = {"threads": arguments.threads, "operators": arguments.operators, "check": False}
    draw = random.Random(0)
    engine = load(arguments.bundle, **how)
    vocab = engine.codec.vocab_size
    prompts = [[draw.randrange(3, vocab) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]
    # chains: siblings that are replaced by their neighbours may be right
    settings = Settings(max_new_tokens=arguments.tokens, ignore_eos=True).changed(nodes=1)
    falsify(vocab)
    choice = engine.choose(AUTO)
    for method in engine.methods:  # load and measure what is measured once
        engine.generate(prompts[0], settings, method=method, max_new_tokens=32)
    first = measure(engine, prompts, settings, fresh=True)
    later = measure(engine, prompts, settings, fresh=False)
    show(
        conditions(bundle=arguments.bundle.name, threads=engine.model.threads, tokens=arguments.tokens)
        | {"candidates": {one.name: round(one.promise, 2) for one in choice.candidates}, "reason": choice.reason}
        | {"first": first, "later": later}
    )


if __name__ == "__main__":
    main()
