"""Bundles are written atomically, and match their manifests."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from edgespec.engine.loading import load
from edgespec.errors import EdgespecError, ExportError
from edgespec.export.emit.device import add_device_graphs
from edgespec.export.emit.graph import reads
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files import staged
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.files.manifest import MANIFEST, ModelPart, Operators
from tests.conftest import OPERATORS, Written
from tests.support import hf

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]


@pytest.fixture(scope="module")
def target(checkpoint: Callable[[str], Path]) -> str:
    return str(checkpoint(NAME))


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_what_is_there_is_not_replaced_unasked(tmp_path: Path, target: str) -> None:
    options = ExportOptions(target, tmp_path / "out", format="int8", threads=1)
    (tmp_path / "out").mkdir()  # an empty folder may be used
    export_model(options, golden=False)
    before = (tmp_path / "out" / MANIFEST).read_bytes()
    with pytest.raises(ExportError, match=r"already there(.|\n)*--overwrite"):
        export_model(options, golden=False)
    assert (tmp_path / "out" / MANIFEST).read_bytes() == before
    again = ExportOptions(target, tmp_path / "out", format="int4", threads=1, overwrite=True)
    export_model(again, golden=False)
    assert Bundle.open(tmp_path / "out").manifest.target.format == "int4"
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize("overwrite", [True, False])
def test_something_that_is_no_bundle_is_never_replaced(tmp_path: Path, target: str, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work", "utf-8")
    (tmp_path / "file").write_text("more work", "utf-8")
    for name in ("out", "file"):
        with pytest.raises(ExportError, match="exists and is not a bundle"):
            export_model(ExportOptions(target, tmp_path / name, overwrite=overwrite, threads=1), golden=False)
    assert below(tmp_path) == {"out", "out/thesis.txt", "file"}


def full_disk(*_: object, **__: object) -> Iterator[Any]:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*_: object, **__: object) -> Iterator[Any]:
    raise KeyboardInterrupt


PLACES = ["edgespec.export.emit.fill.WeightFile.write", "edgespec.export.emit.graph.GraphBuilder.save",
          "edgespec.export.pipeline.copy_tokenizer", "edgespec.export.onnx_model.parity_report",
          "edgespec.export.measuring.method_parts.measure_steps", "edgespec.export.pipeline.write_manifest",
          "edgespec.export.bundle.writer.save_manifest", "pathlib.Path.rename"]  # fmt: skip


@pytest.mark.parametrize("older", [True, False], ids=["over an older bundle", "new"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("failure, error", [(full_disk, ExportError), (interrupted, KeyboardInterrupt)])
def test_a_failed_export_leaves_nothing(
    tmp_path: Path,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[..., Any],
    error: type[BaseException],
    place: str,
    older: bool,
) -> None:
    if older:
        export_model(ExportOptions(target, tmp_path / "out", format="int8", threads=1), golden=False)
    before = below(tmp_path)
    options = ExportOptions(target, tmp_path / "out", format="int4", threads=1, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(place, failure)
        patch.setattr(staged, "_exchange", lambda *_: False)  # else nothing over an older bundle is renamed
        with pytest.raises(error) as caught:
            export_model(options, golden=False)
    if error is ExportError:
        assert "No space left" in str(caught.value)
        assert "free some space" in str(caught.value)
    assert below(tmp_path) == before
    if older:
        assert Bundle.open(tmp_path / "out").manifest.target.format == "int8"
        assert load(tmp_path / "out", threads=1).generate([5], max_new_tokens=3, ignore_eos=True).tokens


def test_an_older_bundle_survives_a_failed_last_step(
    tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model(ExportOptions(target, tmp_path / "out", format="int8", threads=1), golden=False)
    before, original = below(tmp_path), Path.rename

    def rename(self: Path, to: Path) -> Path:
        if self.name.startswith(".out.part-") and not self.name.endswith(".old"):
            full_disk()
        return original(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(staged, "_exchange", lambda *_: False)
    with pytest.raises(ExportError, match="No space left"):
        export_model(ExportOptions(target, tmp_path / "out", format="int4", threads=1, overwrite=True), golden=False)
    assert below(tmp_path) == before
    assert Bundle.open(tmp_path / "out").manifest.target.format == "int8"


def test_a_place_that_cannot_be_written(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(EdgespecError, match="cannot write here"):
        export_model(ExportOptions(target, tmp_path / "file" / "out", threads=1), golden=False)


OTHER = "qwen2_untied"


def graphs(folder: Path, part: ModelPart, native: bool) -> Iterator[tuple[str, onnx.ModelProto]]:
    for name, graph in part.graphs.items():
        if (graph.operators == "native") == native:
            yield name, onnx.load(folder / graph.file, load_external_data=False)


def files_named(model: onnx.ModelProto) -> set[str]:
    """Return the names of the files that hold the tensors of ``model``."""
    return {item.value for one in model.graph.initializer for item in one.external_data if item.key == "location"}


def everything(writer: Callable[..., Written], layout: Operators, form: str = "int4") -> tuple[Path, ModelPart]:
    """Write a model with all graphs that ``form`` has, those for a device included; return its folder and entry."""
    made = writer(layout, OTHER, form)
    part = made.part
    if form in ("int4", "fp32"):
        part = add_device_graphs(made.folder, made.arch, part, "webgpu", None)
    return made.folder, part


@pytest.mark.parametrize("layout", OPERATORS)
def test_a_graph_of_the_other_layout_names_a_file_that_is_not_there(
    writer: Callable[..., Written], layout: Operators
) -> None:
    folder, part = everything(writer, layout)
    converted = f"model.{'stock' if layout == 'native' else 'native'}.data"
    assert part.converted == converted
    assert not (folder / converted).exists()
    for native in (True, False):
        own = native == (layout == "native")
        for name, model in graphs(folder, part, native):
            assert files_named(model) <= {"model.data" if own else converted}, name
    model = dict(graphs(folder, part, True))["native"]
    assert files_named(model)


@pytest.mark.parametrize("form", FORMATS)
def test_plain_onnxruntime_finds_no_weights_rather_than_others(writer: Callable[..., Written], form: str) -> None:
    """The bundle is for native operators: fp32 and w8a8 used to open, and gave wrong numbers."""
    folder, part = everything(writer, "native", form)
    stock = [graph for graph in part.graphs.values() if graph.operators == "stock" and graph.device == "cpu"]
    assert stock
    for graph in stock:
        with pytest.raises(Exception, match=r"model\.stock\.data"):
            onnxruntime.InferenceSession(str(folder / graph.file), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", OPERATORS)
def test_every_initializer_is_read(writer: Callable[..., Written], layout: Operators, form: str) -> None:
    """ONNX Runtime warns of others."""
    folder, part = everything(writer, layout, form)
    for native in (True, False):
        for name, model in graphs(folder, part, native):
            read = {one for node in model.graph.node for one in reads(node)}
            assert {one.name for one in model.graph.initializer} <= read, name
