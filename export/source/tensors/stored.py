"""One tensor of a checkpoint, read in parts, and what opening a checkpoint gives."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        """A part as it is stored.

        The file is mapped for this read alone, so that its pages do not stay in the process.
        """
        dtype = numpy_dtype(self.dtype)
        if dtype is None:
            raise self._unreadable()
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        try:
            mapped = np.memmap(self.file, np.uint8, "r", self.offset, (int(np.prod(self.shape)) * dtype.itemsize,))
        except (OSError, ValueError) as error:
            raise ExportError(f"{self.file}: cannot read {self.name}: {error}", TRUNCATED) from error
        whole = mapped.view(np.ndarray).view(dtype).reshape(self.shape)
        if not self.shape:
            return whole.copy()
        return whole[rows].copy() if columns is None else whole[rows, columns].copy()

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
