"""Guided requests on real graphs: what each method writes is plain guided decoding's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.runtimes.opening import open_slot
from tests.conftest import PROMPTS

HOW: dict[str, Any] = {"guidance_scale": 3.0, "negative_prompt": "JULIET:\n", "ignore_eos": True, "max_new_tokens": 32}


TREES: dict[str, dict[str, Any]] = {"tree": {"branch": (3, 2)}, "medusa": {"nodes": 8}}


def by_hand(engine: Engine, prompt: str) -> list[int]:
    """Mix the logits of two slots, one row after the other."""
    asked, other = (open_slot(engine.model) for _ in range(2))
    texts = [engine.codec.encode(prompt), engine.codec.encode(HOW["negative_prompt"])]
    found: list[int] = []
    for slot, text in zip((asked, other), texts, strict=True):
        slot.prefill(text[:-1])
    for _ in range(HOW["max_new_tokens"]):
        first, second = (
            slot.forward(np.array([text[-1]], np.int64)).logits[0].copy()
            for slot, text in zip((asked, other), texts, strict=True)
        )
        found.append(int((second + np.float32(HOW["guidance_scale"]) * (first - second)).argmax()))
        for slot, text in zip((asked, other), texts, strict=True):
            slot.keep([0])
            text.append(found[-1])
    return found


def test_every_method_writes_plain_guided_decodings_text(engine: Callable[..., Engine]) -> None:
    made, drafted = engine("int4"), 0
    wanted = by_hand(made, PROMPTS[0])
    assert made.generate(PROMPTS[0], **{**HOW, "guidance_scale": 1.0}).tokens != wanted
    for method in ("ar", "ngram", "self-spec", "swift", "speculative", "blockwise", "paradecode", "medusa", "tree"):
        how = TREES.get(method, {})
        result = made.generate(PROMPTS[0], method=method.replace("tree", "speculative"),
                               fallback=False, adaptive=not how, **HOW, **how)  # fmt: skip
        assert result.tokens == wanted or not result.exact, method
        assert result.stats.dropped_reason is None
        assert result.exact or (how and made.operators.kind == "stock"), method
        drafted += result.stats.drafted
    assert drafted
    both = made.generate_batch(PROMPTS[:2], **HOW)
    assert both[0].tokens == wanted
    assert made.generate(PROMPTS[1], method="ar", **HOW).tokens == both[1].tokens


@pytest.mark.parametrize("asked", [{"guidance_scale": -1}, {"negative_prompt": [10**6]}, {"beams": 2}])
def test_what_guidance_cannot_be_is_refused(engine: Callable[..., Engine], asked: dict[str, Any]) -> None:
    with pytest.raises(EdgespecError, match=r"guidance|negative|stock ones"):
        engine("int4").generate(PROMPTS[0], **{**HOW, **asked})
