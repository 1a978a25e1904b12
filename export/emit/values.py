"""What waits to be written into a program, until something says where its result goes."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.export.architectures.ops import Activation, ExpertsRule, Linear, Norm
from edgespec.export.emit.program import Acts, Floats


@dataclass(frozen=True)
class Normed:
    """A norm that is computed when a matrix needs it, or when it is added to the residual stream."""

    x: Floats
    norm: Norm


@dataclass(frozen=True)
class Given:
    """Columns of what the pass is given, read when they are needed."""

    first: int
    width: int


@dataclass(frozen=True)
class Product:
    """A matrix product that waits for what happens to it; ``part`` of the matrices that share its input."""

    x: Value
    parts: tuple[Linear, ...]
    part: int


@dataclass(frozen=True)
class Mixture:
    """What a row's experts give, which waits for where it is added to."""

    x: Value
    rule: ExpertsRule
    activation: Activation


Value = Floats | Normed | Acts | Product | Given | Mixture
