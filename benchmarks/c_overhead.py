"""Time a round of the C interface outside the passes: the loop, its drafters, verification and control.

    python -m benchmarks.c_overhead BUNDLE [--methods plain,ngram,auto] [--tokens N] [--turns N]

Decodes greedily after a text that repeats itself, so that drafters have guesses, and prints JSON: by method the median
with its interval, and the least, of the microseconds of a round beyond its passes; tokens per round of the last text.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.common import conditions
from edgespec.decoding.sampling import SamplingParams
from edgespec.reports.bench import bootstrap
from tests.support.c_sessions import Bundle, settings_of

PROMPT = [11 + at % 23 for at in range(64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--methods", default="plain,ngram,auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with Bundle(arguments.bundle) as bundle, bundle.session() as session:
        for method in arguments.methods.split(","):
            added = list[float]()
            for turn in range(arguments.turns + 1):
                session.begin(PROMPT, settings_of(SamplingParams(), method, arguments.tokens, fixed=0))
                before, ended = 0, False
                while not ended:
                    ended = session.next().finish is not None
                    counts = session.counts()
                    outside = counts.round_ns - counts.pass_ns
                    if turn:  # the first text warms up
                        added.append((outside - before) / 1000)
                    before = outside
            low, high = bootstrap(added[:: max(1, len(added) // 500)])
            found[method] = {
                "median_us": round(statistics.median(added), 2), "low": round(low, 2), "high": round(high, 2),
                "least_us": round(min(added), 2), "tokens_a_round": round(counts.tokens / counts.rounds, 2),
            }  # fmt: skip
        vocab = int(bundle.facts.vocab)
    print(json.dumps(conditions(bundle=arguments.bundle.name, threads=1, vocab=vocab) | {"methods": found}))


if __name__ == "__main__":
    main()
