"""Manifests and profiles made by hand, for tests of planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.planning.profiles import Machine, Profile, Trial, manifest_hash, this_machine
from edgespec.planning.traffic import kv_token_bytes, read_bytes
from edgespec.runtimes.files.formats import SPECS, Format
from edgespec.runtimes.files.manifest import (
    SCHEMA,
    FileEntry,
    Graph,
    Manifest,
    Measured,
    MethodPart,
    ModelFacts,
    ModelPart,
    SkipSetPart,
    TokenizerFacts,
)

SIZES: dict[str, int] = {name: int(spec.native_bits * (63 << 20)) for name, spec in SPECS.items()}
SIZES |= {"int4": 300 << 20, "w8a8": 500 << 20, "int8": 530 << 20, "fp32": 2000 << 20}
FACTS = ModelFacts(
    architecture="llama",
    layers=24,
    hidden=896,
    intermediate=4864,
    heads=14,
    kv_heads=2,
    head_dim=64,
    vocab=150000,
    context=8192,
    tied=True,
    parameters=494_000_000,
)


def part(form: Format, weights: str, facts: ModelFacts = FACTS) -> ModelPart:
    """Make a model with native and stock graphs."""
    graphs = {
        "gated": Graph(file="model.strict.onnx", gated=True, padded=True),
        "plain": Graph(file="model.plain.onnx"),
        "native": Graph(file="model.native.onnx", gated=True, hidden=True, operators="native"),
    }
    return ModelPart(
        facts=facts, format=form, graphs=graphs, weights=weights, layout="native", extra_rows=64, min_rows=0
    )


def manifest(form: Format = "int4", methods: Sequence[str] = ("ar", "ngram", "self-spec")) -> Manifest:
    """Make a bundle of the shape of a 0.5B model."""
    measured = [Measured(acceptance=[0.8, 0.7], positions=40, text="t", text_sha256="0")]
    skip = SkipSetPart(attention=[3, 4], mlp=[3, 4])
    parts = {
        "self-spec": MethodPart(gamma=3, skip=skip, draft_cost=0.6, predicted_speedup=1.1, measured=measured),
        "speculative": MethodPart(gamma=4, draft_cost=0.1, predicted_speedup=1.6, measured=measured),
    }
    files = {
        "model.data": FileEntry(size=SIZES[form], sha256="0"),
        "tokenizer.json": FileEntry(size=7 << 20, sha256="0"),
    }
    draft = None
    if "speculative" in methods:
        draft = part(form, "draft/model.data", FACTS.model_copy(update={"layers": 2}))
        files["draft/model.data"] = FileEntry(size=SIZES[form] // 6, sha256="0")
    return Manifest(
        schema_version=SCHEMA,
        edgespec_version="0",
        target=part(form, "model.data"),
        draft=draft,
        methods={name: parts.get(name, MethodPart()) for name in methods},
        tokenizer=TokenizerFacts(),
        files=files,
    )


def predicting(made: Manifest, gains: Mapping[str, float]) -> Manifest:
    """Copy a manifest whose export predicted these speeds over plain decoding, by method, and no others."""
    parts = {
        name: part.model_copy(update={"predicted_speedup": gains.get(name)}) for name, part in made.methods.items()
    }
    return made.model_copy(update={"methods": parts})


ELSEWHERE = Machine(
    processor="aarch64 Phone 1 asimddp",
    cores=4,
    memory=4 << 30,
    onnxruntime="1.99.0",
    edgespec="0.1.0",
    isa="neon",
    library="abc",
)


def passes(one: float = 10.0, row: float = 1.0, token: float = 0.001) -> dict[int, dict[int, float]]:
    """``one`` ms for a row, ``row`` more for each other one, and ``token`` ms for each row and token of depth."""
    sizes, depths = (1, 2, 3, 5, 9, 17), (0, 1000, 4000)
    return {d: {n: one + row * (n - 1) + token * n * d for n in sizes} for d in depths}


def trial(**changes: Any) -> Trial:
    """100 rounds of 150 tokens: half of them of three rows; 1.25 times plain decoding at depth 0."""
    values: dict[str, Any] = {
        "rounds": 100,
        "tokens": 150,
        "drafted": 100,
        "accepted": 50,
        "rows": {1: 50, 3: 50},
        "draft_ms": 1.0,
        "verify_ms": 11.0,
        "other_ms": 0.0,
        "speedup": 1.25,
        "depth": 0.0,
        "drafted_at": [50, 30],
        "accepted_at": [30, 20],
    }
    return Trial(**values | changes)


def profile(manifest: Manifest, machine: Machine | None = None, **changes: Any) -> Profile:
    """Make a profile of a bundle on this machine, native operators; the default passes are ``passes()``."""
    values: dict[str, Any] = {
        "machine": machine or this_machine(),
        "bundle": manifest_hash(manifest),
        "name": "bundle",
        "facts": manifest.target.facts,
        "format": manifest.target.format,
        "weight_bytes": read_bytes(manifest.target, "native"),
        "kv_bytes": kv_token_bytes(manifest.target, "native", "f16"),
        "operators": "native",
        "threads": 2,
        "attention": "f16",
        "passes": passes(),
        "plain": {depth: times[1] for depth, times in passes().items()},
        "prefill": {0: 500.0, 1000: 250.0},
        "bandwidth": 1e9,
        "rows_exact": True,
        "process_bytes": 80 << 20,
        "seconds": 10.0,
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Profile(**values | changes)
