"""LoRA adapters loaded with a bundle: each request names its own, and no text depends on the other requests."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgespec.decoding.target import Pass
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import BudgetError, BundleError, EdgespecError, InvalidRequest, SessionError, UnsupportedModel
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import resolve
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.lora import adapter_bytes
from edgespec.runtimes.files.manifest import Operators, read_manifest
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.slots.adapters import AS_STORED
from edgespec.runtimes.slots.native_batch import NativeBatch
from tests.conftest import PROMPTS, TARGET
from tests.engine.conftest import keep_prompts
from tests.support import hf
from tests.support.checkpoints import write_adapter

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
pytestmark = pytest.mark.usefixtures("native")
Get = Callable[..., Engine]


def of_target(folder: Path, scale: float = 1.0, **how: Any) -> Path:
    """Write an adapter of the embedded model."""
    config = json.loads((resolve(TARGET) / "config.json").read_text("utf-8"))
    write_adapter(folder, config, EVERY, **how)
    file = folder / "adapter_model.safetensors"
    tensors = {
        name: value * np.float32(scale) if "lora_B" in name else value for name, value in load_file(file).items()
    }
    save_file(tensors, file)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the embedded model, of different ranks and matrices."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": of_target(folder / "a", 0.5, rank=4),
        "b": of_target(folder / "b", 1.5, rank=19, use_rslora=True),
    }


@pytest.fixture(scope="module")
def adapted(bundles: Callable[..., Path], adapters: dict[str, Path]) -> Get:
    """Form -> an engine over the embedded model with both adapters."""
    made: dict[str, Engine] = {}

    def get(form: str = "int8") -> Engine:
        if form not in made:
            made[form] = load(bundles("native", form), threads=2, adapters=adapters)
        return made[form]

    return get


# -- the numbers -------------------------------------------------------------------------------------------------------


NAMES = (
    "llama_tied_gqa",
    "qwen2_tied_gqa7",
    "qwen3_window_linear",
    "gemma2_caps",
    "gemma3_new",
    "olmo2_mha",
    "phi3_long",
)
"""Models with heads of one size and of several, norms before and after, biases, and matrices in each kind of step."""


def merged_and_adapted(folder: Path, name: str, modules: tuple[str, ...] = EVERY) -> dict[str, np.ndarray]:
    """Logits of a model in float32: without an adapter, with one added to rows, and with the same one merged."""
    base, adapter = hf.write_checkpoint(folder / "base-model", hf.CONFIGS[name], 3), folder / "lora"
    write_adapter(adapter, hf.CONFIGS[name], modules)
    found, tokens = {}, np.arange(5, 45)
    for kind, merged in (("base", None), ("merged", str(adapter))):
        options = ExportOptions(str(base), folder / kind, [], "fp32", adapter=merged, threads=1, operators="native")
        export_model(options, golden=False)
    with load(folder / "merged", threads=1) as engine:
        found["merged"] = engine.new_session().target.forward(tokens).logits.copy()
    with load(folder / "base", threads=1, adapters={"x": adapter}) as engine:
        slot = engine.new_session().target
        found["base"] = slot.forward(tokens).logits.copy()
        slot.use_adapter(1)
        found["adapted"] = slot.forward(tokens).logits.copy()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_added_rows_give_the_logits_of_the_merged_model(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, one in hf.CONFIGS.items() if one["model_type"] in AS_STORED])
def test_added_rows_of_every_model_give_the_logits_of_the_merged_one(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, name)


def test_models_with_reordered_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="adapters of glm4 models cannot be added"):
        merged_and_adapted(tmp_path, "glm4_half")


def _compare(folder: Path, name: str) -> None:
    found = merged_and_adapted(folder, name)
    most = np.abs(found["merged"]).max()
    assert np.abs(found["merged"] - found["base"]).max() > 0.01 * most
    np.testing.assert_allclose(found["adapted"], found["merged"], rtol=0, atol=1e-4 * most)


@pytest.mark.parametrize("form", ["int4", "int8", "fp32"])
def test_rows_have_the_same_bits_in_every_pass(tmp_path: Path, adapters: dict[str, Path], form: Format) -> None:
    options = ExportOptions(TARGET, tmp_path / "bundle", [], form, threads=1, operators="native")
    export_model(options, golden=False)
    with load(tmp_path / "bundle", threads=2, adapters=adapters) as engine:
        tokens = np.random.default_rng(1).integers(0, 200, 37)
        texts = []
        for adapter in (0, 1, 2):
            slot = engine.new_session().target
            slot.use_adapter(adapter)
            alone = []
            for token in tokens:
                alone.append(slot.forward(np.array([token])).logits[0].copy())
                slot.keep([0])
            slot.follow([])
            np.testing.assert_array_equal(slot.forward(tokens).logits, np.array(alone))
            texts.append(alone)
        assert not np.array_equal(texts[0], texts[1])
        assert not np.array_equal(texts[1], texts[2])
        batch = NativeBatch(engine.model, 3)
        try:
            for number, slot in enumerate(batch.slots):
                slot.use_adapter(number)
            sizes = (37, 5, 20)
            outputs = batch.run([(slot, Pass(tokens[:size])) for slot, size in zip(batch.slots, sizes, strict=True)])
            for output, text, size in zip(outputs, texts, sizes, strict=True):
                np.testing.assert_array_equal(output.logits, np.array(text[:size]))
        finally:
            batch.close()


PRINT_BITS = """
import hashlib, sys
from pathlib import Path
import numpy as np
from edgespec.engine.loading import load
with load(Path(sys.argv[1]) / "bundle", threads=1, adapters={"x": Path(sys.argv[1]) / "lora"}) as engine:
    slot = engine.new_session().target
    slot.use_adapter(1)
    print(hashlib.sha256(slot.forward(np.arange(5, 45)).logits.tobytes()).hexdigest())
