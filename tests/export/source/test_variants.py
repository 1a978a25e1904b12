"""Variants of configurations and of checkpoints: other names, other prefixes, wider ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures import ARCHITECTURES, VERIFIED
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.source import Checkpoint, ConfigOnly, resolve
from edgespec.export.source.widened import FILE, _rows_of_hadamard
from tests.conftest import Reference
from tests.support.saved import REFERENCE

Rename = Callable[[str], "str | None"]


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the checkpoint of configuration ``name``, so that the test may damage it."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def rename(folder: Path, rule: Rename) -> None:
    """Rename the checkpoint's tensors; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    save_file({new: value for name, value in tensors.items() if (new := rule(name))}, folder / "model.safetensors")


def configure(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **values}), "utf-8")


def assert_same(folder: Path, known: Reference, text_only: bool = False) -> None:
    arch = open_model(folder, None, text_only=text_only)
    got = reference_logits(arch, known.tokens.tolist(), known.rows.tolist())
    np.testing.assert_allclose(got, known.logits, atol=1e-4)


BASES = {"llama_tied_gqa": "model.", "gpt2_default": "transformer.", "falcon_7b": "transformer."}


@pytest.mark.parametrize("name", BASES)
def test_a_base_model_saved_alone(
    copied: Callable[[str], Path], reference: Callable[[str], Reference], name: str
) -> None:
    folder = copied(name)
    rename(folder, lambda tensor: tensor.removeprefix(BASES[name]))
    assert_same(folder, reference(name))


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", ["gemma3_new", "mistral_window"])
def test_the_text_part_of_a_model_with_images(
    copied: Callable[[str], Path], reference: Callable[[str], Reference], name: str, new: bool
) -> None:
    """transformers 5 writes model.language_model.layers, transformers 4 wrote language_model.model.layers."""
    folder = copied(name)

    def outer(tensor: str) -> str:
        if new:
            return tensor.replace("model.", "model.language_model.", 1) if tensor.startswith("model.") else tensor
        return f"language_model.{tensor}"

    rename(folder, outer)
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_tower.layers.0.mlp.bias"] = np.zeros(3, np.float32)
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "pictures", "text_config": text, "vision_config": {"model_type": "siglip"}}), "utf-8"
    )
    assert_same(folder, reference(name), text_only=True)


@pytest.mark.parametrize(
    "kind, name",
    [("granite_docling", "granite_tied"), ("hunyuan_vl", "hunyuan_alpha"), ("paddleocr_vl", "llama_tied_gqa")],
)
def test_a_text_part_that_is_another_decoder(
    copied: Callable[[str], Path], reference: Callable[[str], Reference], kind: str, name: str
) -> None:
    folder = copied(name)
    rename(folder, lambda tensor: tensor.replace("model.", "model.language_model.", 1))
    text = json.loads((folder / "config.json").read_text("utf-8")) | {"model_type": f"{kind}_text"}
    vision = {"model_type": f"{kind}_vision"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, "text_config": text, "vision_config": vision}), "utf-8"
    )
    assert_same(folder, reference(name), text_only=True)


def test_the_older_name_of_a_head(copied: Callable[[str], Path], reference: Callable[[str], Reference]) -> None:
    folder = copied("gpt_neox_parallel")
    rename(folder, lambda tensor: tensor.replace("lm_head", "embed_out"))
    assert_same(folder, reference("gpt_neox_parallel"))


@pytest.mark.parametrize(
    "name, buffer",
    [
        ("llama_tied_gqa", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("falcon_7b", "transformer.h.0.self_attention.maybe_rotary.inv_freq"),
        ("qwen3_tied", "model.layers.1.self_attn.k_scale"),
        ("gpt2_default", "transformer.h.1.attn.bias"),
        ("gpt2_default", "transformer.h.1.attn.masked_bias"),
        ("gpt_neox_parallel", "gpt_neox.layers.2.attention.masked_bias"),
    ],
)
def test_buffers_that_old_versions_saved(
    copied: Callable[[str], Path], reference: Callable[[str], Reference], name: str, buffer: str
) -> None:
    folder = copied(name)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, buffer: np.zeros(4, np.float32)}, folder / "model.safetensors")
    assert_same(folder, reference(name))


