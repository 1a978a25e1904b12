"""One source model -> one weight file and its graphs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.emit import GraphOps
from edgespec.export.formats import Errors, linear_format
from edgespec.export.graph import WeightFile
from edgespec.export.heads import HeadPlan
from edgespec.export.native.emit import NativeOps
from edgespec.export.native.formats import NativeFormat
from edgespec.export.quantizers import LevelSource
from edgespec.export.source import Checkpoint
from edgespec.export.vectors import HEADROOM
from edgespec.runtimes.manifest import Format, Graph, HeadVocab, Layout, ModelPart

WEIGHTS = "model.data"
MAIN, PLAIN, NATIVE = "model.onnx", "model.plain.onnx", "model.native.onnx"
INDEX = "model.weights.json"


@dataclass(frozen=True)
class WrittenModel:
    """A model part on disk, and the relative squared error of each of its matrices."""

    part: ModelPart
    errors: Errors


def open_model(path: Path, context: int | None, adapter: Path | None = None) -> Architecture:
    """Open a checkpoint as one of the supported architectures, limited to ``context`` tokens.

    Args:
        path: a model's folder or .gguf file.
        context: None = as far as the model was made for.
        adapter: folder of a LoRA adapter to merge into it.

    Raises:
        ExportError: unreadable, unsupported, or a context beyond what the model was made for.
    """
    arch = architecture(Checkpoint.open(path, adapter))
    if context is not None:
        if not 1 < context <= arch.most_context:
            raise ExportError(f"--context {context}: expected 2 to {arch.most_context}, the model's own limit")
        arch.facts = arch.facts.model_copy(update={"context": context})
    return arch


def write_model(
    folder: Path,
    arch: Architecture,
    form: Format,
    *,
    head: Format | None = None,
    chosen: LevelSource | None = None,
    gated: bool = False,
    draft: bool = False,
    prefix: str = "",
    layout: Layout = "native",
    plan: HeadPlan | None = None,
    head_vocab: HeadVocab | None = None,
) -> WrittenModel:
    """Write ``model.data`` and the graphs over it into ``folder``.

    With stock operators a target has two graphs: the strict one (its sub-layers gated if asked for), whose rows have
    the same bits in every pass, and the plain one, the fastest plain decoding.  A draft needs only the latter.  With
    native operators one graph does all of it.  The weights are stored once; ``model.weights.json`` says where each
    lies in either layout, so that the other one can be made without looking into the graphs.

    Args:
        folder: an existing folder.
        arch: the model.
        form: weight format of every matrix.
        head: weight format of the LM head and of the embedding tied to it; None = ``form``.
        chosen: the levels of int4 and int8 matrices; None = round to nearest.
        gated: sub-layers can be left out of the strict graph.
        draft: only the plain graph.
        prefix: path of ``folder`` inside the bundle, with a trailing slash.
        layout: which operators' weights are stored.
        plan: heads beside the LM head; the checkpoint has their tensors.  None = hidden states are not asked for either
            (native graphs give them anyway).
        head_vocab: the tokens of the plan's cut LM head.
    """
    linear = linear_format(form, chosen)
    head_linear = linear_format(head, chosen) if head else linear
    errors: Errors = {}
    plan, hidden = plan or HeadPlan(), plan is not None and not draft
    strict = Graph(file=prefix + MAIN, gated=gated, padded=True, hidden=hidden)
    graphs = {"plain": Graph(file=prefix + (MAIN if draft else PLAIN))}
    if not draft:
        graphs = {"gated" if gated else "strict": strict} | graphs
    with WeightFile(folder / WEIGHTS, plan=layout != "stock") as weights:
        for graph in graphs.values():  # the second graph finds every tensor already stored
            kind = {"gates": graph.gated, "padded": graph.padded, "hidden": graph.hidden}
            ops = GraphOps(arch, linear, weights, errors, head=head_linear, plan=plan, **kind)
            arch.build(ops)
            ops.graph.save(folder / graph.file.removeprefix(prefix))
    with WeightFile(folder / WEIGHTS, plan=layout != "native") as packed:
        native = NativeOps(arch, NativeFormat(form, arch, head or form, chosen), packed, errors, plan)
        arch.build(native)
        native.graph.save(folder / NATIVE)
    graphs["native"] = Graph(file=prefix + NATIVE, gated=True, hidden=True, operators="native")
    _write_index(folder / INDEX, weights, packed)
    facts = arch.facts.model_copy(update={"parameters": sum(prod(shape) for shape in arch.tensors.values())})
    part = ModelPart(
        facts=facts,
        format=form,
        quantizer=chosen.quantizer_name if chosen else "rtn",
        head_format=head,
        graphs=graphs,
        weights=prefix + WEIGHTS,
        index=prefix + INDEX,
        layout=layout,
        headroom=HEADROOM,
        min_rows=max(linear.min_rows, head_linear.min_rows),
        heads=list(plan.groups),
        head_vocab=head_vocab,
        cut=plan.only,
    )
    return WrittenModel(part, errors)


def _write_index(path: Path, stock: WeightFile, native: WeightFile) -> None:
    """Where each tensor lies in either layout, and which matrices differ between them."""

    def entries(file: WeightFile) -> dict[str, list[object]]:
        return {
            name: [entry.offset, entry.length, entry.dtype.str, list(entry.dims)]
            for name, entry in file.entries.items()
        }

    matrices = {name: asdict(packed) for name, packed in native.packed.items()}
    index = {"matrices": matrices, "stock": entries(stock), "native": entries(native)}
    path.write_text(json.dumps(index), "utf-8")
