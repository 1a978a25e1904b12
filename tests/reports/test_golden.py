"""Golden vectors: made, and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.reports import proof as golden
from edgespec.reports.proof import check_golden
from edgespec.runtimes.files.manifest import GoldenVector
from tests.conftest import THREADS

Get = Callable[..., Engine]


TEXT = "First line of the text here\n\nok\n" + "".join(f"This is line number {n} of a long text.\n" for n in range(40))


def test_golden_vectors_are_what_plain_decoding_writes(bundle: Callable[..., Path], engine: Get) -> None:
    vectors, made_by = golden.make_golden(bundle("int4"), TEXT, THREADS)
    assert made_by == golden.made_by(load(bundle("int4"), threads=THREADS))
    assert len(vectors) == golden.PROMPTS
    lines = [engine().codec.encode(line) for line in TEXT.splitlines()]
    for vector in vectors:
        assert vector.method == "ar"
        assert 4 <= len(vector.prompt) <= golden.PROMPT_TOKENS
        assert any(line[: golden.PROMPT_TOKENS] == vector.prompt for line in lines)
        for method in ("ar", "ngram", "self-spec", "speculative"):
            made = engine().generate(vector.prompt, method=method, max_new_tokens=golden.NEW_TOKENS)
            assert made.tokens == vector.tokens
    assert golden.make_golden(bundle("int4"), TEXT, THREADS)[0] == vectors


@pytest.mark.parametrize("text, count", [("a\nb\n" * 40, 8), ("word " * 400, 1), ("x", 1)])
def test_any_text_gives_golden_prompts(engine: Get, text: str, count: int) -> None:
    prompts = golden.golden_prompts(engine(), text)
    assert len(prompts) == count
    assert all(0 < len(prompt) <= golden.PROMPT_TOKENS for prompt in prompts)


def test_golden_vectors_that_fit_are_checked(engine: Get, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    prompt = made.codec.encode("ROMEO:")
    tokens = made.generate(prompt, method="ar", max_new_tokens=8).tokens
    wrong = [*tokens[:-1], (tokens[-1] + 1) % made.model.facts.vocab]
    vectors = [GoldenVector(prompt=prompt, method="ar", tokens=item) for item in (tokens, wrong, tokens * 500)]
    manifest = made.bundle.manifest.model_copy(update={"golden": vectors})
    monkeypatch.setattr(made, "bundle", type(made.bundle)(made.bundle.path, manifest))
    assert check_golden(made) == (1, 2)
