"""Encoders of texts: those of transformers, of every family, alone and in a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import edgespec
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, ExportError, InvalidRequest
from edgespec.export.architectures import ENCODERS
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.options import RunOptions
from tests.support import encoders

TEXTS = encoders.TEXTS
LEAST = {"fp32": 0.99999, "int8": 0.998, "int4": 0.85}
"""Least cosine with transformers: small random models lose more by rounding than trained ones."""


def export(folder: Path, form: str = "fp32", **more: Any) -> Engine:
    """Export the model in ``folder/model``, and load the bundle."""
    export_model(ExportOptions(str(folder / "model"), folder / form, [], form, threads=1, **more))  # type: ignore[arg-type]
    return edgespec.load(folder / form, threads=1)


def rows_of(model: Any, tokens: list[int], **more: Any) -> NDArray[Any]:
    """Compute the rows of a text by transformers."""
    import torch

    with torch.no_grad():
        found: NDArray[Any] = model(torch.tensor([tokens]), **more).last_hidden_state[0].numpy()
    return found


def cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_every_encoder_has_a_configuration_here() -> None:
    assert set(encoders.CONFIGS) == set(ENCODERS)


@pytest.mark.parametrize("kind", encoders.CONFIGS)
def test_vectors_are_those_of_transformers_in_any_batch(tmp_path: Path, kind: str) -> None:
    """In every format; a text has the same bits alone, in a batch of any order, and next to copies of itself."""
    model = encoders.torch_model(kind)
    encoders.save(model, tmp_path / "model", encoders.unigram() if "roberta" in kind else None)
    for form, least in LEAST.items():
        with export(tmp_path, form) as engine:
            together = engine.embed(TEXTS)
            for text, row in zip(TEXTS, together, strict=True):
                wanted = rows_of(model, engine.codec.encode(text)).mean(0)
                assert cosine(row, wanted) > least
                assert engine.embed([text])[0].tobytes() == row.tobytes()
            mixed = engine.embed([*reversed(TEXTS * 9), "a king"])
            for at, row in enumerate(mixed[:-1]):
                assert row.tobytes() == together[len(TEXTS) - 1 - at % len(TEXTS)].tobytes()
            quality = read_manifest(tmp_path / form).embedding
            assert quality is not None
            assert quality.quality is not None
            assert quality.quality.cosine is not None
            assert quality.quality.cosine > least


@pytest.mark.parametrize("kind", ["bert", "modernbert", "gemma3_text"])
def test_long_texts_and_windows_in_both_directions(tmp_path: Path, kind: str) -> None:
    """Up to the longest text; more splits of attention than one, and every row compared."""
    model = encoders.torch_model(kind, max_position_embeddings=700)
    encoders.save(model, tmp_path / "model")
    with export(tmp_path) as engine:
        rng = np.random.default_rng(0)
        for length in (1, 9, 17, 511, 699):
            tokens = rng.integers(5, 90, length).tolist()
            for pooling, row in (("last", -1), ("cls", 0)):
                got = engine.embed([tokens, tokens[: length // 2 + 1]], pooling=pooling)  # type: ignore[arg-type]
                assert cosine(got[0], rows_of(model, tokens)[row]) > 0.9999
        with pytest.raises(InvalidRequest, match="701 tokens"):
            engine.embed([[5] * 701])


POOLED: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "cls_token": lambda rows: rows[0],
    "mean_tokens": lambda rows: rows.mean(0),
    "max_tokens": lambda rows: rows.max(0),
    "lasttoken": lambda rows: rows[-1],
    "weightedmean_tokens": lambda rows: np.average(rows, 0, np.arange(1, len(rows) + 1)),
}


@pytest.mark.parametrize("mode", POOLED)
@pytest.mark.parametrize("modules", [("Normalize",), ()])
def test_pooling_and_length_are_those_of_sentence_transformers(
    tmp_path: Path, mode: str, modules: tuple[str, ...]
) -> None:
    model = encoders.torch_model("bert")
    encoders.add_sentences(encoders.save(model, tmp_path / "model"), mode, modules)
    with export(tmp_path) as engine:
        for text, row in zip(TEXTS, engine.embed(TEXTS), strict=True):
            wanted = POOLED[mode](rows_of(model, engine.codec.encode(text)))
            if modules:
                wanted = wanted / np.linalg.norm(wanted)
            np.testing.assert_allclose(row, wanted, rtol=0, atol=2e-5)
        assert np.allclose(np.linalg.norm(engine.embed(TEXTS, normalize=True), axis=1), 1, atol=1e-6)


def test_dense_layers_and_prompts_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Two matrices after pooling, as EmbeddingGemma has, and prompts by name."""
    model, folder = encoders.torch_model("gemma3_text"), tmp_path / "model"
    encoders.save(model, folder)
    encoders.add_sentences(folder, modules=("Dense", "Dense", "Normalize"), query="speak: ", document="a ")
    rng, sizes, steps = np.random.default_rng(1), (64, 96, 40), []
    for at, activation in enumerate(("modules.activation.Tanh", "modules.linear.Identity")):
        inside, outside = sizes[at : at + 2]
        weight, bias = rng.normal(size=(outside, inside)).astype("f4") / 8, rng.normal(size=outside).astype("f4")
        steps.append((weight, bias, np.tanh if at == 0 else lambda x: x))
        dense = folder / f"{2 + at}_Dense"
        dense.mkdir()
        told = {"in_features": inside, "out_features": outside, "bias": True,
                "activation_function": f"torch.nn.{activation}"}  # fmt: skip
        (dense / "config.json").write_text(json.dumps(told), "utf-8")
        save_file({"linear.weight": weight, "linear.bias": bias}, dense / "model.safetensors")
    with export(tmp_path) as engine:
        for prompt, before in (("query", "speak: "), ("document", "a "), (None, ""), ("", "")):
            got = engine.embed(TEXTS[:2], prompt=prompt)
            assert got.shape == (2, 40)
            for text, row in zip(TEXTS, got, strict=False):
                x = rows_of(model, engine.codec.encode(before + text)).mean(0)
                for weight, bias, activate in steps:
                    x = activate(weight @ x + bias)
                np.testing.assert_allclose(row, x / np.linalg.norm(x), rtol=0, atol=2e-5)
        with pytest.raises(InvalidRequest, match="unknown prompt 'quary'"):
            engine.embed(TEXTS, prompt="quary")
        assert engine.embed(TEXTS, dimensions=8).shape == (len(TEXTS), 8)
        with pytest.raises(InvalidRequest, match="expected 1 to 40"):
            engine.embed(TEXTS, dimensions=41)
        query, documents = engine.embed(["king"], prompt="query")[0], engine.embed(TEXTS, prompt="document")
        for one in engine.rerank("king", TEXTS):
            assert one.score == pytest.approx(float(query @ documents[one.index]), abs=1e-6)


