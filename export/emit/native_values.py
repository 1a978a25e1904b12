"""What operations give while a native program is written: buffers, and values that wait for what reads them."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.export.architectures.ops import Activation, ExpertsRule, Linear, Norm
from edgespec.export.emit.program import Acts, Floats


@dataclass(frozen=True)
class LazyNorm:
    """A norm that is computed when a matrix needs it, or when it is added to the residual stream."""

    x: Floats
    norm: Norm


@dataclass(frozen=True)
class LazySlice:
    """Columns of the rows that the pass reads, loaded when they are needed."""

    first: int
    width: int


@dataclass(frozen=True)
class LazyProduct:
    """A matrix product that waits for what happens to it; ``part`` of the matrices that share its input."""

    x: Value
    parts: tuple[Linear, ...]
    part: int


@dataclass(frozen=True)
class LazyExperts:
    """A mixture of experts, emitted once its destination buffer is known."""

    x: Value
    rule: ExpertsRule
    activation: Activation


@dataclass(frozen=True)
class LazyActivation:
    """An activation of a product, which is made together with it where a matrix reads it."""

    x: LazyProduct
    activation: Activation


Value = Floats | LazyNorm | Acts | LazyProduct | LazySlice | LazyExperts | LazyActivation
