"""N-gram stores: what is counted, kept and found, how the drafter uses them, and that no store changes the text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgespec.decoding.loop import DecodeOptions
from edgespec.drafters.ngram import NGram
from edgespec.drafters.ngram_stores import ENTRY_BYTES, HEADER_BYTES, Hit, NGramStore, build_store
from edgespec.errors import StoreError
from tests.support.toy import emitted, hash_logits, hash_target, plain

VOCABULARY = "ab" * 32
LARGE = 151_935  # a token beyond 16 bits


def made(path: Path, *texts: list[int], size: int = 1 << 20) -> NGramStore:
    arrays = [np.array(text, np.int32) for text in texts]
    build_store(path / "a.store", arrays, LARGE + 1, VOCABULARY, size, overwrite=True)
    return NGramStore(path / "a.store")


def expected(texts: list[list[int]], tail: list[int], share: float) -> tuple[int, int, int] | None:
    """(n, seen, of) by counting: the longest known end of ``tail`` whose first follower is sure enough."""
    for n in range(min(4, len(tail)), 0, -1):
        after = Counter(t[i] for t in texts for i in range(n, len(t)) if t[i - n : i] == tail[-n:])
        of, seen = sum(after.values()), max(after.values(), default=0)
        if seen >= max(share, 0.5) * of and of >= (1 if n == 4 else 2):
            return n, seen, of
    return None


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4).filter(lambda t: max(map(len, t)) > 4),
    st.lists(st.integers(0, 3), max_size=6),
    st.sampled_from([0.5, 0.6, 0.9]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_knows_what_counting_finds(tmp_path: Path, texts: list[list[int]], tail: list[int], share: float) -> None:
    hit = made(tmp_path, *texts).likely(tail, share)
    assert (hit and (hit.n, hit.seen, hit.of)) == expected(texts, tail, share)
    if hit:
        last = tail[-hit.n :]
        again = sum(t[i - hit.n : i + 1] == [*last, hit.token] for t in texts for i in range(hit.n, len(t)))
        assert again == hit.seen


def test_facts(tmp_path: Path) -> None:
    store = made(tmp_path, [1, 2, 3, 4, LARGE], [1, 2, 9])
    facts = store.facts
    assert (facts.texts, facts.tokens, facts.by_length, facts.left_out) == (2, 8, (2, 1, 0, 1), 0)
    assert (facts.vocab, facts.vocabulary) == (LARGE + 1, VOCABULARY)
    assert store.path.stat().st_size == facts.file_bytes == HEADER_BYTES + 4 * ENTRY_BYTES
    assert store.likely([1, 2, 3, 4], 0.6) == Hit(4, LARGE, 1, 1)
    assert store.likely([7, 1], 0.6) == Hit(1, 2, 2, 2)
    assert store.likely([2], 0.6) is None  # 3 and 9 once each
    assert store.likely([], 0.6) is None


def test_the_file_is_what_the_format_says(tmp_path: Path) -> None:
    content = made(tmp_path, [5, 6, 5, 6]).path.read_bytes()
    assert content[:8] == b"EDGENGRM"
    key = 6 * 0x9E3779B97F4A7C15 % 2**64
    key ^= key >> 32
    (n,) = np.frombuffer(content, "<u8", 1, 24)
    keys = np.frombuffer(content, "<u8", n, 256).tolist()
    assert keys == sorted(keys)
    at = keys.index(key)
    assert np.frombuffer(content, "<i4", n, 256 + 8 * n)[at] == 6
    assert np.frombuffer(content, "<u2", n, 256 + 12 * n)[at] == 2
    assert np.frombuffer(content, "<u2", n, 256 + 14 * n)[at] == 2


def test_what_occurs_most_often_stays(tmp_path: Path) -> None:
    texts = [[1, 2, 3]] * 50 + [[10, 11, 12, 13, 14]] * 2
    store = made(tmp_path, *texts, size=HEADER_BYTES + 3 * ENTRY_BYTES + 5)
    assert store.facts.by_length == (2, 1, 0, 0)
    assert store.facts.left_out == 10
    assert store.likely([1, 2], 0.6) == Hit(2, 3, 50, 50)
    assert store.likely([10], 0.6) is None


def test_large_counts_are_scaled(tmp_path: Path) -> None:
    hit = made(tmp_path, [1, 2] * 70_000 + [1, 3] * 20_000).likely([1], 0.6)
    assert hit is not None
    assert (hit.token, hit.of) == (2, 65535)
    assert hit.seen / hit.of == pytest.approx(7 / 9, abs=1e-4)


def test_nothing_is_left_of_a_failed_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, [1, 2, 3, 4, 5])
    before = (tmp_path / "a.store").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        made(tmp_path, [1, 2, 3, 4, 5, 6])
    assert [path.name for path in tmp_path.iterdir()] == ["a.store"]
    assert (tmp_path / "a.store").read_bytes() == before


# -- in the drafter ----------------------------------------------------------------------------------------------------


def test_the_own_text_comes_first(tmp_path: Path) -> None:
    store = made(tmp_path, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4)
    drafter = NGram(store=store)
    own = drafter.propose([1, 2, 3, 30, 31, 1, 2, 3], 8)
    assert own.tokens.tolist() == [30, 31, 1, 2]  # three matched: the text's own word
    assert own.bucket == 2
    from_store = drafter.propose([40, 1, 2, 3], 8)  # no match in the text
    assert from_store.tokens.tolist() == [4, 5, 6, 7, 8, 9]  # two a token matched
    assert from_store.bucket > 5
    longer = drafter.propose([3, 50, 1, 2, 3], 8)  # 3 -> 50 once, but the store knows 1 2 3
    assert longer.tokens.tolist() == [4, 5, 6, 7, 8, 9]
    assert len(drafter.propose([1, 2, 3], 2)) == 2


def test_one_known_token_is_enough_where_the_text_has_no_guess(tmp_path: Path) -> None:
    drafter = NGram(store=made(tmp_path, [7, 8, 1], [7, 8, 2]))
    assert drafter.propose([5, 7], 4).tokens.tolist() == [8]  # then 1 and 2 once each


def test_buckets_tell_how_sure_the_store_is(tmp_path: Path) -> None:
    texts = [[1, 2], *[[3, 4]] * 2, *[[5, 6]] * 4, *[[7, 8]] * 16, [11, 12, 13, 14, 15], *[[21, 22, 23, 24, 25]] * 16]
    drafter = NGram(store=made(tmp_path, *texts))
    found = [drafter.propose(tail, 1).bucket for tail in ([3], [5], [7], [11, 12, 13, 14], [21, 22, 23, 24])]
    assert found == [7, 8, 9, 6, 12]


def test_no_store_changes_the_text(tmp_path: Path) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        prompt = random.integers(4, size=8).tolist()
        truth = plain(hash_logits(seed, 4), 4, prompt, 24)
        wrong = [(token + 1) % 4 for token in prompt + truth]  # every guess is another token
        for text in (prompt + truth, wrong, random.integers(4, size=200).tolist(), [LARGE] * 9 + prompt + [LARGE]):
            drafter = NGram(store=made(tmp_path, text))
            assert emitted(hash_target(seed, 4), drafter, prompt, DecodeOptions(24, 1 + seed % 6)) == truth
