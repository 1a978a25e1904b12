"""Writing the program of a ``Decoder`` node (runtimes/native/program.h): steps, buffers, gates and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from edgespec.export.architectures.ops import Linear, Norm
from edgespec.export.emit.graph import EDGESPEC, GraphBuilder
from edgespec.export.emit.plan import StoragePlan, stacked_name
from edgespec.export.emit.vectors import stacked_bias, vector
from edgespec.runtimes.files.formats import KINDS, SPECS, Kind

PLAN, CONTROLS = 6, 8


@dataclass(frozen=True)
class Floats:
    """A float32 buffer [rows, width]."""

    id: int
    width: int


@dataclass(frozen=True)
class Acts:
    """Activations in the form that matrices multiply."""

    id: int
    width: int


class ProgramWriter:
    """Collects the steps of one decoder.

    Args:
        storage: where the weights lie.
    """

    def __init__(self, storage: StoragePlan) -> None:
        self.arch, self.storage = storage.arch, storage
        self.graph = GraphBuilder(storage)
        self._inputs: dict[str, int] = {}  # weight -> index among the node's weight inputs
        self._steps: list[str] = []
        self._buffers: dict[tuple[str, str], tuple[int, int]] = {}  # (floats or acts, use) -> id, width
        self._declared = [f"lent {layer} {dim}" for layer, dim in enumerate(self.arch.borrowed_kv_dims)]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, op: str, **fields: int | float | str) -> None:
        """Add a step as it stands in program.h."""
        self._steps.append(" ".join([op, *(f"{key}={value:.9g}" if isinstance(value, float) else f"{key}={value}"
                                           for key, value in fields.items())]))  # fmt: skip

    def gated(self, index: int, body: Callable[[], None], other: int | None = None) -> None:
        """The steps that ``body`` adds, behind a gate, or behind two of which one is enough."""
        outer, self._steps = self._steps, []
        body()
        inner, self._steps = self._steps, outer
        self.step("gate", index=index, skip=len(inner), **({} if other is None else {"other": other}))
        self._steps += inner

    def gate_all(self, index: int) -> None:
        """Put every step so far behind a gate."""
        inner, self._steps = self._steps, []
        self.gated(index, lambda: self._steps.extend(inner))

    def quantize(
        self,
        x: Floats,
        use: str,
        matrix: str,
        *,
        norm: Norm | None = None,
        rows: int = 0,
        times: int = 1,
        first: int = 0,
    ) -> Acts:
        """(Normed) floats in the form that ``matrix`` multiplies."""
        out = self.acts(use, x.width)
        kind = activation_form(self.kind(matrix))
        repeated: dict[str, int] = {"times": times, "first": first} if rows == 2 else {}
        normed = {"norm": -1, "eps": float(self.arch.eps)} if norm is None else self.norm(norm)
        self.step("quantize", x=x.id, **normed, k=x.width, kind=kind, out=out.id, rows=rows, **repeated)
        return out

    def linear(self, act: Acts, parts: tuple[Linear, ...], out: Floats, *, add: bool = False, rows: int = 0) -> None:
        """The product with matrices stacked along n, plus their biases."""
        self.step(
            "linear",
            act=act.id,
            w=self.matrix(*parts),
            kind=self.kind(parts[0].weight),
            n=self.storage.width(*parts),
            k=act.width,
            bias=self.bias(parts),
            out=out.id,
            add=int(add),
            rows=rows,
        )

    def norm(self, norm: Norm) -> dict[str, int | float]:
        """The fields of a step that say a norm."""
        fields: dict[str, int | float] = {"norm": self.vector(norm.weight), "eps": float(self.arch.eps)}
        if norm.bias is not None:
            fields["beta"] = self.vector(norm.bias)
        return fields | ({"center": 1} if norm.centered else {})

    def logits(self, act: Acts, head: Linear, *, times: int = 1, first: int = 0, own: bool = False) -> None:
        """An LM head; its rows follow those of the heads before it that are on at the same time.

        Args:
            own: it is not the model's: what the architecture does to its logits is not done.
        """
        rule: dict[str, int | float] = {} if head.bias is None else {"bias": self.bias((head,))}
        if not own:
            rule |= {"scale": float(self.arch.logits.scale)} if self.arch.logits.scale != 1 else {}
            rule |= {"cap": float(self.arch.logits.cap)} if self.arch.logits.cap else {}
        self.step("logits", act=act.id, w=self.matrix(head), kind=self.kind(head.weight),
                  n=self.storage.width(head), k=act.width, times=times, first=first, **rule)  # fmt: skip

    # -- what steps name -----------------------------------------------------------------------------------------------

    def buffer(self, kind: str, use: str, width: int) -> int:
        """A buffer that is used again wherever use and width are the same."""
        key = kind, use
        if key not in self._buffers:
            number = sum(1 for other, _ in self._buffers if other == kind)
            self._buffers[key] = number, width
            self._declared.append(f"{kind} {number} {width}")
        number, known = self._buffers[key]
        if known != width:
            return self.buffer(kind, f"{use}.{width}", width)
        return number

    def floats(self, use: str, width: int) -> Floats:
        """See ``buffer``."""
        return Floats(self.buffer("floats", use, width), width)

    def acts(self, use: str, width: int) -> Acts:
        """See ``buffer``."""
        return Acts(self.buffer("acts", use, width), width)

    def kind(self, name: str) -> Kind:
        """How the matrix ``name`` is stored."""
        return SPECS[self.storage.form_of(name)].kind

    def matrix(self, *parts: Linear) -> int:
        """Matrices stacked along n, stored as one."""
        return self.stored(f"{stacked_name(part.weight for part in parts)}.packed")

    def stored(self, name: str) -> int:
        """A tensor of the weight file."""
        return self.input(self.graph.stored(name))

    def bias(self, parts: Sequence[Linear]) -> int:
        """Their biases, -1 if there are none."""
        name = stacked_bias(self.graph, self.storage, parts)
        return -1 if name is None else self.input(name)

    def vector(self, name: str) -> int:
        """A vector of the checkpoint."""
        return self.input(vector(self.graph, self.storage, name))

    def input(self, name: str) -> int:
        """The index of a weight among the node's."""
        return self._inputs.setdefault(name, len(self._inputs))

    # -- the node ------------------------------------------------------------------------------------------------------

    def close(self, gates: int) -> None:
        """Write the node down."""
        graph, hidden = self.graph, self.arch.facts.hidden
        inputs: dict[str, tuple[int, list[int | str]]] = {
            "plan": (TensorProto.INT64, [PLAN, "T"]),
            "rows": (TensorProto.INT64, ["R"]),
            "gates": (TensorProto.BOOL, [gates]),
            "moves": (TensorProto.INT64, ["M", 3]),
            "kv": (TensorProto.UINT8, ["S", "B"]),
            "control": (TensorProto.INT64, [CONTROLS]),
            "tables": (TensorProto.FLOAT, ["N"]),
            "hidden_in": (TensorProto.FLOAT, ["H", self.arch.input_width or hidden]),
        }
        outputs: dict[str, tuple[int, list[int | str]]] = {
            "logits": (TensorProto.FLOAT, ["L", "V"]),
            "ids": (TensorProto.INT64, ["K", "top"]),
            "values": (TensorProto.FLOAT, ["K", "top"]),
            "hidden": (TensorProto.FLOAT, ["G", "W" if self.storage.heads.tapped else hidden]),
        }
        for name, (kind, dims) in inputs.items():
            graph.input(name, kind, dims)
        graph.node("Decoder", [*inputs, *self._inputs], list(outputs), domain=EDGESPEC,
                   program="\n".join([*self._declared, *self._steps]), constant_weights=1)  # fmt: skip
        for name, (kind, dims) in outputs.items():
            graph.output(name, kind, dims)


def activation_form(kind: Kind) -> str:
    """The form of activations that matrices of a kind multiply; q4 and q8 read the same."""
    return KINDS[kind].acts
