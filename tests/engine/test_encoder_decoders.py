"""Encoder-decoders through the engine: every method's text is plain decoding's.

Those of float32, and beams, are compared with transformers' in ``tests/lossless/test_beams.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.sentences import pieces, sentences
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.footprint import memory_of
from edgespec.runtimes.files.formats import Format
from edgespec.server.app import make_app
from edgespec.server.models import Models
from tests.cli.conftest import Command, command
from tests.support.drawn import check_drawn

__all__ = ["command"]  # a fixture

LINES = (Path(__file__).parents[1] / "data" / "restore.txt").read_text("utf-8").splitlines()
METHODS = ["speculative", "self-spec", "swift", "ngram", "auto"]


def plain(text: str) -> str:
    """Leave out capitals and punctuation, as builtin:restore was trained."""
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter in " '")


SOURCES = [plain(line) for line in LINES[:6]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format], Engine]:
    """Give an engine, by format, over builtin:restore and its draft."""
    made: dict[str, Engine] = {}

    def get(form: Format) -> Engine:
        if form not in made:
            folder = tmp_path_factory.mktemp(form) / "bundle"
            layers = [] if form == "fp32" else ["self-spec", "swift"]
            options = ExportOptions("builtin:restore", folder, ["speculative", *layers], form, threads=1, trials=2,
                                    draft="builtin:restore-draft", draft_format="int4" if form == "int8" else None,
                                    quick=True)  # fmt: skip
            export_model(options, golden=False)
            made[form] = load(folder, threads=1)
        return made[form]

    return get


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_every_methods_text_is_plain_decodings(engine: Callable[[Format], Engine], form: Format) -> None:
    it, drafted = engine(form), set[str]()
    expected = [it.generate(source, method="ar") for source in SOURCES]
    assert sum(len(result.tokens) for result in expected) > 80
    for method in METHODS:
        for source, plainly in zip(SOURCES, expected, strict=True):
            made = it.generate(source, method=method, fallback=False)
            assert (made.tokens, made.text, made.finish) == (plainly.tokens, plainly.text, plainly.finish), method
            assert made.lossless
            assert made.exact
            drafted |= {method} if made.stats.accepted else set()
        together = it.generate_batch(SOURCES, method=method, batch=3)
        assert [made.tokens for made in together] == [plainly.tokens for plainly in expected], method
    assert {"speculative", "self-spec", "ngram"} <= drafted
    alike = [
        SequenceMatcher(None, line, made.text, autojunk=False).ratio()
        for line, made in zip(LINES[:6], expected, strict=True)
    ]
    assert sum(alike) > 0.95 * len(alike)  # of the characters; the sources are .93
    assert expected[0].stats.source_rows == len(it.inputs.sources.encode(SOURCES[0]) if it.inputs.sources else [])


def test_names_that_a_source_has_are_guessed(engine: Callable[[Format], Engine]) -> None:
    """The first n-grams are the source's: words that come again cost no pass each."""
    made = engine("int8").generate("art thou his father yet he would be king on't", method="ngram", fallback=False)
    assert made.stats.accepted > 3


@pytest.mark.parametrize("method", ["speculative", "self-spec"])
def test_drawn_texts_have_the_models_distribution(engine: Callable[[Format], Engine], method: str) -> None:
    check_drawn(engine("int8"), SOURCES[1], method)


def test_what_is_refused(engine: Callable[[Format], Engine]) -> None:
    it = engine("fp32")
    for asked, what in (
        (lambda: it.generate("x", target_language="ko"), "cannot be told to write ko"),
        (lambda: it.generate(np.zeros((3, 8), np.float32)), "this model reads a text or token ids"),
        (lambda: it.generate([10**6]), "outside the vocabulary"),
        (lambda: it.generate("word " * 4000), "cut it into parts"),
        (lambda: it.generate("x", prefix_tokens=[]), "prefix_tokens is"),
        (lambda: it.stream("x", beams=2), "there at the end"),
        (lambda: it.generate("x", beams=2, temperature=1.0), "without sampling"),
        (lambda: it.embed(["x"]), "gives no embeddings"),
        (lambda: it.save_session("file", "x"), "no session to save"),
    ):
        with pytest.raises(InvalidRequest, match=what):
            asked()


def test_devices_are_refused(engine: Callable[[Format], Engine], command: Command) -> None:
    bundle = str(engine("fp32").bundle.path)
    for asked in (["run", bundle, "--prompt", "x"], ["plan", bundle], ["plan", "builtin:restore"], ["bench", bundle]):
        command(*asked, "--device", "webgpu").refused(1, "run it on the CPU: leave --device and --operators out")


def test_long_texts_go_by_sentences() -> None:
    text = "One. Two words! \u4e09\u3002\u56db\uff01 \u201cFive?\u201d six\nseven " + "long " * 30
    assert "".join(sentences(text)) == text
    assert sentences(text)[:4] == ["One. ", "Two words! ", "\u4e09\u3002", "\u56db\uff01 "]
    parts = pieces(text, lambda part: len(part) <= 24)
    assert "".join(parts) == text
    assert all(len(part.strip()) <= 24 for part in parts)


def test_a_line_of_the_output_is_that_of_the_input(
    engine: Callable[[Format], Engine], command: Command, tmp_path: Path
) -> None:
    it, (source, output) = engine("int8"), (tmp_path / name for name in ("in.txt", "out.txt"))
    source.write_text(f"{SOURCES[0]}\n\n{SOURCES[1]}\n{SOURCES[2]}\n", "utf-8")
    asked = ("run", it.bundle.path, "--threads", 1, "--batch", 2, "--input", source, "--output")
    made = command(*asked, output, "--json")
    texts = [it.generate(one).text for one in SOURCES[:3]]
    assert output.read_text("utf-8").splitlines() == [texts[0], "", *texts[1:]]
    assert {name: made.json[name] for name in ("lines", "parts", "cut")} == {"lines": 4, "parts": 3, "cut": 0}
    command(*asked, output).refused(1, "is there already")
    command(*asked, tmp_path / "missing" / "out.txt").refused(1, "cannot be written")


def test_a_server_gives_the_same_texts(engine: Callable[[Format], Engine]) -> None:
    it = engine("int8")
    asked = {"model": "it", "prompt": SOURCES[:2], "temperature": 0}
    with TestClient(make_app(Models({"it": it.bundle.path})), base_url="http://localhost") as client:
        answer = client.post("/v1/completions", json=asked).json()
        assert [one["text"] for one in answer["choices"]] == [it.generate(source).text for source in SOURCES[:2]]
        assert it.inputs.sources is not None
        assert answer["usage"]["prompt_tokens"] == sum(len(it.inputs.sources.encode(source)) for source in SOURCES[:2])
        refused = client.post("/v1/completions", json=asked | {"edgespec": {"target_language": "ko"}})
        assert refused.status_code == 400
        assert "cannot be told to write ko" in refused.text


def test_memory_of_both_sides_is_planned(engine: Callable[[Format], Engine]) -> None:
    it = engine("int8")
    parts = {part.name: part.all for part in memory_of(it.bundle.manifest, it.run).parts}
    assert it.inputs.sourced
    it.generate(SOURCES[0], method="ar")
    assert 0 < it.inputs.nbytes <= parts["memories"] + parts["encoder scratch"]
    encoder = it.bundle.manifest.target.encoder
    assert encoder is not None
    size = it.bundle.manifest.files[encoder.weights].size
    assert 0.7 * size < parts["encoder"] <= size
