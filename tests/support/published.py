"""Drafters in the format of their authors' code, with its drafts: made by tools/make_drafter_references.py.

An archive has the config.json and the names and shapes of the tensors that the code saved, and its drafts.  Weights and
the target's tapped states are recreated from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.export.architectures import Architecture
from tests.support import hf
from tests.support.any_drafter import Floats, random_tensors

REFERENCES = Path(__file__).resolve().parent.parent / "data" / "reference" / "drafters"
TARGET, SEED = "qwen3_tied", 11
HIDDEN, VOCAB, INNER, LAYERS = 64, 160, 96, 3  # the target's
CUT = (3, *range(9, 120), 150)  # what a cut LM head scores
BLOCK, MASK, RANK = 6, 2, 32
LENGTHS = (2, 3, 7, 12, 20, 33)  # tokens of the contexts, the pending one among them
CHAIN = 5  # guesses after each, of drafters of chains
HEADS = 3  # of Medusa


@dataclass
class Published:
    """An archive, read.

    Attributes:
        name: of it.
        config: config.json.
        shapes: of the tensors, by name, in order.
        found: what the code gave, by name; the first index is the context's.
    """

    name: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    found: dict[str, NDArray[Any]]

    @property
    def file(self) -> str:
        """Return the name of the tensors' file."""
        return "medusa_lm_head.safetensors" if self.name.startswith("medusa") else "model.safetensors"

    @classmethod
    def read(cls, name: str) -> Published:
        """Read an archive."""
        with np.load(REFERENCES / f"{name}.npz") as file:
            said = json.loads(str(file["said"]))
            found = {key: file[key] for key in file.files if key != "said"}
        return cls(name, said["config"], {key: tuple(shape) for key, shape in said["shapes"].items()}, found)

    def write(self, folder: Path, target: Path, changed: Mapping[str, Any] | None = None) -> Path:
        """Write the checkpoint that the code saved; ``changed``: keys of its config.json."""
        folder.mkdir(parents=True)
        save_file(tensors_of(self.shapes, target), folder / self.file)
        (folder / "config.json").write_text(json.dumps(self.config | dict(changed or {})), "utf-8")
        return folder


def tensors_of(shapes: Mapping[str, tuple[int, ...]], target: Path) -> dict[str, NDArray[Any]]:
    """Draw the tensors of a checkpoint; copies of the target's, and the tables of tokens, are what they should be."""
    whole = {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    found: dict[str, NDArray[Any]] = {**random_tensors(whole, SEED)}
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    if found.get("embed_tokens.weight") is not None and "mask_hidden" not in shapes:
        found["embed_tokens.weight"] = theirs
    if shapes.get("lm_head.weight") == theirs.shape:
        found["lm_head.weight"] = theirs
    if "d2t" in shapes:
        ids = np.array(CUT, np.int64)
        found |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(VOCAB), ids)}
    return {name: np.ascontiguousarray(found[name]) for name in shapes}


def contexts(columns: int) -> list[tuple[list[int], Floats]]:
    """Make texts, and the target's tapped states of all tokens but the last, [n - 1, columns]."""
    random = np.random.default_rng(SEED)
    return [
        (random.integers(3, 150, n).tolist(), random.standard_normal((n - 1, columns)).astype(np.float32))
        for n in LENGTHS
    ]


def write_target(folder: Path) -> Path:
    """Write the target."""
    return hf.write_checkpoint(folder, hf.CONFIGS[TARGET], hf.SEEDS[TARGET])


def known_keys(arch: Architecture) -> set[str]:
    """Return the names of the checkpoint's tensors that a drafter uses."""
    source = arch.source
    names = set(arch.tensors) | set(getattr(source, "extra", {}))
    while (base := getattr(source, "base", None)) is not None:
        extra = getattr(source, "extra", {})
        names = {one for name in names for one in (extra[name].origins if name in extra else (name,))}
        source = base
    return names
