"""Where models come from: folders, the hub, the embedded ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import ExportError
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.heads import check_heads, read_heads
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.source.source import builtin_heads, builtin_names, resolve
from edgespec.runtimes.text.codec import TextCodec

NAME = "llama_tied_gqa"


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that may be damaged."""
    return Path(shutil.copytree(checkpoint(NAME), tmp_path / "model"))


def test_embedded_models() -> None:
    assert {"shakespeare", "shakespeare-draft"} <= set(builtin_names())
    for name in builtin_names():
        open_model(resolve(f"builtin:{name}"), None)
    with pytest.raises(ExportError, match=r"no embedded model 'hamlet'(.|\n)*shakespeare-draft"):
        resolve("builtin:hamlet")


@pytest.mark.parametrize("kind", ["medusa", "blockwise", "paradecode"])
def test_embedded_heads(kind: str) -> None:
    name = f"shakespeare-{kind}"
    assert name in builtin_heads()
    assert name not in builtin_names()
    folder, model = resolve(f"builtin:{name}"), resolve("builtin:shakespeare")
    heads = read_heads(folder)
    check_heads(heads, open_model(model, None), TextCodec(model), folder)
    assert heads.file.kind == kind
    assert heads.file.ranks["greedy"][0][0] > 0.3
    with pytest.raises(ExportError, match=r"has no config\.json"):
        open_model(folder, None)


def test_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(folder)) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert resolve("~/model") == folder
    with pytest.raises(ExportError, match="got a file"):
        resolve(str(folder / "config.json"))
    for path in ("/no/such/folder", "./nothing", "../a/b/c", "a/b/c"):
        with pytest.raises(ExportError, match="no such folder"):
            resolve(path)


def test_a_hub_model_is_downloaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def download(name: str, *, revision: str | None = None, allow_patterns: list[str] | None = None) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("someone/some-model", "v1") == folder
    ((name, revision, patterns),) = asked
    assert (name, revision) == ("someone/some-model", "v1")
    assert "*.safetensors" in patterns
    assert not [pattern for pattern in patterns if "bin" in pattern or pattern in ("*", "*.py")]
    manifest = Exporter(ExportOptions("someone/some-model", tmp_path / "out", revision="v1", threads=1)).run()
    assert manifest.provenance["model"] == "someone/some-model"
    assert manifest.provenance["revision"] == "v1"


@pytest.mark.parametrize(
    "error", [OSError("We couldn't connect\nsecond line"), ValueError("gated repo"), RuntimeError()]
)
def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ExportError, match=r"someone/some-model: no local folder(.|\n)*check the spelling") as caught:
        resolve("someone/some-model")
    assert "second line" not in str(caught.value)
