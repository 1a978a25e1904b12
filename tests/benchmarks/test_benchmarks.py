"""Every benchmark runs on the embedded model and prints what its description says; no test asserts a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import comb
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from tests.conftest import TARGET
from tests.support import hf
from tests.support.wide import wide_config

ROOT = Path(__file__).resolve().parents[2]
CONDITIONS = {"processor", "cores", "load", "python", "onnxruntime"}
RATIO = {"ratio", "low", "high", "pairs"}

Run = Callable[..., Any]


def test_every_benchmark_is_here() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"__init__", "common", "memory_cell"}
    names -= {"device"}  # tests/runtimes/native/test_kernels.py
    here = Path(__file__).read_text("utf-8")
    assert [name for name in sorted(names) if f'"{name}"' not in here] == []


def test_acceptance(figures: Run) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install 'edgespec[train]'")
    pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[train]'")
    heads, draft = "builtin:shakespeare-medusa", "builtin:shakespeare-draft"
    short = ("--texts", 2, "--new-tokens", 12)
    found = figures("acceptance", "--model", TARGET, "--heads", heads, "--draft", draft, *short)
    assert set(found["positions"]) == {"sampled", "greedy"}
    for kind in ("sampled", "greedy"):
        assert set(found["found"][heads][kind]) == {"top1", "top5"}
        assert set(found["found"][draft][kind]) == {"overlap", "agreement", "positions"}
        assert found["found"][draft][kind]["overlap"] > 0.2


@pytest.mark.usefixtures("native")
def test_attention(figures: Run) -> None:
    short = ("--depths", 64, "--formats", "f16", "--pairs", 2, "--shape", "llama-3.2-1b")
    found = figures("attention", *short, CACHE_BYTES=1 << 18)["depths"]["64"]
    assert found["layers"] >= 1
    assert set(found["us_per_layer"]) == {"onnxruntime", "f16"}
    assert set(found["speed_over_onnxruntime"]) == {"f16"}


def test_checking(figures: Run, bundles: Callable[..., Path]) -> None:
    found = figures("checking", bundles("stock"), "--operators", "stock", "--threads", 1, "--pairs", 2)
    assert set(found["load_ms"]) == {"without", "remembered", "taken"}
    assert set(found["share"]) == set(found["over_without"]) == {"remembered", "taken"}
    assert found["bytes"] > 0
    assert found["read"] >= 0


def test_wide_heads(figures: Run, tmp_path: Path) -> None:
    source = hf.write_checkpoint(tmp_path / "source", wide_config(256, positions=128), seed=1)
    Exporter(ExportOptions(str(source), tmp_path / "out", ["ngram"], "int4", operators="stock")).run()
    short = ("--pairs", 3, "--threads", 1, "--rows", "1,4", "--depths", "0,64,4096")
    found = figures("wide_heads", tmp_path / "out", *short)
    assert found["head_dim"] == 256
    assert set(found["depths"]) == {"0", "64"}  # those that the context has
    for passes in found["depths"].values():
        assert set(passes) == {"1", "4"}
        for each in passes.values():
            assert set(each["ms"]) == {"strict", "one dummy", "plain"}
            assert set(each["strict_over_one_dummy"]) == RATIO


@pytest.mark.usefixtures("native")
def test_attention_quality(text: Callable[..., str]) -> None:
    short = ("--tokens", 64, "--threads", 1)
    found = json.loads(
        text("attention_quality", *short, KEYS=("f16", "int8"), VALUES=("f16",), BUDGET=256, LEARNT=("nomad1",))
    )
    assert set(found) > CONDITIONS
    assert {row["keys"] for row in found["formats"]} == {"f16", "int8"}
    exact = found["formats"][0]
    assert (exact["perplexity_change"], exact["agreement"], exact["positions"]) == (0, 1, found["scored"])
    table = text(
        "attention_quality", *short, "--markdown", KEYS=("f16",), VALUES=("f16",), BUDGET=256, LEARNT=("nomad1",)
    ).splitlines()
    assert table[0] == "| keys | f16 | f16, window |"
    assert table[2].startswith("| f16 | +0.00% 1.000 |")


def test_auto(figures: Run, small: Path) -> None:
    found = figures("auto", small, "--requests", 2, "--tokens", 12, "--prompt", 8)
    for part in ("first", "later"):
        assert set(found[part]["time"]) == RATIO
        assert set(found[part]) == {"time", "counted", "tokens", "drafted", "accepted", "switches", "method_used"}
        assert found[part]["tokens"] == 24
        assert found[part]["accepted"] == 0  # by construction


def test_batch(figures: Run, native_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("My lord,\nSpeak,\n")
    short = (
        "--batch",
        2,
        "--method",
        "ngram",
        "--new",
        8,
        "--repeats",
        1,
        "--threads",
        1,
        "--fixed",
        2,
        "--prompts",
        tmp_path / "prompts.txt",
    )
    runs = figures("batch", native_bundle, *short)["runs"]
    assert set(runs) == {
        f"{name}, {width} together" for name in ("ar", "ngram", "ngram, 2 guesses") for width in (1, 2)
    }
    for run in runs.values():
        assert run["same_texts"]
        assert set(run["against_one_plain"]) == set(run["against_plain_together"]) == RATIO


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", ["q4", "c8"])
def test_linear(figures: Run, kind: str) -> None:
    changes: dict[str, Any] = {"SHAPES": {"tiny": [(64, 64), (128, 64)]}, "TOTAL": 1 << 16, "ROWS": (1, 2)}
    found = figures("linear", "--shapes", "tiny", "--kind", kind, "--pairs", 5, "--threads", 1, **changes)
    assert set(found["shapes"]["tiny"]) == {"weight_mb", "gb_s", "bandwidth_gb_s", "share", "ms", "v"}
    assert set(found["shapes"]["tiny"]["v"]) == {"1", "2"}
    assert found["shapes"]["tiny"]["v"]["1"] == 1


@pytest.mark.usefixtures("native")
def test_roof(figures: Run) -> None:
    found = figures("roof", "--threads", "1", ISAS=("scalar",))
    assert set(found["isas"]) == {"scalar"}
    assert set(found["isas"]["scalar"]) == {"1"}
    assert all(rate > 0 for rate in found["isas"]["scalar"]["1"].values())


@pytest.mark.usefixtures("native")
def test_drafter_cost(figures: Run) -> None:
    tiny = {"tiny": (64, 4, 4, 2, 16, 96, 128)}
    changes: dict[str, Any] = {"SHAPES": tiny, "DEPTH": 8, "BLOCKS": (4,), "MEGABYTES": 8}
    found = figures("drafter_cost", "--model", "tiny", "--heads", 96, "--pairs", 2, "--threads", 1, **changes)
    size = {name: found["passes"][name]["bytes_over_a_steps"] for name in found["passes"]}
    step, first = size["eagle, head of 96: a step"], size["eagle, head of 96: 3 entries and a guess"]
    assert 0 < step < first < size["target, 5 rows"] == 1  # a step does not fuse
    assert size["dflash, head of 96: 3 entries"] > 0
    assert set(found["eagle_rounds"]["96"]) == {"1", "2", "3", "4"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory(text: Callable[..., str], native_bundle: Path) -> None:
    short = (native_bundle, "--contexts", 128, "--methods", "ngram", "--threads", 1)
    (cell,) = json.loads(text("memory", *short, "--json"))["cells"]
    assert (cell["method"], cell["context"], cell["operators"]) == ("ngram", 128, "native")
    for figure in cell["figures"].values():
        assert set(figure) == {"predicted", "measured", "error"}
    assert cell["measured"]["drafted"] >= 0


def test_methods(figures: Run, small: Path) -> None:
    asked = ("--method", "ngram", "--gamma", 2, "--run", "speculative:gamma=2:branch=2")
    found = figures("methods", small, *asked, "--new", 6, "--repeats", 1, "--threads", 1)
    tree = "int4 speculative:gamma=2:branch=2"
    assert set(found["runs"]) == {"int4 plain", "int4 ngram", "int4 ngram gamma 2", tree}
    for run in found["runs"].values():
        assert set(run) == {"ms_per_token", "speedup", "tokens_per_round", "acceptance_rate", "same_text", "texts"}
        assert run["same_text"] == run["texts"] > 0
    assert found["baseline"] == "int4 plain"
    assert found["runs"]["int4 plain"]["tokens_per_round"] == 1


@pytest.mark.parametrize(
    "run",
    ["nowhere:gamma=2", "ngram:gamma=two", "ngram:gamma=0", "ngram:breadth=2", "ngram:branch", "ngram:branch=0"],
)
def test_a_wrong_run_of_methods_ends_in_words(figures: Run, small: Path, run: str) -> None:
    with pytest.raises(SystemExit, match=f"{run}: .+"):
        figures("methods", small, "--method", "ngram", "--run", run, "--new", 2, "--repeats", 1)


def test_overhead(figures: Run, small: Path) -> None:
    found = figures("overhead", small, "--steps", 6, "--repeats", 2)
    assert set(found) == CONDITIONS | {"bundle", "threads", "steps", "run_us", "added_us", "low", "high"}
    assert found["run_us"] > 0


def test_long_texts(figures: Run, small: Path) -> None:
    found = figures("long_texts", small, "--tokens", 150, "--repeats", 2, VOCAB=1000, LENGTHS=(64, 128))
    assert set(found) == CONDITIONS | {"bundle", "threads", "penalty_us", "follow_us", "turns"}
    assert set(found["penalty_us"]) == set(found["follow_us"]) == {"64", "128"}
    assert [turn["reused"] for turn in found["turns"]] == [0, 0, 157, 157]


def test_plans(text: Callable[..., str], small: Path) -> None:
    changes: dict[str, Any] = {"CONTEXTS": (128,), "BUDGETS": 1, "LONG": 16, "SHORT": 4}
    short = (small, "--new", 4, "--repeats", 1, "--prompts", 1, "--seconds", 0.1, "--calibrate-on", "golden", "--json")
    found = json.loads(text("plans", *short, **changes))
    assert {row["prompts"] for row in found["rows"]} == {"own", "long", "repeated", "random"}
    assert found["cells"] == len(found["rows"])
    for row in found["rows"]:
        assert {"context", "budget", "pick", "best", "regret", "auto"} < set(row)
        assert 0 <= row["regret"] < 1


def test_prediction(text: Callable[..., str], small: Path) -> None:
    short = (small, "--own-prompts", 1, "--new", 6, "--repeats", 1, "--method", "ngram", "--seconds", 0.1)
    found = json.loads(text("prediction", *short, "--json"))
    assert {row["method"] for row in found["rows"]} == {"ngram"}
    assert found["summary"]
    assert "ngram" in text("prediction", *short)


def test_quality(text: Callable[..., str], tmp_path: Path, small: Path) -> None:
    held_out = tmp_path / "held.txt"
    held_out.write_text("MENENIUS:\nWhat work's, my countrymen, in hand? where go you\nWith bats and clubs?\n" * 8)
    short = ("--text", held_out, "--tokens", 64, "--length", 32, "--threads", 1)
    changes: dict[str, Any] = {"VARIANTS": [("int8", "rtn", None)], "MIXED": (0.5,)}
    models = json.loads(text("quality", TARGET, small, *short, **changes))["models"]
    assert [row["label"] for row in models[TARGET]["rows"]] == ["fp32", "int8 rtn", "int4 mse, 1.32 times its bytes"]
    exact, rounded, mixed = models[TARGET]["rows"]
    assert (exact["perplexity_gap"], exact["top1_agreement"], exact["kl"]) == (0, 1, 0)
    assert 0 < rounded["kl"] < mixed["kl"] < 0.1
    assert len(models[small.name]["rows"]) == 1
    assert "| int8 rtn |" in text("quality", TARGET, *short, "--markdown", **changes)


def test_replay(figures: Run, small: Path, tmp_path: Path) -> None:
    from edgespec.export.source.source import resolve

    answer = "to be, or not to be: that is the question. " * 6
    asked = {"question_id": 1, "turns": ["Who speaks?", "And then?"]}
    said = {"question_id": 1, "choices": [{"turns": ["The prince.", answer]}]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(asked))
    (tmp_path / "answers.jsonl").write_text(json.dumps(said))
    files = ("--traces", tmp_path / "answers.jsonl", "--questions", tmp_path / "questions.jsonl")
    short = ("--tokenizer", resolve(TARGET) / "tokenizer.json", "--new", 24, "--threads", 1)
    found = figures("replay", small, *files, *short, "--operators", "stock")
    assert (found["answers"], found["baseline"]) == (1, "int4 plain")
    assert set(found["runs"]) == {"int4 plain", "int4 ngram", "int4 ngram --no-strict"}
    assert found["runs"]["int4 plain"]["tokens_per_round"] == 1


def test_rows(figures: Run, small: Path) -> None:
    short = ("--depths", "0,8", "--rows", "1,2,8", "--pairs", 2, "--threads", 1, "--trees")
    found = figures("rows", small, *short)
    assert found["prefill_tokens_per_second"] > 0
    assert set(found["depths"]) == {"0", "8"}
    for depth in found["depths"].values():
        assert set(depth) == {"ms", "v", "share_of_bandwidth", "tree_over_chain"}
        assert set(depth["ms"]) == {*depth["v"], "tree 8"} == {"1", "2", "8", "tree 8"}
        assert set(depth["tree_over_chain"]["8"]) == RATIO
    assert comb(9).tolist() == [-1, 0, 0, 1, 1, 3, 3, 5, 5]


def test_rivals(figures: Run, small: Path) -> None:
    again = f"again={sys.executable} -m benchmarks.rivals.worker edgespec {small} {{threads}} {{context}}"
    short = ("--depths", "8", "--rows", "1,2", "--pairs", 2, "--threads", 1, "--context", 64, "--rival", again)
    found = figures("rivals.__main__", small, *short, "--prefill", PROMPT=16)["passes"]
    assert set(found) == {"depth 8, 1 rows", "depth 8, 2 rows", "prefill 16"}
    for cell in found.values():
        assert set(cell["ms"]) == {"edgespec", "again"}
        assert set(cell["over_edgespec"]["again"]) == RATIO


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_checkpoints_for_rivals_are_those_of_the_architecture(kind: str, tmp_path: Path) -> None:
    from benchmarks.rivals.files import tensors, write_checkpoint
    from edgespec.export.bundle.model_part import open_described

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
    found = figures("structured", native_bundle, "--schemas", 3, "--methods", "ngram", "--threads", 1)
    assert set(found["methods"]) == {"ar", "ngram"}
    for row in found["methods"].values():
        assert (row["valid"], row["same_text"]) == (3, 3)
        assert set(row["speed_up"]) == RATIO


def test_serving(figures: Run, native_bundle: Path) -> None:
    found = figures("serving", native_bundle, "--clients", 16, "--seconds", 1, "--parallel", 4, "--threads", 1)
    assert (found["failed"], found["other_text"]) == (0, 0)
    assert found["whole_answers"] + found["left"] >= 16
    assert set(found["fairness"]) == {"short", "long"}
    assert found["resident_mib"]["most"] > 0


@pytest.mark.parametrize("through", [(), ("--serve",)])
def test_first_token(figures: Run, native_bundle: Path, through: tuple[str, ...]) -> None:
    """The prompt may be read before anybody has asked beside it."""
    arguments = ("--prompt", 800, "--most", 2, "--threads", 1, *through)
    found = figures("first_token", native_bundle, *arguments, PAUSE=0.0, ALONE=2)
    assert found["alone_ms"]["requests"] == 2
    assert set(found.get("beside_ms", found["alone_ms"])) == {"median", "p95", "most", "requests"}
    assert "long_prompt_s" in found
