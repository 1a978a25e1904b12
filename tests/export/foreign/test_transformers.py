"""Calling transformers' exporter: in its stead a pretended process, and the real one where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.engine.loading import load
from edgespec.errors import UnsupportedModel
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.foreign import model as foreign_model
from edgespec.export.foreign import write
from edgespec.export.foreign.model import ForeignModel
from edgespec.export.foreign.write import exporter_missing
from edgespec.export.loading import load_source
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import dry_run, export_model
from tests.export.foreign.test_foreign import CONFIG, NAME, SEED, refused
from tests.support import every_decoder, hf
from tests.support.foreign import MODEL_TYPE, write_export

MISSING = exporter_missing()
PRETENDED = "pretended_capture"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an export by optimum, which tests only read; return its folder."""
    return write_export(tmp_path_factory.mktemp("export"), CONFIG, SEED)


@pytest.fixture
def harbour(tmp_path: Path) -> Path:
    """Write a checkpoint whose ``model_type`` is unknown."""
    folder = hf.write_reference_checkpoint(tmp_path / "harbour", NAME)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": MODEL_TYPE}), "utf-8")
    return folder


def test_without_transformers_both_ways_are_named(
    harbour: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_model, "exporter_missing", lambda: "onnxscript is not installed here")
    message = refused(f"architecture '{MODEL_TYPE}' is not supported", harbour, tmp_path / "bundle", UnsupportedModel)
    for part in (*ARCHITECTURES, "onnxscript is not installed here", ".[transformers]", "optimum-cli export onnx"):
        assert part in message


def test_the_class_of_bundles_names_its_extra() -> None:
    code = "import sys; sys.modules['torch'] = None; import edgespec.transformers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert ".[transformers]" in run.stderr.splitlines()[-1]


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give a function that lets another process, which runs ``body``, stand for transformers' exporter."""
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setattr(foreign_model, "exporter_missing", lambda: None)
    monkeypatch.setattr(write, "_CAPTURE", PRETENDED)

    def put(body: str) -> None:
        (packages / f"{PRETENDED}.py").write_text(f"import os, shutil, sys\n{body}\n", "utf-8")

    return put


def test_the_exporter_is_called_for_a_checkpoint(
    harbour: Path, source: Path, tmp_path: Path, pretended: Callable[[str], None]
) -> None:
    pretended(f"print('noise'); shutil.copy({str(source / 'model.onnx')!r}, sys.argv[2])")
    options = ExportOptions(str(harbour), tmp_path / "bundle", format="int4", threads=1)
    plan = dry_run(options)  # before the exporter was called: by the checkpoint's shapes
    assert isinstance(load_source(options).models.target, ForeignModel)
    manifest = export_model(options, golden=False)
    assert manifest.target.origin == "optimum"  # by its ports: the pretended exporter writes such a graph
    assert plan["weight_bytes"]["target"] == pytest.approx(manifest.memory["weight_bytes"]["target"], rel=0.1)
    names = {path.name for path in (tmp_path / "bundle").iterdir()}
    assert names >= {"edgespec.json", "model.onnx", "model.data", "tokenizer.json"}
    assert write.WORK not in names
    assert not any(write.WORK in name for name in manifest.files)
    assert load(tmp_path / "bundle").generate("The", max_new_tokens=5, ignore_eos=True).stats.tokens == 5


@pytest.mark.parametrize(
    "body, message",
    [
        ("sys.exit('noise\\nValueError: no such layer')", "cannot export this model: ValueError: no such layer"),
        ("print('KeyError: it', file=sys.stderr); sys.exit(1)", "cannot export this model: KeyError: it"),
        ("os._exit(7)", "exit code 7"),
        ("pass", "not a readable ONNX file"),
    ],
)
def test_a_failed_export_leaves_nothing(
    harbour: Path, tmp_path: Path, pretended: Callable[[str], None], body: str, message: str
) -> None:
    pretended(body)
    refused(message, harbour, tmp_path / "bundle")


def test_pickles_are_not_given_to_the_exporter(harbour: Path, tmp_path: Path, pretended: Callable[[str], None]) -> None:
    pretended("raise AssertionError('called')")
    (harbour / "model.safetensors").rename(harbour / "pytorch_model.bin")
    refused("only as pickle", harbour, tmp_path / "bundle")


@pytest.mark.nightly
@pytest.mark.skipif(MISSING is not None, reason=f"needs edgespec[transformers]: {MISSING}")
@pytest.mark.parametrize("kind", every_decoder.SAMPLE)
def test_the_real_exporter(kind: str, tmp_path: Path) -> None:
    """A bundle of every sampled type writes transformers' own text by every method; only states go row by row."""
    row = every_decoder.try_type(kind, tmp_path)
    assert row.exported, row.why
    assert row.equal, row.why
    assert row.exact, row.why
    assert row.rows != (kind in every_decoder.SINGLE), row.why
    assert {"ar", "ngram", "speculative"} <= {*row.methods}, row.why
