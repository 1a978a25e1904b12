"""``edgespec bench``."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.result import Result
from edgespec.planning import profiles as quiet
from edgespec.reports.bench import MethodFigures
from edgespec.runtimes.files.manifest import Operators
from tests.cli.conftest import Command
from tests.conftest import OPERATORS

QUICK = ("--max-prompts", 2, "--repeats", 1, "--max-new-tokens", 16)
ADVICE = {"situation", "bundle", "format", "method", "why", "evidence", "measured", "faster_than_plain"}
SITUATIONS = ["chat", "batch", "memory", "quality"]


BOTH = pytest.mark.parametrize("operators", OPERATORS, indirect=True)


def rows_of(operators: Operators) -> list[str]:
    """Return the rows: on stock operators strict mode has its own graph, so ``ar`` has its own row."""
    return ["plain", *(["ar"] if operators == "stock" else []), "ngram", "speculative", "self-spec"]


def test_a_busy_machine_is_said(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = "--max-prompts", 1, "--repeats", 1, "--max-new-tokens", 8, "--threads", 1, "--method", "ngram"
    monkeypatch.setattr(quiet.Watch, "others", lambda _: 0.4)
    assert "busy" not in command("bench", demo, *how).out  # tests lift the bound
    monkeypatch.setattr(quiet, "OTHERS", 0.2)
    assert "the machine was busy: other programs took 40% of the processors: times are too long" in (
        command("bench", demo, *how).out
    )


@BOTH
def test_json(command: Command, demo: Path, operators: Operators) -> None:
    how = "--max-prompts", 3, "--repeats", 2, "--max-new-tokens", 24, "--threads", 1, "--operators", operators
    result = command("bench", demo, *how, "--json")
    made = result.json
    assert made.keys() == {"bundle", "bundles", "baseline", "conditions", "methods", "advice"}
    others = made["conditions"].pop("others")
    assert others is None or 0 <= others <= 1
    assert made["conditions"] == {"threads": 1, "prompts": 3, "max_new_tokens": 24, "batch": 0, "busy": ""}
    assert [item["situation"] for item in made["advice"]] == SITUATIONS
    assert all(item.keys() == ADVICE for item in made["advice"])
    assert made["baseline"] == "plain"
    assert result.err.startswith("bench: ")
    rows = made["methods"]
    assert [row["method"] for row in rows] == rows_of(operators)
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert 0 < row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert (row["pairs"], row["runs"]) == (6, 6)
        assert row["lossless"] is True
        assert row["exact"] is (row["method"] != "plain")
        assert (row["extra_bytes"] > 0) is (row["method"] == "speculative")
        if row["method"] != "plain":
            assert row["same_text"] == row["runs"]
    assert rows[0]["speedup"] == rows[0]["speedup_low"] == rows[0]["speedup_high"] == 1


@BOTH
def test_table(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch, operators: Operators) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = command("bench", demo, *QUICK, "--operators", operators)
    assert result.code == 0
    lines = result.out.splitlines()
    runs = 2 * (len(rows_of(operators)) - 1)
    assert re.fullmatch(
        rf"(no method is|[a-z-]+ is \d+\.\d times as|[a-z-]+ may be faster,) .*; same text in all {runs} runs", lines[0]
    )
    assert lines[1] == ""
    assert re.sub(" +", " ", lines[2]).strip() == "method tokens/s speed-up tok/round accepted same text extra"
    rows = rows_of(operators)
    end = 3 + len(rows)
    assert [line.split()[0] for line in lines[3:end]] == rows
    assert max(map(len, lines[:end])) <= 80
    for line in lines[3:end]:  # nothing is wrapped
        assert re.search(r"\d+\.\d\d?x \(\d+\.\d\d-\d+\.\d\d\) ", line)
    assert lines[end] == ""
    assert re.fullmatch(rf"next: edgespec run {re.escape(str(demo))}( --method [a-z-]+)? --prompt .*", lines[end + 1])
    assert len(lines) == end + 2


def test_advice_is_given_where_it_is_asked_for(command: Command, demo: Path) -> None:
    lines = command("bench", demo, *QUICK, "--method", "ngram", "--verbose").out.splitlines()
    assert lines[lines.index("advice:") - 1] == "" or "ngram: " in lines[lines.index("advice:") - 1]
    assert [line.split()[0] for line in lines[-4:]] == SITUATIONS


def test_several_bundles_and_batches(command: Command, demo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(demo, other)
    how = "--batch", 2, "--method", "ngram", *QUICK
    made = command("bench", demo, other, demo, *how, "--json").json
    assert made["bundles"] == [str(demo), str(other)]
    rows = made["methods"]
    assert [(row["bundle"], row["method"]) for row in rows] == [
        (str(path), name) for path in (demo, other) for name in ("plain", "ngram")
    ]
    assert all(row["batch_tokens_per_second"] > 0 and row["weight_bytes"] > 0 for row in rows)
    assert [rows[at]["speedup"] for at in (0, 2)] == [1, 1]
    assert made["advice"][1]["measured"] is True
    lines = command("bench", demo, other, *how, "--verbose").out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [demo.name, "other"]
    assert (
        re.sub(" +", " ", lines[3]).strip() == "bundle method tokens/s speed-up tok/round lossless same extra together"
    )
    assert [line.split()[:2] for line in lines[4:8]] == [
        [path.name, name] for path in (demo, other) for name in ("plain", "ngram")
    ]
    assert all(line.endswith("same text in all 2 runs") for line in lines[:2])
    assert [line.split()[0] for line in lines[-4:]] == SITUATIONS


def test_bundles_of_different_tokenizers_want_texts(command: Command, demo: Path, chatty: Path, tmp_path: Path) -> None:
    command("bench", demo, chatty, *QUICK).refused(1, "different tokenizers", "hint: give texts with --prompts FILE")
    (tmp_path / "p.txt").write_text("ROMEO", "utf-8")
    made = command("bench", demo, chatty, "--prompts", tmp_path / "p.txt", *QUICK, "--json").json
    assert {row["format"] for row in made["methods"]} == {"int4"}


def test_without_strict_there_is_one_plain_method(command: Command, demo: Path) -> None:
    made = command("bench", demo, *QUICK, "--no-strict", "--json").json
    assert [row["method"] for row in made["methods"]] == ["plain", "ngram", "speculative", "self-spec"]
    assert not any(row["exact"] for row in made["methods"])
    assert all(row["lossless"] for row in made["methods"])


def test_sampling_without_a_seed_is_no_false_alarm(command: Command, demo: Path) -> None:
    """Texts that are sampled again are not compared: only their distribution must be the same."""
    result = command(
        "bench", demo, *QUICK, "--no-fallback", "--temperature", 1, "--method", "ngram", "--method", "speculative"
    )
    lines = result.out.splitlines()
    assert re.search(r"; (same text in all 2 runs; )?same distribution, other texts: (ngram, )?speculative$", lines[0])
    assert next(line for line in lines if line.startswith("speculative")).split()[-3] == "-"
    assert "ANOTHER TEXT" not in result.out
    made = command("bench", demo, *QUICK, "--temperature", 1, "--acceptance", "coupled", "--json").json
    assert all(row["same_text"] == row["runs"] for row in made["methods"][1:])


@pytest.mark.parametrize(
    "measured, said, named",
    [
        ({"same_text": 0}, "ANOTHER TEXT: see `edgespec verify`", None),
        ({"speedup": 2.5, "speedup_low": 2.0},
         "ngram is 2.5 times as fast as plain decoding; same text in all 2 runs", True),
        # one pair does not decide the fastest
        ({"speedup": 2.5, "speedup_low": 2.5, "speedup_high": 2.5, "pairs": 1},
         "one pair of runs: too few to find the fastest", False),
        # nor is a likely gain denied
        ({"speedup": 1.26, "speedup_low": 0.98, "speedup_high": 1.5, "pairs": 2},
         "ngram may be faster, but 1.00x is in its interval", False),
        ({"speedup": 0.9, "speedup_low": 0.8, "speedup_high": 1.1, "pairs": 2},
         "no method is faster than plain decoding here", False),
    ],
)  # fmt: skip
def test_what_is_said_of_what_was_measured(
    command: Command,
    demo: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: dict[str, Any],
    said: str,
    named: bool | None,
) -> None:
    as_dict = MethodFigures.as_dict
    monkeypatch.setattr(
        MethodFigures, "as_dict", lambda self: as_dict(self) | (measured if self.method == "ngram" else {})
    )
    shown = command("bench", demo, *QUICK, "--method", "ngram").out
    assert said in shown
    if named is not None:
        first, *_, following = shown.splitlines()
        assert first.startswith(said)
        assert (" --method ngram " in following) == named


@pytest.mark.parametrize("after", [1, 2, 3, 12])
def test_ctrl_c_shows_what_was_measured(
    command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """An interrupt prints the results so far: those of the first round if it is the only one, none before any run."""
    calls, generate = 0, Engine.generate

    def interrupted(*arguments: Any, **changes: Any) -> Result:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyboardInterrupt
        return generate(*arguments, **changes)

    monkeypatch.setattr(Engine, "generate", interrupted)
    how = "--method", "ngram", "--max-prompts", 1, "--repeats", 20, "--max-new-tokens", 4, "--threads", 1, "--json"
    result = command("bench", demo, *how)
    assert result.code == 130
    found = json.loads(result.out)
    if after == 1:
        assert found["error"]["type"] == "KeyboardInterrupt"
        return
    assert [row["method"] for row in found["methods"]] == ["plain", "ngram"][: after - 1]
    assert "    plain " in result.err.replace("\n", "    ")  # printed as soon as it is measured
    if after < 12:
        assert "stopped: the first round alone was measured" in result.err
        return
    pairs = {row["pairs"] for row in found["methods"]} | {row["runs"] for row in found["methods"]}
    assert len(pairs) == 1
    assert 0 < (measured := pairs.pop()) < 20
    assert f"stopped: {measured} of 20 pairs were measured" in result.err


def test_how_all_stand_is_said_meanwhile(command: Command, demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each method when its first run is over, and then now and then one for all."""
    how = "bench", demo, "--max-prompts", 2, "--repeats", 1, "--max-new-tokens", 4, "--method", "ngram"
    lines = command(*how).err.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["plain", "ngram"]
    monkeypatch.setattr("edgespec.cli.bench.EVERY", 0)
    lines = [line for line in command(*how).err.splitlines() if line.startswith("  ")]
    assert [line.split(":")[0].strip() for line in lines[2:]] == ["first round", "1 pairs", "2 pairs"]
    assert re.fullmatch(r"  2 pairs: plain \d+\.\d tokens/s, ngram \d+\.\d\dx", lines[-1])


