"""Published drafters are read in every layout; what is not one, or one of another model, is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.read import read_drafter
from tests.support import hf
from tests.support.eagle import DIM, write_random

IDS = "eagle_aux_hidden_state_layer_ids"
LAYERS = 8
CUT = [3, 4, *range(10, 40), 77]

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    """Write and open a model of eight layers with random weights."""
    config = {**hf.CONFIGS["llama_tied_gqa"], "num_hidden_layers": LAYERS}
    return open_model(hf.write_checkpoint(tmp_path_factory.mktemp("target"), config, seed=1), None)


@pytest.fixture
def made(target: Architecture, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a drafter of ``config`` after a ``change`` to it and its tensors."""

    def make(config: dict[str, Any], change: Callable[[dict[str, Any], Tensors], None] | None = None) -> Path:
        known = {IDS: [2, 4, 5], **config}
        folder = write_random(tmp_path / "drafter", target, known, CUT)
        if change is not None:
            said, tensors = (
                json.loads((folder / "config.json").read_text("utf-8")),
                load_file(folder / "model.safetensors"),
            )
            change(said, tensors)
            (folder / "config.json").write_text(json.dumps(said), "utf-8")
            save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def without_ids(said: dict[str, Any], tensors: Tensors) -> None:
    """Write it as the authors of EAGLE do, without the layers."""
    del said[IDS]


def as_sglang(said: dict[str, Any], tensors: Tensors) -> None:
    """Count layers by their outputs, in a separate part."""
    del said[IDS]
    said["eagle_config"] = {IDS: [1, LAYERS // 2 - 1, LAYERS - 4], "use_aux_hidden_state": True}
    del said["draft_vocab_size"]


@pytest.mark.parametrize(
    "change, tapped, note",
    [
        (None, (2, 4, 5), ""),
        (without_ids, (2, LAYERS // 2, LAYERS - 3), "does not say which layers"),
        (as_sglang, (2, LAYERS // 2, LAYERS - 3), "as SGLang counts them"),
    ],
    ids=["original", "without ids", "SGLang"],
)
def test_layouts(
    made: Callable[..., Path],
    target: Architecture,
    change: Callable[..., None] | None,
    tapped: tuple[int, ...],
    note: str,
) -> None:
    """Speculators' layout is read in tests/drafters/test_published.py, as their code writes it."""
    drafter = read_drafter(made({}, change), target)
    assert drafter.tapped == tapped
    assert drafter.tokens is not None
    assert drafter.tokens.tolist() == CUT
    assert drafter.arch.facts.head_dim == DIM  # hidden / heads would be another
    assert len(drafter.notes) == bool(note)
    assert all(note in each for each in drafter.notes)


def test_a_copy_of_the_embedding_is_dropped(made: Callable[..., Path], target: Architecture) -> None:
    embedding = target.source.read(target.embedding)

    def copied(said: dict[str, Any], tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = embedding

    def other(said: dict[str, Any], tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = embedding[::-1].copy()

    folder = made({}, copied)
    drafter = read_drafter(folder, target)
    assert not any("embed" in name for name in drafter.arch.tensors)
    shutil.rmtree(folder)
    with pytest.raises(ExportError, match="not the target's embedding"):
        read_drafter(made({}, other), target)


def test_a_pickle_is_refused_with_how_to_convert_it(target: Architecture, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ExportError, match="is a pickle") as refused:
        read_drafter(tmp_path, target)
    assert "weights_only=True" in str(refused.value.hint)
    assert "save_file" in str(refused.value.hint)


def wider(said: dict[str, Any], tensors: Tensors) -> None:
    said["hidden_size"] = 2 * said["hidden_size"]


def two_taps(said: dict[str, Any], tensors: Tensors) -> None:
    said[IDS] = said[IDS][:2]


def too_deep(said: dict[str, Any], tensors: Tensors) -> None:
    said[IDS] = [2, 4, LAYERS + 1]


def no_offsets(said: dict[str, Any], tensors: Tensors) -> None:
    del tensors["d2t"]


def offsets_as_tokens(said: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] = np.asarray(CUT) + 1000


def offsets_as_floats(said: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"] = np.asarray(CUT, np.float32)


def no_layer(said: dict[str, Any], tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("midlayer")]:
        del tensors[name]


def narrow(said: dict[str, Any], tensors: Tensors) -> None:
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"][:, :-1].copy()


def each_tap_normed(said: dict[str, Any], tensors: Tensors) -> None:
    said["fc_norm"] = True


def another_kind(said: dict[str, Any], tensors: Tensors) -> None:
    said["architectures"] = ["SomethingElse"]


@pytest.mark.parametrize(
    "change, message",
    [
        (wider, "hidden size"),
        (two_taps, r"expected \[hidden, 2 \* hidden\]"),
        (too_deep, f"this model has {LAYERS}"),
        (no_offsets, "no d2t says which"),
        (offsets_as_tokens, "d2t names tokens"),
        (offsets_as_floats, "d2t is of type F32"),
        (no_layer, "q_proj.weight of an EAGLE-3 drafter"),
        (narrow, "down_proj.weight"),
        (each_tap_normed, "fc_norm.0.weight"),
        (another_kind, "SomethingElse"),
    ],
)
def test_what_does_not_fit_is_refused(
    made: Callable[..., Path], target: Architecture, change: Callable[..., None], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        read_drafter(made({}, change), target)
