"""``edgespec export``."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.export import QUANTIZERS
from edgespec.errors import InvalidRequest
from edgespec.export.quantization import quantizer
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import BLOCK_FORMATS, listed
from edgespec.runtimes.files.manifest import Manifest
from tests.cli.conftest import Command
from tests.conftest import DRAFT, TARGET, fixed_skip_set

PLAN = {"model", "architecture", "format", "head_format", "quantizer", "methods", "context", "weight_bytes",
        "kv_bytes_per_token", "notes"}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test exports into an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_formats_with_the_default_name(command: Command, elsewhere: Path, form: str) -> None:
    result = command("export", TARGET, "--format", form)
    assert result.code == 0
    assert result.out.startswith("shakespeare-edge: ")
    assert "next: edgespec run shakespeare-edge --prompt" in result.out
    assert "perplexity" in result.out
    assert [path.name for path in elsewhere.iterdir()] == ["shakespeare-edge"]
    manifest = Bundle.open(elsewhere / "shakespeare-edge").manifest
    assert manifest.target.format == form
    assert list(manifest.methods) == ["ar", "ngram", *(["self-spec"] if manifest.target.layers_have_planes else [])]
    assert len(manifest.golden) == 8


def test_every_method_as_json(command: Command, elsewhere: Path) -> None:
    methods = ("--method", "self-spec", "--trials", 4, "--method", "speculative", "--draft", DRAFT)
    result = command("export", TARGET, *methods, "-o", "new/demo", "--json")
    assert result.json.keys() == {"bundle", "seconds", "manifest", "choice"}
    assert result.json["choice"] == result.json["manifest"]["provenance"]["format_choice"]
    assert result.json["choice"]["format"] == result.json["manifest"]["target"]["format"]
    assert result.json["bundle"] == str(Path("new/demo"))
    assert result.json["manifest"].keys() == set(Manifest.model_fields)
    assert list(result.json["manifest"]["methods"]) == ["ar", "ngram", "speculative", "self-spec"]
    for stage in ("weights", "parity", "acceptance", "skip set", "golden"):
        assert f"{stage}: " in result.err
    assert [path.name for path in (elsewhere / "new").iterdir()] == ["demo"]  # nothing is left of the search
    written = json.loads((elsewhere / "new/demo/edgespec.json").read_text("utf-8"))
    for one, other in zip(written["golden"], result.json["manifest"]["golden"], strict=True):
        assert one.items() <= other.items()  # usual values are not written


def test_the_text_names_what_was_found(command: Command) -> None:
    result = command("export", TARGET, "--method", "self-spec", "--trials", 2, "-o", "a b", "--verbose")
    assert result.code == 0
    assert "self-spec: skips " in result.out
    assert "next: edgespec run 'a b' --prompt" in result.out  # can be pasted into a shell


def test_a_low_agreement_is_warned_of(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "warning: on " not in command("export", TARGET, "-o", "good", "--format", "int8").err
    monkeypatch.setattr("edgespec.cli.export.LOW_AGREEMENT", 1.01)  # beyond what any bundle reaches
    result = command("export", TARGET, "-o", "bad", "--format", "int4", "--json")
    assert result.code == 0
    agreement = result.json["manifest"]["parity"]["top1_agreement"]
    assert f"the source's only {100 * agreement:.0f} % of the time" in result.err
    assert "try --head-format int8" in result.err


def test_dry_run(command: Command, elsewhere: Path) -> None:
    methods = ("--method", "speculative", "--draft", DRAFT)
    plan = command("export", TARGET, *methods, "--format", "int8", "--context", 100, "--dry-run", "--json").json
    assert plan.keys() == PLAN
    assert (plan["format"], plan["context"]) == ("int8", 100)
    assert plan["methods"] == ["ar", "ngram", "speculative"]
    assert plan["weight_bytes"].keys() == {"target", "draft"}
    text = command("export", TARGET, *methods, "--dry-run").out
    assert "target weights: " in text
    assert "draft weights: " in text
    assert "KV: " in text
    assert not list(elsewhere.iterdir())


def test_quantizer_and_head_format(command: Command, elsewhere: Path) -> None:
    assert tuple(QUANTIZERS) == tuple(quantizer.QUANTIZERS)
    options = ("--quantizer", "gptq", "--head-format", "int8")
    plan = command("export", TARGET, *options, "--dry-run", "--json").json
    assert (plan["format"], plan["quantizer"], plan["head_format"]) == ("int4", "gptq", "int8")
    four = command("export", TARGET, "--format", "int4", "--dry-run", "--json").json
    assert plan["weight_bytes"]["target"] > four["weight_bytes"]["target"]
    assert "int4 by gptq, head int8" in command("export", TARGET, *options, "--dry-run").out
    (elsewhere / "text").write_text("A horse! a horse! my kingdom for a horse!\n" * 4, "utf-8")
    small = ("--calibration", "text", "--context", "64")
    result = command("export", TARGET, *options, *small, "-o", "demo", "--json")
    assert "quantize: " in result.err
    part = result.json["manifest"]["target"]
    assert (part["format"], part["quantizer"], part["head_format"]) == ("int4", "gptq", "int8")
    assert "int4, gptq, head int8" in command("info", "demo").out
    assert command("verify", "demo").code == 0


def test_what_is_replaced(command: Command, elsewhere: Path) -> None:
    (elsewhere / "empty").mkdir()
    (elsewhere / "full").mkdir()
    (elsewhere / "full" / "file").touch()
    (elsewhere / "file").touch()
    assert command("export", TARGET, "-o", "empty").code == 0
    before = (elsewhere / "empty" / "edgespec.json").read_bytes()
    for more in ((), ("--dry-run",)):
        command("export", TARGET, "-o", "empty", *more).refused(1, "empty: a bundle is already there", "--overwrite")
        for name in ("full", "file"):
            refusal = command("export", TARGET, "-o", name, "--overwrite", *more)
            refusal.refused(1, f"{name}: exists and is not a bundle", "hint: choose another folder")
    assert (elsewhere / "empty" / "edgespec.json").read_bytes() == before
    assert command("export", TARGET, "-o", "empty", "--overwrite", "--format", "int8").code == 0
    assert Bundle.open(elsewhere / "empty").manifest.target.format == "int8"
    assert sorted(path.name for path in elsewhere.iterdir()) == ["empty", "file", "full"]


@pytest.mark.parametrize(
    "arguments, code, parts",
    [
        ((), 2, ["Missing argument 'MODEL'"]),
        (("builtin:nope",), 1, ["no embedded model 'nope'", "hint: ", "shakespeare"]),
        (("./nope",), 1, ["./nope: no such folder", "hint: "]),
        (("file",), 1, ["file: expected a model folder, got a file"]),
        (("full",), 1, ["full: has no config.json"]),
        ((TARGET, "--format", "int5"), 2, ["'int5' is not one of"]),
        ((TARGET, "--quantizer", "best"), 2, ["'best' is not one of"]),
        (
            (TARGET, "--quantizer", "mse", "--format", "fp32"),
            1,
            ["--quantizer mse was given", listed(BLOCK_FORMATS), "hint: "],
        ),
        ((TARGET, "--quantizer", "rtn", "--format", "w8a8"), 1, ["--quantizer rtn was given", "--format w8a8"]),
        ((TARGET, "--head-format", "int8", "--format", "w8a8"), 1, ["--head-format int8 was given"]),
        ((TARGET, "--head-format", "fp32"), 2, ["'fp32' is not one of"]),
        ((TARGET, "--method", "magic"), 1, ["unknown method 'magic'", "hint: there are: "]),
        ((TARGET, "--method", "speculative"), 1, ["needs a draft model", "--draft"]),
        ((TARGET, "--draft", DRAFT), 1, ["--draft was given", "--method speculative"]),
        ((TARGET, "--skip-set", "file"), 1, ["--skip-set was given"]),
        ((TARGET, "--skip-set", "none", "--method", "self-spec"), 1, ["none: cannot be read"]),
        ((TARGET, "--context", "-1"), 1, ["--context -1: expected 2 to 1024"]),
        ((TARGET, "--context", "1025"), 1, ["--context 1025: expected 2 to 1024"]),
        ((TARGET, "--calibration", "none"), 1, ["none: cannot read the calibration text"]),
        ((TARGET, "--calibration", "file"), 1, ["file: expected at least 32 tokens"]),
        ((TARGET, "--trials", "0"), 2, ["--trials"]),
        ((TARGET, "-o", "."), 2, ["current folder"]),
        ((TARGET, "-o", "file/sub"), 1, ["file: cannot write here"]),
    ],
)
def test_wrong_input(command: Command, elsewhere: Path, arguments: Any, code: int, parts: list[str]) -> None:
    (elsewhere / "file").touch()
    (elsewhere / "full").mkdir()
    (elsewhere / "full" / "file").touch()
    command("export", *arguments).refused(code, *parts)
    assert sorted(path.name for path in elsewhere.iterdir()) == ["file", "full"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder that even root cannot write to")
def test_a_folder_that_cannot_be_written(command: Command) -> None:
    command("export", TARGET, "-o", "/proc/demo").refused(1, "/proc: cannot write here", "hint: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InvalidRequest("what came", "what to do"), OSError(28, "full")])
def test_a_bundle_appears_only_with_its_golden_vectors(
    command: Command, demo: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    old = Path(shutil.copytree(demo, elsewhere / "old"))
    before = sorted((path.name, path.stat().st_mtime_ns) for path in old.iterdir())
    monkeypatch.setattr("edgespec.export.pipeline.make_golden", fail)
    for more in (("-o", "new"), ("-o", "old", "--overwrite")):
        result = command("export", TARGET, *more)
        assert (result.code, result.out) == (130 if isinstance(error, KeyboardInterrupt) else 1, "")
        assert "Traceback" not in result.err
    assert [path.name for path in elsewhere.iterdir()] == ["old"]
    assert sorted((path.name, path.stat().st_mtime_ns) for path in old.iterdir()) == before


def test_another_search_in_the_folder_is_kept(command: Command, elsewhere: Path) -> None:
    other = elsewhere / ".demo.search" / "skip-other.journal"
    other.parent.mkdir()
    other.touch()
    assert command("export", TARGET, "--method", "self-spec", "--trials", 1, "-o", "demo").code == 0
    assert list(other.parent.iterdir()) == [other]


@pytest.mark.parametrize("context", [2, 40])
def test_the_smallest_contexts(command: Command, elsewhere: Path, context: int) -> None:
    manifest = command("export", TARGET, "--context", context, "-o", "small", "--json").json["manifest"]
    assert manifest["golden"]
    for vector in manifest["golden"]:
        assert 1 <= len(vector["prompt"]) < len(vector["prompt"]) + len(vector["tokens"]) <= context


def test_calibration_on_lines_of_a_word(command: Command, elsewhere: Path) -> None:
    (elsewhere / "words.txt").write_text("the\nand\nof\nto\n" * 20, "utf-8")
    manifest = command("export", TARGET, "--calibration", "words.txt", "--json").json["manifest"]
    assert manifest["golden"]
    assert manifest["parity"]["text"] == "words.txt"


def test_a_given_skip_set(command: Command, elsewhere: Path) -> None:
    file = fixed_skip_set(elsewhere, TARGET)
    manifest = command("export", TARGET, "--method", "self-spec", "--skip-set", file, "--json").json["manifest"]
    both_planes = {"high_attention": [], "high_mlp": [], "high_head": False, "head_rows": 0}
    assert manifest["methods"]["self-spec"]["skip"] == both_planes | json.loads(file.read_text("utf-8"))
    assert sorted(path.name for path in elsewhere.iterdir()) == ["shakespeare-edge", "skip.json"]


PROMPT = "ROMEO:"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"],
          "additionalProperties": False}  # fmt: skip


def test_structured_text_is_clean_and_complete(command: Command, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), "utf-8")
    ask = ("run", demo, "--prompt", PROMPT, "--json-schema", tmp_path / "schema.json")
    made = command(*ask)
    assert made.code == 0
    assert json.loads(made.out).keys() == {"name"}
    assert "cut" not in made.err


def test_structured_text_that_is_cut_exits_with_3(command: Command, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), "utf-8")
    (tmp_path / "grammar.lark").write_text('start: ("a" | "b")* "c"', "utf-8")
    for kind, rule in (
        ("--json-schema", tmp_path / "schema.json"),
        ("--regex", "[ab]{900}"),
        ("--grammar", tmp_path / "grammar.lark"),
    ):
        ask = ("run", demo, "--prompt", PROMPT, kind, rule, "--max-new-tokens", 2)
        made, as_json = command(*ask), command(*ask, "--json")
        assert (made.code, as_json.code) == (3, 3)
        for shown in (made, as_json):
            assert "warning: cut after 2 tokens, before the grammar was complete: --max-new-tokens" in shown.err
        assert json.loads(as_json.out)["text"] == made.out.removesuffix("\n")
    stopped = command("run", demo, "--prompt", PROMPT, "--regex", "a{9}b{9}", "--stop", "b")
    assert (stopped.code, stopped.out) == (3, "a" * 9 + "\n")
    assert "a stop string came" in stopped.err


def test_what_cut_a_text_is_said(command: Command, demo: Path) -> None:
    ask = ("run", demo, "--prompt", PROMPT)
    assert "note: cut after 128 tokens: --max-new-tokens N allows more" in command(*ask).err
    full = command(*ask, "--context", 40, "--max-new-tokens", 100)
    assert full.code == 0
    assert re.search(r"note: cut after 3\d tokens: the context of 40 tokens is full", full.err)
    text = command(*ask, "--max-new-tokens", 24, "--json").json["text"]
    assert "cut" not in command(*ask, "--stop", text[9:12]).err