def test_a_prompt_that_does_not_count_is_left_out(tmp_path: Path) -> None:
    model, folder = encoders.torch_model("bert"), tmp_path / "model"
    encoders.add_sentences(encoders.save(model, folder), query="speak night ")
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"include_prompt": False}), "utf-8")
    with export(tmp_path) as engine:
        (row,) = engine.embed(["the king"], prompt="query")
        wanted = rows_of(model, engine.codec.encode("speak night the king"))[3:].mean(0)
        assert cosine(row, wanted) > 0.9999


HEADED = ("bert", "xlm-roberta", "distilbert", "mpnet", "modernbert", "gte")


@pytest.mark.parametrize("kind", HEADED)
def test_scores_are_those_of_transformers_in_any_batch(tmp_path: Path, kind: str) -> None:
    """The second text of a BERT's pair has its own type; a document that is too long loses its end."""
    import_torch = pytest.importorskip("torch", reason="needs torch: pip install 'edgespec[train]'")
    model = encoders.torch_model(kind, "ForSequenceClassification", num_labels=1)
    encoders.save(model, tmp_path / "model", encoders.unigram() if "roberta" in kind else None)
    with export(tmp_path) as engine:
        found = engine.rerank("who is the king?", TEXTS)
        assert sorted(one.index for one in found) == list(range(len(TEXTS)))
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        for one in found:
            pair = engine.codec.tokenizer.encode("who is the king?", TEXTS[one.index])
            more = {"token_type_ids": import_torch.tensor([pair.type_ids])} if kind == "bert" else {}
            with import_torch.no_grad():
                logit = model(import_torch.tensor([pair.ids]), **more).logits[0, 0]
            assert one.score == pytest.approx(float(import_torch.sigmoid(logit)), abs=2e-5)
            assert engine.rerank("who is the king?", [TEXTS[one.index]])[0].score == one.score
        assert engine.rerank("who?", [TEXTS[2] * 40])[0].score > 0
        assert [one.index for one in engine.rerank("who is the king?", TEXTS, top=2)] == [
            one.index for one in found[:2]
        ]
        with pytest.raises(InvalidRequest, match="leaves no room"):
            engine.rerank("who " * 300, TEXTS)
        with pytest.raises(InvalidRequest, match="scores pairs"):
            engine.embed(TEXTS)


