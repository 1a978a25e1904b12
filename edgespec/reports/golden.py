"""Golden vectors: what a bundle's plain decoding writes, kept in it so that any runtime can prove itself."""

from __future__ import annotations

from pathlib import Path

from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.runtimes.files.manifest import GoldenVector

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 16, 32


def golden_prompts(engine: Engine, text: str) -> list[list[int]]:
    """Short prompts taken from a text at even distances, each beginning a line where possible."""
    size = min(PROMPT_TOKENS, engine.context // 2)
    lines = [tokens for line in text.splitlines() if len(tokens := engine.codec.encode(line)) >= 4]
    if not lines:  # a text of very short lines: take it as one
        tokens = engine.codec.encode(text)
        lines = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    step = max(1, len(lines) // PROMPTS)
    return [line[:size] for line in lines[::step][:PROMPTS]]


def make_golden(bundle: Path, text: str, threads: int | None = None) -> list[GoldenVector]:
    """Greedy plain decoding, strict, of the prompts."""
    engine = load(bundle, threads=threads, check=False)
    vectors = []
    for prompt in golden_prompts(engine, text):
        result = engine.generate(prompt, Settings(method=AR, max_new_tokens=NEW_TOKENS))
        vectors.append(GoldenVector(prompt=prompt, method=AR, tokens=result.tokens))
    return vectors
