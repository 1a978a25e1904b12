"""The page of a measurement: complete, alone in one file, and true to the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.reports.bench import MethodFigures, bench_all, check_output
from edgespec.reports.pages import colored_text, read_llama_bench, time_passes, write_page
from edgespec.runtimes.files.manifest import Operators
from tests.conftest import OPERATORS

PROMPT = "ROMEO:\n"
SETTINGS = Settings(max_new_tokens=24, ignore_eos=True)
LLAMA = {"build_commit": "abc123", "model_filename": "/models/small.gguf", "model_type": "llama 1B Q4_0",
         "n_threads": 2, "n_prompt": 0, "n_gen": 128, "n_depth": 512, "avg_ts": 41.25, "stddev_ts": 0.5}  # fmt: skip


class Page(HTMLParser):
    """Parts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "h1"):
            self.cells.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass


@pytest.fixture(scope="module", params=OPERATORS)
def own(request: pytest.FixtureRequest, bundles: Callable[..., Path]) -> Iterator[Engine]:
    kind: Operators = request.param
    if kind == "native":
        request.getfixturevalue("native")
    engine = load(bundles(kind), threads=1, operators=kind)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def figures(own: Engine) -> list[MethodFigures]:
    return bench_all([(own, ["ngram", "speculative"])], [PROMPT], SETTINGS, 2)


def write(path: Path, own: Engine, figures: list[MethodFigures], **more: Any) -> str:
    write_page(path, {str(own.bundle.path): own}, figures, PROMPT, SETTINGS, "edgespec bench 'a <b>'", **more)
    return path.read_text("utf-8")


def test_a_page_holds_all_figures_and_needs_nothing_else(
    own: Engine, figures: list[MethodFigures], tmp_path: Path
) -> None:
    text = write(tmp_path / "out.html", own, figures)
    page = Page(text)
    for row in (figure.as_dict() for figure in figures):
        at = page.cells.index(row["method"])
        assert page.cells[at + 1 : at + 3] == [f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x"]
    assert sum(tag == "svg" for tag, _ in page.tags) == 5
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert all((value or "").startswith("#") for value in links)
    assert "edgespec bench &#39;a &lt;b&gt;&#39;" in text
    assert list(tmp_path.iterdir()) == [tmp_path / "out.html"]


def test_it_counts_the_runs_that_the_terminal_counts(own: Engine, figures: list[MethodFigures], tmp_path: Path) -> None:
    """Plain decoding is the reference of the others, and not a separate run."""
    text = write(tmp_path / "out.html", own, figures, busy="the machine was busy: so it was")
    rows = [figure.as_dict() for figure in figures]
    same, runs = (sum(row[key] for row in rows[1:]) for key in ("same_text", "runs"))
    assert rows[0]["method"] == "plain"
    assert f"{same} of {runs} runs gave its very text" in text
    assert "threads used" in text
    assert "; the machine was busy: so it was</td>" in text


def test_the_text_is_the_models_own_once_the_refused_guesses_are_out(own: Engine) -> None:
    plain = own.generate(PROMPT, SETTINGS, method="ar")
    pieces = colored_text(own, PROMPT, SETTINGS.changed(method="speculative", fallback=False))
    assert pieces[0] == ("prompt", PROMPT)
    assert "".join(text for kind, text in pieces[1:] if kind != "rejected") == plain.text
    assert {kind for kind, _ in pieces} == {"prompt", "accepted", "rejected", "own"}


def test_passes_are_timed_by_rows_and_depth(own: Engine) -> None:
    by_rows, by_depth = time_passes(own, seconds=0.05)
    assert list(by_rows) == [1, 2, 3, 4, 6, 8, 12, 16]
    assert list(by_depth) == [64, 256]  # the context is 1024
    assert min(*by_rows.values(), *by_depth.values()) > 0


def test_names_are_no_markup(own: Engine, figures: list[MethodFigures], tmp_path: Path) -> None:
    llama = tmp_path / "bench.json"
    llama.write_text(json.dumps([LLAMA | {"model_type": "<script>alert(1)</script>"}]), "utf-8")
    text = write(tmp_path / "<i>x.html", own, figures, foreign=read_llama_bench(llama))
    assert "<script" not in text
    assert "<i>" not in text
    assert "tg128 @ d512" in text
    assert "41.2 ± 0.5" in text


def test_a_synthetic_size_is_said(
    own: Engine, figures: list[MethodFigures], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "synthetic" not in write(tmp_path / "a.html", own, figures)
    monkeypatch.setitem(own.bundle.manifest.provenance, "notes", ["other", "synthetic in size: made wide"])
    assert "synthetic in size: made wide" in write(tmp_path / "b.html", own, figures)


@pytest.mark.parametrize("name, message", [("page.txt", "ends in .html"), ("nowhere/page.html", "there is no folder")])
def test_a_page_that_cannot_be_written_is_refused_early(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_output(tmp_path / name, ".html", ".htm")


def test_llama_benchs_output_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps([LLAMA, LLAMA | {"n_prompt": 512, "n_gen": 0, "n_depth": 0}]), "utf-8")
    first, second = read_llama_bench(file)
    assert (first.model, first.test, first.n_threads) == ("small.gguf (llama 1B Q4_0)", "tg128 @ d512", 2)
    assert (first.avg_ts, first.stddev_ts, first.build_commit) == (41.25, 0.5, "abc123")
    assert second.test == "pp512"


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"model_filename": 3}]', "[" * 5000, "\x00"])
def test_what_is_no_output_of_llama_bench_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text, "utf-8")
    with pytest.raises(InvalidRequest, match=r"bench\.json"):
        read_llama_bench(file)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_llama_bench(tmp_path / "none.json")