def test_a_score_is_what_the_model_says_it_is(tmp_path: Path) -> None:
    """config.json may name another activation than the sigmoid; a classifier of several labels is refused."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'edgespec[train]'")
    model = encoders.torch_model("bert", "ForSequenceClassification", num_labels=1)
    folder = encoders.save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    told = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}}
    (folder / "config.json").write_text(json.dumps(config | told), "utf-8")
    with export(tmp_path) as engine:
        pair = engine.codec.tokenizer.encode("who?", TEXTS[0])
        with torch.no_grad():
            logit = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits[0, 0]
        assert engine.rerank("who?", TEXTS[:1])[0].score == pytest.approx(float(logit), abs=2e-4)
    several = encoders.torch_model("bert", "ForSequenceClassification", num_labels=3)
    encoders.save(several, tmp_path / "several")
    with pytest.raises(ExportError, match="a classifier of 3 labels"):
        export_model(ExportOptions(str(tmp_path / "several"), tmp_path / "other", [], "fp32"))
    assert not (tmp_path / "other").exists()


def test_names_of_the_authors_of_gte(tmp_path: Path) -> None:
    """NewModel: one matrix of q, k and v, one of up and gate, and positions scaled by NTK."""
    model = encoders.torch_model("gte")
    folder = encoders.save(model, tmp_path / "model")
    tensors, hub = load_file(folder / "model.safetensors"), dict[str, Any]()
    own = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    for name in ("word_embeddings", "token_type_embeddings", "LayerNorm"):
        hub |= {f"new.{key}": value for key, value in own.items() if key.startswith(f"embeddings.{name}.")}
    for layer in range(3):
        ours, theirs = f"layers.{layer}", f"new.encoder.layer.{layer}"
        for kind in ("weight", "bias"):
            joined = [own[f"{ours}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            hub[f"{theirs}.attention.qkv_proj.{kind}"] = np.concatenate(joined)
            hub[f"{theirs}.attention.o_proj.{kind}"] = own[f"{ours}.self_attn.o_proj.{kind}"]
            hub[f"{theirs}.attn_ln.{kind}"] = own[f"{ours}.post_attention_layernorm.{kind}"]
            hub[f"{theirs}.mlp_ln.{kind}"] = own[f"{ours}.post_mlp_layernorm.{kind}"]
            hub[f"{theirs}.mlp.down_proj.{kind}"] = own[f"{ours}.mlp.down_proj.{kind}"]
        both = [own[f"{ours}.mlp.{name}_proj.weight"] for name in ("up", "gate")]
        hub[f"{theirs}.mlp.up_gate_proj.weight"] = np.concatenate(both)
    assert tensors
    save_file(hub, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config = {key: value for key, value in config.items() if key != "rope_parameters"}
    config |= {"model_type": "new", "architectures": ["NewModel"], "rope_theta": 20000.0, "pack_qkv": True,
               "layer_norm_type": "layer_norm", "position_embedding_type": "rope"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with export(tmp_path) as engine:
        for text, row in zip(TEXTS, engine.embed(TEXTS), strict=True):
            assert cosine(row, rows_of(model, engine.codec.encode(text)).mean(0)) > 0.99999
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "ntk", "factor": 8.0}}), "utf-8")
    steps = 1.0 / (20000.0 * 8.0) ** (np.arange(0, 16, 2) / 16) / 8.0 ** (2 / 16)
    model.rotary_emb.inv_freq.copy_(model.rotary_emb.inv_freq.new_tensor(steps))
    export_model(ExportOptions(str(folder), tmp_path / "ntk", [], "fp32", threads=1))
    with edgespec.load(tmp_path / "ntk", threads=1) as engine:
        for text, row in zip(TEXTS, engine.embed(TEXTS), strict=True):
            assert cosine(row, rows_of(model, engine.codec.encode(text)).mean(0)) > 0.99999


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small BERT, and its bundle in int8, the format without a choice."""
    folder = tmp_path_factory.mktemp("plain")
    encoders.save(encoders.torch_model("bert"), folder / "model")
    export_model(ExportOptions(str(folder / "model"), folder / "bundle", choose=True, threads=1))
    return folder


