"""Plans match exports, before anything is written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import SHAPES, write_shape
from edgespec.drafters.registry import complete
from edgespec.errors import EdgespecError, ExportError, TrainingError, UnsupportedModel
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_described, open_model
from edgespec.export.bundle.sizes import weight_bytes
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import ConfigOnly, resolve
from edgespec.export.source.stored import Plain
from edgespec.runtimes.files.formats import BLOCK_FORMATS, FORMATS, LEARNT, Format, listed
from edgespec.runtimes.files.kv import table_shape
from edgespec.runtimes.files.manifest import Layout, Manifest, Operators, read_manifest
from tests.conftest import DRAFT, HEAD_METHODS, TARGET, Written
from tests.support import hf
from tests.support.gguf_files import write_gguf
from tests.support.planned import PLANS, config_only, plan_of, with_heads

METHODS = ("speculative", "self-spec", "swift", *HEAD_METHODS)
# tied and not, with biases, learnt positions, norms of heads, fused and parallel layers
SOME = (
    *("llama_tied_gqa", "qwen2_untied", "llama_biases_mqa", "gpt2_default", "gemma3_new", "olmo2_mha", "falcon_40b"),
    *("phi_half", "apertus_llama3", "nanochat_capped", "ministral3_growth", "granitemoehybrid_rope"),
)
LAYOUTS: tuple[Layout, ...] = ("native", "stock")


# -- only a config.json ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(hf.CONFIGS))
def test_a_config_says_the_shapes_of_every_tensor(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    context = hf.CONTEXTS.get(name)
    whole = open_model(checkpoint(name), context)
    alone = open_described(config_only(checkpoint(name), tmp_path / "config"), context)
    assert isinstance(ConfigOnly.open(tmp_path / "config"), ConfigOnly)
    assert alone.facts == whole.facts
    assert alone.tensors == whole.tensors == {tensor: whole.source.shape(tensor) for tensor in whole.tensors}


def test_an_export_still_wants_the_weights(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    alone = config_only(checkpoint("llama_tied_gqa"), tmp_path / "config", "tokenizer.json", "tokenizer_config.json")
    with pytest.raises(ExportError, match="safetensors"):
        load_source(ExportOptions(str(alone), tmp_path / "out"))
    with pytest.raises(ExportError, match="missing from the checkpoint"):
        open_described(alone, None).source.read("model.norm.weight")
    for name in ("pytorch_model.bin", "half.safetensors"):  # weights that an export refuses are not passed over
        (alone / name).write_bytes(b"x")
        with pytest.raises(ExportError):
            plan_of(alone)
        (alone / name).unlink()
    plan_of(alone)


def test_nothing_is_planned_of_nonsense(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    alone = config_only(checkpoint("llama_tied_gqa"), tmp_path / "config")
    config = json.loads((alone / "config.json").read_text("utf-8"))

    def refused(kind: type[EdgespecError], message: str, change: dict[str, Any], **options: Any) -> None:
        (alone / "config.json").write_text(json.dumps({**config, **change}), "utf-8")
        with pytest.raises(kind, match=message):
            plan_of(alone, **options)

    refused(UnsupportedModel, r"'mamba' is not supported \(recurrent", {"model_type": "mamba"})
    refused(ExportError, "positive integer hidden_size", {"hidden_size": None})
    refused(ExportError, "even sizes", {"num_key_value_heads": 3})
    refused(UnsupportedModel, "multiple of 8", {"head_dim": 12})
    refused(ExportError, "expected 2 to 512", {}, context=513)
    refused(ExportError, "unknown method 'magic'", {}, methods=["magic"])
    refused(ExportError, "not --method speculative", {}, draft=DRAFT)
    refused(ExportError, "--head-vocab was given", {}, head_vocab=64)
    refused(ExportError, "--draft-vocab 999: expected 2 to 160", {}, methods=["speculative"], draft_vocab=999)
    refused(ExportError, "--head-vocab 1: expected 2 to 160", {}, methods=["medusa"], head_vocab=1)
    refused(ExportError, f"expected {listed(BLOCK_FORMATS)}", {}, format="fp32", head_format="int8")
    refused(ExportError, "unknown attention 'int3'", {}, attention=["int3"])
    refused(ExportError, "needs native operators", {}, attention=["int8"], operators="stock")
    refused(ExportError, "expected int4, int8 or fp32", {}, format="w8a8", devices=["webgpu"])
    refused(ExportError, "swift leaves out layers", {}, methods=["swift"])
    refused(ExportError, "hidden size 128, but", {}, methods=["medusa"], heads=["builtin:shakespeare-medusa"])
    refused(ExportError, "but not --method medusa", {}, heads=["builtin:shakespeare-medusa"])
    refused(TrainingError, "need a model of two layers", {"num_hidden_layers": 1}, methods=["paradecode"])
    (alone / "config.json").write_text("[]", "utf-8")
    with pytest.raises(ExportError, match="expected a JSON object"):
        plan_of(alone)
    with pytest.raises(ExportError, match="no such folder"):
        plan_of(tmp_path / "nothing")


def test_an_unsupported_model_is_refused_as_by_an_export(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama_tied_gqa"), folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}), "utf-8")
    from edgespec.export.foreign.write import exporter_missing
    from edgespec.export.loading import load_source

    if exporter_missing() is None:
        pytest.skip("transformers is installed: the export would go through it")
    said = []
    for plan in (lambda: plan_of(folder), lambda: load_source(ExportOptions(str(folder), tmp_path / "out"))):
        with pytest.raises(UnsupportedModel) as caught:
            plan()
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("where", [".", "onnx"])
def test_a_graph_of_optimum_is_not_planned(checkpoint: Callable[[str], Path], tmp_path: Path, where: str) -> None:
    alone = config_only(checkpoint("llama_tied_gqa"), tmp_path / "config")
    (alone / where).mkdir(exist_ok=True)
    (alone / where / "model.onnx").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match="cannot be planned"):
        plan_of(alone)


@pytest.mark.parametrize("name", sorted(hf.CONFIGS))
def test_the_size_of_weights_is_exact(checkpoint: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Some models are planned in all formats, alternating layouts; the others in int4."""
    context, alone = hf.CONTEXTS.get(name), config_only(checkpoint(name), tmp_path / "config")
    turns = [(form, LAYOUTS[(at + SOME.index(name)) % 2]) for at, form in enumerate(FORMATS)] if name in SOME else None
    for form, layout in turns or [("int4", "native")]:
        head: Format | None = "int8" if form == "int4" and name in SOME else None
        spec = ModelSpec(form, head=head, layout=layout, gated=True)
        write_model(tmp_path, open_model(checkpoint(name), context), spec)
        planned = weight_bytes(open_described(alone, context), form, head, layout)
        assert planned == (tmp_path / "model.data").stat().st_size, (form, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_size_of_heads_is_exact(
    checkpoint: Callable[[str], Path], tmp_path: Path, plan: str, form: Format, layout: Operators
) -> None:
    made = with_heads(tmp_path, checkpoint("gemma2_caps"), PLANS[plan], form, layout)
    size = (tmp_path / made.written.part.weights).stat().st_size
    assert weight_bytes(made.written.arch, form, None, layout, PLANS[plan]) == size


def test_large_tensors_are_aligned_to_large_pages(written: Callable[..., Written]) -> None:
    made = written(TARGET, "fp32")
    size = (made.folder / made.part.weights).stat().st_size
    assert weight_bytes(open_model(resolve(TARGET), None), "fp32", None, "stock") == size > 4 << 20


# -- compared with real exports ----------------------------------------------------------------------------------------


def same(planned: Manifest, real: Manifest) -> None:
    """Check that ``planned`` equals ``real``, the export's manifest, in its models and files."""
    assert planned.target == real.target
    assert planned.draft == real.draft
    assert set(complete(planned).methods) == set(complete(real).methods)
    for name, method in planned.methods.items():
        assert not method.measured
        assert method.predicted_speedup is None
        if name != "paradecode":  # which exits are worth it is measured
            assert method.heads == real.methods[name].heads
    assert planned.memory == real.memory
    assert planned.tokenizer == real.tokenizer
    assert set(planned.files) == set(real.files)
    for name, entry in planned.files.items():
        size = real.files[name].size
        if name.endswith((".onnx", ".weights.json")):
            assert entry.size == pytest.approx(size, rel=0.25, abs=2500), name  # names of inputs are estimated
        else:
            assert entry.size == size, name


@pytest.mark.parametrize("operators", ["native", "stock"], indirect=True)
@pytest.mark.parametrize("form", FORMATS)
def test_a_plan_is_what_an_export_writes(bundle: Callable[..., Path], operators: Operators, form: Format) -> None:
    real = read_manifest(bundle(form))
    planned = plan_of(TARGET, format=form, methods=METHODS, draft=DRAFT, operators=real.target.layout)
    same(planned, real)
    assert planned.provenance["planned"] is True
    assert planned.provenance["model"] == real.provenance["model"]
    assert planned.provenance["traits"] == real.provenance["traits"]
    assert Manifest.model_validate(planned.model_dump(mode="json")) == planned


def test_every_option_is_planned(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {
        "methods": ["speculative", "medusa", "paradecode"], "head_format": "int8", "draft": DRAFT, "context": 256,
        "head_vocab": 200, "draft_vocab": 300, "devices": ["webgpu"], "quantizer": "rtn",
    }  # fmt: skip
    real = export_model(ExportOptions(TARGET, tmp_path / "out", threads=1, **options), golden=False)
    planned = plan_of(TARGET, **options)
    assert planned.target == real.target
    assert planned.draft == real.draft
    assert planned.memory == real.memory
    assert set(planned.files) == set(real.files)
    for name in ("model.data", "draft/model.data", "head_vocab.bin", "draft/head_vocab.bin"):
        assert planned.files[name].size == real.files[name].size


def test_a_whole_checkpoint_and_its_config_plan_the_same(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for name in SOME:
        source = checkpoint(name)
        small = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
        alone = config_only(source, tmp_path / name, *small)
        plans = [plan_of(path, methods=["self-spec", "medusa"]) for path in (source, alone)]
        assert plans[0].model_copy(update={"provenance": {}}) == plans[1].model_copy(update={"provenance": {}})


def test_a_gguf_file_is_planned(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama_tied_gqa")
    planned = plan_of(tmp_path / "model.gguf")
    assert planned.target.facts == open_model(tmp_path / "model.gguf", None).facts.model_copy(
        update={"parameters": planned.target.facts.parameters}
    )
    assert planned.files["tokenizer.json"].size > 0


def test_no_weights_of_a_hub_model_are_fetched(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config_only(checkpoint("qwen2_untied"), tmp_path / "snapshot", "tokenizer.json")
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(name: str, *, revision: str | None = None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    planned = plan_of("someone/some-model", revision="v2")
    assert planned.provenance["model"] == "someone/some-model"
    assert planned.target.facts.architecture == "qwen2"
    ((name, revision, patterns),) = asked
    assert (name, revision) == ("someone/some-model", "v2")
    assert {"config.json", "tokenizer.json"} <= set(patterns)
    assert not [pattern for pattern in patterns if "safetensors" in pattern or pattern in ("*", "*.json")]


@pytest.mark.parametrize("name, form", [(name, ("int4", "w8a8", "fp32")[at % 3]) for at, name in enumerate(SOME)])
def test_graphs_are_estimated(checkpoint: Callable[[str], Path], tmp_path: Path, name: str, form: Format) -> None:
    write_model(tmp_path, open_model(checkpoint(name), None), ModelSpec(form, gated=True))
    planned = plan_of(checkpoint(name), format=form, methods=["self-spec"])
    for file in ("model.strict.onnx", "model.plain.onnx", "model.native.onnx", "model.weights.json"):
        assert planned.files[file].size == pytest.approx((tmp_path / file).stat().st_size, rel=0.33), file


# -- what is assumed ---------------------------------------------------------------------------------------------------


def test_what_is_not_there_yet_is_assumed_and_said(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    alone = config_only(checkpoint("qwen3_tied"), tmp_path / "config")
    planned = plan_of(alone, methods=METHODS, attention=["int4", "f16"])
    facts = planned.target.facts
    assert [(group.name, group.count) for group in planned.target.heads[:2]] == [("medusa", 4), ("blockwise", 4)]
    assert planned.target.heads[1].inner == 4 * facts.hidden
    assert not planned.target.heads[0].own
    assert planned.draft is not None
    assert planned.draft.facts.vocab == facts.vocab
    assert planned.draft.facts.layers == 2
    skip = planned.methods["self-spec"].skip
    assert skip is not None
    assert len(skip.attention) + len(skip.mlp) == pytest.approx(facts.layers, abs=1)
    assert 0 not in skip.attention
    assumed = " ".join(planned.provenance["assumed"])
    for what in ("medusa", "blockwise", "paradecode", "train draft", "self-spec", "tokenizer.json", "int4 keys"):
        assert what in assumed
    part = planned.target.attention
    assert part is not None
    assert (part.default, part.learnt) == ("int4", ["int4"])
    assert planned.files["kv/tables.safetensors"].size == 4 * 2 * facts.layers * facts.kv_heads * 32 + 100
    assert table_shape(LEARNT[0], facts)[-1] == 32
    assert plan_of(TARGET).provenance["assumed"] == []


def test_the_skip_set_is_the_middle_half(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    alone = config_only(checkpoint("llama_tied_gqa"), tmp_path / "config")
    config = json.loads((alone / "config.json").read_text("utf-8"))
    (alone / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 24}), "utf-8")
    skip = plan_of(alone, methods=["self-spec"]).methods["self-spec"].skip
    assert skip is not None
    assert skip.attention == skip.mlp == list(range(6, 18))


# -- cheap -------------------------------------------------------------------------------------------------------------


def test_no_weights_are_read(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(Plain, "raw", fail)
    for name in (TARGET, str(checkpoint("phi3_long"))):
        assert plan_of(name, methods=["self-spec", "medusa"]).target.facts.parameters > 0


def test_a_plan_needs_neither_onnx_nor_torch(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    alone = config_only(checkpoint("llama_tied_gqa"), tmp_path / "config")
    code = """
import sys
for name in ("onnx", "onnxruntime", "torch", "transformers", "ml_dtypes", "optuna"):
    sys.modules[name] = None
from edgespec.export.options import ExportOptions
from edgespec.export.plan_manifest import plan_bundle
planned = plan_bundle(ExportOptions(sys.argv[1], methods=["speculative", "self-spec", "medusa"], attention=["int8"]))
print(planned.target.facts.layers)
"""
    ran = subprocess.run([sys.executable, "-c", code, str(alone)], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.strip()) == (0, "2"), ran.stderr


# parameters of the text part, as transformers 5.23 makes it, and numbers of the tables of positions, for each position
PARAMETERS = {
    "qwen2.5-0.5b": (494_032_768, 64),
    "llama-3.2-1b": (1_235_814_400, 64),
    "llama-3.2-3b": (3_212_749_824, 128),
    "qwen3.5-0.8b": (752_393_024, 64),
    "qwen3.5-2b": (1_881_825_088, 64),
    "lfm2-350m": (354_483_968, 64),
    "lfm2-1.2b": (1_170_340_608, 64),
    "lfm2-8b-a1b": (8_339_929_856, 64),
    "lfm3-1.7b": (1_728_801_536, 128 + 64),
    "gemma-4-e2b": (4_628_569_344, 256 + 128),
    "gemma-4-e4b": (7_463_013_376, 256 + 128),
    "granite-4.0-350m": (352_379_904, 64),
    "granite-4.0-h-350m": (340_332_224, 0),
    "granite-3.1-1b-a400m": (1_334_628_352, 64),
    "olmoe-1b-7b": (6_919_161_856, 128),
    "qwen3-30b-a3b": (30_532_122_624, 128),
    "olmo-hybrid-7b": (7_430_870_688, 0),
    "smollm3-3b": (3_075_098_624, 128),
}
INT4, INT8 = 0.5 + 2 / 32, 1.0  # bytes of a weight: levels, and a scale of two bytes for 32 of them


def test_every_shape_is_here() -> None:
    assert set(PARAMETERS) == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_of_published_models_are_planned_within_three_percent(tmp_path: Path, name: str) -> None:
    config = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    planned = plan_of(tmp_path)
    parameters, angles = PARAMETERS[name]
    # in addition to the parameters of transformers: the bias of each router, which it counts as a buffer, and norms of
    # ones
    assert planned.target.facts.parameters == pytest.approx(parameters, abs=1000)
    table = config["num_hidden_layers"] * config.get("hidden_size_per_layer_input", 0) * config["vocab_size"]
    weights = INT4 * (parameters - table) + INT8 * table
    expected = weights + 4 * angles * config["max_position_embeddings"]
    assert planned.files["model.data"].size == pytest.approx(expected, rel=0.03)
    assert planned.memory["weight_bytes"] == {"target": planned.files["model.data"].size}


def test_a_written_shape_is_as_large_as_planned(tmp_path: Path) -> None:
    """All files of a model of 31 million parameters, layers of both kinds."""
    config = {**SHAPES["granite-4.0-h-350m"], "vocab_size": 8192, "num_hidden_layers": 12,
              "layer_types": ["mamba"] * 11 + ["attention"], "hidden_size": 384, "num_attention_heads": 6,
              "num_key_value_heads": 2, "mamba_n_heads": 24, "shared_intermediate_size": 1024}  # fmt: skip
    write_shape(config, tmp_path / "made", context=256)
    small = tmp_path / "small"
    small.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "made" / name).rename(small / name)
    planned = plan_of(small, context=256)
    made = {file.name: file.stat().st_size for folder in ("made", "small") for file in (tmp_path / folder).iterdir()}
    made.pop("edgespec.json")
    assert planned.files["model.data"].size == made["model.data"]
    assert sum(file.size for file in planned.files.values()) == pytest.approx(sum(made.values()), rel=0.03)
