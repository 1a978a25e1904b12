"""Exporting models through optimum: folders of its exports, calling it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import needing
from edgespec.engine.loading import load
from edgespec.errors import BundleError, EdgespecError, ExportError
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.foreign.graph import choose_strict, lead_with_sinks
from edgespec.export.foreign.model import ForeignModel
from edgespec.export.foreign.write import AGAINST, HEADROOM, write_foreign
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from edgespec.export.quantization.levels import dequantize_block, unpack_levels
from edgespec.export.quantization.weights import WeightChoice
from edgespec.reports.proof import prove
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMATS, FOUR_BITS, Format
from edgespec.runtimes.files.manifest import Manifest
from tests.support import hf
from tests.support.foreign import MODEL_TYPE, write_export

NAME = "llama_tied_gqa"
CONFIG, SEED = hf.CONFIGS[NAME], hf.SEEDS[NAME]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an export by optimum, which tests only read; return its folder."""
    return write_export(tmp_path_factory.mktemp("export"), CONFIG, SEED)


def export(model: Path | str, output: Path, **options: Any) -> Manifest:
    return export_model(ExportOptions(str(model), output, threads=1, **options), golden=False)


def native(form: str) -> set[str]:
    """Name the graph that native operators run; a float32 model has none."""
    return set() if form == "fp32" else {"native"}


def refused(
    match: str, model: Path | str, output: Path, kind: type[EdgespecError] = ExportError, **options: Any
) -> str:
    """Check that the export of ``model`` fails with ``kind`` and leaves no file; return the whole message."""
    with pytest.raises(kind, match=match) as found:
        export(model, output, **options)
    assert not output.exists()
    assert not list(output.parent.glob(".*"))
    return str(found.value)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "w8a8"])
