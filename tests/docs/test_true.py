"""Statements of pages match the program, if a table or a file of it has the fact."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.shapes import SHAPES
from edgespec.cli.app import EXTRAS, cli
from edgespec.drafters.registry import searching
from edgespec.export.options import ExportOptions
from edgespec.export.plan_manifest import plan_bundle
from edgespec.planning.plan import Option, PlanRequest, make_plan
from edgespec.runtimes.options import LoadOptions
from tests.docs.conftest import ROOT, first_column, section, text_of

DEMO = {"ar", "ngram", "speculative", "auto"}  # what the bundle of README and Getting started holds


def test_the_help_begins_with_the_readmes_export() -> None:
    (line,) = re.findall(r"edgespec export .*", cli.help or "")
    assert f"&& {line} " in text_of("README.md")


@pytest.mark.parametrize("page", ["README.md", "docs/start.md", "docs/guides/run.md"])
def test_methods_of_the_first_bundle(page: str) -> None:
    for line in re.findall(r"^edgespec (?:run|bench) demo .*", text_of(page), re.M):
        assert set(re.findall(r"--method (\S+)", line)) <= DEMO, line


def test_an_export_on_a_page_looks_as_it_does() -> None:
    code = (ROOT / "edgespec/cli/export.py").read_text("utf-8")
    shown = re.search(r"^against the source: .*", text_of("docs/start.md"), re.M)
    assert shown is not None
    for word in ("top-1 agreement", "perplexity", "divergence", "nats"):
        assert word in code
        assert word in shown[0]


def test_what_devices_cannot_run() -> None:
    (said,) = re.findall(r"^Methods: .*?\.$|Methods: (all except .*?)\.", text_of("docs/devices.md"), re.S)
    assert set(re.findall(r"`([\w-]+)`", said)) == {*searching()}
    assert "drafters that read hidden states" in said


def test_the_report_names_its_extra() -> None:
    assert f".[{EXTRAS['matplotlib']}]" in text_of("docs/guides/choose.md")


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    code = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "edgespec").rglob("*.py")))
    messages = re.findall(r"^### `(.+)`$", text_of("docs/troubleshooting.md"), re.M)
    assert len(messages) >= 15
    unknown = [message for message in messages if message not in code]
    assert not unknown


def test_every_embedded_file_has_a_license() -> None:
    page, own = "docs/licenses.md", {"__pycache__", "configs", "traces"}  # the last two: shapes and times, no works
    models = {path.name for path in (ROOT / "edgespec/builtin").iterdir() if path.is_dir()} - own
    assert models == first_column(section(page, "Embedded models")) - {"edgespec/builtin/"}
    vendored = text_of("edgespec/server/page/vendor/README.md")
    rows = re.findall(r"^\| [\w.-]+ \| (\S+ \| [\d.]+ \| \S+) \|", vendored, re.M)
    assert rows
    assert all(f"| {row} |" in text_of(page) for row in rows)
    data = {
        f"tests/data/{path.name}" for path in (ROOT / "tests/data").iterdir() if path.is_dir() and path.name not in own
    }
    assert data <= first_column(section(page, "Texts and test data"))


def test_memory_by_model_is_what_plan_predicts(tmp_path: Path) -> None:
    rows = re.findall(r"^\| ([A-Z][\w. ]+B) \| ([\d |]+) \|$", text_of("docs/guides/raspberry-pi.md"), re.M)
    assert len(rows) >= 3
    for model, figures in rows:
        shape = SHAPES[model.lower().replace(" ", "-")]
        (tmp_path / "config.json").write_text(json.dumps(shape), "utf-8")
        planned = []
        for form in ("int4", "int8"):
            for context in (2048, 8192):
                bundle = plan_bundle(ExportOptions(str(tmp_path), format=form, context=context))
                request = PlanRequest(64 << 30, load=LoadOptions(context=context, operators="native", threads=2))
                runs = make_plan([Option(bundle, model, ())], request).candidates
                run = next(run for run in runs if run.use.method == "ngram" and not run.approximates)
                planned.append(run.memory.peak)
        said = [int(figure) for figure in figures.split(" | ")]
        assert said == pytest.approx([peak / 2**20 for peak in planned], rel=0.02), model


def test_instruction_sets() -> None:
    files = {path.stem.removeprefix("isa_") for path in (ROOT / "edgespec/runtimes/native").glob("isa_*.cpp")}
    (row,) = re.findall(r"^\| `EDGESPEC_ISA` \|.*", text_of("CONTRIBUTING.md"), re.M)
    assert set(re.findall(r"`(\w+)`", row)) - {"EDGESPEC_ISA"} == files
    assert section("CONTRIBUTING.md", "The native library")
