"""Profiles made by hand, for tests of planning."""

from __future__ import annotations

from typing import Any

from edgespec.planning.profiles import Machine, Profile, Trial, manifest_hash, this_machine
from edgespec.planning.traffic import kv_token_bytes, read_bytes
from edgespec.runtimes.files.manifest import Manifest

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
        "offered": [50, 30],
        "accepted_at": [30, 20],
    }
    return Trial(**values | changes)


def profile(manifest: Manifest, machine: Machine | None = None, **changes: Any) -> Profile:
    """Of a bundle on this machine, native operators; ``passes()`` unless told otherwise."""
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
