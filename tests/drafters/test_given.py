"""Rows that a drafter is given: embeddings, of which some are kept, and what stands beside them."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.drafters.draft_cache import InputRows
from tests.support.toy_drafter import HIDDEN, TappedToy, embedded

COLUMNS = HIDDEN + 4


def test_rows_are_embeddings_and_what_stands_beside_them() -> None:
    """In the order of the tokens, however often one is among them; zeros where nothing stands."""
    target = TappedToy()
    given = InputRows(target, COLUMNS, HIDDEN)
    for tokens in ([4, 1, 4], [7], [1, 7, 2, 1]):
        for width in (0, 1, 4):
            state = np.random.default_rng(width).standard_normal((len(tokens), width)).astype(np.float32)
            expected = [[*embedded(token), *row, *[0] * (4 - width)] for token, row in zip(tokens, state, strict=True)]
            found = given(tokens, state)
            assert found.dtype == np.float32
            assert found.tolist() == np.array(expected, np.float32).tolist()
    assert sorted(target.asked) == [1, 2, 4, 7]  # each once


def test_one_state_beside_all_rows() -> None:
    state = np.array([[5, 6]], np.float32)
    assert InputRows(TappedToy(), COLUMNS, HIDDEN)([4, 1], state)[:, HIDDEN:].tolist() == [[5, 6, 0, 0]] * 2


def test_embeddings_that_are_kept_take_no_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for five: where more might come, none is kept, and what is needed again is asked for again."""
    monkeypatch.setattr("edgespec.drafters.draft_cache.EMBEDDING_BYTES", 5 * HIDDEN * 4)
    target = TappedToy()
    given, state = InputRows(target, HIDDEN, HIDDEN), np.zeros((1, 0), np.float32)
    for tokens in ([0, 1, 2], [3], [0], [4], [0], [5], [6, 7], [0, 5]):
        assert given(tokens, state).tolist() == [embedded(token).tolist() for token in tokens]
        assert len(given._token_embeddings) <= 5
    assert target.asked == [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 5]
