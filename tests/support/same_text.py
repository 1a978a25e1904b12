"""Texts of a method beside plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine


def assert_plain_text(engine: Engine, method: str, prompts: Sequence[str], *how: Settings) -> None:
    """Every text is plain decoding's, exactly, and of all guesses some stood and some did not."""
    offered = accepted = 0
    for settings in how:
        for prompt in prompts:
            plain = engine.generate(prompt, settings, method="ar")
            result = engine.generate(prompt, settings, method=method)
            assert result.tokens == plain.tokens
            assert result.method_used == method
            assert result.lossless
            assert result.exact
            offered, accepted = offered + result.stats.drafted, accepted + result.stats.accepted
    assert 0 < accepted < offered
