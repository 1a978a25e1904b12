"""Every benchmark runs on the embedded model and prints what its description says; no test asserts a time."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import drafter_cost
from benchmarks.rivals.files import tensors, write_checkpoint
from benchmarks.rows import comb
from benchmarks.shapes import TRANSLATORS, write_shape
from edgespec.decoding.verify import RowSampler
from edgespec.engine.sessions import Session
from edgespec.export.bundle.model_part import open_described
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.source.source import resolve
from tests.conftest import TARGET
from tests.support import hf
from tests.support.wide import wide_config

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {"__init__", "common", "memory_cell", "shapes", "device", "kotlin", "plain", "k_quants", "drawing",
             "real", "transcripts"}  # fmt: skip
"""No benchmarks; in test_kernels.py; of a JVM, of onnxruntime-genai, of ggml, of matplotlib; of published models."""
Run = Callable[..., Any]


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """(benchmark, arguments) -> what it prints; ``changes`` are constants of the benchmark that make it short."""

    def run(name: str, *arguments: object, **changes: Any) -> str:
        module = importlib.import_module(f"benchmarks.{name}")
        for constant, value in changes.items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        # some replace these for the rest of their process
        monkeypatch.setattr(RowSampler, "choose", RowSampler.choose)
        monkeypatch.setattr(Session, "_bare", Session._bare)
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def figures(text: Callable[..., str]) -> Run:
    """Give the one JSON object that a benchmark prints."""
    return lambda *arguments, **changes: json.loads(text(*arguments, **changes))


@pytest.fixture
def small(bundles: Callable[..., Path]) -> Path:
    """Make a bundle with every method."""
    return bundles("stock")


@pytest.fixture
def native_bundle(native: None, bundles: Callable[..., Path]) -> Path:
    """Give the same for native operators."""
    return bundles("native")


@pytest.fixture
def pair(native: None, tmp_path: Path) -> Path:
    """Make a small encoder-decoder with a draft, of random weights."""
    write_shape(SMALL_T5, tmp_path / "pair", "int8", 128, SMALL_T5)
    return tmp_path / "pair"


@pytest.fixture
def int8_bundle(native: None, bundles: Callable[..., Path]) -> Path:
    """Give the same in int8."""
    return bundles("native", "int8")


def test_every_benchmark_is_here() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - ELSEWHERE
    here = Path(__file__).read_text("utf-8")
    assert [name for name in sorted(names) if f'"{name}"' not in here] == []


def numbers(value: Any) -> Iterator[float]:
    """Give every number inside."""
    if isinstance(value, (int, float)):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers(item)


ONE = ("--threads", 1)
SMALL_T5 = {**TRANSLATORS["t5-small"], "d_model": 64, "num_heads": 1, "num_layers": 1, "d_ff": 64}
TINY = {"SHAPES": {"tiny": [(64, 64), (128, 64)]}, "TOTAL": 1 << 16, "ROWS": (1, 2)}
SLOW = partial(pytest.param, marks=pytest.mark.nightly)  # other processes, or seconds
AGAIN = f"again={sys.executable} -m benchmarks.rivals.worker edgespec {{small}} {{{{threads}}}} {{{{context}}}}"


@pytest.mark.parametrize(
    "name, bundle, arguments, changes, keys",
    [
        ("attention", "native", ("--depths", 64, "--formats", "f16", "--pairs", 2, "--shape", "llama-3.2-1b"),
         {"CACHE_BYTES": 1 << 18}, "depths 64 speed_over_onnxruntime f16"),
        ("checking", "small", ("--operators", "stock", "--pairs", 2, *ONE), {}, "over_without remembered"),
        ("linear", "native", ("--shapes", "tiny", "--kind", "q4", "--pairs", 5, *ONE), TINY, "shapes tiny v 2"),
        ("roof", "native", ("--threads", 1), {"ISAS": ("scalar",)}, "isas scalar 1"),
        ("overhead", "small", ("--steps", 6, "--repeats", 2), {}, "added_us"),
        ("first_token", "native_bundle", ("--prompt", 800, "--most", 2, *ONE), {"PAUSE": 0.0, "ALONE": 2},
         "beside_ms p95"),
        SLOW("first_token", "native_bundle", ("--prompt", 800, "--most", 2, "--serve", *ONE),
             {"PAUSE": 0.0, "ALONE": 2}, "alone_ms p95"),
        SLOW("c_interface", "native_bundle", ("--rows", "1,2", "--turns", 2), {}, "passes_ms"),
        ("planes", "int8_bundle", ("--new", 12, "--repeats", 1, *ONE), {}, "runs own speedup ratio"),
        ("planes", "int8_bundle", ("--new", 12, "--repeats", 1, "--agreement", ".5,.9", *ONE), {},
         "runs .9 speedup ratio"),
        ("told_drafts", "pair", ("--new", 12, "--repeats", 1, "--source", 8, "--agreement", ".9", *ONE), {},
         "int8 runs .9 speedup ratio"),
        ("translating", "native", ("small", "--sources", 8, "--new", 4, "--pairs", 1, *ONE),
         {"TRANSLATORS": {"small": SMALL_T5}}, "sources 8 milliseconds"),
        SLOW("prompt_cache", "native_bundle", ("--worth", 0, "--tokens", 600, "--runs", 1, "--attention", "f16", *ONE),
             {}, "cells"),
        SLOW("rivals.__main__", "small", ("--depths", "8", "--rows", "1,2", "--pairs", 2, "--context", 64, *ONE,
             "--rival", AGAIN, "--prefill"), {"PROMPT": 16}, "passes prefill_16 over_edgespec again ratio"),
    ],
)  # fmt: skip
def test_it_runs(request: pytest.FixtureRequest, figures: Run, name: str, bundle: str, arguments: tuple[Any, ...],
                 changes: dict[str, Any], keys: str) -> None:  # fmt: skip
    """What it prints has a figure of this name, and no number that is none."""
    made = request.getfixturevalue(bundle)
    given = [str(one).format(small=made) if one is AGAIN else one for one in arguments]
    found = printed = figures(name, *([] if made is None else [made]), *given, **changes)
    for key in keys.split():
        found = found[key.replace("_", " ") if key.startswith("prefill_") else key]
    assert found or found == 0  # a ratio, on a busy machine
    assert all(map(math.isfinite, numbers(printed)))


@pytest.mark.nightly  # it imports torch
def test_acceptance(figures: Run) -> None:
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'edgespec[train]'")
    heads, draft = "builtin:shakespeare-medusa", "builtin:shakespeare-draft"
    short = ("--texts", 2, "--new-tokens", 12)
    found = figures("acceptance", "--model", TARGET, "--heads", heads, "--draft", draft, *short)["found"]
    for kind in ("sampled", "greedy"):
        assert found[draft][kind]["overlap"] > 0.2
        assert found[heads][kind]["top1"]


def test_wide_heads(figures: Run, tmp_path: Path) -> None:
    source = hf.write_checkpoint(tmp_path / "source", wide_config(256, positions=128), seed=1)
    Exporter(ExportOptions(str(source), tmp_path / "out", ["ngram"], "int4", operators="stock")).run()
    found = figures("wide_heads", tmp_path / "out", "--pairs", 3, "--rows", "1,4", "--depths", "0,64,4096", *ONE)
    assert found["head_dim"] == 256
    assert set(found["depths"]) == {"0", "64"}  # those that the context has


@pytest.mark.usefixtures("native")
def test_attention_quality(text: Callable[..., str]) -> None:
    short: dict[str, Any] = {"VALUES": ("f16",), "BUDGET": 256, "LEARNT": ("nomad1",)}
    found = json.loads(text("attention_quality", "--tokens", 64, *ONE, KEYS=("f16", "int8"), **short))
    assert {row["keys"] for row in found["formats"]} == {"f16", "int8"}
    exact = found["formats"][0]
    assert (exact["perplexity_change"], exact["agreement"], exact["positions"]) == (0, 1, found["scored"])
    table = text("attention_quality", "--tokens", 64, *ONE, "--markdown", KEYS=("f16",), **short).splitlines()
    assert table[2].startswith("| f16 | +0.00% 1.000 |")


def test_control(figures: Run, small: Path, shared: Path) -> None:
    short = ("--tokens", 12, "--repeats", 1, "--methods", "self-spec", "--lengths", "1,2", *ONE)
    found = figures("control", small, "--data", shared / "data", *short, TAIL=4)
    assert set(found["over_plain"]["auto"]) == {"chat", "code", "summary", "free", "all"}
    assert found["over_fixed"]["self-spec"]["ratio"] > 0
    assert len(found["tail"]["each"]) == 4


def test_auto(figures: Run, small: Path) -> None:
    found = figures("auto", small, "--requests", 2, "--tokens", 12, "--prompt", 8)
    for part in ("first", "later"):
        assert (found[part]["tokens"], found[part]["accepted"]) == (24, 0)  # by construction


def test_batch(figures: Run, native_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("My lord,\nSpeak,\n")
    short = ("--batch", 2, "--method", "ngram", "--new", 8, "--repeats", 1, *ONE, "--fixed", 2)
    runs = figures("batch", native_bundle, *short, "--prompts", tmp_path / "prompts.txt")["runs"]
    assert len(runs) == 6
    assert all(run["same_texts"] for run in runs.values())


@pytest.mark.usefixtures("native")
def test_drafter_cost(figures: Run) -> None:
    tiny = {"tiny": (64, 4, 4, 2, 16, 96, 128)}
    changes: dict[str, Any] = {"SHAPES": tiny, "DEPTH": 8, "BLOCKS": (4,), "MEGABYTES": 8}
    found = figures("drafter_cost", "--model", "tiny", "--heads", 96, "--pairs", 2, *ONE, **changes)
    size = {name: found["passes"][name]["bytes_over_a_steps"] for name in found["passes"]}
    step, first = size["eagle, head of 96: a step"], size["eagle, head of 96: 3 entries and a guess"]
    assert 0 < step < first < size["target, 5 rows"] == 1  # a step does not fuse
    assert size["dflash, head of 96: 3 entries"] > 0


@pytest.mark.usefixtures("native")
def test_which_drafter(figures: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(drafter_cost.SHAPES, "tiny", (64, 4, 4, 2, 16, 96, 256))
    monkeypatch.setattr(drafter_cost, "MEGABYTES", 8)
    found = figures("which_drafter", "--model", "tiny", "--pairs", 1, *ONE, HEAD=96, RANK=16)
    assert {"eagle", "dflash", "dspark", "mtp"} <= {name.split()[0].strip(",") for name in found["speed"]}


@pytest.mark.nightly  # it trains
@pytest.mark.usefixtures("native")
def test_trained(figures: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs edgespec[train]")
    monkeypatch.setattr("edgespec.export.measuring.drafters.LEAST", 0.0)
    short = ("--folder", tmp_path, "--train", "dspark:lk=2", "--prompts", 2, "--new", 8)
    small: dict[str, Any] = {"TEXTS": 8, "LENGTH": 24, "BATCH": 4}
    found = figures("trained", *short, **small)["found"]["dspark:lk"]
    assert min(found[f"gamma={most}:threshold=0"][kind][0] for most in (4, 7) for kind in ("greedy", "drawn")) >= 1
    passes = {"target 1": 10, "target 8": 17, "block entries": 1, "dspark block": 2, "dspark correct": 0.1}
    costs = {"passes": {name: {"ms": ms} for name, ms in passes.items()}}
    (tmp_path / "costs.json").write_text(json.dumps(costs), "utf-8")
    lengths = figures("trained", *short, "--costs", tmp_path / "costs.json", **small)["found"]["dspark:lk"]["costs"]
    rows = [lengths[name]["greedy"]["rows"] for name in ("always 1", "what its row is worth", "always 7")]
    assert 1 < rows[0] <= 2
    assert rows[0] < rows[1] < rows[2]


@pytest.mark.nightly  # it imports torch
@pytest.mark.usefixtures("native")
def test_towers(figures: Run) -> None:
    pytest.importorskip("torch", reason="needs edgespec[train]")
    towers = importlib.import_module("benchmarks.towers")
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    like = towers.SHAPES["LFM2-VL-450M"]
    model = like.model | {"vision_config": like.model["vision_config"] | size, "projector_hidden_size": 64}
    found = figures("towers", "small", SHAPES={"small": towers.Shape(model, like.pixels, (4, 4))})["towers"]["small"]
    assert min(found["int8_ms"], found["fp32_ms"], found["transformers_ms"]) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.nightly  # it imports torch
@pytest.mark.usefixtures("native")
def test_seeing(figures: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs edgespec[train]")
    seeing, name = importlib.import_module("benchmarks.seeing"), "LFM2-VL-450M"
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    like = seeing.TOWERS[name]
    model = like.model | {"vision_config": like.model["vision_config"] | size, "projector_hidden_size": 64}
    monkeypatch.setitem(seeing.TOWERS, name, replace(like, model=model))
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "block_ff_dim": 96}
    layers = {"num_hidden_layers": 2, "full_attn_idxs": [1], "vocab_size": 512}
    monkeypatch.setitem(seeing.TEXT, name, seeing.TEXT[name] | small | layers)
    seeing.write(name, tmp_path, None)
    found = figures("seeing", name, tmp_path, "--threads", 1, "--pairs", 1, "--new", 2)
    assert {"encode", "first", "text_step", "guessed", "peak_mb"} <= found["figures"]["edgespec"].keys()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.nightly  # it imports torch
def test_hearing(figures: Run) -> None:
    pytest.importorskip("torch", reason="needs edgespec[train]")
    found = figures("hearing", "micro", "--pairs", 1, "--threads", 1, WRITTEN=2, BEFORE=4)
    assert {f"edgespec {name}" for name in ("encoder", "fill", "rows 1", "text", "features")} <= found[
        "milliseconds"
    ].keys()
    assert "transformers / edgespec, encoder" in found["ratios"]


@pytest.mark.usefixtures("native")
def test_reader(text: Callable[..., str], tmp_path: Path) -> None:
    """Of a text that it has not seen, the embedded model reads nearly all, by every method the same."""
    pytest.importorskip("torch", reason="needs edgespec[train]")
    (tmp_path / "text").write_text("Behold, a sentence that nobody has trained on; it is 47 words short.\n\n" * 40)
    Exporter(ExportOptions("builtin:reader", tmp_path / "b", [], "int8", threads=1, quick=True)).run()
    found = text("reader", tmp_path / "b", "--text", tmp_path / "text", "--lines", 2, "--by-line", "--pages", 3)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()[2:]]
    assert [row[2] for row in rows] == ["ar", "ngram", "self-spec"]
    assert all(float(row[3]) < 0.1 and row[8] == "3/3" for row in rows)


@pytest.mark.nightly  # it imports torch
@pytest.mark.usefixtures("native")
def test_restoring(text: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs edgespec[train]")
    said = "\n\n".join(f"A LORD:\nMy lord, I have {word} ships.\nWhat say you?" for word in ("nine", "ten") * 20)
    (tmp_path / "text").write_text(said, "utf-8")
    Exporter(ExportOptions("builtin:restore", tmp_path / "b", [], "int8", threads=1, quick=True)).run()
    found = text("restoring", tmp_path / "b", "--text", tmp_path / "text", "--most", 3)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()[2:]]
    assert [row[1] for row in rows] == ["ar", "ngram", "self-spec"]
    assert all(row[6] == "3/3" and float(row[2].removesuffix(" %")) < 20 for row in rows)
    assert all(float(row[4]) > 1 for row in rows[1:])


@pytest.mark.nightly  # processes of its own
def test_memory(text: Callable[..., str], native_bundle: Path) -> None:
    short = (native_bundle, "--contexts", 128, "--methods", "ngram", *ONE)
    (cell,) = json.loads(text("memory", *short, "--json"))["cells"]
    assert (cell["method"], cell["context"], cell["operators"]) == ("ngram", 128, "native")
    assert all(figure["measured"] >= 0 for figure in cell["figures"].values())


def test_methods(figures: Run, small: Path) -> None:
    asked = ("--method", "ngram", "--gamma", 2, "--run", "speculative:gamma=2:branch=2")
    runs = figures("methods", small, *asked, "--new", 6, "--repeats", 1, *ONE)["runs"]
    assert set(runs) == {"int4 plain", "int4 ngram", "int4 ngram gamma 2", "int4 speculative:gamma=2:branch=2"}
    assert all(run["same_text"] == run["texts"] > 0 for run in runs.values())
    for wrong in ("nowhere:gamma=2", "ngram:gamma=two", "ngram:gamma=0", "ngram:breadth=2", "ngram:branch"):
        with pytest.raises(SystemExit, match=f"{wrong}: .+"):
            figures("methods", small, "--method", "ngram", "--run", wrong, "--new", 2, "--repeats", 1)


def test_long_texts(figures: Run, small: Path) -> None:
    found = figures("long_texts", small, "--tokens", 150, "--repeats", 2, VOCAB=1000, LENGTHS=(64, 128))
    assert [turn["reused"] for turn in found["turns"]] == [0, 0, 157, 157]


def test_plans(text: Callable[..., str], small: Path) -> None:
    changes: dict[str, Any] = {"CONTEXTS": (128,), "BUDGETS": 1, "LONG": 16, "SHORT": 4}
    short = (small, "--new", 4, "--repeats", 1, "--prompts", 1, "--seconds", 0.1, "--calibrate-on", "golden", "--json")
    found = json.loads(text("plans", *short, **changes))
    assert {row["prompts"] for row in found["rows"]} == {"own", "long", "repeated", "random"}
    assert all(0 <= row["regret"] < 1 for row in found["rows"])


def test_prediction(text: Callable[..., str], small: Path) -> None:
    short = (small, "--own-prompts", 1, "--new", 6, "--repeats", 1, "--method", "ngram", "--seconds", 0.1)
    found = json.loads(text("prediction", *short, "--json"))
    assert {row["method"] for row in found["rows"]} == {"ngram"}
    assert found["summary"]


def test_quality(text: Callable[..., str], tmp_path: Path, small: Path) -> None:
    held_out = tmp_path / "held.txt"
    held_out.write_text("MENENIUS:\nWhat work's, my countrymen, in hand? where go you\nWith bats and clubs?\n" * 8)
    short = ("--text", held_out, "--tokens", 64, "--length", 32, *ONE)
    changes: dict[str, Any] = {"VARIANTS": [("int8", "rtn", None)], "MIXED": (0.5,)}
    models = json.loads(text("quality", TARGET, small, *short, **changes))["models"]
    assert [row["label"] for row in models[TARGET]["rows"]] == ["fp32", "int8 rtn", "int4 mse, 1.33 times its bytes"]
    exact, rounded, mixed = models[TARGET]["rows"]
    assert (exact["perplexity_gap"], exact["top1_agreement"], exact["kl"]) == (0, 1, 0)
    assert 0 < rounded["kl"] < mixed["kl"] < 0.1
    assert "| int8 rtn |" in text("quality", TARGET, *short, "--markdown", **changes)
    variants = [("Q4_0", "q4_0", None, 0, False), ("gptq", "gptq", None, 0, True), ("half", "mse", None, 0.5, False)]
    changes = {"OWN_VARIANTS": variants, "TOKENS": 512, "HELD": 2}
    table = text("quality", TARGET, *short, "--markdown", "--seeds", "0,1", **changes).splitlines()[2:7]
    assert [line.split(" | ")[0] for line in table[2:]] == ["| Q4_0", "| gptq", "| half (1.33 times the bytes)"]
    assert all(line.count(" to ") == 2 for line in table[2:])


def test_replay(figures: Run, small: Path, tmp_path: Path) -> None:
    answer = "to be, or not to be: that is the question. " * 6
    (tmp_path / "asked").write_text(json.dumps({"question_id": 1, "turns": ["Who speaks?", "And then?"]}))
    said = {"question_id": 1, "choices": [{"turns": ["The prince.", answer]}]}
    (tmp_path / "said").write_text(json.dumps(said))
    files = ("--traces", tmp_path / "said", "--questions", tmp_path / "asked")
    short = ("--tokenizer", resolve(TARGET) / "tokenizer.json", "--new", 24, *ONE)
    found = figures("replay", small, *files, *short, "--operators", "stock")
    assert (found["answers"], found["baseline"]) == (1, "int4 plain")
    assert set(found["runs"]) == {"int4 plain", "int4 ngram", "int4 ngram --no-strict"}


def test_rows(figures: Run, small: Path) -> None:
    found = figures("rows", small, "--depths", "0,8", "--rows", "1,2,8", "--pairs", 2, *ONE, "--trees", READ=8)
    for depth in found["depths"].values():
        assert set(depth["ms"]) == {*depth["v"], "tree 8"} == {"1", "2", "8", "tree 8"}
    assert comb(9).tolist() == [-1, 0, 0, 1, 1, 3, 3, 5, 5]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_checkpoints_for_rivals_are_those_of_the_architecture(kind: str, tmp_path: Path) -> None:
    config = {
        "model_type": kind, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }  # fmt: skip
    write_checkpoint(config, tmp_path / "model")
    arch = open_described(tmp_path / "model", None)
    assert {name: tuple(shape) for name, shape in arch.tensors.items()} == {
        name: shape for name, _, shape in tensors(config)
    }


def test_structured(figures: Run, native_bundle: Path) -> None:
    found = figures("structured", native_bundle, "--schemas", 3, "--methods", "ngram", *ONE)
    assert set(found["methods"]) == {"ar", "ngram"}
    assert all((row["valid"], row["same_text"]) == (3, 3) for row in found["methods"].values())


@pytest.mark.nightly  # seconds of a server
def test_serving(figures: Run, native_bundle: Path) -> None:
    found = figures("serving", native_bundle, "--clients", 16, "--seconds", 1, "--parallel", 4, *ONE)
    assert (found["failed"], found["other_text"]) == (0, 0)
    assert found["whole_answers"] + found["left"] >= 16
