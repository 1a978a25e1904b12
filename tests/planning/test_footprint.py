"""The memory model: parts against formulas and what bundles really hold, predictions against processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.loading import load
from edgespec.export.bundle.drafter import write_drafter
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.read import read_drafter
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import resolve
from edgespec.planning.buffers import kv_bytes, native_scratch
from edgespec.planning.footprint import PROCESS, Memory, MemoryPart, memory_of, process_bytes, resident_now
from edgespec.planning.traffic import weight_size
from edgespec.planning.weights import group_bytes, looked_up, needs, stock_weights, weight_parts
from edgespec.reports.bench import extra_bytes
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import FileEntry, Manifest, ModelPart, Operators, read_manifest
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.slots.shared import Model
from tests.conftest import LARGE, OPERATORS, Written, write_large
from tests.support import hf
from tests.support.eagle import write_random

TIED, UNTIED = "builtin:shakespeare", "builtin:shakespeare-draft"
MIB = 1 << 20


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Path]:
    """(format, operators) -> a small bundle with a draft and heads."""
    made: dict[tuple[Format, Operators], Path] = {}

    def get(form: Format = "int4", operators: Operators = "native") -> Path:
        if operators == "native":
            request.getfixturevalue("native")
        if (form, operators) not in made:
            folder = tmp_path_factory.mktemp("bundle")
            (skip := folder / "skip.json").write_text(json.dumps({"attention": [1], "mlp": [2]}), "utf-8")
            options = ExportOptions(TIED, folder / "bundle", ["speculative", "self-spec", "medusa"], form, draft=UNTIED,
                                    skip_set=skip, threads=1, operators=operators)  # fmt: skip
            export_model(options, golden=False)
            made[form, operators] = options.output
        return made[form, operators]

    return get


@pytest.fixture(scope="module")
def manifest(exported: Callable[..., Path]) -> Manifest:
    return read_manifest(exported())


# -- weights -----------------------------------------------------------------------------------------------------------


def entries(folder: Path, part: ModelPart) -> dict[str, int]:
    """Bytes of every tensor of a weight file, by name; a second view of one is left out."""
    assert part.index is not None
    index: dict[str, dict[str, list[Any]]] = json.loads((folder / part.index).read_text("utf-8"))
    offsets: dict[int, tuple[str, int]] = {}
    for name, entry in index[part.layout].items():
        offsets.setdefault(entry[0], (name, int(entry[1])))
    return dict(offsets.values())


def of(held: dict[str, int], *words: str) -> int:
    """Bytes of the tensors whose names have one of these words."""
    return sum(size for name, size in held.items() if any(word in name for word in words))


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [TIED, "qwen2_untied", "gemma3_old", "gpt2_default"])
def test_weight_files_are_taken_apart(
    writer: Callable[..., Written], name: str, form: Format, operators: Operators
) -> None:
    written = writer(operators, name, form)
    part, held = written.part, entries(written.folder, written.part)
    size = (written.folder / part.weights).stat().st_size
    found = weight_parts(part, {part.weights: FileEntry(size=size, sha256="")})
    assert found.angles == of(held, "rope_", "rope_local", "wpe", "positions")
    embedding = of(held, "embed_tokens", "lm_head", "wte")
    slack = 4096 * len(held)  # tensors begin at pages
    assert found.table + found.lm_head == pytest.approx(embedding, abs=slack)
    assert needs(found, []) + found.table + found.angles == pytest.approx(size, abs=slack)
    assert found.matrices == pytest.approx(sum(held.values()) - embedding - found.angles, abs=slack)


@pytest.mark.parametrize("operators", OPERATORS)
def test_a_drafter_has_no_embedding(tmp_path: Path, operators: Operators) -> None:
    arch = open_model(resolve(TIED), 96)
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
    drafter = read_drafter(write_random(tmp_path / "checkpoint", arch, layers, None, 1), arch)
    part = write_drafter(tmp_path, drafter, WeightChoice.of("int8", None, None), operators)
    held, size = entries(tmp_path, part), (tmp_path / part.weights).stat().st_size
    found, slack = weight_parts(part, {part.weights: FileEntry(size=size, sha256="")}), 4096 * len(held)
    assert (found.table, of(held, "embed_tokens")) == (0, 0)
    assert 0 < found.lm_head <= of(held, "lm_head") + slack
    assert needs(found, []) + found.angles == pytest.approx(size, abs=slack)
    assert stock_weights(part, found).table == 0


@pytest.mark.parametrize("form", FORMATS)
def test_embeddings_of_layers_are_apart(writer: Callable[..., Written], form: Format) -> None:
    written = writer("native", "gemma4_shared", form)
    part, held = written.part, entries(written.folder, written.part)
    size = (written.folder / part.weights).stat().st_size
    found, slack = weight_parts(part, {part.weights: FileEntry(size=size, sha256="")}), 4096 * len(held)
    assert found.layer_table == of(held, "embed_tokens_per_layer") == 160 * 6 * (64 if form == "fp32" else 16 + 4)
    assert found.angles == of(held, "rope_cos", "rope_sin", "rope_full") == (512 + 66) * 4 * (16 + 8)
    assert needs(found, []) + found.table + found.angles + found.layer_table == pytest.approx(size, abs=slack)


@pytest.mark.parametrize(
    "form, operators, weight",
    [
        ("int4", "native", 18 / 32),
        ("int4", "stock", 20 / 32),
        ("int8", "native", 34 / 32),
        ("int8", "stock", 36 / 32),
        ("fp32", "native", 4.0),
    ],
)
def test_bytes_of_weights_are_said_once(
    exported: Callable[..., Path], form: Format, operators: Operators, weight: float
) -> None:
    """Counted by hand: four heads of [128, 128]; levels, and a scale for each 32."""
    bundle = exported(form, operators)
    made = read_manifest(bundle)
    target, (group,) = made.target, made.target.heads
    assert (group.count, target.facts.hidden, target.facts.vocab, target.head_format) == (4, 128, 1024, None)
    heads = int(4 * 128 * 128 * weight)
    held = entries(bundle, target)
    assert of({name: size for name, size in held.items() if not name.endswith("bias")}, "medusa") == heads
    assert group_bytes(target, group, operators == "native") == heads
    assert weight_parts(target, made.files).heads == {"medusa": heads}
    assert weight_size(form, operators) == weight
    assert extra_bytes(load(bundle, threads=1, check=False), "medusa") == heads


def test_only_the_methods_that_need_them_read_heads_and_the_draft(manifest: Manifest) -> None:
    found = {method: memory_of(manifest, RunOptions(method)) for method in ("ar", "medusa", "self-spec", "speculative")}
    heads = found["medusa"].part("weights").file - found["ar"].part("weights").file
    assert heads == sum(weight_parts(manifest.target, manifest.files).heads.values()) > 0
    assert found["self-spec"].part("draft weights") == MemoryPart("draft weights")
    assert found["speculative"].part("draft weights").file > 0


def test_rows_that_a_text_looks_up() -> None:
    row, vocab = 512, 100_000
    found = [looked_up(row * vocab, row, tokens) for tokens in (0, 1, 100, 10_000, 10**9)]
    assert found[0] == 0
    assert found[1] == pytest.approx(256 << 10, rel=0.01)
    assert all(less < more for less, more in pairwise(found))
    assert found[-1] == pytest.approx(row * vocab, rel=0.01)


# -- keys and values, scratch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [100, 512, 1000])
@pytest.mark.parametrize("operators", OPERATORS)
def test_kv_is_what_a_slot_allocates(exported: Callable[..., Path], operators: Operators, context: int) -> None:
    bundle = Bundle.open(exported())
    part = bundle.manifest.target
    graph = "native" if operators == "native" else part.main
    slot = open_slot(Model(bundle.path, part, graph, 1), context=context, reserve=context)
    predicted = kv_bytes(part, RunOptions(operators=operators, context=context), operators == "native")[0]
    beyond = part.extra_rows + 128
    assert predicted <= slot.kv_bytes <= predicted * (context + beyond) / context


def test_kv_by_attention(manifest: Manifest) -> None:
    target, tokens = manifest.target, 1024
    sizes = []
    for name, kv in ATTENTION.items():
        found, _ = kv_bytes(target, RunOptions(context=tokens, attention=name), native=True)
        assert found == kv.nbytes(target.facts, tokens)
        sizes.append(found)
    assert sizes[0] == tokens * target.facts.kv_bytes_per_token == 2 * sizes[1]


def test_scratch_by_formula(manifest: Manifest) -> None:
    """64 rows at 1024 tokens: two pieces of attention."""
    part = manifest.target.model_copy(update={"format": "fp32"})
    facts = part.facts
    attended = facts.heads * facts.head_dim
    floats = 2 * (facts.hidden + attended) + facts.intermediate
    query = facts.heads * (48 + 5 * facts.head_dim)
    partial = facts.heads * 2 * (facts.head_dim + 16) * 4
    assert native_scratch(part, RunOptions(context=1024), 64) == 64 * (4 * floats + query + partial)


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize("method", ["ar", "ngram", "speculative", "medusa"])
def test_more_never_takes_less(manifest: Manifest, operators: Operators, method: str) -> None:
    use = RunOptions(method, operators, context=64, batch=1, gamma=1, chunk=16, greedy=False)
    grid: dict[str, tuple[int, ...]] = {"context": (64, 100, 512, 1000), "batch": (1, 2, 8), "gamma": (1, 4, 16)}
    for name, values in (grid | {"chunk": (16, 64, 128)}).items():
        uses = [replace(use, **{name: value}) for value in values]  # type: ignore[arg-type]
        found = [memory_of(manifest, one) for one in uses]
        assert all(less.peak <= more.peak and less.after <= more.after for less, more in pairwise(found)), name
        if name != "gamma" or method != "ar":
            assert found[0].after < found[-1].after, name
    most = manifest.target.facts.context  # beyond which no context goes
    kv = [memory_of(manifest, replace(use, context=context)).part("kv").private for context in (most, 2 * most)]
    assert kv[0] == kv[1]


def test_sums_and_keys(manifest: Manifest) -> None:
    memory = memory_of(manifest, RunOptions("speculative"))
    assert memory.after == memory.private + memory.file == sum(p.private + p.file for p in memory.parts)
    assert memory.peak >= memory.after > memory.loaded > 0
    assert list(memory.as_dict()) == ["peak", "after", "private", "file", "loaded", "opened", "parts"]
    assert list(memory.as_dict()["parts"][0]) == ["name", "private", "file", "loading", "note"]
    names = [part.name for part in memory.parts]
    model = ["weights", "tables", "session", "kv", "scratch", "logits"]
    draft = [f"draft {name}" for name in model]
    assert names == ["process", "libraries", "runtime", "tokenizer", *model, *draft, "text", "margin"]
    json.dumps(memory.as_dict())
    assert Memory((MemoryPart("a", 3, 4),), loaded=5, opened=9).peak == 9  # the worst moment of loading


def test_packing_needs_memory_beside_the_file(manifest: Manifest) -> None:
    native, stock = (memory_of(manifest, RunOptions(operators=operators)) for operators in ("native", "stock"))
    assert native.part("weights").private == 0
    assert stock.part("weights").private > native.part("weights").file
    assert stock.part("weights").loading > 0


def test_manifests_that_say_little(manifest: Manifest) -> None:
    """A plan, an export by optimum, a device: nothing may fail."""
    bare = manifest.model_copy(update={"files": {}})
    plain = {"plain": manifest.target.graphs["plain"]}
    target = manifest.target.model_copy(update={"origin": "optimum", "layout": "stock", "graphs": plain})
    optimum = manifest.model_copy(update={"target": target})
    draft, heads = RunOptions("speculative", "stock"), RunOptions("medusa", device="webgpu")
    for odd in (bare, optimum):
        for use in (RunOptions(), draft, heads, RunOptions("unknown")):
            assert memory_of(odd, use).peak > PROCESS.all


# -- the process -------------------------------------------------------------------------------------------------------


def test_a_measured_process_is_used(manifest: Manifest) -> None:
    usual, larger = memory_of(manifest, RunOptions()), memory_of(manifest, RunOptions(), PROCESS.all + 50 * MIB)
    assert 50 * MIB <= larger.peak - usual.peak < 51 * MIB
    for size in (PROCESS.all, 1001):
        process = memory_of(manifest, RunOptions(), size).part("process")
        assert process.all == size
        assert process.private == size * PROCESS.private // PROCESS.all


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_this_machines_process() -> None:
    private, file = resident_now()
    assert min(private, file) > MIB
    assert 20 * MIB < process_bytes() < 200 * MIB


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resident_now(tmp_path / "none") == (0, 0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    assert process_bytes() == PROCESS.all


def test_tokenizers(manifest: Manifest) -> None:
    found = []
    for size in (0, 7 * MIB):
        files = manifest.files | {"tokenizer.json": FileEntry(size=size, sha256="")}
        found.append(memory_of(manifest.model_copy(update={"files": files}), RunOptions()).part("tokenizer"))
    assert (found[0].private, found[0].loading) == (0, 0)
    assert 50 * MIB < found[1].private < 70 * MIB
    assert 0 < found[1].loading < found[1].private


# -- predicted against measured ----------------------------------------------------------------------------------------

RUN = """
import sys
import numpy as np
from edgespec.engine.loading import load
from edgespec.runtimes.process import peak_bytes

