"""GGUF files mean what their source meant; damaged and unsupported ones are refused."""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, PoolingType
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model_part import open_model
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.reference import reference_logits, reference_rows
from edgespec.export.sentences import read_sentences
from edgespec.export.source.gguf_config import llama3_scaling
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.tokenizers.facts import sampling_part, tokenizer_facts
from edgespec.export.tokenizers.generation import decoder_rules
from edgespec.export.tokenizers.sentencepieces import new_sentencepiece
from edgespec.export.tokenizers.text_form import text_form
from edgespec.runtimes.files.manifest import SamplingPart, TokenizerFacts
from edgespec.runtimes.text.codec import TextCodec
from tests.support import hf, seq2seq, spm
from tests.support.gguf_files import BLOCKS, Change, gguf_name, interleaved, rope_factors, write_gguf, write_t5

NAME = "llama_tied_gqa"
TEXTS = [
    "",
    "The harbour lights came on",
    "How long?  As long   as it takes\n\n\tin 1873, with 12345 lamps; isn't it",
    "she'll say: I'm done.</s> and <s>again",
    " leading and trailing ",
]
KINDS = [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, *BLOCKS]


# -- tensors -----------------------------------------------------------------------------------------------------------


def facts_of(arch: Architecture) -> TokenizerFacts:
    folder = arch.source.path
    return tokenizer_facts(folder, arch.config, arch.facts.vocab, TextCodec(folder))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [NAME, "qwen2_tied_gqa7", "llama_biases_mqa"])
def test_every_part_is_read_as_what_it_means(tmp_path: Path, name: str, kind: GGMLQuantizationType) -> None:
    file = tmp_path / "model.gguf"
    truth = write_gguf(file, name, kind=kind)
    checkpoint = Checkpoint.open(file)
    assert set(checkpoint.index) == set(truth)
    for tensor, value in truth.items():
        assert checkpoint.shape(tensor) == value.shape
        np.testing.assert_array_equal(checkpoint.read(tensor), value)
        if value.ndim == 2:
            for rows in (slice(0, 1), slice(3, 29), slice(15, 17), slice(-5, None), slice(4, 4)):
                for columns in (None, slice(0, 1), slice(5, 43), slice(32, None), slice(7, 7)):
                    expected = value[rows] if columns is None else value[rows, columns]
                    np.testing.assert_array_equal(checkpoint.read(tensor, rows, columns), expected)
        else:
            np.testing.assert_array_equal(checkpoint.read(tensor, slice(3, 20)), value[3:20])


