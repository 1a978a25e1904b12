"""Sources are found, opened and refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.errors import BundleError, EdgespecError, ExportError, UnsupportedModel
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.heads import check_heads, read_heads
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.reference import reference_logits
from edgespec.export.source import source
from edgespec.export.source.source import Checkpoint, builtin_heads, builtin_names, resolve
from edgespec.runtimes.text.codec import TextCodec
from tests.support import hf, seq2seq

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """Copy a checkpoint, so that the test may damage it."""
    return Path(shutil.copytree(checkpoint(NAME), tmp_path / "model"))


def configure(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    config = {**json.loads((folder / "config.json").read_text("utf-8")), **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), "utf-8")


def rewrite(folder: Path, edit: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def refused(folder: Path, *words: str, error: type[EdgespecError] = ExportError) -> None:
    with pytest.raises(error) as caught:
        open_model(folder, None)
    for word in words:
        assert word in str(caught.value)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [NAME, "gpt2_default", "gemma_mqa", "bart"])
@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_a_tied_embedding(tmp_path: Path, name: str, same: bool) -> None:
    """Transformers ties them only if they are equal, and otherwise reports it."""
    folder = tmp_path / "model"
    if name == "bart":
        seq2seq.write_case(folder, name)
    else:
        hf.write_checkpoint(folder, hf.CONFIGS[name], 3)
    configure(folder, tie_word_embeddings=True)
    arch = open_model(folder, None)
    assert arch.facts.tied
    embedding = arch.source.read(arch.embedding)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding if same else embedding[::-1].copy()}))
    arch = open_model(folder, None)
    assert arch.facts.tied == same
    assert same == (not any("lm_head.weight" in note for note in arch.source.notes))
    if not same:
        np.testing.assert_array_equal(arch.source.read(arch.head.weight), embedding[::-1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_shards_and_dtypes(tmp_path: Path, dtype: hf.DType, shards: int) -> None:
    folder = hf.write_checkpoint(tmp_path / "model", CONFIG, 3, dtype, shards)
    assert len(list(folder.glob("*.safetensors"))) == shards
    checkpoint = Checkpoint.open(folder)
    expected = hf.weights(CONFIG, 3)
    assert set(checkpoint.index) == set(expected)
    for name, value in expected.items():
        rounded = value.astype(hf.NUMPY_DTYPES[dtype]).astype(np.float32)
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        assert checkpoint.shape(name) == value.shape
        np.testing.assert_array_equal(got, rounded)
        if value.ndim == 2:
            np.testing.assert_array_equal(np.concatenate(list(checkpoint.pieces(name))), rounded)
            np.testing.assert_array_equal(checkpoint.read(name, slice(3, 9), slice(1, 5)), rounded[3:9, 1:5])


def test_pieces_are_small_and_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PIECE_BYTES", 4 * 64 * 7)
    checkpoint = Checkpoint.open(folder)
    pieces = list(checkpoint.pieces("model.embed_tokens.weight"))
    assert {len(piece) for piece in pieces[:-1]} == {7}
    np.testing.assert_array_equal(np.concatenate(pieces), checkpoint.read("model.embed_tokens.weight"))


def test_several_files_without_an_index(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, folder / "b.safetensors")
    assert set(Checkpoint.open(folder).index) == set(names)
    open_model(folder, None)


def test_float64_and_extra_tensors_are_read(folder: Path) -> None:
    logits = reference_logits(open_model(folder, None), [5, 6, 7])
    rewrite(folder, lambda t: t.update({name: value.astype(np.float64) for name, value in t.items()}))
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}))
    np.testing.assert_array_equal(reference_logits(open_model(folder, None), [5, 6, 7]), logits)


def test_the_model_type_may_stand_in_architectures(folder: Path) -> None:
    configure(folder, model_type=None, architectures=["llama"])
    assert open_model(folder, None).facts.architecture == "llama"


# -- what is refused ---------------------------------------------------------------------------------------------------


Change = Callable[[Path], object]


def reshard(folder: Path, count: int) -> None:
    """Cut the weights into shards with an index."""
    (folder / WEIGHTS).unlink()
    hf.write_checkpoint(folder, CONFIG, 3, shards=count)


def write_index(folder: Path, text: str) -> None:
    reshard(folder, 2)
    (folder / INDEX).write_text(text, "utf-8")


def point_outside(folder: Path, name: str) -> None:
    """Name a file of another folder in the index."""
    reshard(folder, 2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "outside.safetensors")
    listing = json.loads((folder / INDEX).read_text("utf-8"))
    listing["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(listing), "utf-8")


def replace_weights(folder: Path, name: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")


def both(*changes: Change) -> Change:
    """Make several changes, one after the other."""
    return lambda folder: [change(folder) for change in changes]


def rename(tensors: dict[str, np.ndarray]) -> None:
    for name in list(tensors):
        tensors[name.replace("model.", "decoder.", 1)] = tensors.pop(name)


SIZES = ("num_attention_heads", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size",
         "max_position_embeddings")  # fmt: skip
WRONG: list[tuple[Change, tuple[str, ...]]] = [
    (
        both(partial(reshard, count=3), lambda f: (f / "model-00002-of-00003.safetensors").unlink()),
        ("model-00002-of-00003.safetensors", "missing", "download all shards"),
    ),
    *(
        (partial(write_index, text=text), (INDEX,))
        for text in ("{", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}')
    ),
    *((partial(point_outside, name=name), (INDEX,)) for name in ("../outside.safetensors", "/tmp/outside.safetensors")),
    *(
        (partial(lambda f, left: os.truncate(f / WEIGHTS, left), left=left), (WEIGHTS, "download it again"))
        for left in (0, 4, 100, 5000)
    ),
    *(
        (partial(replace_weights, name=name), (name, "pickle", "safe_serialization=True"))
        for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth")
    ),
    (lambda f: (f / WEIGHTS).unlink(), ("no *.safetensors",)),
    (
        lambda f: rewrite(f, rename),
        ("model.embed_tokens.weight is missing", "a similar name is decoder.embed_tokens.weight"),
    ),
    *(
        (lambda f, changes=changes: configure(f, **changes), ("has shape", "config.json implies"))
        for changes in ({"vocab_size": 161}, {"hidden_size": 32, "head_dim": 16}, {"num_key_value_heads": 4},
                        {"intermediate_size": 97}, {"head_dim": 8})
    ),
    (lambda f: (f / "config.json").unlink(), ("has no config.json",)),
    *(
        (partial(lambda f, text: (f / "config.json").write_text(text, "utf-8"), text=text), ("config.json",))
        for text in ("", "{", "[]", "3", "null")
    ),
    *(
        (lambda f, key=key, value=value: configure(f, **{key: value}), (key,))
        for key in SIZES
        for value in (None, 0, -1, "64", 1.5, [1], True)
    ),
]  # fmt: skip
"""Changes of a folder, and words of the error that opening it gives."""
UNSUPPORTED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(
        (changes, ("is not supported", "; supported:", *ARCHITECTURES))
        for changes in ({"model_type": "mamba"}, {"model_type": None, "architectures": ["MambaForCausalLM"]},
                        {"model_type": None, "architectures": None})
    ),
    *(
        ({key: {"rope_type": "mrope"}}, ("rope type", "supported: default, linear"))
        for key in ("rope_scaling", "rope_parameters")
    ),
    *(
        ({"quantization_config": {"quant_method": method, "bits": 4}}, ("already quantized", method, "unquantized"))
        for method in ("gptq", "awq", "bitsandbytes")
    ),
    ({"hidden_act": "mish"}, ("activation 'mish'",)),
]  # fmt: skip
UP = "model.layers.0.mlp.up_proj.weight"
UNREADABLE: list[tuple[Change, str]] = [
    # the index says what a shard holds, so only reading it can tell
    (
        both(partial(reshard, count=2), lambda f: os.truncate(f / "model-00002-of-00002.safetensors", 40_000)),
        r"model-00002-of-00002\.safetensors(.|\n)*download it again",
    ),
    *(
        (partial(lambda f, name: rewrite(f, lambda t: t.pop(name)), name=name), f"tensor {name} is missing")
        for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight")
    ),
    *(
        (partial(lambda f, new: rewrite(f, lambda t: t.update(new)), new={name: np.ones(shape, np.float32)}), "shape")
        for name, shape in (("model.layers.1.self_attn.o_proj.weight", (64, 63)),
                            ("model.layers.1.mlp.down_proj.weight", (64, 95)), ("model.norm.weight", (63,)),
                            ("model.layers.0.input_layernorm.weight", (1, 64)))
    ),
    (lambda f: configure(f, num_hidden_layers=3), r"model\.layers\.2\..* is missing"),
    (lambda f: rewrite(f, lambda t: t.update({UP: np.ones((96, 64), np.int8)})), f"{UP} is stored as I8"),
    *(
        (partial(lambda f, value: rewrite(f, lambda t: t[UP].__setitem__((3, 4), value)), value=value), UP)
        for value in (np.nan, np.inf)
    ),
    (lambda f: configure(f, rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
]  # fmt: skip
"""Changes that an export meets, at the latest while it reads."""


@pytest.mark.parametrize("change, words", WRONG)
def test_a_folder_that_cannot_be_opened(folder: Path, change: Change, words: tuple[str, ...]) -> None:
    change(folder)
    refused(folder, *words)


@pytest.mark.parametrize("changes, words", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    configure(folder, **changes)
    refused(folder, *words, error=UnsupportedModel)


@pytest.mark.parametrize("change, words", UNREADABLE)
def test_weights_that_cannot_be_read_leave_nothing_behind(
    folder: Path, tmp_path: Path, change: Change, words: str
) -> None:
    change(folder)
    with pytest.raises(ExportError, match=words):
        export_model(ExportOptions(str(folder), tmp_path / "out", threads=1), golden=False)
    assert not (tmp_path / "out").exists()


def test_a_bundle_is_no_source(folder: Path) -> None:
    (folder / "edgespec.json").write_text("{}", "utf-8")
    with pytest.raises(ExportError, match="is a bundle, made by an export"):
        resolve(str(folder))


def test_the_old_name_of_a_rotation_wins_as_in_transformers(folder: Path) -> None:
    """A user adds ``rope_scaling``, as models' pages say, to what transformers 5 has saved."""
    configure(folder, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert open_model(folder, None).rotaries["rope"].parameters["rope_type"] == "linear"
    configure(folder, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    refused(folder, "rope_scaling means a rope_theta of 10000.0", "500.0", error=UnsupportedModel)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"has no tokenizer\.json"):
        TextCodec(folder)


def test_a_broken_sentencepiece_tokenizer_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0b")
    with pytest.raises(ExportError, match=r"tokenizer\.model: expected a sentencepiece model(.|\n)*download it again"):
        export_model(ExportOptions(str(folder), tmp_path / "out", threads=1), golden=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": {"type": "Unheard"}}'])
def test_a_broken_tokenizer(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a readable tokenizer"):
        TextCodec(folder)


def test_a_broken_tokenizer_configuration(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(BundleError, match=r"tokenizer_config\.json: not readable as JSON"):
        TextCodec(folder)


def test_embedded_models() -> None:
    assert {"shakespeare", "shakespeare-draft"} <= set(builtin_names())
    assert {"restore", "restore-draft", "spoken-digits", "spoken-digits-draft"} <= set(builtin_names())
    assert {"glyphs", "glyphs-draft"} <= set(builtin_names())
    for name in builtin_names():
        open_model(resolve(f"builtin:{name}"), None)
    with pytest.raises(ExportError, match=r"no embedded model 'hamlet'(.|\n)*shakespeare-draft"):
        resolve("builtin:hamlet")


@pytest.mark.parametrize("kind", ["medusa", "blockwise", "paradecode"])
def test_embedded_heads(kind: str) -> None:
    name = f"shakespeare-{kind}"
    assert name in builtin_heads()
    assert name not in builtin_names()
    folder, model = resolve(f"builtin:{name}"), resolve("builtin:shakespeare")
    heads = read_heads(folder)
    check_heads(heads, open_model(model, None), TextCodec(model), folder)
    assert heads.file.kind == kind
    assert heads.file.ranks["greedy"][0][0] > 0.3
    with pytest.raises(ExportError, match=r"has no config\.json"):
        open_model(folder, None)


def test_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(folder)) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert resolve("~/model") == folder
    with pytest.raises(ExportError, match="got a file"):
        resolve(str(folder / "config.json"))
    for path in ("/no/such/folder", "./nothing", "../a/b/c", "a/b/c"):
        with pytest.raises(ExportError, match="no such folder"):
            resolve(path)


def test_a_hub_model_is_downloaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(name: str, *, revision: str | None = None, allow_patterns: list[str] | None = None) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("someone/some-model", "v1") == folder
    ((name, revision, patterns),) = asked
    assert (name, revision) == ("someone/some-model", "v1")
    assert "*.safetensors" in patterns
    assert not [
        pattern
        for pattern in patterns
        if pattern in ("*", "*.py") or (pattern.endswith("bin") and pattern != "model.bin")
    ]  # CTranslate2's
    manifest = export_model(
        ExportOptions("someone/some-model", tmp_path / "out", revision="v1", threads=1), golden=False
    )
    assert manifest.provenance["model"] == "someone/some-model"
    assert manifest.provenance["revision"] == "v1"


@pytest.mark.parametrize(
    "error", [OSError("We couldn't connect\nsecond line"), ValueError("gated repo"), RuntimeError()]
)
def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ExportError, match=r"someone/some-model: no local folder(.|\n)*check the spelling") as caught:
        resolve("someone/some-model")
    assert "second line" not in str(caught.value)
