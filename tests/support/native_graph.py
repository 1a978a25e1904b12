"""``Decoder`` nodes of a test's program and weights, or of a model, with every input as an array."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.export.emit.graph import EDGESPEC
from edgespec.export.quantization import levels as quantize
from edgespec.export.quantization.native_packing import pack_rows
from edgespec.export.source.stored import FileRows
from edgespec.runtimes.files.formats import FILE_KINDS, Kind
from edgespec.runtimes.files.kv import KvFormat
from edgespec.runtimes.files.manifest import ModelFacts
from edgespec.runtimes.files.packing import Packed
from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots.native_runner import Gates
from edgespec.runtimes.slots.shared import Bound
from tests.conftest import Written

Floats = NDArray[np.float32]
Feeds = dict[str, NDArray[Any]]
ROOT = -1  # the parent of a row that follows the cache


@dataclass
class Weights:
    """The weight inputs of a node, in order; what adds one returns its index."""

    arrays: list[NDArray[Any]] = field(default_factory=list)

    def vector(self, values: NDArray[Any]) -> int:  # of any shape
        """Float32 numbers as they are."""
        return self._keep(np.ascontiguousarray(values, np.float32))

    def matrix(self, values: Floats, kind: Kind = "f32") -> int:  # [n, k]
        """Make a packed matrix: f32, or q8 rounded to nearest."""
        packed = Packed(kind, *values.shape)
        pieces = packed.pack_floats([values]) if kind == "f32" else packed.pack_blocks([levels(values)])
        return self._keep(np.concatenate(list(pieces)))

    def rows(self, rows: NDArray[np.uint8], k: int, kind: str) -> tuple[int, int]:
        """Make a packed matrix of rows [n, bytes] of a type of files -> its index, and its low plane's; -1: none."""
        packed = Packed(FILE_KINDS[kind], len(rows), k, parts=(("", len(rows)),))
        made = list(pack_rows(packed, [FileRows(kind, lambda some: rows[some])]))
        low = [each for _, each in made if each is not None]
        high = self._keep(np.concatenate([each for each, _ in made]))
        return high, self._keep(np.concatenate(low)) if low else -1

    def _keep(self, array: NDArray[Any]) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


def levels(values: Floats) -> tuple[NDArray[np.uint8], NDArray[Any]]:  # [n, k] -> [n, blocks, 32], [n, blocks]
    """Make a matrix in 8-bit blocks."""
    return quantize.quantize_block(values, quantize.Blocks(8))


@dataclass(frozen=True)
class Rows:
    """Rows of a pass, each [n]: see the plan's lines in edgespec/runtimes/native/ops.cpp."""

    position: Sequence[int]
    visible: Sequence[int]
    parent: Sequence[int]
    place: Sequence[int]
    slot: Sequence[int]
    token: Sequence[int]

    @classmethod
    def chain(cls, n: int, past: int = 0, slot: int = 0, token: Sequence[int] | None = None) -> Rows:
        """Rows after ``past`` tokens of a slot."""
        at = list(range(past, past + n))
        return cls(at, [past] * n, list(range(-1, n - 1)), at, [slot] * n, token or [0] * n)

    @classmethod
    def tree(cls, parents: Sequence[int], past: int, slot: int = 0) -> Rows:
        """Make a tree after ``past`` tokens; its rows are adjacent."""
        depth: list[int] = []
        for parent in parents:
            depth.append(0 if parent == ROOT else depth[parent] + 1)
        n = len(parents)
        return cls([past + d for d in depth], [past] * n, parents, list(range(past, past + n)), [slot] * n, [0] * n)

    @property
    def plan(self) -> NDArray[np.int64]:  # [6, n]
        """As the operator reads it."""
        lines = self.token, self.position, self.slot, self.visible, self.parent, self.place
        return np.array(lines, np.int64).reshape(6, -1)

    def __len__(self) -> int:
        return len(self.position)


def beside(*parts: Rows) -> Rows:
    """Give the rows of several slots, in their order, as one pass."""
    plans, rows = [], 0
    for part in parts:
        plan = part.plan
        plan[4] = np.where(plan[4] < 0, ROOT, plan[4] + rows)
        rows += len(part)
        plans.append(plan)
    token, position, slot, visible, parent, place = np.concatenate(plans, 1).tolist()
    return Rows(position, visible, parent, place, slot, token)


