"""The token map and prompt lookup: what they find, how they follow the text, and that the text stays."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.proposal import EMPTY
from edgespec.decoding.stats import Stats
from edgespec.drafters.ngram import NGram
from tests.support.reference import TableTarget
from tests.support.toy import emitted, hash_logits, hash_target, plain


def guesses(drafter: NGram, tokens: list[int], budget: int = 8) -> list[int]:
    return [int(token) for token in drafter.propose(tokens, budget).tokens]


def test_it_copies_what_followed() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert guesses(NGram(), text) == [4, 5, 6, 9]  # three matched, and one more
    assert NGram().propose([1, 2, 3], 8) is EMPTY
    assert NGram().propose([1], 8) is EMPTY


def test_n_min_refuses_short_matches() -> None:
    text = [1, 2, 3, 7, 8, 3]
    assert guesses(NGram(n_min=1), text) == [7, 8]
    assert guesses(NGram(n_min=2), text) == []
    assert guesses(NGram(n_min=2), [*text, 7]) == [8, 3, 7]


def test_a_loop_is_followed_round_and_round() -> None:
    assert guesses(NGram(), [5, 1, 2, 3, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_the_map_goes_on_only_with_what_mostly_followed() -> None:
    text = [1, 2, 1, 3, 1, 2, 1, 4, 1, 2, 8, 1]  # after 1: 2 three times, 3 and 4 once each
    assert guesses(NGram(n_max=1, share=0.6), text, 1) == [2]
    assert guesses(NGram(n_max=1, share=0.61), text, 1) == []


def test_equal_counts_prefer_the_most_recent() -> None:
    assert guesses(NGram(n_max=1, share=0.5), [1, 2, 1, 3, 9, 1], 1) == [3]
    assert guesses(NGram(n_max=1, share=0.5), [1, 3, 1, 2, 9, 1], 1) == [2]


def test_a_longer_key_that_is_unsure_leaves_it_to_a_shorter_one() -> None:
    text = [7, 1, 2, 7, 1, 3, 5, 1, 2, 6, 1, 2, 8, 1, 2, 7, 1]  # 7 1 -> 2, 3; 1 -> 2 mostly
    assert guesses(NGram(n_max=2, share=0.6), text, 1) == [2]


def test_the_bucket_tells_the_length_of_the_match() -> None:
    buckets = []
    for length in (1, 2, 3, 4, 5, 9, 10, 15, 16, 40):
        block = list(range(100, 100 + length))
        buckets.append(NGram().propose([1, *block, 2, 3, *block], 1).bucket)
    assert buckets == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(0, 3), max_size=20)), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_the_index_follows_a_text_that_grows_shrinks_and_changes(
    text: list[int], edits: list[tuple[int, list[int]]]
) -> None:
    followed = NGram(share=1e-9)  # whatever mostly followed
    for keep, more in [(len(text), []), *edits]:
        text = (text[:keep] + more) or [0]
        fresh = NGram(share=1e-9)
        a, b = followed.propose(text, 6), fresh.propose(text, 6)
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.bucket == b.bucket
        # And the first guess is one that a search of the whole text finds.
        assert not a.tokens.size or a.tokens[0] in brute_force(text)
        assert bool(len(a)) is bool(brute_force(text))


def brute_force(text: list[int]) -> list[int]:
    """Search ``text`` for its last 4 to 1 tokens, the longest first; return the most frequent next tokens."""
    for n in range(min(4, len(text)), 0, -1):
        found = [text[at] for at in range(n, len(text)) if text[at - n : at] == text[-n:]]
        if found:
            return [token for token in found if found.count(token) == max(map(found.count, found))]
    return []


@given(st.lists(st.integers(0, 2), min_size=2, max_size=80), st.floats(0.05, 1))
@settings(max_examples=150, deadline=None)
def test_the_map_counts_every_continuation(text: list[int], share: float) -> None:
    found = guesses(NGram(n_max=3, share=share), text, 1)
    for n in range(3, 0, -1):
        after = Counter(text[i] for i in range(n, len(text)) if text[i - n : i] == text[-n:])
        if len(text) >= n and after and max(after.values()) >= share * sum(after.values()):
            assert after[found[0]] == max(after.values())
            return
    assert found == []


def test_the_text_is_plain_text_and_loops_are_fast() -> None:
    for seed in range(60):
        prompt = np.random.default_rng(seed).integers(4, size=12).tolist()
        options = DecodeOptions(20, 1 + seed % 6)
        function = hash_logits(seed, 4)
        assert emitted(hash_target(seed, 4), NGram(), prompt, options) == plain(function, 4, prompt, 20)
    cycle = TableTarget(np.roll(np.eye(5), 1, axis=1) * 9)
    stats = Stats()
    list(decode(cycle, NGram(), [0], DecodeOptions(100, 8), stats))
    assert stats.tokens_per_round > 4


def test_a_new_request_forgets_and_a_continued_one_remembers() -> None:
    drafter = NGram()
    drafter.begin(DraftRequest([1, 2, 3, 4]))
    assert guesses(drafter, [9, 2]) == []
    drafter.begin(DraftRequest([1, 2, 3, 4]))
    assert guesses(drafter, [1, 2, 3, 4, 7, 2], 2) == [3, 4]