def test_interleaving_is_what_it_should_be() -> None:
    """A head of four rows: rows 0 and 2 are a rotary pair, then 1 and 3."""
    assert interleaved(np.arange(8.0, dtype=np.float32)[:, None], 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ4_NL"])
def test_k_quants(tmp_path: Path, kind: str) -> None:
    """Blocks of 256, which the package can read but not write: random bytes with sane scales."""
    its = GGMLQuantizationType[kind]
    from gguf import GGML_QUANT_SIZES

    size, length = GGML_QUANT_SIZES[its]
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (64, 512 // size, length), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for at in halves:  # the float16 scales of a block
        blocks[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    data = blocks.reshape(64, -1)
    file = tmp_path / "model.gguf"
    names = ("blk.0.ffn_down.weight", "blk.0.attn_q.weight")

    def change(writer: GGUFWriter) -> None:
        tensors = writer.tensors[0]
        for name in names:
            del tensors[name]
            writer.add_tensor(name, data, raw_dtype=its)

    write_gguf(file, NAME, change=change)
    checkpoint, whole = Checkpoint.open(file), dequantize(data, its)
    down, query = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    assert checkpoint.shape(down) == (64, 512)
    np.testing.assert_array_equal(checkpoint.read(down), whole)
    np.testing.assert_array_equal(checkpoint.read(down, slice(3, 9), slice(100, 300)), whole[3:9, 100:300])
    np.testing.assert_array_equal(interleaved(checkpoint.read(query), 4), whole)
    assert kind in checkpoint.notes[0]


def test_only_some_rows_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf.quants

    file = tmp_path / "model.gguf"
    write_gguf(file, NAME, kind=GGMLQuantizationType.Q8_0)
    checkpoint = Checkpoint.open(file)
    seen: list[int] = []

    def counted(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        seen.append(data.size)
        return np.asarray(dequantize(data, kind))

    monkeypatch.setattr(gguf.quants, "dequantize", counted)
    checkpoint.read("model.layers.0.self_attn.q_proj.weight", slice(3, 5), slice(33, 34))
    assert seen == [2 * 34]  # bytes: of two rows, one block of 32


# -- configuration -----------------------------------------------------------------------------------------------------


MODELS = [name for name, config in hf.CONFIGS.items() if config["model_type"] in ("llama", "qwen2")]


@pytest.mark.parametrize("name", [*MODELS, "qwen3_tied", "gemma_mqa", "gemma2_caps", "gemma3_old"])
def test_the_model_is_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    """The same weights as safetensors and as GGUF give the same logits, bit for bit."""
    folder = hf.write_checkpoint(tmp_path / "hf", hf.CONFIGS[name], 3)
    truth = write_gguf(tmp_path / "model.gguf", name)
    save_file(truth, folder / "model.safetensors")
    if name == "gemma2_caps":  # a file does not say by what queries are scaled: it is the head's size
        config = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"query_pre_attn_scalar": config["head_dim"]}), "utf-8")
    ours, theirs = open_model(tmp_path / "model.gguf", None), open_model(folder, None)
    assert ours.facts.model_copy(update={"rope": {}}) == theirs.facts.model_copy(update={"rope": {}})
    tokens = [0, *(int(token) for token in np.random.default_rng(1).integers(2, 120, 80))]
    np.testing.assert_array_equal(reference_logits(ours, tokens), reference_logits(theirs, tokens))
    for text in TEXTS:
        assert TextCodec(ours.source.path).encode(text) == TextCodec(folder).encode(text)
    assert facts_of(ours) == facts_of(theirs)


@pytest.mark.parametrize("name", ["t5", "t5_gated_untied", "umt5"])
def test_a_t5_is_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    model, found = new_sentencepiece(), seq2seq.saved(name)
    model.ParseFromString(spm.train("unigram", 400, pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    config = found["config"] | {"vocab_size": len(model.pieces) + 40, "relative_attention_max_distance": 128}
    shapes = {tensor: [config["vocab_size"] if size == found["config"]["vocab_size"] else size for size in shape]
              for tensor, shape in found["tensors"].items()}  # fmt: skip
    if name != "t5":  # as published ones are
        config |= {"tie_word_embeddings": False, "scale_decoder_outputs": False}
        shapes["lm_head.weight"] = shapes["shared.weight"]
    folder = seq2seq.write_checkpoint(tmp_path / "hf", config, shapes)
    write_t5(tmp_path / "model.gguf", config, load_file(folder / "model.safetensors"), model)
    ours, theirs = open_model(tmp_path / "model.gguf", None), open_model(folder, None)
    assert ours.facts == theirs.facts
    tokens = np.random.default_rng(1).integers(3, 400, 50).tolist()
    one, other = (reference_rows(arch.encoder, tokens) for arch in (ours, theirs) if arch.encoder is not None)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(
        reference_logits(ours, tokens, floats=one), reference_logits(theirs, tokens, floats=other)
    )
    codec = TextCodec(ours.source.path)
    reader = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    for text in TEXTS[1:3]:
        assert codec.encode(text) == [*reader.encode(text), 1]
    form = text_form(ours.source.path, ours.source.config, codec)
    assert (form.source, form.prefix_tokens) == (["text", 1], [0])


@pytest.mark.parametrize("factor, original, size", [(8.0, 8192, 128), (32.0, 8192, 64), (4.0, 777, 16), (8.0, 100, 4)])
def test_llama3_scaling_is_found_from_its_factors(factor: float, original: int, size: int) -> None:
    parameters = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters["original_max_position_embeddings"] = original
    config = {"rope_theta": 500000.0, "head_dim": size, "rope_scaling": parameters}
    factors = rope_factors(config)
    assert factors is not None
    found = llama3_scaling(Path("x"), factors.astype(np.float64), 500000.0, 131072)
    again = rope_factors(config | {"rope_scaling": found})
    assert again is not None
    np.testing.assert_allclose(again, factors, rtol=1e-4)
    if any(1.001 < value < factor * 0.999 for value in factors):  # a pair that tells
        assert found == parameters


def test_other_factors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not those of the llama3 scaling"):
        llama3_scaling(tmp_path, np.array([1.0, 1.2, 1.1, 5.0]), 10000.0, 4096)


@pytest.mark.parametrize(
    "change, scaling",
    [
        (lambda w: w.add_rope_scaling_type(_scaling("none")), None),
        (lambda w: (w.add_rope_scaling_type(_scaling("linear")), w.add_rope_scaling_factor(1.0)), None),
        (
            lambda w: (w.add_rope_scaling_type(_scaling("linear")), w.add_rope_scaling_factor(2.0)),
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            lambda w: (w.add_rope_scaling_type(_scaling("yarn")), w.add_rope_scaling_factor(4.0),
                       w.add_rope_scaling_orig_ctx_len(128)),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        # a factor without a type is linear in llama.cpp; its factor of scores multiplies that of YaRN
        (lambda w: w.add_rope_scaling_factor(2.0), {"rope_type": "linear", "factor": 2.0}),
        (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), {"rope_type": "linear", "factor": 2.0}),
        (lambda w: (w.add_rope_scaling_type(_scaling("none")), w.add_rope_scaling_factor(2.0)), None),
        (
            lambda w: (w.add_rope_scaling_type(_scaling("yarn")), w.add_rope_scaling_factor(4.0),
                       w.add_rope_scaling_attn_factors(0.5), w.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)),
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (0.1 * math.log(4) + 1), "beta_fast": 16.0},
        ),
    ],
)  # fmt: skip
def test_other_scalings_are_told(tmp_path: Path, change: Change, scaling: dict[str, Any] | None) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    assert Checkpoint.open(tmp_path / "model.gguf").config.get("rope_scaling") == scaling


@pytest.mark.parametrize("biased", [("q_proj", "k_proj", "v_proj"), ("q_proj",), ("up_proj",), ()])
def test_biases_of_some_projections(tmp_path: Path, biased: tuple[str, ...]) -> None:
    """Missing biases are zero: config.json has one switch for all of them."""
    biases = {
        name: value for name, value in hf.weights(hf.CONFIGS["llama_biases_mqa"], 3).items() if "proj.bias" in name
    }

    def change(writer: GGUFWriter) -> None:
        kept = [gguf_name(name, "llama") for name in biases if any(one in name for one in biased)]
        for name in [name for name in writer.tensors[0] if name.endswith(".bias") and name not in kept]:
            del writer.tensors[0][name]

    write_gguf(tmp_path / "model.gguf", "llama_biases_mqa", change=change)
    arch = open_model(tmp_path / "model.gguf", None)
    for name, value in biases.items():
        if arch.source.has(name):
            kept = any(one in name for one in biased)
            assert np.abs(arch.source.read(name)).sum() == pytest.approx(np.abs(value).sum() if kept else 0)
    assert reference_logits(arch, [1, 2, 3]).shape[0] == 3


def test_caps_of_gemma3_and_no_window(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_final_logit_softcapping(30.0)
        writer.add_attn_logit_softcapping(50.0)

    write_gguf(tmp_path / "model.gguf", "gemma3_old", change=change)
    arch = open_model(tmp_path / "model.gguf", None)
    assert (arch.logits.cap, arch.rule(0).cap) == (30.0, 50.0)
    assert arch.window(0) > 0
    write_gguf(tmp_path / "model.gguf", "gemma3_old", change=drop("gemma3.attention.sliding_window"))
    assert {open_model(tmp_path / "model.gguf", None).window(layer) for layer in range(arch.facts.layers)} == {0}


def drop(*keys: str) -> Change:
    return lambda writer: [writer.kv_data[0].pop(key) for key in keys]


def test_what_else_the_metadata_asks_for(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_array("tokenizer.ggml.suppress_tokens", [7, 9])
        writer.add_pooling_type(PoolingType.LAST)
        for name, value in (("temp", 0.5), ("top_p", 0.75)):
            writer.add_float32(f"general.sampling.{name}", value)
        writer.add_int32("general.sampling.top_k", 20)

    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    checkpoint = Checkpoint.open(tmp_path / "model.gguf")
    folder = checkpoint.path
    assert read_sentences(folder, 64).pooling == "last"
    assert sampling_part(folder) == SamplingPart(temperature=0.5, top_k=20, top_p=0.75)
    rules = decoder_rules(folder, {})
    assert rules is not None
    assert rules.suppress_tokens == [7, 9]


# -- several files -----------------------------------------------------------------------------------------------------


def split(file: Path, count: int) -> list[Path]:
    """Cut a file as llama-gguf-split does: metadata in the first part, tensors in all of them."""
    reader = GGUFReader(file)
    parts = [file.with_name(f"{file.stem}-{at:05}-of-{count:05}.gguf") for at in range(1, count + 1)]
    for at, part in enumerate(parts):
        writer = GGUFWriter(part, "llama")
        if at == 0:
            for key, field in reader.fields.items():
                if not key.startswith(("GGUF.", "general.architecture")):
                    sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                    writer.add_key_value(key, field.contents(), field.types[0], sub)
        writer.add_uint16("split.no", at)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[at::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    file.unlink()
    return parts


def test_parts_are_one_model(tmp_path: Path) -> None:
    """Any part or the folder can be named, also if there is a projector."""
    truth = write_gguf(tmp_path / "model.gguf", NAME, kind=GGMLQuantizationType.Q8_0)
    parts = split(tmp_path / "model.gguf", 3)
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(b"")
    for given in (*parts, tmp_path):
        checkpoint = Checkpoint.open(given)
        assert checkpoint.index.keys() == truth.keys()
        assert {*checkpoint.index.values()} == {*parts}
        for name, value in truth.items():
            np.testing.assert_array_equal(checkpoint.read(name), value)
        assert any("mmproj-model-f16.gguf" in note for note in checkpoint.notes)
    parts[0].rename(tmp_path / "model.gguf")
    refused(parts[1], parts[0].name, "missing", "download all")
    refused(tmp_path / "model.gguf", "part 1 of 3", "part 1 of 1")
    shutil.copy(parts[1], parts[0])
    refused(parts[1], "part 2 of 3", "part 1 of 3")


def _scaling(name: str) -> Any:
    from gguf import RopeScalingType

    return RopeScalingType(name)


def test_numbers_are_those_of_the_original(tmp_path: Path) -> None:
    """A file holds float32: 1e-5 must not become 9.999999747378752e-06."""
    write_gguf(tmp_path / "model.gguf", NAME)
    config = Checkpoint.open(tmp_path / "model.gguf").config
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 10000.0)
    assert json.loads(json.dumps(config)) == config


# -- where the file is -------------------------------------------------------------------------------------------------


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    truth = write_gguf(tmp_path / "model-Q8.gguf", NAME)
    checkpoint = Checkpoint.open(tmp_path)
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), truth["model.norm.weight"])
    assert resolve(str(tmp_path / "model-Q8.gguf")) == tmp_path / "model-Q8.gguf"
    shutil.copy(tmp_path / "model-Q8.gguf", tmp_path / "model-Q4.gguf")
    with pytest.raises(ExportError, match=r"holds 2 GGUF files \(model-Q4\.gguf, model-Q8\.gguf(.|\n)*the file itself"):
        Checkpoint.open(tmp_path)


def test_safetensors_are_read_first(tmp_path: Path) -> None:
    hf.write_checkpoint(tmp_path, hf.CONFIGS[NAME], 4)
    write_gguf(tmp_path / "model.gguf", NAME, seed=3)
    expected = hf.weights(hf.CONFIGS[NAME], 4)["model.norm.weight"]
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).read("model.norm.weight"), expected)