def test_a_method_named_twice_is_measured_once(command: Command, demo: Path) -> None:
    rows = command("bench", demo, *QUICK, "--method", "ngram", "--method", "ngram", "--json").json["methods"]
    assert [(row["method"], row["runs"]) for row in rows] == [("plain", 2), ("ngram", 2)]


def test_plot(command: Command, chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(chatty)
    result = command("bench", ".", *QUICK, "--plot", tmp_path / "speed.PNG")  # the bundle's name has two $ in it
    assert result.code == 0
    assert (tmp_path / "speed.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name, lines",
    [
        ("p.txt", ["ROMEO:", "", "  ", "JULIET:"]),
        ("chat.jsonl", [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("Speak!", "Hark!")]),
        ("p.jsonl", [json.dumps({"prompt": "ROMEO:\n"}), "", json.dumps({"turns": ["JULIET:", "more"], "id": 1})]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_prompts_of_a_file(
    command: Command, demo: Path, chatty: Path, tmp_path: Path, name: str, lines: Any, encoding: str
) -> None:
    (tmp_path / name).write_text("\n".join(lines), encoding)
    bundle = chatty if name.startswith("chat") else demo
    made = command("bench", bundle, "--prompts", tmp_path / name, *QUICK[2:], "--method", "ar", "--json").json
    assert made["conditions"]["prompts"] == 2


@pytest.mark.parametrize(
    "name, content",
    [
        ("none.txt", None),
        ("empty.txt", b" \n\n"),
        ("bytes.txt", b"\xff\xfe"),
        ("broken.jsonl", b"{"),
        ("list.jsonl", b"[1]"),
        ("text.jsonl", b'"x"'),
        ("null.jsonl", b"null"),
        ("other.jsonl", b'{"text": "x"}'),
        ("turns.jsonl", b'{"turns": []}'),
        ("messages.jsonl", b'{"messages": null}'),
    ],
)
def test_prompts_that_cannot_be_read(
    command: Command, demo: Path, tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    command("bench", demo, "--prompts", tmp_path / name).refused(1, name, "hint: one prompt a line")


def test_wrong_input(command: Command, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.reports.bench.bench_all", lambda *_: pytest.fail("measured before all was checked"))
    command("bench", demo, "--plot", tmp_path / "none" / "x.png").refused(1, "there is no folder", "hint: ")
    command("bench", demo, "--plot", tmp_path / "x.xyz").refused(1, "expected a name that ends in .png")
    command("bench", demo, "--method", "magic").refused(1, "'magic' is not in this bundle")
    command("bench", demo, "--prompts", tmp_path).refused(1, "cannot read prompts")
    command("bench", demo, "--repeats", 0).refused(2, "--repeats")


def test_a_bundle_without_prompts(command: Command, bundle: Any) -> None:
    command("bench", bundle("int4")).refused(1, "holds no prompts", "hint: give some with --prompts")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX paths")
def test_results_are_shown_even_if_the_plot_cannot_be_written(command: Command, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "x.png").mkdir()
    result = command("bench", demo, *QUICK, "--method", "ngram", "--plot", tmp_path / "x.png")
    assert result.code == 1
    assert "error: " in result.err
    assert "same text in all " in result.out


def test_a_lossy_rule_is_named(command: Command, demo: Path) -> None:
    out = command("bench", demo, *QUICK, "--method", "speculative", "--accept", "all").out
    assert "lossy, as was asked for: every guess accepted" in out


@pytest.mark.usefixtures("native")
def test_profile(command: Command, demo: Path) -> None:
    how = "--threads", 1, "--operators", "native", "--profile"
    made = command("bench", demo, *how, "--json").json["profiles"]
    assert [profile["bundle"] for profile in made] == [str(demo)]
    assert made[0].keys() == {
        "bundle", "isa", "threads", "depth", "bandwidth_gb_s", "dot_gmac_s", "planned_mb", "passes",
    }  # fmt: skip
    assert made[0]["passes"][0].keys() == {"rows", "ms", "v", "least_ms", "python_ms", "parts"}
    assert made[0]["passes"][0]["parts"].keys() == {"linear", "attention", "head", "rest"}
    lines = command("bench", demo, *how).out.splitlines()
    assert lines[2].split() == [
        "rows", "ms", "v", "MB", "GMAC", "linear", "attention", "head", "rest", "Python", "of", "roof",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[3:9]] == ["1", "2", "4", "8", "16", "32"]
