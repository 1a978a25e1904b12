"""Plan of a model's weight file, computed only from shapes.

No tensors are read, so a config.json is enough.  Only the plan defines what is stored, in which order and form:
``fill`` follows it, graphs and native programs name its entries, and sizes are its end.  ``StockPlan`` is a pass over
the trace; the program of native operators stores what it names while it is written (``native.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import Activation, Kind
from edgespec.export.architectures.rules import (
    AttentionRule,
    ConvolutionRule,
    DeltaRule,
    DepthwiseRule,
    ExpertsRule,
    LayerEmbedding,
    Linear,
    MemoryRule,
    Norm,
)
from edgespec.export.architectures.shapes import Shapes
from edgespec.export.architectures.trace import Pass
from edgespec.export.drafters.heads import HeadPlan, cut_head, group_matrices, is_head
from edgespec.export.quantization.levels import BLOCK, BLOCKS
from edgespec.export.source.derived import ExtendedCheckpoint
from edgespec.runtimes.files.formats import FILE, FILE_KINDS, STOCK_BLOCKS, Format, StockBlocks
from edgespec.runtimes.files.formats import Kind as Packing
from edgespec.runtimes.files.manifest import BytesPerWeight, Layout
from edgespec.runtimes.files.packing import Packed

Content = Literal["matrix", "rows", "vector", "angles", "positions", "order"]
WEIGHTS = "model.data"
INLINE_BYTES = 1024  # smaller tensors sit inside the .onnx file
SMALL_ALIGN, LARGE_ALIGN = 1 << 12, 1 << 16  # page sizes of Linux and, for large tensors, of Windows mappings
FLOATS = {"F32", "F16", "BF16"}  # types of files that are not quantized
ROUTER = ".router.weight"  # how the names of matrices end that choose experts
ORDER = ".order"  # how the names of the orders of matrices' inputs end
CHANGED = "matrices that are not stored one by one, or not alike in a mixture"
HEADROOM = 66  # rows beyond the context: the largest tree (64 nodes) and two for padding


def converted_name(operators: str) -> str:
    """Name the weight file in the layout of these operators, for a bundle that has the other layout.

    No bundle has a file of that name, so a wrong layout is never read; ``edgespec/runtimes/files/repack.py`` makes it
    in the cache.
    """
    return f"model.{operators}.data"


@dataclass(frozen=True)
class Stored:
    """Location of a tensor in the weight file."""

    offset: int
    length: int
    dims: tuple[int, ...]
    dtype: np.dtype[Any]


class WeightLayout:
    """Consecutive tensors of a weight file.

    Attributes:
        entries: by name, in order.
        end: bytes of the file.
        file: its name in graphs.
    """

    def __init__(self) -> None:
        self.file = WEIGHTS
        self.entries: dict[str, Stored] = {}
        self.end = 0

    def add(self, name: str, dims: tuple[int, ...], dtype: Any, align: int | None = None) -> Stored:
        """Place one more tensor, where pages begin unless ``align`` says otherwise."""
        dtype = np.dtype(dtype)
        length = prod(dims) * dtype.itemsize
        align = align or (LARGE_ALIGN if length >= 1 << 20 else SMALL_ALIGN)
        offset = -(-self.end // align) * align
        self.end = offset + length
        self.entries[name] = Stored(offset, length, dims, dtype)
        return self.entries[name]


@dataclass(frozen=True)
class Matrix:
    """Matrices [n_i, k] of the checkpoint, stored as one.

    Attributes:
        parts: their names.
        n, k: of all together, stacked along n.
        form: of the levels.
        packed: where they are stored for native operators.
        blocks: how stock operators have a file's own weights.
    """

    parts: tuple[str, ...]
    n: int
    k: int
    form: Format
    packed: Packed | None = None
    blocks: StockBlocks | None = None


class StoragePlan(WeightLayout):
    """Common part of both layouts, as the module describes it.

    Args:
        head: format of its LM heads, and of the embedding tied to one.

    Attributes:
        contents: what is stored, in order: tensors of the checkpoint, and tables by the name of their rotation.
        matrices: by the names of their parts, joined by ``+``.
        inline: bytes that are stored inside the graph's file instead, by name.
        stacked: biases of matrices stacked along n, by the name that they have together.
    """

    def __init__(
        self, arch: Architecture, form: Format, head: Format, heads: HeadPlan, fine: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self.arch, self.form, self.head_form, self.heads, self.fine = arch, form, head, heads, fine
        self.shapes = arch.tensors
        if isinstance(arch.source, ExtendedCheckpoint):
            self.shapes |= {name: tensor.shape for name, tensor in arch.source.extra.items()}
        self.contents: list[tuple[Content, str]] = []
        self.matrices: dict[str, Matrix] = {}
        self.inline: dict[str, int] = {}
        self.stacked: dict[str, tuple[Linear, ...]] = {}
        self._orders: dict[bytes, str] = {}  # names of orders of inputs, by their numbers

    @property
    def planes(self) -> bool:
        """Whether any matrix is int8, which native operators have in two planes."""
        if self.form == FILE:
            matrices = (name for name, shape in self.shapes.items() if len(shape) == 2)
            return any(self.form_of(name) == "int8" or self.file_kind(name) == "p8" for name in matrices)
        return "int8" in (self.form, self.head_form) or bool(self.fine)

    def form_of(self, name: str) -> Format:
        """How a matrix is stored."""
        if name.endswith(ROUTER):  # small, and a choice: rounding would send rows elsewhere
            return "fp32"
        if name in self.fine:
            return "int8"
        if self.form == FILE:
            kind = self.file_kind(name)
            return "fp32" if kind == "f32" else FILE if kind else "int8"
        return self.head_form if is_head(name, self.arch) else self.form

    def file_kind(self, name: str) -> Packing | None:
        """Return how a matrix of a file is packed as it is; None = its type has no packing, and it becomes int8."""
        rows = self.arch.source.blocks(name)
        if rows is None or (rows.order is not None and name == self.arch.embedding):
            return None
        return FILE_KINDS.get(rows.type)

    def order_of(self, name: str) -> str:
        """Name the order of a matrix's inputs, which others may have as well; "" = that of the model."""
        rows = self.arch.source.blocks(name) if self.form_of(name) == FILE else None
        if rows is None or rows.order is None:
            return ""
        return self._orders.setdefault(rows.order.tobytes(), f"{name}{ORDER}")

    def store_order(self, name: str, dtype: Any = np.float32) -> None:
        """Store an order of inputs by the name that ``order_of`` gives it."""
        if name not in self.entries:
            self.contents.append(("order", name))
            self.add(name, self.shapes[name.removesuffix(ORDER)][1:], dtype)

    def width(self, *parts: Linear) -> int:
        """Rows of matrices stacked along n."""
        return sum(self.shapes[part.weight][0] for part in parts)

    def store_vectors(self, *names: str | None) -> None:
        """Store vectors; small ones sit inside the graph's file."""
        for name in names:
            if name is None or name in self.entries:
                continue
            if (length := 4 * prod(self.shapes[name])) <= INLINE_BYTES:
                self.inline[name] = length
            else:
                self.contents.append(("vector", name))
                self.add(name, self.shapes[name], np.float32)

    def store_norm(self, norm: Norm) -> None:
        self.store_vectors(norm.weight, norm.bias)

    def store_bias(self, parts: Sequence[Linear]) -> None:
        """Store the biases of matrices that are stored as one."""
        if len(parts) == 1:
            self.store_vectors(parts[0].bias)
        elif any(part.bias for part in parts):
            name = stacked_name(part.bias for part in parts)
            self.inline[name], self.stacked[name] = 4 * self.width(*parts), tuple(parts)

    def store_angles(self, rotary: str) -> None:
        """Store cosines and sines of all positions, and how queries grow there."""
        if f"{rotary}_cos" not in self.entries:
            self.contents.append(("angles", rotary))
            dims = self.arch.facts.context + HEADROOM, self.arch.rotaries[rotary].dims // 2
            for name in ("cos", "sin"):
                self.add(f"{rotary}_{name}", dims, np.float32)
            if self.arch.rotaries[rotary].growth(dims[0]) is not None:
                self.add(f"{rotary}_growth", dims[:1], np.float32)
            if axes := self.arch.rotaries[rotary].axes:
                self.add(f"{rotary}_axes", (len(axes),), np.float32)

    def store_positions(self, name: str | None) -> None:
        if name is not None:
            self.contents.append(("positions", name))
            self.add(name, (self.arch.position_rows + HEADROOM, self.arch.facts.hidden), np.float32)

    def store_embedding(self, name: str) -> None:
        """Store an embedding: as a matrix where rows of one can be looked up cheaply, else as a table."""
        k = self.shapes[name][1]
        if k % BLOCK == 0 if self.form in (*BLOCKS, FILE) else self.arch.head.weight == name:
            self.store_matrix(Linear(name))
            return
        self.store_table(name, 1)

    def store_table(self, name: str, parts: int) -> None:
        """Store embeddings that are only looked up, with a scale for each part of a row."""
        if f"{name}.table" not in self.entries:
            self.contents.append(("rows", name))
            self.add(f"{name}.table", self.shapes[name], np.float32 if self.form == "fp32" else np.int8)
            if self.form != "fp32":
                self.add(f"{name}.table_scales", (self.shapes[name][0], parts), np.float32)

    def store_matrix(self, *parts: Linear, head_dim: int = 0) -> None:
        """Store matrices stacked along n as one, packed in tiles of ``head_dim`` rows (0 = of all)."""
        names = tuple(part.weight for part in parts)
        name, form = stacked_name(names), self.form_of(names[0])
        if name not in self.matrices:
            self.contents.append(("matrix", name))
            self.matrices[name] = self._placed(name, Matrix(names, self.width(*parts), self.shapes[names[0]][1], form),
                                               head_dim)  # fmt: skip

    def _placed(self, name: str, matrix: Matrix, head_dim: int) -> Matrix:
        raise NotImplementedError

    @property
    def kept(self) -> BytesPerWeight | None:
        """Mean bytes of weights that are as their file has them; None = they are all of one format."""
        if self.form != FILE:
            return None
        outside = self.arch.head.weight, self.arch.embedding
        layers = [name for name in self.matrices if name not in outside]
        whole = [name for name in outside if name in self.matrices] or layers
        sizes = {name: one.n * one.k for name, one in self.matrices.items()}
        planes = sum(sizes[name] for name in layers if self._low_nbytes(name))
        return BytesPerWeight(
            layers=self._mean_bytes(layers),
            head=self._mean_bytes(whole[:1]),
            embedding=self._mean_bytes(whole[-1:]),
            planes=2 * planes > sum(sizes[name] for name in layers),
        )

    def _low_nbytes(self, name: str) -> int:
        packed = self.matrices[name].packed
        return packed.low_nbytes if packed else 0

    def _mean_bytes(self, names: Sequence[str]) -> float:
        """Mean bytes of a weight of some matrices."""
        parts = ("", ".packed", ".levels", ".scales", ".zeros")
        entries = [self.entries[name + part] for name in names for part in parts if name + part in self.entries]
        stored = sum(entry.length for entry in entries) + sum(map(self._low_nbytes, names))
        return stored / sum(self.matrices[name].n * self.matrices[name].k for name in names)