def test_the_temporary_folder_lasts_as_long_as_the_checkpoint(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", NAME)
    checkpoint = Checkpoint.open(tmp_path / "model.gguf")
    folder = checkpoint.path
    assert (folder.name, (folder / "config.json").is_file()) == ("model.gguf", True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]
    del checkpoint
    gc.collect()
    assert not folder.parent.exists()


def test_a_tokenizer_beside_the_file_is_taken(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, tokenizer=lambda writer: writer.add_tokenizer_model("unheard"))
    with pytest.raises(
        UnsupportedModel, match=r"tokenizer model 'unheard'(.|\n)*put the model's tokenizer\.json beside"
    ):
        Checkpoint.open(tmp_path / "model.gguf")
    hf.write_tokenizer(tmp_path, hf.CONFIGS[NAME], hf.CHAT_TEMPLATE)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}', "utf-8")
    checkpoint = Checkpoint.open(tmp_path / "model.gguf")
    assert "tokenizer.json beside the file" in checkpoint.notes[0]
    codec = TextCodec(checkpoint.path)
    assert codec.chat_template == hf.CHAT_TEMPLATE
    assert facts_of(open_model(tmp_path / "model.gguf", None)).eos == [1, 7]


def with_arrays(*names: str) -> Callable[[GGUFWriter], None]:
    """Tensors of this name, of no use to any model."""

    def change(writer: GGUFWriter) -> None:
        for name in names:
            writer.add_tensor(name, np.ones(4, np.float32))

    return change


