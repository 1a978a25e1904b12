"""Trained heads: what they are, and whose.

A folder of heads holds ``edgespec_heads.json`` (``HeadsFile``) and ``heads.safetensors`` with float tensors

* medusa: ``medusa.I.weight`` [hidden, hidden], ``medusa.I.bias`` [hidden] of head I, and, if ``own``,
  ``medusa.I.lm_head.weight`` [vocab, hidden];
* blockwise: ``blockwise.inner.weight`` [inner, hidden], ``.inner.bias`` [inner], ``blockwise.outer.weight``
  [count * hidden, inner], ``.outer.bias`` [count * hidden];
* paradecode: ``exit.L.weight`` [hidden, hidden] for the exit after L layers.

What they compute from hidden states is said at ``runtimes.manifest.HeadGroup``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.ops import Linear
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.text.codec import TextCodec

SCHEMA = 1
DESCRIPTION, TENSORS = "edgespec_heads.json", "heads.safetensors"
CUT, CUT_BIAS = "lm_head.cut.weight", "lm_head.cut.bias"  # names of the cut LM head among a checkpoint's tensors
FUSE = "fc.weight"  # what fuses hidden states for a drafter
HeadKind = Literal["medusa", "blockwise", "paradecode"]


class HeadsFile(BaseModel):
    """``edgespec_heads.json``.

    Attributes:
        kind: what the heads are for.
        count: guesses of medusa and blockwise heads; exits of paradecode.
        hidden, vocab: of the model they were trained for.
        model: ``model_fingerprint`` of it.
        tokenizer: ``tokenizer_fingerprint`` of it.
        inner: blockwise: width of the hidden layer.
        exits: paradecode: after how many layers, ascending.
        own: medusa: each head has its own LM head.
        ranks: text kind ("greedy", "sampled", "text") -> [head][rank], share of held-out positions where the head's
            guess of that rank is right (an exit: where it is the model's own likeliest token).
        training: how they were trained; free form.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    kind: HeadKind
    count: int = Field(gt=0)
    hidden: int = Field(gt=0)
    vocab: int = Field(ge=0, description="0: not known")
    model: str | None = None
    tokenizer: str | None = None
    inner: int = Field(default=0, ge=0)
    exits: list[int] = Field(default_factory=list)
    own: bool = False
    ranks: dict[str, list[list[float]]] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> HeadsFile:
        _ = self.groups  # whose own bounds hold here too
        return self

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """The groups that a graph computes."""
        if self.kind == "paradecode":
            return tuple(HeadGroup(name=f"exit.{at}", kind="exit", count=1, layer=at) for at in self.exits)
        return (HeadGroup(name=self.kind, kind=self.kind, count=self.count, inner=self.inner, own=self.own),)


@dataclass(frozen=True)
class TrainedHeads:
    """Heads read from a folder.

    Attributes:
        file: their description.
        tensors: by the names that graphs use.
    """

    file: HeadsFile
    tensors: Mapping[str, Extra]

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """The groups that a graph computes."""
        return self.file.groups


@dataclass(frozen=True)
class HeadPlan:
    """What a graph has beside the model itself.

    Attributes:
        groups: of heads, in the order of their gates.
        cut: there is a cut LM head (``CUT``) for them.
        only: the cut LM head is the only one: a draft model.
        tapped: after how many layers a drafter looks at the residual stream, in its order.
    """

    groups: tuple[HeadGroup, ...] = ()
    cut: bool = False
    only: bool = False
    tapped: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupMatrices:
    """The matrices of a group, as an operator set multiplies by them.

    Attributes:
        first: together one matrix: [count * hidden, hidden] (medusa), [inner, hidden] (blockwise), [hidden, hidden].
        second: blockwise: [count * hidden, inner].
        heads: own LM heads, [vocab, hidden] each.
    """

    first: tuple[Linear, ...]
    second: Linear | None = None
    heads: tuple[Linear, ...] = ()


def group_matrices(group: HeadGroup) -> GroupMatrices:
    """The names of a group's matrices."""
    if group.kind == "medusa":
        first = tuple(Linear(f"medusa.{i}.weight", f"medusa.{i}.bias") for i in range(group.count))
        own = tuple(Linear(f"medusa.{i}.lm_head.weight") for i in range(group.count)) if group.own else ()
        return GroupMatrices(first, heads=own)
    if group.kind == "blockwise":
        return GroupMatrices(
            (Linear("blockwise.inner.weight", "blockwise.inner.bias"),),
            Linear("blockwise.outer.weight", "blockwise.outer.bias"),
        )
    return GroupMatrices((Linear(f"exit.{group.layer}.weight"),))


def cut_head(head: Linear) -> Linear:
    """The cut LM head beside the model's own."""
    return Linear(CUT, None if head.bias is None else CUT_BIAS)


def is_head(name: str, arch: Architecture) -> bool:
    """Whether a matrix is an LM head of any kind, or fuses hidden states, and so has the format of LM heads."""
    return name in (arch.head.weight, CUT, FUSE) or name.endswith(".lm_head.weight")


# -- whose heads these are ---------------------------------------------------------------------------------------------


def model_fingerprint(source: Checkpoint, final_norm: str, embedding: str) -> str:
    """What tells one model from another: SHA-256 over its last norm and the first rows of its embedding, in float32."""
    digest = hashlib.sha256()
    for values in (source.read(final_norm), source.read(embedding, slice(0, 64))):
        digest.update(np.ascontiguousarray(values, "<f4").tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(codec: TextCodec) -> str:
    """SHA-256 over the vocabulary, in the order of the ids."""
    vocabulary = sorted(codec.tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def check_heads(heads: TrainedHeads, arch: Architecture, codec: TextCodec, folder: Path) -> None:
    """Refuse heads of another model.

    Raises:
        ExportError: another hidden size, vocabulary, tokenizer or model, or exits that it does not have; the message
            names both values.
    """
    file, facts = heads.file, arch.facts
    again = "train heads for this model with `edgespec train`"
    for what, theirs, ours in (("hidden size", file.hidden, facts.hidden), ("vocabulary", file.vocab, facts.vocab)):
        if theirs not in (ours, 0):
            raise ExportError(f"{folder}: heads for a model of {what} {theirs}, but this model's is {ours}", again)
    theirs_is = f"{folder}: heads for a {{}} with fingerprint {{:.12}}, but this model's is {{:.12}}"
    if file.tokenizer is not None and file.tokenizer != (mine := tokenizer_fingerprint(codec)):
        raise ExportError(theirs_is.format("tokenizer", file.tokenizer, mine), again)
    if file.model is not None:
        mine = model_fingerprint(arch.source, arch.final_norm.weight, arch.embedding)
        if file.model != mine:
            raise ExportError(
                f"{folder}: heads for a model with fingerprint {file.model[:12]}, but this model's is {mine[:12]}",
                again,
            )
    if beyond := [at for at in file.exits if not 0 < at < facts.layers]:
        raise ExportError(f"{folder}: an exit after layer {beyond[0]}, but this model has {facts.layers} layers", again)