def test_what_writes_refuses_an_encoder(plain: Path) -> None:
    with edgespec.load(plain / "bundle", threads=1) as engine:
        assert engine.bundle.manifest.target.format == "int8"
        assert engine.methods == []
        for ask in (
            lambda: engine.generate("good"),
            lambda: engine.generate_batch(["good"]),
            lambda: list(engine.stream([5, 6])),
            lambda: engine.chat([{"role": "user", "content": "good"}]),
            lambda: engine.save_session(plain / "x.session", "good"),
        ):
            with pytest.raises(InvalidRequest, match="is an encoder: it reads texts and writes none"):
                ask()
        for other in (lambda: engine.draw("a king"), lambda: engine.speak("a king"), lambda: engine.transcribe(b"x")):
            with pytest.raises(EdgespecError):
                other()


@pytest.mark.parametrize("ask, message", [
    (lambda engine: engine.embed(["  "]), "empty"),
    (lambda engine: engine.embed([[]]), "at least one token"),
    (lambda engine: engine.embed([[1 << 20]]), "outside the vocabulary"),
    (lambda engine: engine.embed([["x"]]), "expected text, or token ids"),
    (lambda engine: engine.embed(["king " * 300]), "tokens"),
    (lambda engine: engine.embed(["x"], prompt="query"), "has no prompts"),
    (lambda engine: engine.embed(["x"], pooling="sum"), "expected mean, last, cls, weighted or max"),
    (lambda engine: engine.embed("x"), "expected a list of texts"),
    (lambda engine: engine.rerank("x", "y"), "expected a list of documents"),
    (lambda engine: engine.rerank("", ["y"]), "not empty"),
    (lambda engine: engine.rerank("x", ["y", " "]), "not empty"),
    (lambda engine: engine.rerank("x", [3]), "not empty"),
    (lambda engine: engine.rerank("x", ["y"], top=0), "at least 1"),
])  # fmt: skip
def test_what_is_no_text_is_refused(plain: Path, ask: Callable[[Engine], object], message: str) -> None:
    with edgespec.load(plain / "bundle", threads=1) as engine, pytest.raises(EdgespecError, match=message):
        ask(engine)


def test_long_texts_lose_their_end_only_if_asked(plain: Path) -> None:
    with edgespec.load(plain / "bundle", threads=1) as engine:
        long = "king " * 300
        cut = engine.embed([long], truncate=True)[0]
        assert cut.tobytes() == engine.embed([[2, *engine.codec.encode(long, special=False)[:126], 3]])[0].tobytes()
        assert engine.embed(["king"], truncate=True).tobytes() == engine.embed(["king"]).tobytes()
        assert engine.rerank("x", []) == []


def test_a_pass_takes_no_more_than_is_planned(plain: Path) -> None:
    """Many short texts need more than one long one: each has its block of keys and values."""
    with edgespec.load(plain / "bundle", threads=1) as engine:
        encoder, use = engine.inputs.encoder, RunOptions("ar", context=engine.context)
        assert encoder is not None
        planned = memory_of(read_manifest(plain / "bundle"), use).part("kv").private
        for length, count in ((engine.context, 3), (3, 300), (40, 40)):
            engine.embed([[5] * length] * count)
            assert 0 < encoder.nbytes < planned