def refused(file: Path, *words: str, error: type[ExportError] = ExportError) -> None:
    with pytest.raises(error) as caught:
        Checkpoint.open(file)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("architecture", ["mamba", "rwkv7", "deepseek2"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, architecture=architecture)
    refused(
        tmp_path / "model.gguf", f"'{architecture}' is not supported; supported: llama, qwen2", error=UnsupportedModel
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda w: w.add_expert_count(8), ["llama.expert_count"]),
        (lambda w: w.add_type("adapter"), ["holds a GGUF adapter"]),
        (lambda w: w.add_string("general.type", "mmproj"), ["is a multimodal projector", "the model's own .gguf"]),
        (lambda w: w.add_causal_attention(False), ["is an embedding model", "attention.causal"]),
        (lambda w: w.add_pooling_type(PoolingType.RANK), ["is a reranker"]),
        (lambda w: w.add_rope_scaling_attn_factors(2.0), ["attn_factor 2"]),
        (with_arrays("output.bias"), ["tensor output.bias is unknown"]),
        (with_arrays("blk.0.attn_sinks"), ["tensor blk.0.attn_sinks is unknown"]),
        (with_arrays("blk.0.ffn_gate_inp.weight"), ["tensor blk.0.ffn_gate_inp.weight is unknown"]),
        (lambda w: w.add_value_length(7), ["values of another length"]),
        (lambda w: w.add_rope_dimension_count(8), ["a part of the head"]),
    ],
)
def test_options_that_are_not_supported(tmp_path: Path, change: Change, words: list[str]) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    refused(tmp_path / "model.gguf", *words, error=UnsupportedModel)


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count", "context_length"])
def test_a_missing_fact_is_named(tmp_path: Path, key: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=lambda writer: writer.kv_data[0].pop(f"llama.{key}"))
    refused(tmp_path / "model.gguf", f"expected a positive number llama.{key}, got None")


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_a_missing_part_of_the_tokenizer_is_named(tmp_path: Path, key: str) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=lambda writer: writer.kv_data[0].pop(f"tokenizer.ggml.{key}"))
    refused(tmp_path / "model.gguf", f"tokenizer.ggml.{key}", "tokenizer.json")


