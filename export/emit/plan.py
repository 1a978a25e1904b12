"""The weight file of a model, planned from shapes alone: an architecture run over its tensors' names.

Nothing is read, so that a config.json is enough.  The plan is the one truth about what is stored, in which order and
form: ``fill`` writes by it, graphs and native programs name what it has, and sizes are its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.ops import ExpertsRule, LayerEmbedding, Linear, Norm
from edgespec.export.drafters.heads import HeadPlan, is_head
from edgespec.export.emit.layout import HEADROOM, INLINE_BYTES, WeightLayout
from edgespec.export.quantization.levels import BLOCK, BLOCKS
from edgespec.export.source.derived import ExtendedCheckpoint
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Layout
from edgespec.runtimes.files.packing import Packed

Content = Literal["matrix", "rows", "parts", "vector", "angles", "positions"]


@dataclass(frozen=True)
class Matrix:
    """Matrices [n_i, k] of the checkpoint, stored as one.

    Attributes:
        parts: their names.
        n, k: of all together, stacked along n.
        form: of the levels.
        packed: where they are stored for native operators.
    """

    parts: tuple[str, ...]
    n: int
    k: int
    form: Format
    packed: Packed | None = None


class StoragePlan(WeightLayout):
    """What both layouts store alike; see the module.

    Args:
        arch: the model, with the tensors of its heads.
        form: of its matrices.
        head: of its LM heads, and of the embedding tied to one.
        heads: beside the LM head.
        fine: names of matrices that are int8, whatever ``form`` says.

    Attributes:
        contents: what is stored, in order: tensors of the checkpoint, and tables by the name of their rotation.
        matrices: by the names of their parts, joined by ``+``.
        inline: bytes of what sits inside the graph's file instead, by name.
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

    def form_of(self, name: str) -> Format:
        """How a matrix is stored."""
        if name.endswith(".router.weight"):  # small, and a choice: rounding would send rows elsewhere
            return "fp32"
        if name in self.fine:
            return "int8"
        return self.head_form if is_head(name, self.arch) else self.form

    def width(self, *parts: Linear) -> int:
        """Rows of matrices stacked along n."""
        return sum(self.shapes[part.weight][0] for part in parts)

    def _vectors(self, *names: str | None) -> None:
        for name in names:
            if name is None or name in self.entries:
                continue
            if (length := 4 * prod(self.shapes[name])) <= INLINE_BYTES:
                self.inline[name] = length
            else:
                self.contents.append(("vector", name))
                self.add(name, self.shapes[name], np.float32)

    def _norm(self, norm: Norm) -> None:
        self._vectors(norm.weight, norm.bias)

    def _bias(self, parts: Sequence[Linear]) -> None:
        if len(parts) == 1:
            self._vectors(parts[0].bias)
        elif any(part.bias for part in parts):
            self.inline[stacked_name(part.bias for part in parts)] = 4 * self.width(*parts)

    def _angles(self, rotary: str) -> None:
        if f"{rotary}_cos" not in self.entries:
            self.contents.append(("angles", rotary))
            dims = self.arch.facts.context + HEADROOM, self.arch.rotaries[rotary].dims // 2
            for name in ("cos", "sin"):
                self.add(f"{rotary}_{name}", dims, np.float32)
            if self.arch.rotaries[rotary].growth(dims[0]) is not None:
                self.add(f"{rotary}_growth", dims[:1], np.float32)

    def _positions(self, name: str | None) -> None:
        if name is not None:
            self.contents.append(("positions", name))
            self.add(name, (self.arch.facts.context + HEADROOM, self.arch.facts.hidden), np.float32)

    def _embedding(self, name: str) -> None:
        """As a matrix where rows of one can be looked up cheaply, else as a table that is only looked up."""
        n, k = self.shapes[name]
        if k % BLOCK == 0 if self.form in BLOCKS else self.arch.head.weight == name:
            self._matrix(Linear(name))
            return
        self.contents.append(("rows", name))
        self.add(f"{name}.table", (n, k), np.float32 if self.form == "fp32" else np.int8)
        if self.form != "fp32":
            self.add(f"{name}.table_scales", (n, 1), np.float32)

    def _experts(self, rule: ExpertsRule) -> None:
        """A router, and the matrices of all experts, each expert's in tiles of its own."""
        facts = self.arch.facts
        assert facts.experts is not None
        self._matrix(Linear(rule.router))
        self._vectors(rule.bias)
        for name in (rule.gate, rule.up):
            self._matrix(Linear(name), head_dim=facts.experts.inner)
        self._matrix(Linear(rule.down), head_dim=facts.hidden)

    def _layer_embedding(self, rule: LayerEmbedding) -> None:
        """The embeddings of all layers, [vocab, layers * width], only looked up: a scale for each layer's part."""
        name, (vocab, width) = rule.table, self.shapes[rule.table]
        if f"{name}.table" not in self.entries:
            self.contents.append(("parts", name))
            self.add(f"{name}.table", (vocab, width), np.float32 if self.form == "fp32" else np.int8)
            if self.form != "fp32":
                self.add(f"{name}.table_scales", (vocab, rule.layers), np.float32)

    def _matrix(self, *parts: Linear, head_dim: int = 0) -> None:
        names = tuple(part.weight for part in parts)
        name, form = stacked_name(names), self.form_of(names[0])
        if name not in self.matrices:
            self.contents.append(("matrix", name))
            self.matrices[name] = self._placed(name, Matrix(names, self.width(*parts), self.shapes[names[0]][1], form),
                                               head_dim)  # fmt: skip

    def _placed(self, name: str, matrix: Matrix, head_dim: int) -> Matrix:
        """Add the entries of a matrix."""
        raise NotImplementedError


def stacked_name(names: Any) -> str:
    """What tensors stored as one are called."""
    return "+".join(map(str, names))


def index_text(plans: Mapping[Layout, StoragePlan]) -> str:
    """Where each tensor lies in either layout, and which matrices differ between them, as JSON.

    With it a bundle's weights can be converted without looking into its graphs.
    """
    packed = {name: asdict(matrix.packed) for name, matrix in plans["native"].matrices.items() if matrix.packed}
    entries = {
        layout: {
            name: [entry.offset, entry.length, entry.dtype.str, list(entry.dims)]
            for name, entry in plans[layout].entries.items()
        }
        for layout in ("stock", "native")
    }
    return json.dumps({"matrices": packed, **entries})
