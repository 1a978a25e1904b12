"""What a drafter is worth is measured on the target's own text; one that is read wrongly is found out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.manifest import Manifest

IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = "builtin:shakespeare"

Tensors = dict[str, np.ndarray]


def exported(folder: Path, config: dict[str, Any], change: Callable[[Tensors], None] | None = None) -> Manifest:
    """A bundle with the embedded drafter, changed."""
    source = resolve(f"{TARGET}-eagle")
    said, tensors = json.loads((source / "config.json").read_text("utf-8")), load_file(source / "model.safetensors")
    if change is not None:
        change(tensors)
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps(said | config), "utf-8")
    save_file(tensors, folder / "drafter" / "model.safetensors")
    options = ExportOptions(TARGET, folder / "bundle", ["eagle"], drafter=str(folder / "drafter"), threads=1)
    return Exporter(options).run()


def swapped(tensors: Tensors) -> None:
    """Trained with the hidden state before the embedding."""
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = np.roll(tensors[name], tensors[name].shape[1] // 2, 1)


def other(tensors: Tensors) -> None:
    """Of another model."""
    for name, values in tensors.items():
        tensors[name] = np.ascontiguousarray(values[::-1])


@pytest.mark.parametrize(
    "change, hint", [(swapped, "hidden state before the embedding"), (other, "may be for another model")]
)
def test_a_drafter_near_chance_is_refused(tmp_path: Path, change: Callable[[Tensors], None], hint: str) -> None:
    with pytest.raises(ExportError, match="of the drafter's first guesses") as refused:
        exported(tmp_path, {}, change)
    assert hint in str(refused.value.hint)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("said", [[0, 2, 4], [5, 3, 1]])
def test_a_setting_that_would_be_better_is_said(tmp_path: Path, said: list[int]) -> None:
    """Layers counted from another end, and in another order."""
    notes = exported(tmp_path, {IDS: said}).methods["eagle"].notes
    assert notes is not None
    assert f"{IDS}: [1, 3, 5]" in notes


def test_the_share_of_the_models_tokens_that_it_can_guess_is_said(tmp_path: Path) -> None:
    kept = np.arange(0, 1024, 2)

    def cut(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][kept])
        tensors["d2t"] = kept - np.arange(len(kept))

    notes = exported(tmp_path, {}, cut).methods["eagle"].notes
    assert notes is not None
    found = re.search(r"can guess 512 tokens, (\d+)% of those that the model wrote", notes)
    assert found is not None
    assert 10 < int(found[1]) < 90


def test_first_guesses_are_compared_in_every_format(tmp_path: Path) -> None:
    """What is written has the acceptance of the manifest; eight bits guess as the source does, noise does not."""
    found = exported(tmp_path, {}).methods["eagle"]
    said = re.search(r"by format, as written first: int4 (\d+)%, fp32 (\d+)%, int8 (\d+)%", found.notes or "")
    assert said is not None
    written, whole, eight = map(int, said.groups())
    assert abs(written - 100 * found.measured[0].acceptance[0]) <= 1
    assert abs(whole - eight) <= 10 < 20 <= whole