"""


def test_every_instruction_set_gives_the_same_bits(tmp_path: Path) -> None:
    base = hf.write_checkpoint(tmp_path / "model", hf.CONFIGS["llama_tied_gqa"], 3)
    write_adapter(tmp_path / "lora", hf.CONFIGS["llama_tied_gqa"], EVERY, rank=5)
    export_model(ExportOptions(str(base), tmp_path / "bundle", [], "int8", threads=1, operators="native"), golden=False)
    command = [sys.executable, "-c", PRINT_BITS, str(tmp_path)]
    found = {
        subprocess.run(
            command, env={**os.environ, "EDGESPEC_ISA": isa}, check=True, capture_output=True, text=True, timeout=120
        ).stdout
        for isa in ("scalar", "avx2" if platform.machine() in ("x86_64", "AMD64") else "neon", "")
    }
    assert len(found) == 1


def test_an_adapter_of_zeros_changes_no_bit(tmp_path: Path, bundles: Callable[..., Path]) -> None:
    folder = of_target(tmp_path / "zero", 0.0)
    with load(bundles("native", "int4"), threads=1, adapters={"zero": folder}) as engine:
        base = engine.generate(PROMPTS[0], max_new_tokens=24, logprobs=True, ignore_eos=True)
        same = engine.generate(PROMPTS[0], max_new_tokens=24, logprobs=True, ignore_eos=True, adapter="zero")
        assert (base.tokens, base.logprobs) == (same.tokens, same.logprobs)


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "ngram", "speculative", "self-spec", "swift", "medusa"])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_texts_are_those_of_plain_decoding_alone(adapted: Get, method: str, form: str) -> None:
    engine = adapted(form)
    how: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "adaptive": False}
    names = [None, "a", "b", "a", None, "b"]
    plain = [
        engine.generate(prompt, method="ar", adapter=name, **how).tokens
        for prompt, name in zip(PROMPTS[:6], names, strict=True)
    ]
    together = engine.generate_batch(list(PROMPTS[:6]), method=method, adapters=names, batch=4, **how)
    assert [result.tokens for result in together] == plain
    alone = [
        engine.generate(prompt, method=method, adapter=name, **how)
        for prompt, name in zip(PROMPTS[:6], names, strict=True)
    ]
    assert [result.tokens for result in alone] == plain
    assert all(result.exact and result.lossless for result in alone)


def test_the_adapter_decides_the_text(adapted: Get) -> None:
    engine = adapted()
    texts = {engine.generate(PROMPTS[0], adapter=name, max_new_tokens=32).text for name in (None, "a", "b")}
    assert len(texts) == 3
    with pytest.raises(InvalidRequest, match="unknown adapter 'c'"):
        engine.generate(PROMPTS[0], adapter="c")
    with pytest.raises(InvalidRequest, match="1 adapters for 2 prompts"):
        engine.generate_batch(list(PROMPTS[:2]), adapters=["a"])


def test_beams_are_searched_with_an_adapter(adapted: Get) -> None:
    engine = adapted()
    one, other = (engine.generate(PROMPTS[0], adapter=name, beams=2, max_new_tokens=12) for name in ("a", "b"))
    assert one.tokens != other.tokens
    greedy = engine.generate(PROMPTS[0], adapter="a", beams=2, max_new_tokens=12)
    assert greedy.tokens == one.tokens


def test_nothing_of_another_adapter_is_reused(
    adapted: Get, bundles: Callable[..., Path], adapters: dict[str, Path]
) -> None:
    prompt = PROMPTS[0] * 6
    fresh = {}
    for name in (None, "a"):
        with load(bundles("native", "int8"), threads=2, adapters=adapters) as engine:
            fresh[name] = engine.generate(prompt, adapter=name, max_new_tokens=16).tokens
    engine = adapted()
    for name in (None, "a", None, "a", "a"):
        result = engine.generate(prompt, adapter=name, max_new_tokens=16)
        assert result.tokens == fresh[name]
    again = engine.generate(prompt, adapter="a", max_new_tokens=16)
    assert again.stats.reused_tokens > 0  # its own is


def test_prompts_on_the_disk_are_kept_by_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundles: Callable[..., Path], adapters: dict[str, Path]
) -> None:
    keep_prompts(tmp_path, monkeypatch)
    prompt = "Now is the winter of our discontent " * 40

    def ask(name: str | None, folders: dict[str, Path]) -> tuple[list[int], int]:
        with load(bundles("native", "int8"), threads=2, adapters=folders) as engine:
            result = engine.generate(prompt, adapter=name, max_new_tokens=8)
            return result.tokens, result.stats.reused_tokens

    first, reused = ask("a", adapters)
    assert not reused
    assert ask(None, adapters)[1] == 0  # not what was read with an adapter
    assert ask("b", adapters)[1] == 0
    tokens, reused = ask("other", {"z": adapters["b"], "other": adapters["a"]})  # by what it computes, not by its name
    assert (tokens, reused > 0) == (first, True)


def test_a_saved_session_belongs_to_its_adapter(
    tmp_path: Path, adapted: Get, bundles: Callable[..., Path], adapters: dict[str, Path]
) -> None:
    engine, file = adapted(), tmp_path / "talk.session"
    result = engine.generate(PROMPTS[0], adapter="a", max_new_tokens=12)
    tokens = [*engine.encode(PROMPTS[0]), *result.tokens]
    engine.save_session(file, tokens, adapter="a")
    expected = engine.generate(tokens, adapter="a", max_new_tokens=12)
    with load(bundles("native", "int8"), threads=2, adapters={"x": adapters["a"]}) as other:
        other.restore_session(file)
        assert other.generate(tokens, max_new_tokens=1).stats.reused_tokens == 0
        continued = other.generate(tokens, adapter="x", max_new_tokens=12)
        assert continued.tokens == expected.tokens
        assert continued.stats.reused_tokens > 0
    with (
        load(bundles("native", "int8"), threads=2) as other,
        pytest.raises(SessionError, match="an adapter that is not loaded"),
    ):
        other.restore_session(file)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_counts_adapters(bundles: Callable[..., Path], adapters: dict[str, Path]) -> None:
    manifest = read_manifest(bundles("native", "int8"))
    run = LoadOptions(adapters=adapters).resolve(manifest)
    size = sum(map(adapter_bytes, adapters.values()))
    assert memory_of(manifest, run).part("adapters").all == size
    least = memory_of(manifest, LoadOptions().resolve(manifest)).peak
    assert memory_of(manifest, run).peak >= least + size
    with load(bundles("native", "int8"), adapters=adapters) as engine:
        store = engine.model.adapters
        assert store is not None
        assert size <= store.nbytes <= 1.1 * size  # tiles are padded to cache lines
    with pytest.raises(BudgetError):
        load(bundles("native", "int8"), context=64, budget=least + size // 2 - (8 << 20), adapters=adapters)


# -- what is refused ---------------------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return edit


def configured(**changes: Any) -> Callable[[Path], None]:
    def configure(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")

    return configure


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
OUT = FIRST.replace("lora_A", "lora_B")


EMBEDDED = "base_model.model.model.embed_tokens.lora_embedding_A"


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """Add the first pair once more under another name."""
    return edited(lambda tensors: tensors.update({name.replace(old, new): tensors[name] for name in (FIRST, OUT)}))


def _pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (_pickle, "weights only as pickle"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    "no description": (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no folder": (shutil.rmtree, "no such folder"),
    "cut off": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(
            (folder / "adapter_model.safetensors").read_bytes()[:-100]
        ),
        "not a readable safetensors file",
    ),
    "no B": (edited(lambda tensors: tensors.pop(OUT)), "needs two matrices, lora_A and lora_B"),
    "not a number": (edited(lambda tensors: tensors[FIRST].__setitem__((0, 0), math.nan)), "not finite"),
    "infinite": (edited(lambda tensors: tensors[OUT].__setitem__((0, 0), math.inf)), "not finite"),
    "of a wider model": (
        edited(lambda tensors: tensors.__setitem__(FIRST, np.zeros((4, 4096), np.float32))),
        "model.layers.0.self_attn.q_proj.weight: an adapter for",
    ),
    "of more heads": (
        edited(lambda tensors: tensors.__setitem__(OUT, np.zeros((4096, 4), np.float32))),
        "model.layers.0.self_attn.q_proj.weight: an adapter for",
    ),
    "of other rank": (edited(lambda tensors: tensors.__setitem__(OUT, tensors[OUT][:, :2].copy())), "says rank 4"),
    "three dimensions": (
        edited(lambda tensors: tensors.__setitem__(FIRST, tensors[FIRST][None].copy())),
        "needs two matrices",
    ),
    "of a deeper model": (renamed("layers.0", "layers.99"), "layers.99.self_attn.q_proj.weight: this model has no"),
    "of the LM head": (renamed("model.layers.0.self_attn.q_proj", "lm_head"), "lm_head.weight: this model has no"),
    "of embeddings": (
        edited(lambda tensors: tensors.__setitem__(EMBEDDED, np.zeros((4, 8), np.float32))),
        "LoRA on embeddings",
    ),
    "whole matrices": (
        edited(lambda tensors: tensors.__setitem__("base_model.model.lm_head.weight", np.zeros((4, 8), np.float32))),
        "a tensor that is no lora_A or lora_B",
    ),
    "integers": (
        edited(lambda tensors: tensors.__setitem__(FIRST, tensors[FIRST].astype(np.int8))),
        "stored as I8; expected float32",
    ),
    "DoRA": (configured(use_dora=True), "use_dora = True is not supported"),
    "prefix tuning": (configured(peft_type="PREFIX_TUNING"), "type PREFIX_TUNING is not supported"),
    "biases": (configured(bias="all"), "bias = 'all' is not supported"),
    "alpha of text": (configured(lora_alpha="eight"), "expected a positive number lora_alpha"),
    "alpha without end": (configured(lora_alpha=math.inf), "expected a positive number lora_alpha"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_are_refused(tmp_path: Path, bundles: Callable[..., Path], case: str) -> None:
    spoil, words = HOSTILE[case]
    folder = of_target(tmp_path / "lora")
    spoil(folder)
    with pytest.raises((BundleError, UnsupportedModel), match=words):
        load(bundles("native", "int8"), threads=1, adapters={"x": folder})


@pytest.mark.parametrize("given", [["a"], {"": "folder"}, {"a:b": "folder"}, {"a": 3}, "a"])
def test_what_names_no_adapters_is_refused(bundles: Callable[..., Path], given: Any) -> None:
    with pytest.raises(InvalidRequest, match="adapter"):
        load(bundles("native", "int8"), adapters=given)


def test_stock_operators_refuse_adapters(bundles: Callable[..., Path], adapters: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="adapters are added row by row on native operators"):
        load(bundles("stock", "int4"), operators="stock", adapters=adapters)


def test_a_model_without_adapters_knows_none(engines: Callable[..., Engine]) -> None:
    operators: tuple[Operators, ...] = ("native", "stock")
    for kind in operators:
        with pytest.raises(EdgespecError, match="loaded without adapters"):
            engines(kind, "int4").generate(PROMPTS[0], adapter="a")