def test_a_tokenizer_that_contradicts_itself_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        merges = writer.kv_data[0]["tokenizer.ggml.merges"]
        merges.value = ["zzqq yyyx", *merges.value[1:]]

    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    with pytest.raises(ExportError) as error:
        export_model(ExportOptions(str(tmp_path / "model.gguf"), tmp_path / "out"))
    assert error.value.message.startswith("model.gguf: its tokenizer cannot be used: Token `zzqq` out of vocabulary")
    assert not (tmp_path / "out").exists()


def test_sizes_that_differ_between_layers(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_head_count_kv([2, 4])

    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    refused(tmp_path / "model.gguf", "llama.attention.head_count_kv differs between layers: [2, 4]")


def test_damaged_files(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME)
    content = file.read_bytes()
    for left in [0, 3, 4, 20, 100, 1000, 3000, 5000, len(content) // 2, len(content) - 100]:
        file.write_bytes(content[:left])
        refused(file, "model.gguf", "download it again")
    file.write_bytes(b"PK\x03\x04" + content[4:])
    refused(file, "not a readable GGUF file")


def test_damaged_bytes(tmp_path: Path) -> None:
    """Any header is read or rejected, in short time."""
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME)
    content, generator = file.read_bytes(), np.random.default_rng(1)
    refusals = 0
    for at in [8, 15, 16, 23, *(int(at) for at in generator.integers(0, 4000, 120))]:
        file.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
        try:
            Checkpoint.open(file)
        except ExportError:
            refusals += 1
    assert 20 < refusals < 124


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "tokenizer.ggml.bos_token_id", "split.count"])
def test_metadata_of_other_types(tmp_path: Path, key: str) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_string(key, "many")

    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    refused(tmp_path / "model.gguf", "its metadata cannot be understood", "many")


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, NAME)
    checkpoint = Checkpoint.open(file)
    file.write_bytes(file.read_bytes()[:10000])
    with pytest.raises(ExportError, match=r"model\.gguf: cannot read(.|\n)*download it again"):
        checkpoint.read("model.layers.1.mlp.up_proj.weight")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", NAME)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(tmp_path / "model.gguf", "needs the package gguf", "pip install -e '.[gguf]'")


def test_other_files_are_no_models(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones(3, np.float32)}, file)
    with pytest.raises(ExportError, match=r"expected a model folder, got a file(.|\n)*or a \.gguf file"):
        resolve(str(file))
