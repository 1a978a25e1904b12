"""LoRA adapters: merged value by value, and those that are refused, by name."""

from __future__ import annotations

import gc
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.text.codec import TextCodec
from tests.support import hf, packed
from tests.support.checkpoints import write_adapter
from tests.support.gguf_files import write_gguf

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return hf.write_checkpoint(tmp_path / "base", CONFIG, 3)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return tmp_path / "lora"


def configure(adapter: Path, **changes: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


def edit(adapter: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)


def refused(base: Path, adapter: Path, *words: str, error: type[ExportError] = ExportError) -> None:
    with pytest.raises(error) as caught:
        Checkpoint.open(base, adapter)
    for word in words:
        assert word in str(caught.value)


# -- what is merged ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [False, True])
def test_every_part_is_read_merged(base: Path, adapter: Path, root: bool) -> None:
    made = write_adapter(adapter, CONFIG, use_rslora=root)
    scale = 8 / (math.sqrt(4) if root else 4)
    checkpoint, plain = Checkpoint.open(base, adapter), Checkpoint.open(base)
    assert set(checkpoint.index) == set(plain.index)
    assert len(made) == 6
    for name in plain.index:
        value = plain.read(name).astype(np.float64)
        if name.removesuffix(".weight") in made:
            a, b = made[name.removesuffix(".weight")]
            value = value + scale * (b.astype(np.float64) @ a)
        np.testing.assert_allclose(checkpoint.read(name), value, rtol=0, atol=1e-6)
        assert checkpoint.shape(name) == value.shape
        if value.ndim == 2:
            got = checkpoint.read(name, slice(3, 29), slice(5, 43))
            np.testing.assert_allclose(got, value[3:29, 5:43], rtol=0, atol=1e-6)
            np.testing.assert_allclose(checkpoint.read(name, slice(30, None)), value[30:], rtol=0, atol=1e-6)
            np.testing.assert_allclose(np.concatenate(list(checkpoint.pieces(name))), value, rtol=0, atol=1e-6)
    assert checkpoint.notes == ["the adapter lora is merged into the weights"]


def test_ranks_and_alphas_by_pattern(base: Path, adapter: Path) -> None:
    ranks = {"q_proj": 2, "v_proj": 4, "down_proj": 4}
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {r"layers\.1\.mlp\..*": 3, "v_pro": 100},
    }
    made = write_adapter(adapter, CONFIG, rank=ranks, **patterns)
    checkpoint, plain = Checkpoint.open(base, adapter), Checkpoint.open(base)
    for module, (a, b) in made.items():
        scale = (3 if module == "model.layers.1.mlp.down_proj" else 8) / (2 if module.endswith("q_proj") else 4)
        added = checkpoint.read(f"{module}.weight") - plain.read(f"{module}.weight")
        np.testing.assert_allclose(added, scale * (b @ a), atol=1e-6)


def test_names_of_older_versions(base: Path, adapter: Path) -> None:
    made = write_adapter(adapter, CONFIG)
    expected = Checkpoint.open(base, adapter).read("model.layers.0.self_attn.q_proj.weight")
    assert made

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.replace(".weight", ".default.weight")] = tensors.pop(name)

    edit(adapter, rename)
    np.testing.assert_array_equal(
        Checkpoint.open(base, adapter).read("model.layers.0.self_attn.q_proj.weight"), expected
    )


def test_matrices_stored_the_other_way_round(tmp_path: Path, adapter: Path) -> None:
    """GPT-2 stores [inputs, outputs], and without the first word of PEFT's names if it was saved as a base model."""
    config = hf.CONFIGS["gpt2_default"]
    folder = hf.write_checkpoint(tmp_path / "base", config, 3)
    made = write_adapter(adapter, config, ("c_attn", "c_fc"))
    assert made
    plain = Checkpoint.open(folder)
    expected = {module: plain.read(f"{module}.weight") + 2 * (b @ a).T for module, (a, b) in made.items()}
    for bare in (False, True):
        if bare:
            tensors = load_file(folder / "model.safetensors")
            save_file(
                {name.removeprefix("transformer."): value for name, value in tensors.items()},
                folder / "model.safetensors",
            )
        checkpoint = Checkpoint.open(folder, adapter)
        for module, value in expected.items():
            name = f"{module.removeprefix('transformer.') if bare else module}.weight"
            np.testing.assert_allclose(checkpoint.read(name), value, atol=1e-6)
            np.testing.assert_allclose(checkpoint.read(name, slice(3, 9), slice(5, 8)), value[3:9, 5:8], atol=1e-6)
        open_model(folder, None, adapter)


