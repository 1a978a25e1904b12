"""The C interface of native bundles (edgespec/runtimes/native/edgespec.h), through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.ort.native_library import native_library

NO_ROWS, ALL_ROWS, LAST_ROWS = range(3)
EXACT, F32, F16, INT8 = range(4)


class Facts(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32),
        *((name, c_int32) for name in ("layers", "vocab", "hidden", "input_width", "groups", "gates", "auxiliary",
                                       "stateful", "exact")),
        ("weight_bytes", c_uint64),
    )  # fmt: skip


class Request(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("rows", c_int32), ("tokens", POINTER(c_int64)), ("inputs", POINTER(c_float)),
        ("parents", POINTER(c_int32)), ("slots", POINTER(c_int32)), ("gates", POINTER(c_uint8)),
        ("logits", c_int32), ("top", c_int32), ("hidden", c_int32),
    )  # fmt: skip


class Result(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("rows", c_int32), ("columns", c_int32), ("top", c_int32), ("hidden_columns", c_int32),
        ("logits", POINTER(c_float)), ("ids", POINTER(c_int64)), ("values", POINTER(c_float)),
        ("hidden", POINTER(c_float)),
    )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Copies of a result."""

    logits: NDArray[np.float32] | None
    ids: NDArray[np.int64] | None
    values: NDArray[np.float32] | None
    hidden: NDArray[np.float32] | None


@cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(native_library().path))
    found.edgespec_error.restype = ctypes.c_char_p
    found.edgespec_cache_bytes.restype, found.edgespec_cache_length.restype = c_uint64, c_int64
    found.edgespec_session_bytes.restype = c_uint64
    return found


def array(values: Any, kind: type[np.generic], pointer: Any) -> Any:
    """Pointer to numbers, which it keeps alive; None = null."""
    if values is None:
        return pointer()
    made = np.ascontiguousarray(values, kind)
    found = made.ctypes.data_as(pointer)
    found.kept = made
    return found


def call(name: str, *arguments: Any) -> None:
    """Call a function; ValueError: it was refused."""
    if getattr(library(), name)(*arguments):
        raise ValueError(library().edgespec_error().decode())


