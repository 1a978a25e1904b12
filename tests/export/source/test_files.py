"""Which files of a folder are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.source.source import Checkpoint
from tests.support import hf

WEIGHTS = "model.safetensors"


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).rename(tmp_path / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "b.safetensors")
    with pytest.raises(ExportError, match=r"model\.norm\.weight is in a\.safetensors and in b\.safetensors"):
        Checkpoint.open(tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)
    with pytest.raises(ExportError, match=rf"{shard.name}: has no tensor {name}, which model\.safetensors\.index"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("listed", [True, False])
def test_other_files_do_not_confuse(tmp_path: Path, shards: int, listed: bool) -> None:
    config = hf.CONFIGS["llama_tied_gqa"]
    hf.write_checkpoint(tmp_path, config, 3, shards=shards)
    if not listed:
        (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    strange = {"model.norm.weight": np.zeros(3, np.float32), "layers.0.attention.wq.weight": np.zeros(3, np.float32)}
    for name in ("consolidated", "optimizer", "adapter_model", "training_args"):
        save_file(strange, tmp_path / f"{name}.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.index) == set(hf.weights(config, 3))
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), hf.weights(config, 3)["model.norm.weight"])


def test_mistrals_own_format_alone_is_refused(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3)
    (tmp_path / WEIGHTS).rename(tmp_path / "consolidated.safetensors")
    with pytest.raises(ExportError, match="mistral's own format"):
        Checkpoint.open(tmp_path)


def test_scalars_and_no_dtype_in_the_configuration(tmp_path: Path) -> None:
    folder = hf.write_checkpoint(tmp_path, hf.CONFIGS["llama_tied_gqa"], 3, "bfloat16")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").unlink()
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"steps": np.full((), 7.0, np.float64)}, folder / WEIGHTS)
    assert Checkpoint.open(folder).read("steps") == 7
    open_model(folder, None)
