"""One source model -> one weight file and its graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.emit import HEADROOM, GraphOps
from edgespec.export.formats import Errors, linear_format
from edgespec.export.graph import WeightFile
from edgespec.export.source import Checkpoint
from edgespec.runtimes.manifest import Format, Graph, ModelPart

WEIGHTS = "model.data"
GRAPH_FILES = {"gated": "model.onnx", "plain": "model.plain.onnx"}


@dataclass(frozen=True)
class WrittenModel:
    """A model part on disk, and the relative squared error of each of its matrices."""

    part: ModelPart
    errors: Errors


def open_model(path: Path, context: int | None) -> Architecture:
    """Open a checkpoint as one of the supported architectures, limited to ``context`` tokens.

    Raises:
        ExportError: unreadable, unsupported, or a context beyond what the model was made for.
    """
    arch = architecture(Checkpoint.open(path))
    if context is not None:
        if not 1 < context <= arch.facts.context:
            raise ExportError(f"--context {context}: expected 2 to {arch.facts.context}, the model's own limit")
        arch.facts = arch.facts.model_copy(update={"context": context})
    return arch


def write_model(folder: Path, arch: Architecture, form: Format, *, gated: bool, prefix: str = "") -> WrittenModel:
    """Write ``model.data`` and the graphs over it into ``folder``.

    Args:
        folder: an existing folder.
        arch: the model.
        form: weight format of every matrix.
        gated: also write the graph whose sub-layers can be left out; the plain graph is always written.
        prefix: path of ``folder`` inside the bundle, with a trailing slash.
    """
    linear = linear_format(form)
    errors: Errors = {}
    graphs = {}
    with WeightFile(folder / WEIGHTS) as weights:
        # the second graph finds every tensor already stored
        for name in ("gated", "plain") if gated else ("plain",):
            ops = GraphOps(arch, linear, weights, errors, gates=name == "gated")
            arch.build(ops)
            file = GRAPH_FILES[name] if gated else GRAPH_FILES["gated"]
            ops.graph.save(folder / file)
            graphs[name] = Graph(file=prefix + file, gated=name == "gated")
    source = arch.source
    facts = arch.facts.model_copy(update={"parameters": sum(_size(source.shape(name)) for name in source.index)})
    part = ModelPart(
        facts=facts, format=form, graphs=graphs, weights=prefix + WEIGHTS, headroom=HEADROOM, min_rows=linear.min_rows
    )
    return WrittenModel(part, errors)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
