"""Heads and a draft for a plan: those that are there, or what `edgespec train` makes unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import needing
from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.drafters.drafter import layers_like
from edgespec.export.drafters.eagle3 import Eagle3
from edgespec.export.drafters.heads import CUT, CUT_BIAS, DESCRIPTION, HeadPlan, HeadsFile, read_description, read_heads
from edgespec.export.source.derived import ExtendedCheckpoint
from edgespec.export.source.source import BUILTIN, ConfigOnly, resolve_heads
from edgespec.export.training.options import TrainOptions, choose_exits, choose_taps, draft_shape
from edgespec.runtimes.files.manifest import HeadGroup, ModelFacts


@dataclass(frozen=True)
class Shaped:
    """A tensor that is only planned."""

    shape: tuple[int, ...]

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """Not possible.

        Raises:
            ExportError: always.
        """
        raise ExportError(f"a planned tensor of shape {list(self.shape)} has no values")


@dataclass(frozen=True)
class PlannedHeads:
    """The heads of a planned bundle.

    Attributes:
        groups: by method.
        assumed: in words, what is not there yet.
        tapped: where a drafter looks at the model.
    """

    groups: dict[str, tuple[HeadGroup, ...]]
    assumed: list[str] = field(default_factory=list)
    tapped: tuple[int, ...] = ()

    def plan(self, cut: bool) -> HeadPlan | None:
        """Return what the graphs have; None = nothing.  ``cut``: heads share a cut LM head."""
        if not (self.groups or self.tapped):
            return None
        groups = tuple(group for groups in self.groups.values() for group in groups)
        return HeadPlan(groups, cut=cut, tapped=self.tapped)

    def extend(self, arch: Architecture, rows: int | None) -> None:
        """Put the tensors beside the model's own; ``rows``: of a cut LM head, None = there is none."""
        hidden = arch.facts.hidden
        shapes: dict[str, tuple[int, ...]] = {}
        for groups in self.groups.values():
            for group in groups:
                shapes |= group_shapes(group, hidden, rows or arch.facts.vocab)
        if rows is not None and shapes:
            shapes |= cut_shapes(arch, rows)
        if shapes:
            arch.source = ExtendedCheckpoint(arch.source, {name: Shaped(shape) for name, shape in shapes.items()})


def cut_shapes(arch: Architecture, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a cut LM head of so many rows."""
    return {CUT: (rows, arch.facts.hidden)} | ({CUT_BIAS: (rows,)} if arch.head.bias else {})


def group_shapes(group: HeadGroup, hidden: int, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a group, as ``export.drafters.heads`` names them; ``rows``: of an LM head of its own."""
    if group.kind == "exit":
        return {f"exit.{group.layer}.weight": (hidden, hidden)}
    if group.kind == "blockwise":
        return {
            "blockwise.inner.weight": (group.inner, hidden),
            "blockwise.inner.bias": (group.inner,),
            "blockwise.outer.weight": (group.count * hidden, group.inner),
            "blockwise.outer.bias": (group.count * hidden,),
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(group.count):
        shapes |= {f"medusa.{i}.weight": (hidden, hidden), f"medusa.{i}.bias": (hidden,)}
        if group.own:
            shapes[f"medusa.{i}.lm_head.weight"] = rows, hidden
    return shapes


def planned_heads(model: str, folders: Sequence[str], methods: Sequence[str], facts: ModelFacts) -> PlannedHeads:
    """Plan the heads of the methods: of given folders, of an embedded model, or else of the shape that training gives.

    Raises:
        ExportError: heads of no wanted method, two of a kind, or of another model's sizes.
    """
    found: dict[str, tuple[HeadGroup, ...]] = {}
    names = list(folders)
    if model.startswith(BUILTIN):
        given = {_described(name).kind for name in folders}
        names += [f"{model}-{kind}" for kind in needing("heads") if kind in methods and kind not in given]
    for name in names:
        file = _described(name)
        _check(name, file, facts, methods, found)
        found[file.kind] = file.groups
    missing = [kind for kind in needing("heads") if kind in methods and kind not in found]
    found |= {kind: assumed_groups(kind, facts) for kind in missing}
    assumed = [f"{kind} heads as `edgespec train {kind}` makes them: they are not trained yet" for kind in missing]
    return PlannedHeads(found, assumed)


def assumed_groups(kind: str, facts: ModelFacts) -> tuple[HeadGroup, ...]:
    """Heads of the shape that ``edgespec train`` gives by default."""
    if kind == "paradecode":
        exits = choose_exits((), facts.layers)
        return tuple(HeadGroup(name=f"exit.{at}", kind="exit", count=1, layer=at) for at in exits)
    count = TrainOptions.heads
    if kind == "blockwise":
        return (HeadGroup(name=kind, kind="blockwise", count=count, inner=count * facts.hidden),)
    return (HeadGroup(name=kind, kind="medusa", count=count, own=TrainOptions.own_lm_heads),)


def assumed_draft(target: Architecture) -> Architecture:
    """Return a draft of the shape that ``edgespec train draft`` gives by default."""
    facts = target.facts
    shape = draft_shape(TrainOptions("draft", "", Path()), facts)
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": facts.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": facts.context,
        "tie_word_embeddings": True,
    }
    return architecture(ConfigOnly(target.source.path, config))


def assumed_drafter(target: Architecture) -> tuple[Eagle3, tuple[int, ...]]:
    """Give a drafter of the shape that ``edgespec train eagle`` gives by default, and where it looks at the target."""
    tapped = choose_taps(target.facts.layers)
    source = ConfigOnly(target.source.path, layers_like(target, 1))
    return Eagle3(source, len(tapped), target.facts.context), tapped


def _described(name: str) -> HeadsFile:
    folder = resolve_heads(name)
    if (folder / DESCRIPTION).is_file():
        return read_description(folder)
    return read_heads(folder).file


def _check(
    name: str, file: HeadsFile, facts: ModelFacts, methods: Sequence[str], found: Mapping[str, tuple[HeadGroup, ...]]
) -> None:
    """As an export checks heads, fingerprints apart: those need the weights."""
    if file.kind in found:
        raise ExportError(f"{name}: the second {file.kind} heads: expected one folder of each kind")
    if file.kind not in methods:
        raise ExportError(f"{name}: holds {file.kind} heads, but not --method {file.kind}", f"add --method {file.kind}")
    for what, theirs, ours in (("hidden size", file.hidden, facts.hidden), ("vocabulary", file.vocab, facts.vocab)):
        if theirs not in (ours, 0):
            raise ExportError(f"{name}: heads for a model of {what} {theirs}, but this model's is {ours}",
                              "train heads for this model with `edgespec train`")  # fmt: skip
    if beyond := [at for at in file.exits if not 0 < at < facts.layers]:
        raise ExportError(f"{name}: an exit after layer {beyond[0]}, but this model has {facts.layers} layers")
