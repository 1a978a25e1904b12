"""Every benchmark runs on the embedded model and prints what its description says; no test asserts a time."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rivals.files import tensors, write_checkpoint
from benchmarks.rows import comb
from benchmarks.shapes import TRANSLATORS
from edgespec.decoding.verify import RowSampler
from edgespec.engine.sessions import Session
from edgespec.export.bundle.model_part import open_described
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.conftest import TARGET
from tests.engine.test_streaming import SHAPE, exported

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {"__init__", "common", "memory_cell", "shapes", "device", "kotlin", "plain", "k_quants", "four_bits",
             "real", "block_types", "transcripts", "adapters", "browser"}  # fmt: skip
"""No benchmarks; in test_kernels.py; of a JVM, of onnxruntime-genai, of ggml, of matplotlib; of published models;
in tests/judge; in tests/web."""
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
        monkeypatch.setattr(Session, "drafter", Session.drafter)
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
        ("linear", "native", ("--shapes", "tiny", "--kind", "q4", "--pairs", 5, *ONE), TINY, "shapes tiny v 2"),
        ("roof", "native", ("--threads", 1), {"ISAS": ("scalar",)}, "isas scalar 1"),
        ("overhead", "small", ("--steps", 6, "--repeats", 2), {}, "added_us"),
        ("first_token", "native_bundle", ("--prompt", 800, "--most", 2, *ONE), {"PAUSE": 0.0, "ALONE": 2},
         "beside_ms p95"),
        SLOW("first_token", "native_bundle", ("--prompt", 800, "--most", 2, "--serve", *ONE),
             {"PAUSE": 0.0, "ALONE": 2}, "alone_ms p95"),
        ("encoders", "native_bundle", ("--lengths", "8", "--texts", "2", "--pairs", 2, *ONE), {"PAUSE": 0.0},
         "figures"),
        ("c_overhead", "native_bundle", ("--tokens", 8, "--turns", 1), {}, "methods auto median_us"),
        SLOW("c_interface", "native_bundle", ("--rows", "1,2", "--turns", 2), {}, "passes_ms"),
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
    """Its output has a figure of this name, and no NaN."""
    made = request.getfixturevalue(bundle)
    given = [str(one).format(small=made) if one is AGAIN else one for one in arguments]
    found = printed = figures(name, *([] if made is None else [made]), *given, **changes)
    for key in keys.split():
        found = found[key.replace("_", " ") if key.startswith("prefill_") else key]
    assert found or found == 0  # a ratio, on a busy machine
    assert all(map(math.isfinite, numbers(printed)))


@pytest.mark.nightly  # it imports torch
@pytest.mark.usefixtures("native")
def test_foreign(figures: Run, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs edgespec[transformers]")
    short = ("--layers", 1, "--hidden", 64, "--threads", 1, "--depth", 8, "--times", 2)
    found = figures("foreign", tmp_path / "both", *short)["figures"]
    assert all(found[f"{rows} rows, {way}"]["ms"] > 0 for rows in (1, 8) for way in ("own", "native"))


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


def test_control(figures: Run, small: Path, shared: Path) -> None:
    short = ("--tokens", 12, "--repeats", 1, "--methods", "self-spec", "--lengths", "1,2", *ONE)
    found = figures("control", small, "--data", shared / "data", *short, TAIL=4)
    assert set(found["over_plain"]["auto"]) == {"chat", "code", "summary", "free", "all"}
    assert found["over_fixed"]["self-spec"]["ratio"] > 0
    assert len(found["tail"]["each"]) == 4


def test_batch(figures: Run, native_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("My lord,\nSpeak,\n")
    short = ("--batch", 2, "--method", "ngram", "--new", 8, "--repeats", 1, *ONE, "--fixed", 2)
    runs = figures("batch", native_bundle, *short, "--prompts", tmp_path / "prompts.txt")["runs"]
    assert len(runs) == 6
    assert all(run["same_texts"] for run in runs.values())


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
    """The embedded model reads nearly all of an unseen text, the same by every method."""
    pytest.importorskip("torch", reason="needs edgespec[train]")
    (tmp_path / "text").write_text("Behold, a sentence that nobody has trained on; it is 47 words short.\n\n" * 40)
    export_model(ExportOptions("builtin:reader", tmp_path / "b", [], "int8", threads=1, quick=True), golden=False)
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
    export_model(ExportOptions("builtin:restore", tmp_path / "b", [], "int8", threads=1, quick=True), golden=False)
    found = text("restoring", tmp_path / "b", "--text", tmp_path / "text", "--most", 3)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()[2:]]
    assert [row[1] for row in rows] == ["ar", "ngram", "self-spec"]
    assert all(row[6] == "3/3" and float(row[2].removesuffix(" %")) < 20 for row in rows)
    assert all(float(row[4]) > 1 for row in rows[1:])


@pytest.mark.nightly  # it starts processes
def test_memory(text: Callable[..., str], native_bundle: Path) -> None:
    short = (native_bundle, "--contexts", 128, "--methods", "ngram", *ONE)
    (cell,) = json.loads(text("memory", *short, "--json"))["cells"]
    assert (cell["method"], cell["context"], cell["operators"]) == ("ngram", 128, "native")
    assert all(figure["measured"] >= 0 for figure in cell["figures"].values())


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(sys.platform == "win32", reason="experts are mapped on Windows")
def test_streaming(figures: Run, tmp_path: Path) -> None:
    bundle = exported(tmp_path / "small", SHAPE | {"num_hidden_layers": 2}, "int4", ["ngram"])
    size = "--hidden", 512, "--inner", 384, "--times", 2, "--share", 3.6, "--seconds", 0.5
    given = bundle.with_name("model"), bundle, tmp_path / "large", *size, "--ways", "mapped,streamed,drafts"
    found = figures("streaming", *given, GROUPS=tmp_path / "none")
    ways = {name: way for name, (way,) in found["ways"].items()}
    assert not any(way["limited"] for way in ways.values())
    assert ways["mapped"]["text"] == ways["streamed"]["text"]
    assert 0 < ways["streamed"]["hits"] <= 1
    assert ways["streamed"]["distinct_by_rows"] == {"1": SHAPE["num_experts_per_tok"]}
    assert found["planned"]["cache"] == ways["streamed"]["cache"] < ways["streamed"]["experts"]


def test_methods(figures: Run, small: Path) -> None:
    asked = ("--method", "ngram", "--gamma", 2, "--run", "speculative:gamma=2:branch=2")
    runs = figures("methods", small, *asked, "--new", 6, "--repeats", 1, *ONE)["runs"]
    assert set(runs) == {"int4 plain", "int4 ngram", "int4 ngram gamma 2", "int4 speculative:gamma=2:branch=2"}
    assert all(run["same_text"] == run["texts"] > 0 for run in runs.values())
    for wrong in ("nowhere:gamma=2", "ngram:gamma=two", "ngram:gamma=0", "ngram:breadth=2", "ngram:branch"):
        with pytest.raises(SystemExit, match=f"{wrong}: .+"):
            figures("methods", small, "--method", "ngram", "--run", wrong, "--new", 2, "--repeats", 1)


def held_out(folder: Path) -> tuple[Any, ...]:
    """Give the options of a short measurement on a text of its own."""
    text = folder / "held.txt"
    text.write_text("MENENIUS:\nWhat work's, my countrymen, in hand? where go you\nWith bats and clubs?\n" * 8)
    return "--text", text, "--tokens", 64, "--length", 32, *ONE


def test_quality(text: Callable[..., str], tmp_path: Path, small: Path) -> None:
    short = held_out(tmp_path)
    changes: dict[str, Any] = {"VARIANTS": [("int8", "rtn", None)], "MIXED": (0.5,)}
    models = json.loads(text("quality", TARGET, small, *short, **changes))["models"]
    assert [row["label"] for row in models[TARGET]["rows"]] == ["fp32", "int8 rtn", "int4 mse, 1.33 times its bytes"]
    exact, rounded, mixed = models[TARGET]["rows"]
    assert (exact["perplexity_gap"], exact["top1_agreement"], exact["kl"]) == (0, 1, 0)
    assert 0 < rounded["kl"] < mixed["kl"] < 0.1
    assert "| int8 rtn |" in text("quality", TARGET, *short, "--markdown", **changes)


@pytest.mark.nightly  # eight models are calibrated
def test_quality_of_own_formats(text: Callable[..., str], tmp_path: Path) -> None:
    short = held_out(tmp_path)
    variants = [("Q4_0", "q4_0", None, 0, False), ("gptq", "gptq", None, 0, True), ("half", "mse", None, 0.5, False)]
    changes: dict[str, Any] = {"OWN_VARIANTS": variants, "TOKENS": 512, "HELD": 2}
    table = text("quality", TARGET, *short, "--markdown", "--seeds", "0,1", **changes).splitlines()[2:7]
    assert [line.split(" | ")[0] for line in table[2:]] == ["| Q4_0", "| gptq", "| half (1.33 times the bytes)"]
    assert all(line.count(" to ") == 2 for line in table[2:])


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
