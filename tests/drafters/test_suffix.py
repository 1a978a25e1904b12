"""The suffix automaton against a search of the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.drafters.ngram import NGram
from edgespec.drafters.suffix import SuffixAutomaton


def longest_repeated_end(text: list[int]) -> tuple[int, int]:
    """(length, index after its most recent earlier occurrence) by trying every length and place."""
    for n in range(len(text) - 1, 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return n, end
    return 0, 0


@given(st.integers(1, 5).flatmap(lambda top: st.lists(st.integers(0, top - 1), max_size=60)))
@settings(max_examples=300, deadline=None)
def test_it_finds_the_longest_end_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for at, token in enumerate(text):
        automaton.push(token)
        matched, after = longest_repeated_end(text[: at + 1])
        assert automaton.matched == matched
        if matched <= 32:  # 32 links at least are exact
            assert automaton.after == after or not matched
        assert not matched or text[automaton.after - matched : automaton.after] == text[at + 1 - matched : at + 1]
    assert len(automaton) == len(text)


@given(st.lists(st.integers(0, 200_000), max_size=40), st.lists(st.integers(0, 2), max_size=4))
@settings(max_examples=100, deadline=None)
def test_large_tokens_and_repeated_blocks(block: list[int], between: list[int]) -> None:
    text = block + between + block + between[::-1] + block
    automaton = SuffixAutomaton()
    for token in text:
        automaton.push(token)
    assert automaton.matched == longest_repeated_end(text)[0]


def test_an_older_occurrence_at_worst_where_ends_are_many() -> None:
    text = [1] * 400
    automaton = SuffixAutomaton()
    for token in text:
        automaton.push(token)
    assert (automaton.matched, automaton.after) == (399, 399)
    automaton.push(2)
    assert automaton.matched == 0
    for n in range(1, 100):
        automaton.push(1)
        assert automaton.matched == n
        assert n <= automaton.after <= 400


def test_states_stay_within_two_a_token() -> None:
    automaton = SuffixAutomaton()
    text = ([0, 1, 0, 2, 0, 1, 3] * 40 + [0, 1, 1] * 30) * 3
    for token in text:
        automaton.push(token)
    assert len(automaton._length) <= 2 * len(text)
    assert len(automaton._others) <= 3 * len(text)


def test_the_drafter_copies_as_much_as_matched() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    drafter = NGram(policy="automaton")
    assert drafter.propose(text, 8).tokens.tolist() == [4, 5, 6]
    assert drafter.propose(text, 2).tokens.tolist() == [4, 5]
    assert NGram(policy="automaton", extra=9).propose(text, 9).tokens.tolist() == [4, 5, 6, 9, 1, 2, 3, 4, 5]
    assert NGram(policy="automaton", n_min=4).propose(text, 8).tokens.tolist() == []
    assert drafter.propose([1, 2], 8).tokens.tolist() == []  # another text


def test_the_match_is_as_long_as_it_is() -> None:
    block = list(range(100, 180))
    proposal = NGram(policy="automaton").propose([1, *block, *range(1000, 1100), *block], 200)
    assert proposal.tokens.tolist() == list(range(1000, 1080))
