"""Measure how rounding parts of a model to four bits changes its predictions: many choices in one run over a text."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from edgespec.export.architectures import Architecture
from edgespec.export.architectures.ops import Activation, Kind
from edgespec.export.architectures.rules import AttentionRule, ExpertsRule, Linear, Norm
from edgespec.export.measuring.parity import log_softmax
from edgespec.export.quantization.layers import Array
from edgespec.export.quantization.levels import Blocks, dequantize_block
from edgespec.export.quantization.quantizer import Quantizer
from edgespec.export.quantization.reference import NumpyOps
from edgespec.export.source.source import Checkpoint

Choice = frozenset[str]  # the parts of a model that are int4: EMBEDDING, "attention.0", "mlp.3", HEAD
HEAD = "head"  # the LM head, with an embedding that is tied to it
EMBEDDING = "embedding"  # one that is not
MEMORY = "memory"  # what makes keys and values of an encoder's rows, for all layers
TOGETHER = 4  # choices whose logits are in memory at once


def part_of(kind: Kind, layer: int) -> str:
    """Name the part that a sub-layer belongs to; a layer's own embedding belongs to its MLP."""
    return f"{'attention' if kind in ('attention', 'memory') else 'mlp'}.{layer}"


class Rounded:
    """A checkpoint whose matrices read as they come back from blocks.

    Args:
        matrices: names of those that a bundle stores in blocks.
    """

    def __init__(self, source: Checkpoint, matrices: frozenset[str], quantizer: Quantizer, form: Blocks) -> None:
        self._source, self._matrices, self._quantize, self._form = source, matrices, quantizer.prepare(None), form

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Array:
        return self.rounded(name, self._source.read(name, rows, columns))

    def pieces(self, name: str) -> Iterator[Array]:
        return (self.rounded(name, piece) for piece in self._source.pieces(name))

    def rounded(self, name: str, rows: Array) -> Array:  # [r, k] both
        """Rows of a tensor; those of a matrix rounded."""
        if name not in self._matrices:
            return rows
        return dequantize_block(*self._quantize(rows, self._form), rows.shape[1], self._form.bits)


class VariantOps(NumpyOps):
    """Runs choices side by side.  Every activation is [choices, T, width], and the first row is the exact model.

    A choice that has rounded nothing so far is the exact model: what costs time is copied from there.

    Args:
        rows: positions whose predictions are compared.
        floats: [1, S, width], what the encoder of an encoder-decoder gave.
    """

    def __init__(
        self,
        arch: Architecture,
        tokens: Sequence[int],
        rows: Sequence[int],
        choices: Sequence[Choice],
        rounded: Rounded,
        progress: Callable[[int], None] | None = None,
        floats: Array | None = None,
    ) -> None:
        self.choices, self.rounded = (Choice(), *choices), rounded
        each = None if floats is None else np.broadcast_to(floats, (len(self.choices), *floats.shape[1:]))
        super().__init__(arch, tokens, rows, progress, each)
        # [choices], from the exact model; the first choice is computed like the others
        self._differs = np.arange(len(self.choices)) == 0
        self._coarse = np.zeros(len(self.choices), bool)  # [choices]: this part has 4 bits
        self._given: list[dict[int, tuple[Array, Array]]] = [{} for _ in self.choices]  # see NumpyOps

    def divergences(self) -> list[float]:
        """Run the model: mean KL in nats of each choice from the exact model."""
        found = self.run(self.arch.trace())
        return [float(value) for value in found[1:]]

    def embed(self, weight: str, scale: float, positions: str | None) -> Array:
        self._enter(HEAD if weight == self.arch.head.weight else EMBEDDING)
        both = [super().embed(weight, scale, positions)]
        if self._coarse.any():
            self.source = self.rounded  # type: ignore[assignment]  # reads as a checkpoint does
            both.append(super().embed(weight, scale, positions))
            self.source = self.arch.source
        return np.concatenate([both[int(coarse)] for coarse in self._coarse])

    def fill_memory(self, memory: Callable[[], None]) -> None:
        self._enter(MEMORY)
        super().fill_memory(memory)

    def sublayer(
        self, kind: Kind, layer: int, x: Array, body: Callable[[Array], Array], scale: str | None, norm: Norm | None
    ) -> Array:
        self._enter(part_of(kind, layer))
        return super().sublayer(kind, layer, x, body, scale, norm)

    def attention(self, q: Array, k: Array | None, v: Array | None, rule: AttentionRule) -> Array:
        found: list[Array] = []
        for at, differs in enumerate(self._differs):
            own = slice(at, at + 1)
            self.given = ChainMap(self._given[at], self._given[0])
            keys, values = None if k is None else k[own], None if v is None else v[own]
            found.append(super().attention(q[own], keys, values, rule) if differs else found[0])
        return np.concatenate(found)

    def experts(self, h: Array, rule: ExpertsRule, activation: Activation, by: Array | None = None) -> Array:
        y = np.empty_like(h)
        for coarse, source in ((False, self.arch.source), (True, self.rounded)):
            if (chosen := self._differs & (self._coarse == coarse)).any():
                self.source = source  # type: ignore[assignment]
                y[chosen] = super().experts(h[chosen], rule, activation, None if by is None else by[chosen])
        self.source = self.arch.source
        y[~self._differs] = y[0]
        return y

    def head(self, x: Array, norm: Norm | None, head: Linear) -> Array:  # [choices]
        """Mean divergence in nats of each choice's predictions from the exact ones: KL(exact || choice)."""
        self._enter(HEAD)
        exact, found = np.empty(0), []
        coarse, differs = self._coarse, self._differs
        for at in range(0, len(x), TOGETHER):
            own = slice(at, at + TOGETHER)
            self._coarse, self._differs = coarse[own], np.ones(len(x[own]), bool)
            logits = super().head(x[own], norm, head)  # [some, R, vocab]
            for mine in logits:
                chances = log_softmax(mine)
                exact = exact if len(exact) else chances
                found.append(float((np.exp(exact) * (exact - chances)).sum(-1).mean()))
        self._coarse, self._differs = coarse, differs
        return np.asarray(found, np.float32)

    def _enter(self, part: str) -> None:
        """Begin the next part of the model."""
        self._coarse = np.array([part in choice for choice in self.choices])
        self._differs = self._differs | self._coarse

    def _linear(self, x: Array, part: Linear) -> Array:
        y, at = np.empty((*x.shape[:-1], self.source.shape(part.weight)[0]), np.float32), 0
        fine = self._differs & ~self._coarse
        for piece in self.source.pieces(part.weight):
            columns = slice(at, at := at + len(piece))
            y[fine, :, columns] = x[fine] @ piece.T
            if self._coarse.any():
                y[self._coarse, :, columns] = x[self._coarse] @ self.rounded.rounded(part.weight, piece).T
        y[~self._differs] = y[0]
        return y if part.bias is None else y + self.source.read(part.bias)
