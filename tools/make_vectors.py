"""Write tests/vectors: what the decoding core computes for given input, for every runtime that must do the same.

python tools/make_vectors.py [FOLDER]

Sessions in C++ are tested against these files (tests/runtimes/native/test_sessions.py), and this program against
itself: a change of the core that changes a vector must be meant.  Rows of logits are not stored where a formula makes
them (``row``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import ACCEPT, BLOCK, DRAFT, RESIDUAL, TARGET, Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams, support
from edgespec.decoding.target import Output
from edgespec.decoding.verify import Accept, RowSampler, verify
from edgespec.drafters.ngram import NGram
from tools.vector_rows import params_of, row

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "vectors"
CURVE = {1: 1.0, 2: 1.2, 8: 2.1}  # of a pass by its rows
NOTHING = Output(np.zeros((1, 1), np.float32))

PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1e-5},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.1, "repetition_penalty": 0.6, "logit_bias": {"3": 4.5, "1": float("-inf"), "7": -2.0}},
    {"temperature": 0.0, "repetition_penalty": 2.0, "logit_bias": {"2": 1.5}},
    {"temperature": 0.9, "presence_penalty": 0.7, "frequency_penalty": 1.3, "prompt": 1},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": -2.0, "frequency_penalty": 0.1, "prompt": 2},
]


def noise() -> Iterator[dict[str, Any]]:
    """Bits, uniform and Gumbel numbers."""
    tokens = [0, 1, 2, 77, 151935]
    for seed in (0, 1, -1, 20240229, 2**63 - 1, -(2**63)):
        made = Noise(seed)
        streams = {0: TARGET, 5: RESIDUAL, 131071: ACCEPT + 3, 7: DRAFT + 9, 9: BLOCK + 4}
        for position, stream in streams.items():
            given = np.array(tokens, np.int64)
            yield {
                "seed": seed,
                "position": position,
                "stream": stream,
                "tokens": tokens,
                "bits": made.bits(position, given, stream).tolist(),
                "uniform": made.uniform(position, stream),
                "gumbel": made.gumbel(position, given, stream).tolist(),
            }


def sampling() -> Iterator[dict[str, Any]]:
    """Make supports, their probabilities, and sampled tokens."""
    for vocab in (24, 700, 9000):
        for number, given in enumerate(PARAMS):
            for seed in range(6 if vocab < 9000 else 2):
                prefix = [seed, 3, 5, 3, 11]
                found = support(row(seed, vocab), params_of(given), prefix)
                drawn = [found.draw(Noise(seed), position) for position in range(number, number + 8)]
                few = len(found.ids) <= 30
                yield {
                    "vocab": vocab,
                    "row": seed,
                    "params": given,
                    "prefix": prefix,
                    "size": len(found.ids),
                    "ids": found.ids.tolist() if few else found.ids[:30].tolist(),
                    "probs": found.probs()[:30].tolist(),
                    "first_position": number,
                    "drawn": drawn,
                }


def _proposals(rng: np.random.Generator, vocab: int) -> Iterator[tuple[dict[str, Any], Proposal]]:
    """Make chains and trees of deterministic and of sampled draft tokens; q is a softmax of ``row``."""
    shapes: list[list[int] | None] = [None, None, [-1, 0, 0, 1, 1, -1, 5], [-1, -1, -1, 0, 1, 3]]
    for number, parents in enumerate(shapes * 2):
        drawn = number >= len(shapes)
        size = 5 if parents is None else len(parents)
        rows = rng.integers(0, 50, size).tolist()
        if parents is not None and drawn:  # siblings are sampled from one distribution
            first: dict[int, int] = {}
            rows = [first.setdefault(parent, rows[at]) for at, parent in enumerate(parents)]
        probs = None
        tokens = rng.integers(0, vocab, size).tolist()
        if drawn:
            probs = np.stack([_softmax(row(one, vocab, 2.0)) for one in rows])
            taken: dict[int, set[int]] = {}
            for at in range(size):  # without replacement among siblings
                used = taken.setdefault(parents[at], set()) if parents is not None else set()
                left = probs[at] * [token not in used for token in range(vocab)]
                tokens[at] = int(rng.choice(vocab, p=left / left.sum()))
                used.add(tokens[at])
        above = None if parents is None else np.array(parents, np.int64)
        made = Proposal(np.array(tokens, np.int64), above, probs, replacement=parents is None)
        yield {"tokens": tokens, "parents": parents, "q_rows": rows if drawn else None}, made


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:  # [vocab] -> [vocab]
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return np.asarray(weights / weights.sum(), np.float64)


def verification() -> Iterator[dict[str, Any]]:
    """Verdicts over chains and trees, token by token, as blocks, coupled, and by lossy rules."""
    rng, vocab = np.random.default_rng(3), 6
    how: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "verification": "block"},
        {"temperature": 0.8, "acceptance": "coupled"},
        {"temperature": 1.2, "top_k": 4},
    ]
    rules = ("exact", "typical:0.2,0.5", "top-k:2", "distance:1", "all")
    for number in range(40):
        for given, proposal in _proposals(rng, vocab):
            params, rule = how[number % len(how)], rules[number // 8 % len(rules)] if number >= 32 else "exact"
            logit_rows = rng.integers(0, 50, len(proposal) + 1).tolist()
            logits = np.stack([row(one, vocab, 2.0) for one in logit_rows])
            if number % 3 == 0 and given["q_rows"] is None:  # guesses that are right up to a point
                _make_right(proposal, logits, params_of(params, number), Noise(number))
                given["tokens"] = proposal.tokens.tolist()
            committed = [1, 2, 3]
            sampler = RowSampler(logits, committed, proposal, params_of(params, number), Noise(number))
            accept = Accept.parse(rule, 1 if number % 16 == 5 else 0)
            verdict = verify(proposal, sampler, Noise(number), accept)
            yield {
                **given,
                "vocab": vocab,
                "seed": number,
                "committed": committed,
                "params": params,
                "accept": rule,
                "min_block": accept.min_block,
                "rows": logit_rows,
                "path": list(verdict.path),
                "next_token": verdict.next_token,
            }


def _make_right(proposal: Proposal, logits: NDArray[np.float32], params: SamplingParams, seed: Noise) -> None:
    """Let the first guesses of a chain, or of the first path of a tree, be what plain decoding writes; in place."""
    sampler, node = RowSampler(logits, [1, 2, 3], proposal, params, seed), -1
    for _ in range(3):
        below = [at for at in range(len(proposal)) if proposal.parent(at) == node]
        if not below:
            return
        proposal.tokens[below[0]] = sampler.choose(node + 1)
        node = below[0]


def ngram() -> Iterator[dict[str, Any]]:
    """Proposals while a text grows."""
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 4, 120).tolist(), ([5, 6, 7, 8, 9, 10] * 12)[:60], rng.integers(0, 12, 200).tolist()]
    settings: list[dict[str, Any]] = [{}, {"n_min": 2, "n_max": 3, "share": 0.5}, {"n_max": 6}]
    for text in texts:
        for given in settings:
            drafter, found = NGram(**given), []
            for length in range(8, len(text) + 1, 3):
                proposal = drafter.propose(text[:length], 1 + length % 8)
                found.append([proposal.bucket if len(proposal) else 0, *proposal.tokens.tolist()])
            yield {"text": text, "settings": given, "proposals": found}


MAKERS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "noise": noise,
    "sampling": sampling,
    "verify": verification,
    "ngram": ngram,
}


def main(folder: Path = FOLDER) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in MAKERS.items():
        cases = ",\n".join(json.dumps(case) for case in make())
        (folder / f"{name}.json").write_text(f"[\n{cases}\n]\n", "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
