"""A pass over the native graph by hand: every input as an array, for tests of the operator itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edgespec.runtimes.files.kv import KvFormat
from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots.native_runner import Gates
from edgespec.runtimes.slots.shared import Bound
from tests.conftest import Written

F32 = KvFormat("f32", "f32")


class Raw:
    """The ``Decoder`` node of a model with caches of its own.

    Args:
        made: the model.
        slots: sequences.
        tokens: capacity of each.
        path: another graph over the same weights.
    """

    def __init__(self, made: Written, slots: int = 1, tokens: int = 128, path: Path | None = None) -> None:
        self.facts = made.part.facts
        self.at = Gates(self.facts.layers, len(made.part.heads))
        self.session = make_session(path or made.folder / made.part.graphs["native"].file, 2, True)
        self.kv = Bound(np.zeros((slots, F32.nbytes(self.facts, tokens)), np.uint8))

    def feeds(self, tokens: Sequence[int], past: int = 0, slot: int = 0) -> dict[str, NDArray[Any]]:
        """The inputs of a chain after ``past`` tokens of a slot; all rows reach the LM head."""
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
        """The gates of a plain pass, some of them changed."""
        gates = np.zeros(self.at.count, bool)
        gates[: self.at.embed] = True
        gates[[self.at.embed, self.at.lm, *on]] = True
        gates[list(off)] = False
        return gates

    def run(self, feeds: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        """logits, ids, values and hidden states of a pass; the cache is updated."""
        io = self.session.io_binding()
        kept = {name: Bound(np.ascontiguousarray(array)) for name, array in feeds.items()}
        for name, bound in ({"kv": self.kv} | kept).items():
            io.bind_ortvalue_input(name, bound.value)
        for name in ("logits", "ids", "values", "hidden"):
            io.bind_output(name)
        self.session.run_with_iobinding(io)
        return tuple(value.numpy() for value in io.get_outputs())


def doctored(made: Written, folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy of the native graph, changed, beside a link to its weights."""
    folder.mkdir(exist_ok=True)
    model = onnx.load(made.folder / made.part.graphs["native"].file, load_external_data=False)
    change(model)
    if not (folder / "model.data").exists():
        shutil.copyfile(made.folder / "model.data", folder / "model.data")
    path = folder / "model.native.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def program_of(model: onnx.ModelProto) -> Any:
    """The attribute that holds the program."""
    (attribute,) = (item for item in model.graph.node[0].attribute if item.name == "program")
    return attribute


def with_program(made: Written, folder: Path, program: str) -> Path:
    """A copy of the native graph with another program."""

    def change(model: onnx.ModelProto) -> None:
        program_of(model).s = program.encode()

    return doctored(made, folder, change)


def program_text(made: Written) -> str:
    """The program of a model."""
    path = made.folder / made.part.graphs["native"].file
    text: str = program_of(onnx.load(path, load_external_data=False)).s.decode()
    return text