@pytest.mark.parametrize("infix", ["", "modules_to_save.", "modules_to_save.default."])
def test_modules_to_save_take_the_place_of_the_base(base: Path, adapter: Path, infix: str) -> None:
    head = np.random.default_rng(1).standard_normal((160, 64)).astype(np.float32)
    write_adapter(adapter, CONFIG, saved={f"lm_head.{infix}weight": head}, modules_to_save=["lm_head"])
    arch = open_model(base, None, adapter)
    assert not arch.facts.tied  # the base is: the adapter has unbound them
    np.testing.assert_array_equal(arch.source.read(arch.head.weight), head)
    embedding = hf.weights(CONFIG, 3)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(arch.source.read(arch.embedding), embedding)


def test_a_saved_embedding_stays_tied(base: Path, adapter: Path) -> None:
    embedding = np.random.default_rng(1).standard_normal((160, 64)).astype(np.float32)
    write_adapter(adapter, CONFIG, saved={"model.embed_tokens.weight": embedding}, modules_to_save=["embed_tokens"])
    arch = open_model(base, None, adapter)
    assert arch.facts.tied
    np.testing.assert_array_equal(arch.source.read(arch.head.weight), embedding)


def test_on_quantized_weights_and_gguf(tmp_path: Path, base: Path, adapter: Path) -> None:
    made = write_adapter(adapter, CONFIG)
    module = "model.layers.1.self_attn.q_proj"
    a, b = made[module]
    truth = packed.pack_checkpoint(base, *packed.KINDS["gptq4"])
    checkpoint = Checkpoint.open(base, adapter)
    np.testing.assert_allclose(checkpoint.read(f"{module}.weight"), truth[f"{module}.weight"] + 2 * (b @ a), atol=1e-6)
    assert [note.split(" (")[0] for note in checkpoint.notes] == [
        "the checkpoint is quantized",
        "the adapter lora is merged into the weights",
    ]
    value = write_gguf(tmp_path / "model.gguf", NAME)[f"{module}.weight"]
    checkpoint = Checkpoint.open(tmp_path / "model.gguf", adapter)
    np.testing.assert_allclose(checkpoint.read(f"{module}.weight"), value + 2 * (b @ a), atol=1e-6)
    TextCodec(checkpoint.path)


# -- where base and tokenizer are --------------------------------------------------------------------------------------


