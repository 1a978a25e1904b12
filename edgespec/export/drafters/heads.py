"""Trained heads: their kinds, their target models, and folders that hold them.

A folder of heads holds ``edgespec_heads.json`` (``HeadsFile``) and ``heads.safetensors`` with float tensors

* medusa: ``medusa.I.weight`` [hidden, hidden], ``medusa.I.bias`` [hidden] of head I, and, if ``own``,
  ``medusa.I.lm_head.weight`` [vocab, hidden];
* blockwise: ``blockwise.inner.weight`` [inner, hidden], ``.inner.bias`` [inner], ``blockwise.outer.weight`` [count *
  hidden, inner], ``.outer.bias`` [count * hidden];
* early exits: ``exit.L.weight`` [hidden, hidden] for the exit after L layers.

``runtimes.manifest.HeadGroup`` defines what they compute from hidden states.  Published Medusa checkpoints (arXiv
2401.10774) have ``config.json`` and ``medusa_lm_head.safetensors`` or ``.pt``; the number of heads is taken from the
tensors, because some configurations are wrong about it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgespec.drafters.registry import METHODS, needing
from edgespec.errors import ExportError, install_hint
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.rules import Linear
from edgespec.export.source.derived import Extra, held
from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import read_header
from edgespec.runtimes.files.json_file import read_json, read_object, validated
from edgespec.runtimes.files.manifest import HeadGroup
from edgespec.runtimes.text.codec import TextCodec

SCHEMA = 1
DESCRIPTION, TENSORS = "edgespec_heads.json", "heads.safetensors"
CUT, CUT_BIAS = "lm_head.cut.weight", "lm_head.cut.bias"  # names of the cut LM head among a checkpoint's tensors
EMBEDDED = "drafter.embed_tokens.weight"  # a drafter's own embedding
MARKOV_TOKENS, MARKOV_OUT = "markov.tokens.weight", "markov.lm_head.weight"  # W1 and W2 of a Markov head
FUSE = "fc.weight"  # what fuses hidden states for a drafter


class HeadsFile(BaseModel):
    """``edgespec_heads.json``.

    Attributes:
        kind: the method that the heads are for.
        count: guesses of medusa and blockwise heads; early exits.
        hidden, vocab: of the model they were trained for.
        model: ``model_fingerprint`` of it.
        tokenizer: ``tokenizer_fingerprint`` of it.
        inner: blockwise: width of the hidden layer.
        exits: of early exits: after how many layers, ascending.
        own: medusa: each head has its own LM head.
        ranks: text kind ("greedy", "sampled", "text") -> [head][rank], share of held-out positions where the head's
            guess of that rank is right (an exit: where it is the model's own likeliest token).
        training: how they were trained; free form.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    kind: str
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
        if self.kind not in needing("heads"):
            raise ValueError(f"kind: expected a method that needs heads: {', '.join(needing('heads'))}")
        _ = self.groups  # checks the bounds of groups
        return self

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """The groups that a graph computes."""
        kind = METHODS[self.kind].heads
        assert kind is not None
        if kind == "exit":
            return tuple(HeadGroup(name=f"exit.{at}", kind="exit", count=1, layer=at) for at in self.exits)
        return (HeadGroup(name=kind, kind=kind, count=self.count, inner=self.inner, own=self.own),)


@dataclass(frozen=True)
class TrainedHeads:
    """Heads read from a folder."""

    file: HeadsFile  # their description
    tensors: Mapping[str, Extra]  # by the names that graphs use


@dataclass(frozen=True)
class HeadPlan:
    """Parts of a graph in addition to the model."""

    groups: tuple[HeadGroup, ...] = ()  # of heads, in the order of their gates
    cut: bool = False  # there is a cut LM head (``CUT``) for them
    only: bool = False  # the cut LM head is the only one: a draft model
    tapped: tuple[int, ...] = ()  # after how many layers a drafter looks at the residual stream, in its order


@dataclass(frozen=True)
class GroupMatrices:
    """The matrices of a group, as an operator set multiplies by them."""

    # together one matrix: [count * hidden, hidden] (medusa), [inner, hidden] (blockwise), [hidden, hidden]
    first: tuple[Linear, ...]
    second: Linear | None = None  # blockwise: [count * hidden, inner]
    heads: tuple[Linear, ...] = ()  # own LM heads, [vocab, hidden] each


def group_matrices(group: HeadGroup) -> GroupMatrices:
    """Return the names of a group's matrices."""
    if group.kind == "markov":
        return GroupMatrices((), heads=(Linear(MARKOV_OUT),))
    if group.kind == "embedding":
        return GroupMatrices(())
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
    """Return the cut LM head that belongs to the model's own."""
    return Linear(CUT, None if head.bias is None else CUT_BIAS)


def is_head(name: str, arch: Architecture) -> bool:
    """Whether a matrix is an LM head of any kind, or fuses hidden states, and so has the format of LM heads."""
    return name in (arch.head.weight, CUT, FUSE) or name.endswith(".lm_head.weight")


# -- whose heads these are ---------------------------------------------------------------------------------------------


def model_fingerprint(source: Checkpoint, final_norm: str, embedding: str) -> str:
    """Tell one model from another: SHA-256 over its last norm and the first rows of its embedding, in float32."""
    digest = hashlib.sha256()
    for values in (source.read(final_norm), source.read(embedding, slice(0, 64))):
        digest.update(np.ascontiguousarray(values, "<f4").tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(codec: TextCodec) -> str:
    """SHA-256 over the vocabulary, in the order of the ids."""
    vocabulary = sorted(codec.tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def check_heads(heads: TrainedHeads, arch: Architecture, codec: TextCodec | None, folder: Path) -> None:
    """Refuse heads of another model; without its tokenizer and weights, only sizes are compared.

    Raises:
        ExportError: another hidden size, vocabulary, tokenizer or model, or exits that it does not have; the message
            names both values.
    """
    file, facts = heads.file, arch.facts
    again = "train heads for this model with `edgespec train`"
    for what, theirs, ours in (("hidden size", file.hidden, facts.hidden), ("vocabulary", file.vocab, facts.vocab)):
        if theirs not in (ours, 0):
            raise ExportError(f"{folder}: heads for a model of {what} {theirs}, but this model's is {ours}", again)
    if codec is not None:
        prints: dict[str, Callable[[], str]] = {"tokenizer": lambda: tokenizer_fingerprint(codec),
                  "model": lambda: model_fingerprint(arch.source, arch.final_norm.weight, arch.embedding)}  # fmt: skip
        for what, compute in prints.items():
            theirs = getattr(file, what)
            if theirs is not None and theirs != (mine := compute()):
                raise ExportError(
                    f"{folder}: heads for a {what} with fingerprint {theirs:.12}, but this model's is {mine:.12}", again
                )
    if beyond := [at for at in file.exits if not 0 < at < facts.layers]:
        raise ExportError(f"{folder}: an exit after layer {beyond[0]}, but this model has {facts.layers} layers", again)


FLOATS = ("F16", "BF16", "F32", "F64")
PUBLISHED = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_heads.safetensors")


def read_heads(folder: Path) -> TrainedHeads:
    """Read heads from a folder of ``edgespec train`` or a published Medusa checkpoint.

    Raises:
        ExportError: no heads there, or tensors that do not match the description.
    """
    if not folder.is_dir():
        raise ExportError(f"{folder}: expected a folder with trained heads", "make one with `edgespec train`")
    if (folder / DESCRIPTION).is_file():
        file = read_description(folder)
        return _checked(TrainedHeads(file, {name: held(x) for name, x in _tensors(folder / TENSORS).items()}), folder)
    found = next((folder / name for name in PUBLISHED if (folder / name).is_file()), None)
    if found is None and any(folder.glob("*.safetensors")):  # Medusa-2: trained with the model, and stored with it
        whole = Checkpoint.open(folder)
        if inside := [name for name in whole.index if name.startswith("medusa_head.")]:
            return _published(folder / "config.json", {name: whole.read(name) for name in inside})
    if found is None:
        raise ExportError(
            f"{folder}: has neither {DESCRIPTION} nor {', '.join(PUBLISHED)}", "make heads with `edgespec train`"
        )
    return _published(found, _tensors(found))


def read_description(folder: Path) -> HeadsFile:
    """Read the description of a folder of ``edgespec train``; no tensor is read."""
    path = folder / DESCRIPTION
    again = "train the heads again"
    file = validated(HeadsFile, read_json(path, ExportError, again), path, ExportError, again)
    if file.schema_version > SCHEMA:
        raise ExportError(f"{path}: schema {file.schema_version} is newer than this edgespec, which reads {SCHEMA}")
    return file


def _published(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> TrainedHeads:
    """Names of the Medusa repository: ``K.0.linear.weight``, ``K.0.linear.bias``; ``K.1.weight``: own LM heads."""
    layouts = (
        r"(?:medusa_head\.)?(\d+)\.(?:0\.linear\.(?P<part>weight|bias)|(?P<own>1\.weight))",
        r"heads\.(\d+)\.(?:linear\.(?P<part>weight|bias)|(?P<own>lm_head\.weight))",
    )
    found: dict[str, Extra] = {}
    numbers: set[int] = set()
    for name, value in tensors.items():
        match = next((m for layout in layouts if (m := re.fullmatch(layout, name))), None)
        if match is None:
            if re.match(r"(medusa_head\.)?\d+\.\d+\.", name):
                raise ExportError(
                    f"{path}: tensor {name}: heads of more than one layer are not supported; expected one residual "
                    "block a head",
                    "train heads with `edgespec train medusa`",
                )
            continue  # a full checkpoint has the model's own tensors too
        numbers.add(int(match[1]))
        found[f"medusa.{match[1]}." + ("lm_head.weight" if match["own"] else str(match["part"]))] = held(value)
    if not numbers:
        raise ExportError(f"{path}: holds no Medusa heads; expected tensors like 0.0.linear.weight")
    weight = found.get("medusa.0.weight")
    if weight is None or numbers != set(range(len(numbers))):
        raise ExportError(f"{path}: expected heads 0, 1, ..., got {sorted(numbers)}", "download it again")
    own, config = found.get("medusa.0.lm_head.weight"), path.parent / "config.json"
    said = read_object(config, ExportError) if config.is_file() else {}
    described = {
        "kind": "medusa",
        "count": len(numbers),
        "hidden": (*weight.shape, 0)[0],
        "vocab": (*own.shape, 0)[0] if own else said.get("vocab_size") or 0,
        "own": own is not None,
        "training": {"published": path.name},
    }
    return _checked(TrainedHeads(validated(HeadsFile, described, path, ExportError, "download it again"), found), path)


def group_shapes(group: HeadGroup, hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a group."""
    matrices = group_matrices(group)
    rows, wide = group.inner if group.kind == "blockwise" else hidden, group.count * hidden
    found: dict[str, tuple[int, ...]] = {}
    for part in matrices.first:
        found[part.weight] = rows, hidden
        if part.bias:
            found[part.bias] = (rows,)
    if matrices.second is not None:
        found |= {matrices.second.weight: (wide, group.inner), str(matrices.second.bias): (wide,)}
    return found | {part.weight: (vocab, hidden) for part in matrices.heads}


def _checked(heads: TrainedHeads, where: Path) -> TrainedHeads:
    for group in heads.file.groups:
        for name, shape in group_shapes(group, heads.file.hidden, heads.file.vocab).items():
            tensor = heads.tensors.get(name)
            if tensor is None:
                raise ExportError(f"{where}: tensor {name} is missing", "train the heads again, or download them again")
            if tensor.shape != shape:
                raise ExportError(f"{where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
    return heads


def _tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """Read all tensors of a file as float32; the pickle reader accepts only numbers."""
    if path.suffix == ".pt":
        return _pickled(path)
    tensors = read_header(path)
    if other := [tensor for tensor in tensors.values() if tensor.dtype not in FLOATS]:
        raise ExportError(
            f"{path}: tensor {other[0].name} is of type {other[0].dtype}, expected one of {', '.join(FLOATS)}",
            "train the heads again, or download them again",
        )
    stored = Checkpoint(path.parent, {}, tensors)
    return {name: stored.read(name) for name in tensors}


def _pickled(path: Path) -> dict[str, NDArray[np.float32]]:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ExportError(
            f"{path}: is a torch file, and torch is not installed",
            f"{install_hint('train')}, or convert it to safetensors",
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe file
        raise ExportError(f"{path}: not a torch file of plain tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ExportError(f"{path}: expected a state dict, got {type(state).__name__}")
    tensors = {str(name): value.float().numpy() for name, value in state.items()}
    if broken := [name for name, value in tensors.items() if not np.isfinite(value).all()]:
        raise ExportError(f"{path}: tensor {broken[0]} holds NaN or infinity", "train the heads again")
    return tensors
