"""Write the graph of a decoder of codes: a ``GraphBuilder`` with weights inside, and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.emit.graph import GraphBuilder
from edgespec.export.emit.plan import WeightLayout

Floats = NDArray[np.float32]


class CodeTensors:
    """Tensors of a checkpoint by name."""

    def __init__(self, read: Callable[[str], Floats], names: Iterable[str]) -> None:
        self._read, self.names = read, frozenset(names)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __call__(self, name: str) -> Floats:
        """Read a tensor as float32.

        Raises:
            ExportError: there is none of that name.
        """
        if name not in self.names:
            raise ExportError(f"the decoder of codes has no tensor {name}", "give the whole checkpoint")
        return self._read(name)


class CodeGraph(GraphBuilder):
    """A graph over the tensors of a checkpoint."""

    def __init__(self, tensors: CodeTensors) -> None:
        super().__init__(WeightLayout())
        self.tensors = tensors

    def weight(self, name: str) -> str:
        """Put a tensor of the checkpoint into the graph."""
        return self.constant(name, self.tensors(name))

    def shape(self, *sizes: int) -> str:
        """Name a constant of sizes, int64 [n]."""
        return self.constant(f"sizes_{'_'.join(map(str, sizes))}", np.array(sizes, np.int64))

    def conv(self, x: str, name: str, **how: Any) -> str:
        """Convolve by ``name``.weight, and ``name``.bias where there is one; ``how``: attributes of Conv."""
        bias = [self.weight(f"{name}.bias")] if f"{name}.bias" in self.tensors else []
        return self.node("Conv", [x, self.weight(f"{name}.weight"), *bias], **how)