def test_a_plan_of_an_encoder(plain: Path) -> None:
    found = dry_run(ExportOptions(str(plain / "model"), plain / "other", choose=True))
    size = (plain / "bundle" / "model.data").stat().st_size
    assert (found["format"], found["methods"], found["weight_bytes"]) == ("int8", [], {"target": size})


@pytest.mark.parametrize("changes, message", [
    ({"methods": ["speculative"], "draft": "x"}, "--method"), ({"attention": ["int8"]}, "--attention"),
    ({"operators": "stock"}, "--operators stock"), ({"quantizer": "gptq"}, "rtn or mse"),
    ({"format": "file"}, "--format"), ({"devices": ["webgpu"]}, "--device"),
    ({"context": 1 << 20}, "--context"), ({"target_size": 5}, "--target-size"),
])  # fmt: skip
def test_options_that_encoders_do_not_have(plain: Path, changes: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_model(ExportOptions(str(plain / "model"), plain / "never", **changes))
    assert not (plain / "never").exists()


def test_a_shorter_context(plain: Path) -> None:
    export_model(ExportOptions(str(plain / "model"), plain / "short", [], "fp32", context=20, threads=1))
    with edgespec.load(plain / "short", threads=1) as engine:
        assert engine.context == 20
        assert cosine(engine.embed(TEXTS[:1])[0], edgespec.load(plain / "bundle").embed(TEXTS[:1])[0]) > 0.99
        with pytest.raises(InvalidRequest, match="tokens"):
            engine.embed(TEXTS)


HOSTILE = [
    ("modules.json", "{}", "expected a list of modules"),
    ("modules.json", "[1]", "expected a list of modules"),
    ("modules.json", "[" * 100_000, "expected a list of modules"),
    ("modules.json", '[{"type": "a.Pooling", "path": "../../etc"}]', "leaves the folder"),
    ("modules.json", '[{"type": "a.Pooling", "path": "/etc"}]', "leaves the folder"),
    ("modules.json", '[{"type": "a.CNN", "path": "x"}]', "CNN is not supported"),
    ("modules.json", '[{"type": "a.Normalize"}, {"type": "a.Pooling", "path": "1_Pooling"}]', "after Normalize"),
    ("1_Pooling/config.json", "{}", "is not supported"),
    ("1_Pooling/config.json", '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true}', "is not supported"),
    ("1_Pooling/config.json", '{"pooling_mode_mean_sqrt_len_tokens": true}', "is not supported"),
    ("1_Pooling/config.json", "[", "1_Pooling"),
    ("config.json", '{"model_type": "bert"}', "positive integer"),
    ("config.json", None, "config.json"),
]


@pytest.mark.parametrize("name, content, message", HOSTILE)
def test_damaged_files_are_errors_that_name_them(
    plain: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(plain / "model", folder)
    encoders.add_sentences(folder)
    if content is None:
        given = json.loads((folder / name).read_text("utf-8"))
        content = json.dumps(given | {"hidden_size": 10**9, "vocab_size": [3]})
    (folder / name).write_text(content, "utf-8")
    with pytest.raises(ExportError, match=message):
        export_model(ExportOptions(str(folder), tmp_path / "bundle", [], "fp32"))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("change, message", [
    ({"steps": [{"outputs": 5}]}, "steps"), ({"scores": True}, "scores"), ({"default_prompt": "x"}, "default_prompt"),
    ({"prompts": {"x": "y" * 5000}}, "prompts"), ({"second_text": -1}, "second_text"), ({"unknown": 1}, "unknown"),
    ({"steps": [{"outputs": 1 << 40}], "file": "embedding.bin"}, "outputs"), ({"file": "../x"}, "file"),
])  # fmt: skip
def test_manifests_of_strangers(plain: Path, tmp_path: Path, change: Any, message: str) -> None:
    import shutil

    shutil.copytree(plain / "bundle", tmp_path / "bundle")
    file = tmp_path / "bundle" / "edgespec.json"
    data = json.loads(file.read_text("utf-8"))
    data["embedding"] |= change
    file.write_text(json.dumps(data), "utf-8")
    with pytest.raises(EdgespecError, match=message):
        edgespec.load(tmp_path / "bundle", threads=1)
