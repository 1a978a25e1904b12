"""Reading config.json: values with a type, and errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.ops import Activation
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.json_file import validated

Made = TypeVar("Made", bound=Part)

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Their names in config.json: ``gelu`` with the error function, ``gelu_tanh`` by its tanh approximation.

``relu2`` is the square of relu (arXiv 2109.08668).  ``xielu`` (arXiv 2411.13010) reads learnt numbers p, n, b: p x^2 +
b x above zero, n (e^x - 1 - x) + b x below.
"""


def part_of(kind: type[Made], file: Path, **fields: Any) -> Made:
    """Return facts of a model, or a part of them such as its experts, within the bounds of any."""
    return validated(kind, fields, file, ExportError, "repair config.json")


class Settings:
    """The configuration of a model.

    Args:
        aliases: names of this architecture's own for common keys, by the common name.
    """

    def __init__(self, path: Path, values: dict[str, Any], aliases: Mapping[str, str] = {}) -> None:
        self.file = path / "config.json"
        known = {common: values[own] for common, own in aliases.items() if own in values}
        self.values = {**values, **known}

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ExportError(f"{self.file}: expected a positive integer {key}, got {value!r}")
        return value

    def optional(self, key: str) -> int | None:
        """Return a positive integer, or None where it is absent."""
        return None if self.get(key) is None else self.integer(key)

    def each(self, key: str, layers: int, known: tuple[object, ...]) -> list[Any] | None:
        """Return a value for each layer, out of those that are known; None where the key is absent."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != layers or any(value not in known for value in values):
            raise ExportError(f"{self.file}: expected {key} to be {layers} of {known}, got {values!r}")
        return values

    def layers(self, key: str) -> list[int]:
        """Numbers of layers; none where the key is absent."""
        values = self.get(key, [])
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ExportError(f"{self.file}: expected {key} to be a list of layers, got {values!r}")
        return values

    def number(self, key: str, default: float) -> float:
        """Return a number that is not negative."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ExportError(f"{self.file}: expected a number {key}, got {value!r}")
        return float(value)

    def positive(self, key: str, default: float) -> float:
        """Return a number above zero."""
        value = self.number(key, default)
        if not value:
            raise ExportError(f"{self.file}: expected a positive number {key}, got {self.get(key)!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def activation(self, key: str, default: str) -> Activation:
        name = self.get(key, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UnsupportedModel(
                f"{self.file}: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def refuse(self, key: str, what: str, supported: str) -> None:
        """Refuse a model that has an option switched on."""
        if self.get(key):
            raise UnsupportedModel(f"{self.file}: {what} ({key}) is not supported; supported: {supported}")
