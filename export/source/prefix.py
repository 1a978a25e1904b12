"""Checkpoints that hold the decoder under another prefix: base models, and the text part of larger ones."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.export.source.source import Checkpoint


class Renamed(Checkpoint):
    """Some tensors of a checkpoint under other names; the others are not there.

    Args:
        base: the checkpoint.
        names: the names there, by the new ones.
    """

    def __init__(self, base: Checkpoint, names: dict[str, str]) -> None:
        super().__init__(base.path, base.config, notes=base.notes)
        self._base, self._names = base, names

    @cached_property
    def index(self) -> dict[str, Path]:
        """Which file holds which tensor."""
        return {new: self._base.index[old] for new, old in self._names.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._base.shape(self._names.get(name, name))

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> NDArray[np.float32]:
        """(Part of) a tensor as float32."""
        return self._base.read(self._names.get(name, name), rows, columns)


def with_usual_prefix(source: Checkpoint, layers_at: str) -> Checkpoint:
    """A checkpoint whose layers stand at ``layers_at``, such as ``model.layers``.

    Known others: without the first word (a base model saved alone), and below ``language_model`` (the text part of a
    model for images and text, in the order of either version of transformers) or ``text_model`` (Idefics 3, SmolVLM).
    """
    first, rest = layers_at.split(".", 1)

    def starts(prefix: str) -> bool:
        return any(name.startswith(f"{prefix}.0.") for name in source.index)

    if starts(layers_at):
        return source
    if starts(rest):
        bare = {name: name if name.startswith("lm_head.") else f"{first}.{name}" for name in source.index}
        return Renamed(source, {new: old for old, new in bare.items()})
    inside = ((f"{first}.language_model.", f"{first}."), (f"{first}.text_model.", f"{first}."), ("language_model.", ""))
    for outer, inner in inside:
        if starts(outer + (rest if inner else layers_at)):
            names = {inner + name.removeprefix(outer): name for name in source.index if name.startswith(outer)}
            names |= {name: name for name in source.index if name.startswith("lm_head.")}
            return Renamed(source, names)
    return source