def kept_types(arch: Architecture, layout: Layout = "native") -> tuple[list[str], list[str]]:
    """Return the types of matrices that are stored as a file has them, and of those that are not, sorted."""
    found = {True: set[str](), False: set[str]()}
    kinds = {name for name, kind in FILE_KINDS.items() if layout == "native" or kind == "f32" or kind in STOCK_BLOCKS}
    for name, shape in arch.tensors.items():
        if len(shape) == 2 and not name.endswith(ROUTER):
            rows = arch.source.blocks(name)
            own = CHANGED if rows is None else rows.type
            found[own in kinds].add(own)
    return sorted(found[True]), sorted(found[False])


def is_quantized(arch: Architecture) -> bool:
    """Whether weights of fewer than 16 bits can be packed as a file has them."""
    return bool(set(kept_types(arch)[0]) - FLOATS)


def stacked_name(names: Any) -> str:
    """Join the names of tensors that are stored as one."""
    return "+".join(map(str, names))


class StockPlan(StoragePlan, Pass[None]):
    """Plan of the weights in the layout of stock operators: operations store at once, in the order of the trace."""

    handled_fields: ClassVar[dict[type, str]] = Shapes.handled_fields

    def __init__(
        self, arch: Architecture, form: Format, head: Format, heads: HeadPlan, fine: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(arch, form, head, heads, fine)
        for layer in range(arch.facts.layers):
            if rotary := arch.rule(layer).rotary:
                self.store_angles(rotary)

    def embed(self, weight: str, scale: float, positions: str | None) -> None:
        self.store_embedding(weight)
        self.store_positions(positions)

    def token_embeddings(self, weight: str, scale: float) -> None: ...

    def norm(self, x: None, norm: Norm) -> None:
        self.store_norm(norm)

    def file_kind(self, name: str) -> Packing | None:
        """Return how a matrix of a file is packed as it is; None = MatMulNBits cannot hold its values."""
        kind = super().file_kind(name)
        return kind if kind == "f32" or kind in STOCK_BLOCKS else None

    def _joined(self, parts: tuple[Linear, ...]) -> bool:
        """Whether matrices are stored as one.  Those of a file may differ, and float32 ones [k, n] are written whole:
        two would be held at once.
        """
        if self.form != FILE:
            return self.form != "fp32"
        found = {(self.form_of(part.weight), self.file_kind(part.weight), self.order_of(part.weight)) for part in parts}
        return len(found) == 1 and self.form_of(parts[0].weight) != "fp32"

    def linear(self, x: None, parts: tuple[Linear, ...], joined: bool) -> tuple[None, ...]:
        for together in (parts,) if joined and self._joined(parts) else ((part,) for part in parts):
            self._multiply(*together)
        return (None,) * len(parts)

    def attention(self, q: None, k: None, v: None, rule: AttentionRule) -> None:
        self.attention_over(q, rule)

    def attention_over(self, q: None, rule: AttentionRule) -> None:
        for norm in (rule.q_norm, rule.k_norm, rule.v_norm):
            if norm is not None:
                self.store_norm(norm)
        if rule.relative is not None:
            self.store_vectors(rule.relative.table)
        self.store_vectors(rule.sinks)

    def append(self, q: None, k: None, v: None, rule: AttentionRule) -> None:
        self.attention_over(q, rule)

    def convolution(self, x: None, rule: ConvolutionRule) -> None:
        self.store_vectors(rule.taps, rule.bias)

    def depthwise(self, x: None, rule: DepthwiseRule, by: None) -> None:
        self.store_vectors(rule.taps, rule.bias)

    def delta(self, x: None, z: None, a: None, b: None, rule: DeltaRule) -> None:
        self.store_vectors(*rule.vectors.values())

    def sigmoid_gate(self, x: None, gate: None) -> None: ...

    def gated(self, gate: None, up: None, activation: Activation) -> None: ...

    def activate(self, x: None, activation: Activation, numbers: str | None) -> None:
        self.store_vectors(numbers)

    def sum(self, x: None, y: None) -> None: ...

    def experts(self, h: None, rule: ExpertsRule, activation: Activation, by: None = None) -> None:
        self.store_matrix(Linear(rule.router))
        self.store_vectors(*rule.vectors)
        for name in (rule.gate, rule.up, rule.down):
            self.store_matrix(Linear(name))

    def layer_embedding(self, gate: None, base: None, rule: LayerEmbedding, activation: Activation) -> None:
        self.store_table(rule.table, rule.layers)

    def sublayer(
        self, kind: Kind, layer: int, x: None, body: Callable[[None], None], scale: str | None, norm: Norm | None
    ) -> None:
        if norm is not None:
            self.store_norm(norm)
        body(x)

    def fill_memory(self, memory: Callable[[], None]) -> None:
        memory()

    def append_memory(self, k: None, v: None, rule: MemoryRule) -> None: ...

    def attend_memory(self, q: None, rule: MemoryRule) -> None: ...

    def place(self, x: None, positions: str) -> None:
        self.store_positions(positions)

    def insert(self, x: None, first: int) -> None: ...

    def plus(self, x: None, product: None) -> None: ...

    def encoded(self, x: None, norm: Norm | None) -> None:
        if norm is not None:
            self.store_norm(norm)

    def head(self, x: None, norm: Norm | None, head: Linear) -> None:
        self.encoded(x, norm)
        if norm is None and (self.heads.groups or self.heads.tapped):
            raise UnsupportedModel("heads and drafters over hidden states do not go with an LM head of two matrices")
        for group in self.heads.groups:
            matrices = group_matrices(group)
            if matrices.first:
                self.linear(x, matrices.first, joined=True)
            if matrices.second is not None:
                self._multiply(matrices.second)
        if not self.heads.only:
            self._multiply(head)
        if self.heads.cut and (self.heads.groups or self.heads.only):
            self._multiply(cut_head(head))
        for group in self.heads.groups:
            for own in group_matrices(group).heads:
                self._multiply(own)

    def input_slice(self, first: int, width: int) -> None: ...

    def select_input(self, fused: Callable[[], None], recycled: Callable[[], None]) -> None:
        fused()
        recycled()

    def prefill_context(self, context: Callable[[], None]) -> None:
        context()

    def join(self, parts: tuple[None, ...]) -> None: ...

    def _multiply(self, *parts: Linear) -> None:
        self.store_matrix(*parts)
        self.store_bias(parts)

    def _placed(self, name: str, matrix: Matrix, head_dim: int) -> Matrix:
        n, k = matrix.n, matrix.k
        if matrix.form == FILE:
            return self._placed_blocks(name, matrix)
        if matrix.form == "fp32":
            self.add(name, (k, n), np.float32)
        elif matrix.form == "w8a8":
            self.add(f"{name}.levels", (k, n), np.int8)
            self.add(f"{name}.scales", (n,), np.float32)
        else:
            _, blocks, width = BLOCKS[matrix.form].stock_shape(n, k)
            self.add(f"{name}.levels", (n, blocks, width), np.uint8)
            self.add(f"{name}.scales", (n, blocks), np.float32)
            self.entries[f"{name}.rows"] = replace(self.entries[f"{name}.levels"], dims=(n, blocks * width))
        return matrix

    def _placed_blocks(self, name: str, matrix: Matrix) -> Matrix:
        kind = self.file_kind(matrix.parts[0])
        assert kind is not None
        own, n = STOCK_BLOCKS[kind], matrix.n
        blocks, width = -(-matrix.k // own.size), own.size * own.bits // 8
        self.add(f"{name}.levels", (n, blocks, width), np.uint8)
        self.add(f"{name}.scales", (n, blocks), np.float32)
        if own.zeros:
            self.add(f"{name}.zeros", (n, -(-blocks * own.bits // 8)), np.uint8)
        if order := self.order_of(matrix.parts[0]):
            self.store_order(order, np.int64)
        self.entries[f"{name}.rows"] = replace(self.entries[f"{name}.levels"], dims=(n, blocks * width))
        return replace(matrix, blocks=own)
