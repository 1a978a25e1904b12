"""Make requests of a fixed length, and compare methods' texts with plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from edgespec.errors import ExportError
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import PROMPTS

METHODS = ("ar", "ngram", "self-spec", "speculative")
PROMPT = PROMPTS[0]
NEW = 48
Get = Callable[..., Engine]


def ask(engine: Engine, prompt: Any = PROMPT, **settings: Any) -> Result:
    """Make a request whose length does not depend on what the model was trained to end with."""
    return engine.generate(prompt, **{"max_new_tokens": NEW, "ignore_eos": True, "method": "ar", **settings})


def assert_plain_text(engine: Engine, method: str, prompts: Sequence[str], *how: Settings) -> None:
    """Check that texts are plain decoding's, exactly, and that some draft tokens were accepted and some rejected."""
    offered = accepted = 0
    for settings in how:
        for prompt in prompts:
            plain = engine.generate(prompt, settings, method="ar")
            result = engine.generate(prompt, settings, method=method)
            assert result.tokens == plain.tokens
            assert result.method_used == method
            assert result.stats.dropped_reason is None
            assert result.lossless
            assert result.exact
            offered, accepted = offered + result.stats.drafted, accepted + result.stats.accepted
    assert 0 < accepted < offered


def said_of(options: ExportOptions) -> str:
    """Export a drafter that guesses as badly as by chance; return what its refusal says would help."""
    with pytest.raises(ExportError, match="of the drafter's first guesses") as refused:
        export_model(options, golden=False)
    assert not options.output.exists()
    return str(refused.value.hint)


Snapshot = Mapping[str, NDArray[Any]]  # by name


def caches_of(engine: Engine, fresh: Slot, tokens: Sequence[int]) -> tuple[Snapshot, Snapshot]:
    """Give what an engine's session holds of a text that it has just written, and a slot after its prefill."""
    session = engine.sessions.take(tokens)
    try:
        assert session.target.tokens == tokens[:-1]
        held = session.target.snapshot()
    finally:
        engine.sessions.give_back(session)
    fresh.follow([])
    fresh.prefill(tokens[:-1])
    return held, fresh.snapshot()
