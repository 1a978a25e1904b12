"""What an architecture may say: the operations of a decoder, with three interpreters.

``GraphOps`` (emit.py) turns them into ONNX nodes; ``NumpyOps`` (reference.py) computes them from the source weights,
one layer at a time, which is what a bundle's parity is measured against; ``CalibrationOps`` (calibrate.py) quantizes
them on such a run.  An architecture file is written once, for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

X = TypeVar("X")
Kind = Literal["attention", "mlp"]


@dataclass(frozen=True)
class Linear:
    """A matrix of the checkpoint, [n, k], and its bias [n]."""

    weight: str
    bias: str | None = None


class Ops(Protocol[X]):
    """The operations.  ``X`` is an activation [1, T, width]: a value name in a graph, an array in numpy."""

    def embed(self, weight: str) -> X:
        """Rows of the embedding matrix for the ids of this pass -> [1, T, hidden]."""
        ...

    def norm(self, x: X, weight: str) -> X:
        """Root-mean-square norm times ``weight``."""
        ...

    def linear(self, x: X, *parts: Linear, joined: bool = False) -> tuple[X, ...]:
        """x @ weight.T + bias for every part.

        Parts given together share their input, which an operator may use (one quantization of x, one fused kernel).

        Args:
            joined: the parts are also consumed together: they may be stored and multiplied as one matrix.
        """
        ...

    def attention(self, q: X, k: X, v: X, layer: int) -> X:
        """Rotary positions, then causal grouped attention over the layer's KV.

        Args:
            q: [1, T, heads * head_dim].
            k: [1, T, kv_heads * head_dim], appended to the layer's keys after rotation.
            v: [1, T, kv_heads * head_dim], appended to the layer's values.
            layer: whose KV.

        Returns [1, T, heads * head_dim].
        """
        ...

    def gated(self, gate: X, up: X) -> X:
        """SiLU(gate) * up."""
        ...

    def sublayer(self, kind: Kind, layer: int, x: X, body: Callable[[X], X]) -> X:
        """x + body(x); in a gated graph the body can be left out, pass by pass."""
        ...

    def head(self, x: X, norm: str, head: Linear) -> X:
        """Final norm and LM head on the rows asked for -> logits [1, R, vocab]."""
        ...
