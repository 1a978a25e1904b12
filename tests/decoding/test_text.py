"""The committed tokens of a request: what a round looks at does not grow with them, and penalties are the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.decoding import loop
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import SamplingParams, adjusted
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import SkipSet, common_prefix
from edgespec.decoding.text import Prefix, Text, different
from edgespec.decoding.verify import RowSampler
from edgespec.drafters.ngram import NGram
from edgespec.drafters.plain import Plain
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from tests.support.reference import FunctionTarget
from tests.support.toy import emitted

VOCAB, PROMPT, NEW = 50, 600, 80
TOKENS = st.lists(st.integers(0, 20), max_size=40)


class Watched(Text):
    """Counts the tokens that are read."""

    looked_at = 0

    def __iter__(self) -> Iterator[int]:
        Watched.looked_at += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Watched.looked_at += len(found) if isinstance(at, slice) else 1
        return found


def penalized(row: NDArray[np.float32], prefix: Sequence[int], penalty: float) -> NDArray[np.float32]:
    """Apply the rule as it is documented: to every present token, once."""
    row = row.copy()
    for token in set(prefix):
        row[token] = row[token] * np.float32(penalty) if row[token] < 0 else row[token] / np.float32(penalty)
    return row


def bigram(prefix: tuple[int, ...]) -> NDArray[np.float32]:
    """Return logits that only the last token of ``prefix`` decides: a draft near them is often right."""
    return np.random.default_rng(prefix[-1]).normal(size=VOCAB).astype(np.float32)


def near(prefix: tuple[int, ...]) -> NDArray[np.float32]:
    """Its draft: nearly the same."""
    noise = np.random.default_rng(len(prefix)).normal(size=VOCAB) / 4
    return np.asarray(bigram(prefix) + noise, np.float32)


DRAFTERS: dict[str, Callable[[FunctionTarget], Drafter]] = {
    "chain": lambda target: Speculative(FunctionTarget(near, VOCAB, 2048), VOCAB),
    "comb": lambda target: Speculative(FunctionTarget(near, VOCAB, 2048), VOCAB, branch=(2,)),
    "tree": lambda target: Speculative(FunctionTarget(near, VOCAB, 2048), VOCAB, branch=(3, 2)),
    "self-spec": lambda target: SelfSpec(target, SkipSet((0,), ())),
    "ngram": lambda target: NGram(),
}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(0.8, repetition_penalty=1.2, seed=1, acceptance="coupled"),
        SamplingParams(0.8, repetition_penalty=1.2, seed=1),
    ],
    ids=["greedy", "coupled", "rejection"],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_does_not_look_at_the_whole_text(
    monkeypatch: pytest.MonkeyPatch, name: str, sampling: SamplingParams
) -> None:
    """Neither for a penalty, for each row, nor to see what a draft or an index already has."""
    prompt = np.random.default_rng(1).integers(0, VOCAB // 2, PROMPT).tolist()
    options = DecodeOptions(NEW, 4, frozenset(), sampling)
    target = FunctionTarget(bigram, VOCAB, 2048, draft=near)
    expected = emitted(FunctionTarget(bigram, VOCAB, 2048), Plain(), prompt, options)
    monkeypatch.setattr(loop, "Text", Watched)
    Watched.looked_at, stats = 0, Stats()
    found = [t for made in loop.decode(target, DRAFTERS[name](target), prompt, options, stats) for t in made.tokens]
    assert stats.dropped_reason is None
    assert stats.drafted > 0
    if not sampling.rejects:
        assert found == expected
    assert stats.rounds >= 15
    assert Watched.looked_at < 8 * PROMPT + 100 * stats.rounds


@given(TOKENS, st.lists(TOKENS, max_size=6))
def test_every_token_is_seen_once(start: list[int], more: list[list[int]]) -> None:
    text = Text(start)
    for tokens in [[], *more]:
        text += tokens
        seen = text.seen().tolist()
        assert sorted(seen) == sorted(set(text))
        assert all(text.has(token) == (token in list(text)) for token in range(21))
    assert Text(range(1000)).seen().tolist() == list(range(1000))


@given(TOKENS, TOKENS, st.slices(90))
def test_a_prefix_is_read_like_a_list(text: list[int], path: list[int], at: slice) -> None:
    for base in (text, Text(text)):
        prefix, whole = Prefix(base, path), text + path
        assert list(prefix) == whole
        assert len(prefix) == len(whole)
        assert prefix[at] == whole[at]
        assert [prefix[i] for i in range(-len(whole), len(whole))] == whole * 2
        assert sorted(token for array in different(prefix) for token in array.tolist()) == sorted(set(whole))


@given(TOKENS, TOKENS, TOKENS, st.integers(0, 60))
def test_a_common_prefix_is_found_from_what_is_known(
    same: list[int], first: list[int], second: list[int], known: int
) -> None:
    for times in (1, 20):  # beyond the blocks that are compared at once
        a, b = same * times + first, same * times + second
        expected = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == common_prefix(Text(a), b) == common_prefix(a, tuple(b)) == expected
        assert common_prefix(a, b, min(known, expected)) == expected


@given(TOKENS, st.integers(0, 1 << 30), st.sampled_from([1.3, 0.7, 5.0]))
def test_penalties_are_the_same_bits_along_chains_and_trees(tokens: list[int], seed: int, penalty: float) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(9, 21)).astype(np.float32)
    params, guesses = SamplingParams(repetition_penalty=penalty), random.integers(0, 21, 8)
    text = Text([0, *tokens])
    for parents in (None, np.array([random.integers(-1, i) for i in range(8)])):
        rows = RowSampler(logits, text, Proposal(guesses, parents), params, Noise(0))
        for row in range(9):
            whole, node = list[int](), row - 1
            while node >= 0:
                whole.insert(0, int(guesses[node]))
                node = node - 1 if parents is None else int(parents[node])
            whole = [0, *tokens, *whole]
            wanted = penalized(logits[row], whole, penalty)
            for prefix in (rows.prefix(row), whole, Text(whole)):
                np.testing.assert_array_equal(adjusted(logits[row], params, prefix), wanted)
            assert rows.choose(row) == wanted.argmax()
