"""The memory that an engine keeps between requests is bounded, for any number of different requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgespec.decoding.settings import Settings
from edgespec.engine.batch import MOST_WIDTHS
from edgespec.engine.engine import Engine
from edgespec.engine.sessions import MOST_DRAFTERS
from edgespec.runtimes.slots.shared import MOST_VIEWS

SHORT = Settings(method="ngram", max_new_tokens=1, ignore_eos=True)


def test_drafters_of_other_options_are_forgotten(fresh: Callable[..., Engine]) -> None:
    """Drafters that are used repeatedly stay, with what they learned."""
    engine = fresh()
    session = engine.sessions.take([])

    def made(gamma: int, method: str = "ngram") -> object:
        settings = SHORT.changed(method=method, gamma=gamma)
        return session.policy(engine.choose_for(settings), gamma, True, True, settings.drafts)

    often = made(1)
    for gamma in range(2, MOST_DRAFTERS):
        assert made(gamma, ("ngram", "chain", "auto")[gamma % 3]) is not None
        assert made(1) is often
    first = made(2, "auto")
    for gamma in range(2, 2 * MOST_DRAFTERS):
        made(1000 + gamma)
    assert made(2, "auto") is not first
    assert len(session._policies) == MOST_DRAFTERS
    engine.sessions.give_back(session)


def test_batches_of_other_widths_are_forgotten(fresh: Callable[..., Engine]) -> None:
    engine = fresh()
    for width in (2, 3, 4, 2, 5):
        engine.generate_batch([[1, 2]] * width, SHORT.changed(batch=width))
        assert len(engine._batches._idle) <= MOST_WIDTHS
    held = engine.kv_bytes()
    engine.generate_batch([[1, 2]] * 5, SHORT.changed(batch=5))
    assert engine.kv_bytes() == held


def test_views_of_other_shapes_are_forgotten(fresh: Callable[..., Engine]) -> None:
    model = fresh().model
    for size in range(1, MOST_VIEWS + 100):
        view = model.buffer("test", (1, size), np.float32)
        assert (view.array.shape, model.buffer("test", (1, size), np.float32) is view) == ((1, size), True)
    assert len(model._views) <= MOST_VIEWS