def test_a_folder_of_an_export(source: Path, tmp_path: Path, form: Format) -> None:
    manifest = export(source, tmp_path / "bundle", format=form)
    assert manifest == Bundle.open(tmp_path / "bundle").manifest
    target, parity = manifest.target, manifest.parity
    assert (target.origin, target.format, target.layout) == ("optimum", form, "stock")
    assert set(target.graphs) == {"plain", "strict", *native(form)}
    facts = target.facts
    assert (facts.architecture, facts.layers, facts.kv_heads, facts.head_dim) == (MODEL_TYPE, 2, 2, 16)
    assert (facts.vocab, facts.hidden, facts.intermediate) == (160, 64, 96)
    assert facts.context == hf.MAX_POSITIONS - HEADROOM
    assert facts.parameters == pytest.approx(sum(np.prod(shape) for shape in hf.shapes(CONFIG).values()), rel=0.01)
    assert list(manifest.methods) == ["ar", "ngram"]
    assert manifest.tokenizer.eos == [hf.EOS]
    assert manifest.provenance["graph"] == "pytorch 2.0"
    assert parity["against"] == f"{AGAINST} optimum"
    assert len(parity["weight_error_by_layer"]) == 2
    if form == "fp32":
        assert parity["logit_max_error"] < 1e-3
        assert parity["weight_error"] == 0
    else:
        least, most = (0.02, 0.2) if form in FOUR_BITS else (0.001, 0.02)
        assert all(least < error < most for error in parity["weight_error_by_layer"])
        assert 0 < parity["logit_rms_error"] < parity["logit_std"]
    tensors = onnx.load(str(tmp_path / "bundle" / "model.onnx")).graph.initializer
    size = sum(numpy_helper.to_array(tensor).nbytes for tensor in tensors)
    assert manifest.memory["weight_bytes"]["target"] == pytest.approx(size, rel=0.01)
    names = {path.name for path in (tmp_path / "bundle").iterdir()}
    graphs = {graph.file for graph in target.graphs.values()}
    other = {"edgespec.json", "model.data", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == graphs | other | ({"model.weights.json"} if form != "fp32" else set())


def test_matrices_are_quantized_and_nothing_else(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "bundle", format="int4", head_format="int8", quantizer="rtn")
    proto = onnx.load(str(tmp_path / "bundle" / "model.onnx"))
    nodes = [node for node in proto.graph.node if node.op_type == "MatMulNBits"]
    assert len(nodes) == 2 * 7 + 1
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    weights = hf.weights(CONFIG, SEED)
    for node in nodes:
        facts = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        head = node.name == "/lm_head/MatMul"
        assert facts["bits"] == (8 if head else 4)
        assert (facts["block_size"], facts["accuracy_level"]) == (32, 4)
        name = "model.embed_tokens" if head else node.name.strip("/").removesuffix("/MatMul").replace("/", ".")
        exact, scales = weights[f"{name}.weight"], tensors[node.input[2]]
        stands_for = dequantize_block(
            unpack_levels(tensors[node.input[1]], facts["bits"]), scales, facts["K"], facts["bits"]
        )
        half_step = np.abs(scales).repeat(32, 1)[:, : facts["K"]] * 0.51 + 1e-6
        clipped = np.abs(stands_for - exact) > half_step  # the largest of a block may be beyond the last level
        assert clipped.mean() < 0.05
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert not any(name.startswith("onnx::MatMul") and name.count(".") < 2 for name in tensors)  # no float copy stays
    assert not any(node.op_type == "Transpose" and node.output[0] == "logits" for node in proto.graph.node)


@pytest.mark.parametrize("answers", ["yes", "no yes", "no no"])
def test_the_strict_graph_is_found_by_trying(source: Path, tmp_path: Path, answers: str) -> None:
    """It doubles attention's rows, else adds a dummy row in every pass; if neither works, strict mode is missing."""
    model, asked = ForeignModel.open(source, None), iter(answers.split())
    part = write_foreign(tmp_path, model.open_graph(), model.facts, WeightChoice.of("fp32", None, None)).part
    products = [
        node
        for node in onnx.load(str(tmp_path / "model.strict.onnx")).graph.node
        if node.output[0].startswith("strict")
    ]
    assert [node.op_type for node in products].count("MatMul") == 2 * 2
    chosen = choose_strict(tmp_path, part, lambda part: next(asked) == "yes").graphs
    assert next(asked, None) is None
    assert chosen["plain"].file == "model.onnx"
    assert (chosen["strict"].file, chosen["strict"].padded) == {
        "yes": ("model.strict.onnx", False),
        "no yes": ("model.onnx", True),
        "no no": ("model.onnx", False),
    }[answers]
    assert {path.name for path in tmp_path.iterdir()} == {"model.data"} | {graph.file for graph in chosen.values()}


def test_products_inside_other_operators(tmp_path: Path) -> None:
    """Methods reproduce plain decoding's text with each strict graph that the export can choose."""
    folder = write_export(tmp_path / "export", CONFIG, SEED, einsum=True)
    export(folder, tmp_path / "bundle", format="fp32")
    engine = load(tmp_path / "bundle", threads=1)
    (proof,) = prove(engine, ["The harbour", "On the quay"], Settings(max_new_tokens=60, ignore_eos=True), ["ngram"])
    assert proof.exact or (not engine.exact_rows and proof.lossless)


def test_a_graph_that_cannot_run_is_a_clear_error(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export", CONFIG, SEED)

    def spoil(model: onnx.ModelProto) -> None:
        shapes = [node for node in model.graph.node if node.op_type == "Reshape"]
        for tensor in model.graph.initializer:
            if tensor.name == shapes[0].input[1]:
                tensor.CopyFrom(numpy_helper.from_array(np.array([0, 0, 7, 16]), tensor.name))

    _change(folder, spoil)
    refused("ONNX Runtime", folder, tmp_path / "bundle", BundleError)


@pytest.mark.parametrize("how", [{"external": True}, {"inside": "onnx"}, {"positions": False}], ids=str)
def test_other_shapes_of_the_folder_give_the_same_text(source: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    other = write_export(tmp_path / "other", CONFIG, SEED, **how)
    texts = []
    for at, model in enumerate((source, other)):
        export(model, tmp_path / f"bundle{at}", format="fp32")
        texts.append(load(tmp_path / f"bundle{at}").generate("The harbour", max_new_tokens=30).tokens)
    assert texts[0] == texts[1]


def test_a_checkpoint_beside_the_graph_of_an_emitted_architecture_wins(source: Path, tmp_path: Path) -> None:
    folder = hf.write_reference_checkpoint(tmp_path / "both", NAME)
    shutil.copy(source / "model.onnx", folder)
    assert export(folder, tmp_path / "own", format="fp32").target.origin == "edgespec"
    (folder / "model.safetensors").unlink()
    assert export(folder, tmp_path / "through", format="fp32").target.origin == "optimum"


def test_the_plan_writes_nothing(source: Path, tmp_path: Path) -> None:
    plan = dry_run(ExportOptions(str(source), tmp_path / "no", format="int8", context=100))
    assert (plan["architecture"], plan["context"], plan["kv_bytes_per_token"]) == (MODEL_TYPE, 100, 2 * 2 * 2 * 16 * 4)
    assert plan["weight_bytes"].keys() == {"target"}
    assert not (tmp_path / "no").exists()


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, draft", [("foreign", "own"), ("foreign", "foreign"), ("own", "foreign")])
def test_pairs_of_any_origin(
    source: Path, checkpoint: Callable[[str], Path], tmp_path: Path, target: str, draft: str
) -> None:
    models = {"foreign": source, "own": checkpoint(NAME)}
    names = {"foreign": "optimum", "own": "edgespec"}
    output, options = tmp_path / "bundle", {"methods": ["speculative"], "draft": str(models[draft])}
    manifest = export(models[target], output, format="int4", **options)
    assert manifest.draft is not None
    assert (manifest.target.origin, manifest.draft.origin) == (names[target], names[draft])
    measured = manifest.methods["speculative"].measured[0]
    assert measured.acceptance[0] > 0.5  # the same weights, hardly different levels
    assert manifest.memory["weight_bytes"].keys() == {"target", "draft"}
    if draft == "foreign":
        assert set(manifest.draft.graphs) == {"plain", *native("int4")}
        assert manifest.draft.graphs["plain"].file == "draft/model.onnx"


def test_a_draft_of_another_vocabulary(source: Path, tmp_path: Path) -> None:
    other = write_export(tmp_path / "other", {**CONFIG, "vocab_size": 130}, 1)
    manifest = export(source, tmp_path / "bundle", format="int4", methods=["speculative"], draft=str(other))
    assert manifest.translation is not None
    with load(tmp_path / "bundle", threads=1) as engine:
        plain, result = (
            engine.generate([5, 6], method=name, max_new_tokens=20, ignore_eos=True, fallback=False)
            for name in ("ar", "speculative")
        )
    assert result.tokens == plain.tokens
    assert result.stats.drafted


def test_what_a_foreign_draft_cannot_be(source: Path, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    pair: dict[str, Any] = {"methods": ["speculative"], "draft": str(source)}
    refused("--draft-vocab: the draft", checkpoint(NAME), tmp_path / "bundle", **pair, draft_vocab=64)
    refused("--format w8a8: the draft", checkpoint(NAME), tmp_path / "bundle", **pair, format="w8a8")


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, named",
    [
        ({"methods": ["self-spec"]}, "--method self-spec"),
        ({"methods": ["swift"]}, "--method swift"),
        ({"methods": ["medusa"]}, "--method medusa"),
        ({"methods": ["blockwise"]}, "--method blockwise"),
        ({"methods": ["paradecode"]}, "--method paradecode"),
        ({"format": "w8a8"}, "--format w8a8"),
        ({"quantizer": "gptq"}, "--quantizer gptq"),
        ({"attention": ["int8"]}, "--attention"),
        ({"heads": ["."]}, "--heads"),
        ({"operators": "native"}, "--operators native"),
    ],
)
def test_options_that_need_graphs_of_our_own(source: Path, tmp_path: Path, options: dict[str, Any], named: str) -> None:
    message = refused(f"{named}: .* goes through another exporter", source, tmp_path / "bundle", **options)
    assert ", ".join(needing("text", "draft")) in message
    assert all(name in message for name in ARCHITECTURES)


def test_contexts(source: Path, tmp_path: Path) -> None:
    refused(f"expected 2 to {hf.MAX_POSITIONS - HEADROOM}", source, tmp_path / "bundle", context=hf.MAX_POSITIONS)
    unbounded = write_export(tmp_path / "alibi", CONFIG, SEED, changes={"max_position_embeddings": None})
    assert "--context N" in refused("positive integer max_position", unbounded, tmp_path / "bundle")
    assert export(unbounded, tmp_path / "bundle", context=300).target.facts.context == 300


def _change(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(str(folder / "model.onnx"))
    change(model)
    onnx.save(model, str(folder / "model.onnx"))


def _quantize(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("DynamicQuantizeLinear", ["a"], ["b", "c", "d"]))


def _halve(model: onnx.ModelProto) -> None:
    for port in (*model.graph.input, *model.graph.output):
        if ".key" in port.name:
            port.type.tensor_type.elem_type = TensorProto.FLOAT16


def _merge(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda at: _change(at, _quantize), "is quantized already"),
        (lambda at: _change(at, _halve), "export it in float32"),
        (lambda at: _change(at, _merge), "has an input 'use_cache_branch'"),
        (lambda at: (at / "model.onnx").write_bytes(b"\x08\x99nonsense"), "not a readable ONNX file"),
        (lambda at: (at / "model.onnx").write_bytes(b""), "no input input_ids"),
        (lambda at: (at / "model.onnx").rename(at / "decoder_model_merged.onnx"), "has decoder_model_merged"),
        (lambda at: (at / "model.onnx_data").unlink(), "cannot read|which has 100 bytes"),
        (lambda at: (at / "model.onnx_data").write_bytes(b"\0" * 100), "cannot read|which has 100 bytes"),
        (lambda at: (at / "config.json").unlink(), "has no config.json"),
        (lambda at: (at / "config.json").write_text("{"), "not readable as JSON"),
        (lambda at: (at / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda at: (at / "config.json").write_text("{}"), "expected a positive integer hidden_size"),
        (lambda at: (at / "tokenizer.json").unlink(), "tokenizer"),
    ],
)  # fmt: skip
def test_folders_that_are_not_whole(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    folder = write_export(tmp_path / "export", CONFIG, SEED, external=True)
    spoil(folder)
    refused(message, folder, tmp_path / "bundle", EdgespecError)


def test_a_graph_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    folder = write_export(tmp_path / "export", CONFIG, SEED, external=True)
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    refused("not a file in the graph's folder", folder, tmp_path / "bundle")


def attention_with_sink(drop: int) -> onnx.ModelProto:
    """Make weights of attention over scores [1, 1, rows, columns] and a sink, which ``drop`` = -1 leaves out."""
    made = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Concat", ["scores", "sink"], ["all"], axis=-1),
        helper.make_node("Softmax", ["all"], ["shares"], axis=-1),
        helper.make_node("Slice", ["shares", "zero", "drop", "last", "one"], ["weights"]),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [made("scores", TensorProto.FLOAT, [1, 1, None, None]), made("sink", TensorProto.FLOAT, [1, 1, None, 1])],
        [made("weights", TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.array([number], np.int64), name)
            for name, number in (("zero", 0), ("drop", drop), ("last", 3), ("one", 1))
        ],
        value_info=[made("sink", TensorProto.FLOAT, [1, 1, None, 1])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def weights_of(model: onnx.ModelProto, scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Run that graph over one row of scores [columns]."""
    session = ort.InferenceSession(model.SerializeToString())
    feed = {"scores": scores[None, None, None], "sink": np.full((1, 1, 1, 1), 0.7, np.float32)}
    found: np.ndarray[Any, Any] = session.run(None, feed)[0][0, 0, 0]
    return found


def test_columns_of_later_tokens_leave_a_row_with_a_sink_as_it_is() -> None:
    before, after = attention_with_sink(-1), attention_with_sink(-1)
    assert lead_with_sinks(after) == 1
    random = np.random.default_rng(3)
    for columns in range(2, 60):
        scores = random.standard_normal(columns).astype(np.float32) * 3
        longer = np.append(scores, np.full(5, np.finfo(np.float32).min, np.float32))
        np.testing.assert_allclose(weights_of(after, scores), weights_of(before, scores), rtol=1e-5)
        np.testing.assert_array_equal(weights_of(after, longer)[:columns], weights_of(after, scores))


def test_what_drops_more_than_a_sink_stays() -> None:
    model = attention_with_sink(-2)
    assert lead_with_sinks(model) == 0
    assert model == attention_with_sink(-2)


def test_sizes_of_each_layer_and_layers_without_a_count_are_read(source: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(source, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["num_hidden_layers"]
    config |= {"intermediate_size": [64, 96], "layer_types": ["full_attention"] * 2}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    facts = ForeignModel.open(folder, None).facts
    assert (facts.layers, facts.intermediate) == (2, 96)
