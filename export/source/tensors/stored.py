"""One tensor of a checkpoint, read in parts, and what opening a checkpoint gives."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError

LOSS = "its weights are read as float32, and quantizing them once more loses a little more"
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of settings of unexpected types
TRUNCATED = "the file may be truncated: download it again"


class Stored(Protocol):
    """A tensor on disk."""

    @property
    def file(self) -> Path:
        """The file that holds it, for messages."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, as the model sees it."""
        ...

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """Some rows, and columns of a matrix; neither slice has a step."""
        ...


class Temporary:
    """A folder for the small files of a model that has none of its own; it is deleted with this object.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="edgespec-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class Opened:
    """A source model.

    Attributes:
        path: the folder of config.json and the tokenizer.
        config: the parsed config.json.
        tensors: by Hugging Face name.
        notes: what the user should know about how it was read.
        temporary: where ``path`` is, if it is not the user's own; to be kept as long as the model is used.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Stored]
    notes: list[str] = field(default_factory=list)
    temporary: Temporary | None = None


def span(part: slice | None, length: int) -> tuple[int, int]:
    """Begin and end of a slice without a step."""
    start, stop, step = (slice(None) if part is None else part).indices(length)
    if step != 1:
        raise ValueError(f"expected a slice without a step, got {part}")
    return start, max(start, stop)


@dataclass(frozen=True)
class Plain:
    """A tensor of a safetensors file.

    Attributes:
        file: the file.
        name: of the tensor in it.
        dtype: as safetensors names it, such as ``BF16``.
        shape: of the tensor.
        offset: of its first byte in the file.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def raw(self, rows: slice = slice(None), columns: slice | None = None) -> NDArray[Any]:
        """A part as it is stored: ``rows`` of the first dimension, ``columns`` of a matrix.

        Whole rows are read, for mapping the file takes longer than a small tensor.  Where columns are left out, the
        file is mapped for this read alone, so that its pages do not stay in the process.
        """
        dtype = numpy_dtype(self.dtype)
        if dtype is None:
            raise self._unreadable()
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        try:
            if columns is None:
                return self._whole_rows(dtype, rows)
            size = prod(self.shape) * dtype.itemsize
            mapped = np.memmap(self.file, np.uint8, "r", self.offset, (size,))
        except (OSError, ValueError) as error:
            raise ExportError(f"{self.file}: cannot read {self.name}: {error}", TRUNCATED) from error
        return mapped.view(np.ndarray).view(dtype).reshape(self.shape)[rows, columns].copy()

    def _whole_rows(self, dtype: np.dtype[Any], rows: slice) -> NDArray[Any]:  # [rows, ..]
        """As ``raw``.

        Raises:
            OSError: the file cannot be read.
            ValueError: it ends before the tensor does.
        """
        first, end = span(rows, self.shape[0]) if self.shape else (0, 1)
        row = prod(self.shape[1:]) * dtype.itemsize
        out = np.empty((end - first, *self.shape[1:]) if self.shape else (), dtype)
        with self.file.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size < (needed := self.offset + prod(self.shape) * dtype.itemsize):
                raise ValueError(f"it needs {needed} bytes, the file has {size}")
            file.seek(self.offset + first * row)
            left = out.reshape(-1).view(np.uint8).data
            while left:
                read = file.readinto(left)
                if not read:
                    raise ValueError("the file became shorter")
                left = left[read:]
        return out

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Stored."""
        if self.dtype not in ("F64", "F32", "F16", "BF16"):
            raise self._unreadable()
        return self.raw(rows, columns).astype(np.float32)

    def _unreadable(self) -> ExportError:
        return ExportError(
            f"{self.file}: tensor {self.name} is stored as {self.dtype}; expected float32, float16 or bfloat16",
            "export from the unquantized checkpoint",
        )


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """The numpy dtype of a safetensors dtype; None for one that is never read."""
    import ml_dtypes

    known: dict[str, Any] = {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
        "U8": np.uint8,
    }  # fmt: skip
    return np.dtype(known[name]) if name in known else None