def run_once(session: Any, kv: Bound, feeds: Feeds) -> tuple[NDArray[Any], ...]:
    """Run a pass -> logits, ids, values and hidden states; the cache ``kv`` is updated."""
    io = session.io_binding()
    kept = {name: Bound(np.ascontiguousarray(array)) for name, array in feeds.items()}
    for name, bound in ({"kv": kv} | kept).items():
        io.bind_ortvalue_input(name, bound.value)
    for name in ("logits", "ids", "values", "hidden"):
        io.bind_output(name)
    session.run_with_iobinding(io)
    return tuple(value.numpy() for value in io.get_outputs())


@dataclass
class Cache:
    """Caches of a node.

    Attributes:
        kv: formats of keys and values; None = float32.
        head: KV heads and dimensions of its one layer, (0, 0) = no attention.
        tokens: capacity of a slot.
        slots: sequences.
        tables: the learned tables of coded keys.
        memories: how many memories there are, of ``tokens`` rows each; 0 = the program has none.
        inserted: columns of rows that replace tokens below 0; 0 = the program has none.
    """

    kv: KvFormat | None = None
    head: tuple[int, int] = (0, 0)
    tokens: int = 128
    slots: int = 1
    tables: Floats | None = None
    memories: int = 0
    inserted: int = 0


