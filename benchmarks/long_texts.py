"""What a long text costs beside its passes: penalties, a draft's look at the text, conversations that alternate.

    python -m benchmarks.long_texts BUNDLE

``penalty_us``: a row's repetition penalty by tokens of the text; nine rows of a pass, a vocabulary of 152,000.
``follow_us``: what a draft model needs to see what of the text it holds, by tokens.
``turns``: two conversations of so many tokens take turns: tokens reused of each prompt, and milliseconds of reading it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.common import conditions, show
from edgespec.decoding.drafter import Proposal
from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import common_prefix
from edgespec.decoding.text import Text
from edgespec.decoding.verify import RowSampler
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load

VOCAB, ROWS, NEW = 152_000, 9, 8
LENGTHS = (2048, 8192, 32768)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    with load(arguments.bundle, threads=arguments.threads, check=False) as engine:
        turns = alternating(engine, arguments.tokens)
    show(
        conditions(bundle=str(arguments.bundle), threads=arguments.threads)
        | {
            "penalty_us": {length: penalty(length, arguments.repeats) for length in LENGTHS},
            "follow_us": {length: follow(length, arguments.repeats) for length in LENGTHS},
            "turns": turns,
        }
    )


def penalty(length: int, repeats: int) -> float:
    """Microseconds of a row in a text that grows by a token a pass."""
    random = np.random.default_rng(length)
    text = Text(random.integers(0, VOCAB, length).tolist())
    logits = random.normal(size=(ROWS, VOCAB)).astype(np.float32)
    proposal = Proposal(random.integers(0, VOCAB, ROWS - 1))

    def run(penalty: float) -> None:
        text.append(int(random.integers(VOCAB)))
        rows = RowSampler(logits, text, proposal, SamplingParams(repetition_penalty=penalty), Noise(0))
        for row in range(ROWS):
            rows.likeliest(row)

    return (timed(lambda: run(1.1), repeats) - timed(lambda: run(1.0), repeats)) / ROWS


def follow(length: int, repeats: int) -> float:
    """Microseconds of a look at a text of which all but the last tokens were common before."""
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    text, held = Text(tokens), [int(str(token)) for token in tokens[:-2]]  # equal, but other objects, as in a slot
    return timed(lambda: common_prefix(held, text, length - 6), repeats)


def alternating(engine: Engine, tokens: int) -> list[dict[str, Any]]:
    """Two turns of each of two conversations."""
    prompts = [[5 + (at * step) % 200 for at in range(tokens)] for step in (3, 7)]
    found = []
    for _ in range(2):
        for at, prompt in enumerate(prompts):
            result = engine.generate(prompt, method="ar", max_new_tokens=NEW, ignore_eos=True)
            stats = result.stats
            found.append({"prompt": len(prompt), "reused": stats.reused_tokens, "prefill_ms": stats.prefill_ms})
            prompts[at] = [*prompt, *result.tokens, *prompt[:28]]
    return found


def timed(run: Callable[[], object], repeats: int) -> float:
    """Microseconds, the median."""
    took = []
    for _ in range(repeats + 1):
        start = perf_counter()
        run()
        took.append(1e6 * (perf_counter() - start))
    return median(took[1:])


if __name__ == "__main__":
    main()