folder, method, context = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = load(folder, threads=2, context=context, operators="native")
vocab = engine.bundle.manifest.target.facts.vocab
chance = 1 / (np.arange(vocab) + 2.7) ** 1.15
text = np.random.default_rng(0).choice(vocab, context - 24, p=chance / chance.sum()).tolist()
stream = engine.stream(text, method=method, max_new_tokens=24, ignore_eos=True, adaptive=False, gamma=4)
for chunk in stream:
    pass
assert len(stream.result.tokens) == 24
print(peak_bytes())
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random model of 110 million parameters as an int4 bundle.

    Its embedding is tied: how much of one that is only looked up is resident depends on how the file was written.
    """
    folder = tmp_path_factory.mktemp("large")
    config = LARGE | {"max_position_embeddings": 4096, "tie_word_embeddings": True, "num_hidden_layers": 14}
    assert write_large(folder / "model", config) > 100_000_000
    hf.write_tokenizer(folder / "model", config)
    options = ExportOptions(str(folder / "model"), folder / "bundle", [], "int4", quantizer="rtn", threads=2)
    export_model(options, golden=False)
    return options.output


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("method", "context"), [("ar", 256), ("ngram", 2048)])
def test_predicted_is_what_a_process_takes(large: Path, method: str, context: int) -> None:
    command = [sys.executable, "-c", RUN, str(large), method, str(context)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr
    measured = int(ran.stdout)
    predicted = memory_of(read_manifest(large), RunOptions(method, context=context, gamma=4), process_bytes()).peak
    assert 0.98 * measured <= predicted <= 1.05 * measured, f"{predicted / MIB:.1f} MiB, measured {measured / MIB:.1f}"