class Native:
    """A model and a cache over it."""

    def __init__(
        self, graph: Path, slots: int = 1, tokens: int = 512, attention: int = EXACT, threads: int = 1
    ) -> None:
        self._model, self._cache = c_void_p(), c_void_p()
        call("edgespec_open", str(graph).encode(), c_int32(threads), byref(self._model))
        self.facts = Facts(ctypes.sizeof(Facts))
        call("edgespec_describe", self._model, byref(self.facts))
        call("edgespec_cache_open", self._model, c_int32(slots), c_int64(tokens), c_int32(attention),
             byref(self._cache))  # fmt: skip

    def __enter__(self) -> Native:
        return self

    def __exit__(self, *_: object) -> None:
        library().edgespec_cache_close(self._cache)
        library().edgespec_close(self._model)

    @contextmanager
    def beside(self, tokens: int = 512) -> Iterator[Native]:
        """Open another cache over the same model."""
        other = object.__new__(Native)
        other._model, other._cache, other.facts = self._model, c_void_p(), self.facts
        call("edgespec_cache_open", self._model, c_int32(1), c_int64(tokens), c_int32(EXACT), byref(other._cache))
        try:
            yield other
        finally:
            library().edgespec_cache_close(other._cache)

    def close_model(self) -> None:
        """Close the model before its caches."""
        library().edgespec_close(self._model)
        self._model = c_void_p()

    def length(self, slot: int = 0) -> int:
        return int(library().edgespec_cache_length(self._cache, c_int32(slot)))

    def prefill(self, tokens: Sequence[int], slot: int = 0) -> None:
        call("edgespec_prefill", self._cache, c_int32(slot), array(tokens, np.int64, POINTER(c_int64)),
             c_int64(len(tokens)))  # fmt: skip

    def result(self, tokens: Sequence[int] | None = None, parents: Sequence[int] | None = None, *, inputs: Any = None,
                slots: Sequence[int] | None = None, gates: Sequence[int] | None = None, logits: int = ALL_ROWS,
                top: int = 0, hidden: int = 0) -> Result:  # fmt: skip
        rows = len(inputs if tokens is None else tokens)
        kept = [  # a structure does not keep what its pointers point to
            array(tokens, np.int64, POINTER(c_int64)), array(inputs, np.float32, POINTER(c_float)),
            array(parents, np.int32, POINTER(c_int32)), array(slots, np.int32, POINTER(c_int32)),
            array(gates, np.uint8, POINTER(c_uint8)),
        ]  # fmt: skip
        request = Request(ctypes.sizeof(Request), rows, *kept, logits, top, hidden)
        result = Result(ctypes.sizeof(Result))
        call("edgespec_pass", self._cache, byref(request), byref(result))
        return result

    def forward(self, tokens: Sequence[int] | None = None, parents: Sequence[int] | None = None, **more: Any) -> Found:
        """Run a pass -> copies of its results."""
        rows = len(more["inputs"] if tokens is None else tokens)
        return found(self.result(tokens, parents, **more), rows)

    def heads(self, group: int, hidden: NDArray[np.float32], top: int = 0) -> Found:
        result = Result(ctypes.sizeof(Result))
        call("edgespec_heads", self._cache, c_int32(group), array(hidden, np.float32, POINTER(c_float)),
             c_int32(len(hidden)), c_int32(top), byref(result))  # fmt: skip
        return found(result, len(hidden))

    def keep(self, rows: Sequence[int], slot: int = 0) -> None:
        call("edgespec_keep", self._cache, c_int32(slot), array(rows, np.int32, POINTER(c_int32)), c_int32(len(rows)))

    def crop(self, length: int, slot: int = 0) -> int:
        left = c_int64()
        call("edgespec_crop", self._cache, c_int32(slot), c_int64(length), byref(left))
        return left.value

    def checkpoint(self, slot: int = 0) -> None:
        call("edgespec_checkpoint", self._cache, c_int32(slot))


def found(result: Result, rows: int) -> Found:
    def copy(pointer: Any, *shape: int) -> Any:
        if not pointer or not np.prod(shape):
            return None
        return np.ctypeslib.as_array(pointer, shape).copy()

    return Found(
        copy(result.logits, result.rows, result.columns), copy(result.ids, result.rows, result.top),
        copy(result.values, result.rows, result.top), copy(result.hidden, rows, result.hidden_columns),
    )  # fmt: skip


class Array(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("rows", c_int64), ("columns", c_int64))


NODE = ("plan", "rows", "gates", "moves", "kv", "control", "tables", "hidden_in", "memory", "sources", "inserted",
        "axes")  # fmt: skip
OUTPUTS = "logits", "ids", "values", "hidden"


class NativeNode:
    """A graph whose passes receive all inputs of its node."""

    def __init__(self, graph: Path, threads: int = 1) -> None:
        self._model = c_void_p()
        call("edgespec_open", str(graph).encode(), c_int32(threads), byref(self._model))

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> list[tuple[int, int]]:
        """Run a pass into the outputs -> the shape of each."""

        def arrays(names: Sequence[str], given: Mapping[str, NDArray[Any]]) -> Any:
            found = [given.get(name, np.zeros((0, 0))) for name in names]
            return (Array * len(names))(*(Array(one.ctypes.data, *(1, *one.shape)[-2:]) for one in found))

        told = arrays(OUTPUTS, outputs)
        call("edgespec_run", self._model, arrays(NODE, inputs), c_int32(len(NODE)), told, c_int32(len(OUTPUTS)))
        return [(one.rows, one.columns) for one in told]

    def close(self) -> None:
        library().edgespec_close(self._model)
