"""Golden vectors: what a bundle's plain decoding writes, kept in it so that any runtime can prove itself."""

from __future__ import annotations

from pathlib import Path

from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.loading import load
from edgespec.planning.profile.machine import this_machine
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


def made_by(engine: LoadedBundle) -> dict[str, str]:
    """What decides the bits of an engine's plain decoding: native operators alone, or also machine and ONNX Runtime."""
    kind = engine.operators.kind
    if kind == "native":
        return {"operators": kind}
    machine = this_machine()
    return {"operators": kind, "processor": machine.processor, "onnxruntime": machine.onnxruntime}


def why_free(engine: LoadedBundle) -> str:
    """Why this engine need not reproduce the bundle's golden vectors, in words; "" = it must, bit for bit."""
    manifest = engine.bundle.manifest
    if engine.device != "cpu":
        return f"device {engine.device} rounds differently"
    # a bundle that does not say it was made by what its layout is for
    then: dict[str, str] = manifest.provenance.get("golden") or {"operators": manifest.target.layout}
    now = made_by(engine)
    for name in now:
        if name not in then:
            return f"the bundle does not say with which {name} they were made"
        if then[name] != now[name]:
            return f"they were made with {name} {then[name]}, and this is {now[name]}"
    return ""


def make_golden(bundle: Path, text: str, threads: int | None = None) -> tuple[list[GoldenVector], dict[str, str]]:
    """Greedy plain decoding, strict, of the prompts -> the vectors, and what made them (``provenance.golden``)."""
    engine = load(bundle, threads=threads, check=False)
    vectors = []
    for prompt in golden_prompts(engine, text):
        result = engine.generate(prompt, Settings(method=AR, max_new_tokens=NEW_TOKENS))
        vectors.append(GoldenVector(prompt=prompt, method=AR, tokens=result.tokens))
    return vectors, made_by(engine)