def test_an_adapter_stands_for_its_base_and_itself(
    tmp_path: Path, base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [5, 6, 7, 90, 17]
    write_adapter(adapter, CONFIG, base=base)
    expected = reference_logits(open_model(base, None, adapter), tokens)
    assert np.abs(expected - reference_logits(open_model(base, None), tokens)).max() > 0.1
    np.testing.assert_array_equal(reference_logits(open_model(adapter, None), tokens), expected)
    monkeypatch.chdir(tmp_path)
    for named in ("base", "../base"):  # from where one is, and from the adapter
        configure(adapter, base_model_name_or_path=named)
        np.testing.assert_array_equal(reference_logits(open_model(adapter, None), tokens), expected)
    configure(adapter, base_model_name_or_path="no/such-model")
    for file in base.iterdir():  # both in one folder
        shutil.copy(file, adapter / file.name)
    np.testing.assert_array_equal(reference_logits(open_model(adapter, None), tokens), expected)


def test_a_configuration_left_behind_by_training_is_no_adapter(base: Path, adapter: Path) -> None:
    write_adapter(adapter, CONFIG)
    shutil.copy(adapter / "adapter_config.json", base)
    assert Checkpoint.open(base).notes == []


def test_a_tokenizer_beside_the_adapter_is_taken(base: Path, adapter: Path) -> None:
    write_adapter(adapter, CONFIG, base=base)
    hf.write_tokenizer(adapter, CONFIG, hf.CHAT_TEMPLATE)
    (base / "calibration.txt").write_text("a text", "utf-8")
    checkpoint = Checkpoint.open(adapter)
    folder = checkpoint.path
    assert folder.name == "lora"
    assert TextCodec(folder).chat_template == hf.CHAT_TEMPLATE
    for name in ("config.json", "generation_config.json", "calibration.txt"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    del checkpoint
    gc.collect()
    assert not folder.exists()
    assert Checkpoint.open(base).path == base


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, "", "someone/some-model", "/no/such/folder"])
def test_a_base_that_is_not_here(adapter: Path, named: str | None) -> None:
    write_adapter(adapter, CONFIG, base=named)
    with pytest.raises(ExportError, match=r"is not a local folder(.|\n)*edgespec export BASE --adapter"):
        Checkpoint.open(adapter)


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], type[ExportError]]] = [
    *(
        ({"peft_type": kind}, (f"type {kind} is not supported", "merge_and_unload"), UnsupportedModel)
        for kind in ("IA3", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "LOHA", "ADALORA", "OFT", None)
    ),
    *(
        ({name: value}, (name, "merge_and_unload"), UnsupportedModel)
        for name, value in (("use_dora", True), ("bias", "all"), ("bias", "lora_only"), ("lora_bias", True),
                            ("init_lora_weights", "pissa"), ("init_lora_weights", "loftq"),
                            ("layer_replication", [[0, 2]]), ("trainable_token_indices", [3]))
    ),
    *(
        ({"saved": {name: np.ones((2, 2), np.float32)}}, (word,), UnsupportedModel)
        for name, word in (("model.embed_tokens.lora_embedding_A", "LoRA on embeddings"),
                           ("model.layers.0.mlp.up_proj.lora_magnitude_vector", "LoRA on lora_magnitude_vector"))
    ),
    # more tokens than the base has
    ({"saved": {"model.embed_tokens.weight": np.ones((161, 64), np.float32)}},
     ("of shape [161, 64], but the base model's is [160, 64]",), ExportError),
    ({"rank_pattern": {"q_proj": 8}}, ("says rank 8", "q_proj has lora_A [4, 64]"), ExportError),
    *(
        (settings, ("adapter_config.json",), ExportError)
        for settings in ({"r": 0}, {"r": "4"}, {"lora_alpha": None}, {"rank_pattern": {"(": 4}}, {"rank_pattern": [4]})
    ),
]  # fmt: skip
"""How adapters are written, and words of the error that opening them gives."""


@pytest.mark.parametrize("written, words, error", REFUSED)
def test_what_cannot_be_merged_is_refused(
    base: Path, adapter: Path, written: dict[str, Any], words: tuple[str, ...], error: type[ExportError]
) -> None:
    write_adapter(adapter, CONFIG, **written)
    refused(base, adapter, *words, error=error)


@pytest.mark.parametrize("other", ["llama_untied_mha_llama3_legacy", "llama_tied_llama3_parameters", "gpt2_default"])
def test_an_adapter_of_another_model(base: Path, adapter: Path, other: str) -> None:
    last = ("c_attn",) if other.startswith("gpt2") else ("q_proj",)
    assert write_adapter(adapter, hf.CONFIGS[other], last)
    refused(base, adapter, "the adapter", "base", "give the model that the adapter was trained on")


def test_half_of_a_pair(base: Path, adapter: Path) -> None:
    write_adapter(adapter, CONFIG)
    edit(adapter, lambda t: t.pop("base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"))
    refused(base, adapter, "model.layers.0.mlp.down_proj needs two matrices")


def test_files_that_are_missing_or_broken(base: Path, adapter: Path) -> None:
    adapter.mkdir()
    refused(base, adapter, "has no adapter_config.json")
    write_adapter(adapter, CONFIG)
    content = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(content[:1000])
    refused(base, adapter, WEIGHTS, "download it again")
    (adapter / WEIGHTS).unlink()
    refused(base, adapter, f"has no {WEIGHTS}")
    (adapter / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(base, adapter, "adapter_model.bin", "pickle")
    (adapter / WEIGHTS).write_bytes(content)
    for text in ("", "{", "[]"):
        (adapter / "adapter_config.json").write_text(text, "utf-8")
        refused(base, adapter, "adapter_config.json")
    save_file({}, adapter / WEIGHTS)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}', "utf-8")
    refused(base, adapter, "holds no tensors")
