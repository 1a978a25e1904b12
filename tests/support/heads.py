"""Small untrained heads on disk, for tests that need heads but not good ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from edgespec.export.bundle.model import open_model
from edgespec.export.heads.description import DESCRIPTION, TENSORS, HeadsFile
from edgespec.export.source.source import resolve


def make_heads(folder: Path, kind: str, model: str, *, count: int = 3, own: bool = False, seed: int = 0) -> Path:
    """A folder of heads of a kind for a model.

    Medusa heads start as the paper's do, near the LM head's own guess; exits are near the identity.
    """
    facts = open_model(resolve(model), None).facts
    hidden, vocab, layers = facts.hidden, facts.vocab, facts.layers
    rng = np.random.default_rng(seed)

    def noise(*shape: int, scale: float = 0.05) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    exits = sorted({max(1, layers // 2), layers - 1}) if kind == "paradecode" else []
    inner = 2 * hidden if kind == "blockwise" else 0
    tensors: dict[str, np.ndarray] = {}
    if kind == "medusa":
        for i in range(count):
            tensors |= {f"medusa.{i}.weight": noise(hidden, hidden), f"medusa.{i}.bias": noise(hidden)}
            if own:
                tensors[f"medusa.{i}.lm_head.weight"] = noise(vocab, hidden)
    elif kind == "blockwise":
        tensors = {
            "blockwise.inner.weight": noise(inner, hidden),
            "blockwise.inner.bias": noise(inner),
            "blockwise.outer.weight": noise(count * hidden, inner),
            "blockwise.outer.bias": noise(count * hidden),
        }
    for layer in exits:
        tensors[f"exit.{layer}.weight"] = np.eye(hidden, dtype=np.float32) + noise(hidden, hidden, scale=0.005)
    file = HeadsFile(
        kind=kind,  # type: ignore[arg-type]
        count=len(exits) or count,
        hidden=hidden,
        vocab=vocab,
        inner=inner,
        exits=exits,
        own=own,
    )
    folder.mkdir(parents=True)
    (folder / DESCRIPTION).write_text(json.dumps(file.model_dump()), "utf-8")
    save_file(tensors, folder / TENSORS)
    return folder
