"""What tokenizer facts and provenance need to know of a model, whoever makes its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from edgespec.runtimes.files.manifest import ModelFacts


class Located(Protocol):
    """Where a model was read from."""

    @property
    def path(self) -> Path:
        """Its folder, with config.json and the tokenizer's files."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know about how it was read."""
        ...


class Described(Protocol):
    """A source model: an ``Architecture``, or one whose graph optimum makes."""

    @property
    def facts(self) -> ModelFacts:
        """Its sizes."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        ...

    @property
    def source(self) -> Located:
        """Where it lies."""
        ...
