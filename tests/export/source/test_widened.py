"""The embedded model at the cost of a larger one: same numbers, other size, nothing stored."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.source import Checkpoint, ConfigOnly, resolve
from edgespec.export.source.widened import FILE, _rows_of_hadamard

WIDE, SMALL = resolve("builtin:shakespeare-73m"), resolve("builtin:shakespeare")


def copy(folder: Path, config: dict[str, Any] | None = None, widened: object = None) -> Path:
    """The wide model's folder with other settings."""
    shutil.copytree(WIDE, folder)
    own = json.loads((folder / "config.json").read_text("utf-8")) | (config or {})
    (folder / "config.json").write_text(json.dumps(own), "utf-8")
    (folder / FILE).write_text(json.dumps(widened or {"source": str(SMALL), "factor": 8}), "utf-8")
    return folder


def test_it_computes_what_the_small_one_computes() -> None:
    tokens = [0, *np.random.default_rng(5).integers(2, 1024, 48).tolist()]
    wide, small = (reference_logits(open_model(path, None), tokens) for path in (WIDE, SMALL))  # [49, 1024] each
    assert np.abs(wide - small).max() < 1e-4
    assert np.array_equal(wide.argmax(-1), small.argmax(-1))


def test_rows_are_orthonormal_and_well_mixed() -> None:
    rows = _rows_of_hadamard(128, 1024, 0)
    assert np.array_equal(rows @ rows.T, np.eye(128))
    columns = np.unique(np.sign(rows).T, axis=0)
    assert len(columns) > 500  # not the same few columns over and over: groups of weights differ
    assert not np.array_equal(rows[:32, :256], _rows_of_hadamard(32, 256, 1) / 2)


def test_its_size_is_that_of_a_larger_model() -> None:
    wide = Checkpoint.open(WIDE)
    assert sum(int(np.prod(tensor.shape)) for tensor in wide.tensors.values()) == 72_889_344
    assert wide.tensors.keys() == Checkpoint.open(SMALL).tensors.keys() | {"lm_head.weight"}
    assert wide.notes == [
        "synthetic in size: shakespeare made 8 times as wide, with the same text and weights repeated"
    ]
    assert not ConfigOnly.suits(WIDE)


def test_its_weights_are_the_same_on_every_machine() -> None:
    wide = Checkpoint.open(WIDE)
    digest = hashlib.sha256()
    for name in sorted(wide.tensors):
        if "layers.1." in name or "lm_head" in name:
            digest.update(wide.read(name).tobytes())
    assert digest.hexdigest() == "2d8fdb36eaaab388e659793e5b042ab78a59d3b1b38bd0d44b8de51757823c96"


def test_parts_of_a_tensor_are_parts_of_the_whole() -> None:
    wide = Checkpoint.open(WIDE)
    for which in ("self_attn.o_proj", "mlp.down_proj", "self_attn.k_proj"):
        whole = wide.read(f"model.layers.0.{which}.weight")
        assert np.array_equal(
            wide.read(f"model.layers.0.{which}.weight", slice(3, 70), slice(5, 90)), whole[3:70, 5:90]
        )


@pytest.mark.parametrize(
    "config, widened, message",
    [
        ({"hidden_size": 512}, None, "as wide"),
        ({}, {"source": str(SMALL), "factor": 3}, "as wide"),
        ({}, {"source": str(SMALL), "factor": "8"}, "expected {"),
        ({}, {"source": str(WIDE), "factor": 1}, "expected {"),
        ({}, {"source": "nowhere", "factor": 8}, "has no config.json"),
    ],
)
def test_what_is_no_widening_is_refused(tmp_path: Path, config: dict[str, Any], widened: object, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        Checkpoint.open(copy(tmp_path / "wide", config, widened))