@pytest.mark.parametrize(
    "name, extra",
    [
        ("llama_tied_gqa", "model.layers.1.self_attn.q_norm.weight"),
        ("llama_tied_gqa", "model.layers.0.self_attn.q_proj.bias"),
        ("gpt2_default", "transformer.h.0.attn.extra.weight"),
        ("falcon_7b", "transformer.h.2.ln_mlp.weight"),
    ],
)
def test_a_tensor_that_nothing_reads_is_refused(copied: Callable[[str], Path], name: str, extra: str) -> None:
    folder = copied(name)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, extra: np.ones(16, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ExportError, match=f"{extra} is part of the checkpoint, but .* has no use for it"):
        open_model(folder, None)


def test_layers_beyond_the_model_are_left_alone(
    copied: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    """Some checkpoints carry a layer that predicts further tokens, after those of the decoder."""
    folder = copied("qwen3_tied")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
    assert_same(folder, reference("qwen3_tied"))


@pytest.mark.parametrize(
    "name, values, what",
    [
        ("stablelm_quarter", {"qk_layernorm": True}, "qk_layernorm"),
        ("falcon_serial", {"alibi": True}, "alibi"),
        ("gpt2_default", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gemma2_caps", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mistral_yarn", {"hidden_act": "mish"}, "activation 'mish'"),
        ("llama_tied_gqa", {"head_dim": 12}, "multiple of 8"),
    ],
)
def test_options_that_are_not_supported(
    copied: Callable[[str], Path], name: str, values: dict[str, object], what: str
) -> None:
    folder = copied(name)
    configure(folder, **values)
    with pytest.raises(UnsupportedModel, match=what):
        open_model(folder, None)


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_layers_with_sizes_of_their_own_by_number(
    copied: Callable[[str], Path], reference: Callable[[str], Reference], digits: int
) -> None:
    """transformers writes as many digits as the last layer has: "05" where there are ten layers or more."""
    folder = copied("gemma4_shared")
    own = json.loads((folder / "config.json").read_text("utf-8"))["per_layer_config"]
    configure(folder, per_layer_config={f"{int(at):0{digits}}": sizes for at, sizes in own.items()})
    assert_same(folder, reference("gemma4_shared"))


def test_a_missing_tensor_has_the_name_of_its_checkpoint(copied: Callable[[str], Path]) -> None:
    folder = copied("gpt_neox_serial")
    rename(folder, lambda tensor: None if tensor == "gpt_neox.layers.1.attention.dense.weight" else tensor)
    with pytest.raises(ExportError, match=r"gpt_neox\.layers\.1\.attention\.dense\.weight is missing"):
        open_model(folder, None)


def test_longer_contexts_where_scaling_allows_them(copied: Callable[[str], Path]) -> None:
    folder = copied("gpt_neox_serial")  # dynamic, factor 2
    assert open_model(folder, None).facts.context == 512
    assert open_model(folder, 1024).facts.context == 1024
    with pytest.raises(ExportError, match="expected 2 to 1024"):
        open_model(folder, 1025)


def test_every_architecture_describes_itself() -> None:
    assert all(kind.example and kind.features for kind in ARCHITECTURES.values())
    assert (REFERENCE / "version.txt").read_text("utf-8").strip() == VERIFIED


WIDE, SMALL = resolve("builtin:shakespeare-73m"), resolve("builtin:shakespeare")


def copy(folder: Path, config: dict[str, Any] | None = None, widened: object = None) -> Path:
    """Copy the wide model to ``folder``, its settings updated by ``config``, its widening replaced by ``widened``."""
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
