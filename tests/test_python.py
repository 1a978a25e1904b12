"""Using the package by hand: completion, printing, wrong names, an export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.engine.loading import load
from edgespec.engine.result import Result
from edgespec.errors import ExportError, InvalidRequest
from edgespec.export.source.source import builtin_drafters, builtin_heads, builtin_names, resolve
from edgespec.planning.budget import parse_bytes
from edgespec.runtimes.options import LoadOptions


def test_a_result_prints_its_text_and_is_short_otherwise() -> None:
    result = Result("word " * 999, list(range(999)), "eos", Stats(), None, "ar", "", True, True, [])
    assert f"{result}" == result.text
    assert repr(result).startswith("<Result 'word word ")
    assert "999 tokens, finish='eos'" in repr(result)
    assert len(repr(result)) < 200


def test_what_an_engine_gives_says_how_it_stands(bundles: Callable[..., Path]) -> None:
    with load(bundles("stock"), threads=1) as engine:
        stream = engine.stream("The king", max_new_tokens=3)
        assert repr(stream) == "<Stream, 0 tokens, running>"
        for _ in stream:
            pass
        assert repr(stream) == "<Stream, 3 tokens, length>"
        stream = engine.stream("The king", max_new_tokens=9)
        next(iter(stream))
        stream.close()
        assert repr(stream).endswith((" tokens, closed>", " tokens, cancelled>"))
        for one in (engine, engine.bundle, stream):
            assert len(repr(one)) < 400
        assert repr(engine).startswith("<Engine ")
    assert "closed" in repr(engine)


@pytest.mark.parametrize(
    "given, meant",
    [
        ("max_tokens", "'max_new_tokens'"),
        ("temprature", "'temperature'"),
        ("topk", "'top_k'"),
        ("json_schema", "grammar=Grammar.json_schema(...)"),
        ("regex", "grammar=Grammar.regex(...)"),
        ("stream", "engine.stream(...)"),
    ],
)
def test_a_setting_that_is_misspelt_or_called_otherwise_is_suggested(given: str, meant: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Settings().changed(**{given: 1})
    assert str(caught.value) == f"unknown setting '{given}'\nhint: did you mean {meant}?"


def test_a_name_like_no_other_gets_all_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="unknown setting 'zzz'\nhint: there are: accept, "):
        Settings().changed(zzz=1)
    with pytest.raises(InvalidRequest, match="did you mean 'threads'"):
        LoadOptions().changed(thread=1)
    with pytest.raises(InvalidRequest, match="unknown export option 'method'\nhint: did you mean 'methods'"):
        edgespec.export("builtin:shakespeare", tmp_path / "x", method="swift")  # type: ignore[call-arg]


@pytest.mark.parametrize("text, size", [("1G", 1 << 30), ("512M", 512 << 20), ("1.5G", 3 << 29), ("64k", 1 << 16)])
def test_budgets_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_the_hint_names_all_that_is_embedded() -> None:
    with pytest.raises(ExportError) as error:
        resolve("builtin:nope")
    for name in (*builtin_names(), *builtin_drafters(), *builtin_heads()):
        assert name in str(error.value)


def test_an_export_from_python(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int, str]] = []
    folder = edgespec.export(
        "builtin:shakespeare-draft", tmp_path / "bundle", format="int8", threads=1, progress=lambda *it: seen.append(it)
    )
    assert folder == tmp_path / "bundle"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert {"weights", "parity", "golden"} <= {stage for stage, *_ in seen}
    assert seen[-1][:3] == ("golden", 1, 1)
    with load(folder, threads=1) as engine:
        manifest = engine.bundle.manifest
        assert (manifest.target.format, bool(manifest.golden)) == ("int8", True)
        assert engine.generate("ROMEO:", max_new_tokens=4).tokens
    with pytest.raises(ExportError):
        edgespec.export("builtin:shakespeare-draft", folder)  # it already exists
    options = edgespec.ExportOptions("builtin:shakespeare", Path("elsewhere"), methods=["magic"])
    with pytest.raises(ExportError, match="unknown method 'magic'"):
        edgespec.export("builtin:shakespeare-draft", folder, options)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"format": "int5"}, "format 'int5': expected one of int4, int8"),
        ({"methods": "magic"}, "unknown method 'magic'"),
        ({"quantizer": "best"}, "unknown quantizer 'best'"),
        ({"target_size": "much"}, "no amount of memory"),
    ],
)
def test_an_export_that_cannot_be(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(edgespec.EdgespecError, match=message):
        edgespec.export("builtin:shakespeare-draft", tmp_path / "bundle", **wrong)
    assert not list(tmp_path.iterdir())


def test_an_export_does_not_replace_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExportError, match="the current folder"):
        edgespec.export("builtin:shakespeare-draft", ".", overwrite=True)
    with pytest.raises(InvalidRequest, match="model is 3: expected"):
        edgespec.export(3, "x")  # type: ignore[arg-type]