class Node:
    """One node over a new cache.

    Args:
        folder: where its graph goes.
        program: the steps, as in edgespec/runtimes/native/steps.inl.
        weights: what the steps name.
        hidden: width of hidden states.
        threads: of the session.
        cache: attributes of ``Cache``.
    """

    def __init__(
        self, folder: Path, program: str, weights: Weights, hidden: int, threads: int = 2, **cache: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path, kept = folder / "node.onnx", Cache(**cache)
        made = model(program, weights, hidden, bool(kept.memories), kept.inserted)
        path.write_bytes(made.SerializeToString())
        self.inserted = np.zeros((0, kept.inserted), np.float32)  # of the next passes
        self.session = make_session(path, threads, True)
        self.kv_format, self.hidden = kept.kv or KvFormat("f32", "f32"), hidden
        self.tables = np.zeros(0, np.float32) if kept.tables is None else kept.tables
        each = kv_bytes(self.kv_format, kept.head, kept.tokens)
        self.kv = Bound(np.zeros((kept.slots, each), np.uint8))
        self.memory = np.zeros((kept.memories, each), np.uint8)

    def run(
        self,
        rows: Rows,
        hidden: Floats | None = None,  # [n, hidden]
        *,
        reach: Sequence[int] | None = None,
        top: int = 0,
        read_codes: bool = False,
        moves: Sequence[tuple[int, int, int]] = (),
        gates: Sequence[bool] = (),
        sources: NDArray[np.int64] | None = None,
    ) -> tuple[NDArray[Any], ...]:
        """logits, ids, values and hidden states; ``reach``: rows that reach the LM head, None = all.

        ``moves``: (slot, from, to), what is kept of tokens goes elsewhere before the pass.
        ``sources``: [2, n], the memory of each row, and how many of its rows are seen or which one is filled.
        """
        controls = self.kv_format.controls()
        controls[3] = int(read_codes)
        if read_codes:
            controls[4] = self.kv_format.draft_window
        feeds: Feeds = {
            "plan": rows.plan,
            "rows": np.array(range(len(rows)) if reach is None else reach, np.int64),
            "gates": np.array(gates, bool),
            "moves": np.array(moves, np.int64).reshape(-1, 3),
            "control": np.array([top, *controls], np.int64),
            "tables": self.tables.reshape(-1),
            "hidden_in": np.zeros((0, self.hidden), np.float32) if hidden is None else hidden,
        }
        if len(self.memory):
            feeds |= {
                "memory": self.memory,
                "sources": np.zeros((2, len(rows)), np.int64) if sources is None else sources,
            }
        if self.inserted.shape[1]:
            feeds["inserted"] = self.inserted
        return run_once(self.session, self.kv, feeds)


def kv_bytes(kv: KvFormat, head: tuple[int, int], tokens: int) -> int:
    """Bytes of one slot of a model of one layer."""
    heads, dim = head
    if not heads:
        return 64
    facts = SimpleNamespace(convolutions=[], delta=None, hidden=0, kv_heads=heads, dims=[dim])
    return kv.nbytes(cast(ModelFacts, facts), tokens)


def model(program: str, weights: Weights, hidden: int, memories: bool = False, inserted: int = 0) -> onnx.ModelProto:
    """Give the graph of one node."""
    inputs = {
        "plan": (TensorProto.INT64, [6, "T"]), "rows": (TensorProto.INT64, ["R"]), "gates": (TensorProto.BOOL, ["G"]),
        "moves": (TensorProto.INT64, ["M", 3]), "kv": (TensorProto.UINT8, ["S", "B"]),
        "control": (TensorProto.INT64, [8]), "tables": (TensorProto.FLOAT, ["N"]),
        "hidden_in": (TensorProto.FLOAT, ["H", hidden]),
    }  # fmt: skip
    if memories:
        inputs |= {"memory": (TensorProto.UINT8, ["M", "N"]), "sources": (TensorProto.INT64, [2, "T"])}
    if inserted:
        inputs["inserted"] = (TensorProto.FLOAT, ["I", "J"])
    outputs = {
        "logits": (TensorProto.FLOAT, ["L", "V"]), "ids": (TensorProto.INT64, ["K", "top"]),
        "values": (TensorProto.FLOAT, ["K", "top"]), "hidden": (TensorProto.FLOAT, ["E", hidden]),
    }  # fmt: skip
    arrays = weights.arrays or [np.zeros(1, np.float32)]  # a node has at least one
    names = [f"w{i}" for i in range(len(arrays))]
    node = helper.make_node("Decoder", [*inputs, *names], list(outputs), domain=EDGESPEC, program=program)
    graph = helper.make_graph(
        [node],
        "node",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for array, name in zip(arrays, names, strict=True)],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(EDGESPEC, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


F32 = KvFormat("f32", "f32")


class Raw:
    """The ``Decoder`` node of a model with new caches.

    Args:
        made: the model.
        slots: sequences.
        tokens: capacity of each.
        path: another graph over the same weights.
    """

    def __init__(self, made: Written, slots: int = 1, tokens: int = 128, path: Path | None = None) -> None:
        self.facts = made.part.facts
        self.at = Gates(self.facts.layers, len(made.part.heads), planes=made.part.planes)
        self.session = make_session(path or made.folder / made.part.graphs["native"].file, 2, True)
        self.kv = Bound(np.zeros((slots, F32.nbytes(self.facts, tokens)), np.uint8))

    def feeds(self, tokens: Sequence[int], past: int = 0, slot: int = 0) -> dict[str, NDArray[Any]]:
        """Give the inputs of a chain after ``past`` tokens of a slot; all rows reach the LM head."""
        n = len(tokens)
        at = np.arange(past, past + n)
        plan = np.stack([np.array(tokens), at, np.full(n, slot), np.full(n, past), np.arange(-1, n - 1), at])
        return {
            "plan": plan.reshape(6, n).astype(np.int64),
            "rows": np.arange(n),
            "gates": self.gates(),
            "moves": np.zeros((0, 3), np.int64),
            "control": np.array([0, *F32.controls()], np.int64),
            "tables": np.zeros(0, np.float32),
            "hidden_in": np.zeros((0, self.facts.hidden), np.float32),
        }

    def gates(self, *on: int, off: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Give the gates of a plain pass, some of them changed."""
        gates = np.zeros(self.at.count, bool)
        gates[: self.at.embed] = gates[self.at.planes] = True
        gates[[self.at.embed, self.at.lm, *on]] = True
        gates[list(off)] = False
        return gates

    def run(self, feeds: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        """logits, ids, values and hidden states of a pass; the cache is updated."""
        return run_once(self.session, self.kv, feeds)


def doctored(made: Written, folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """Make a changed copy of the native graph, with a link to its weights in the same folder."""
    folder.mkdir(exist_ok=True)
    model = onnx.load(made.folder / made.part.graphs["native"].file, load_external_data=False)
    change(model)
    if not (folder / "model.data").exists():
        shutil.copyfile(made.folder / "model.data", folder / "model.data")
    path = folder / "model.native.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def program_of(model: onnx.ModelProto) -> Any:
    """Give the attribute that holds the program."""
    (attribute,) = (item for item in model.graph.node[0].attribute if item.name == "program")
    return attribute


def with_program(made: Written, folder: Path, program: str) -> Path:
    """Make a copy of the native graph with another program."""

    def change(model: onnx.ModelProto) -> None:
        program_of(model).s = program.encode()

    return doctored(made, folder, change)


def program_text(made: Written) -> str:
    """Give the program of a model."""
    path = made.folder / made.part.graphs["native"].file
    text: str = program_of(onnx.load(path, load_external_data=False)).s.decode()
    return text
