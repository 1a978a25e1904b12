"""One tensor of a checkpoint, read in parts; safetensors files; and what opening a checkpoint gives."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.runtimes.files import json_file

LOSS = "its weights are read as float32, and quantizing them once more loses a little more"
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of settings of unexpected types
UNQUANTIZED = "export from the unquantized checkpoint"
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
        """Read some rows, and columns of a matrix; neither slice has a step."""
        ...


@dataclass(frozen=True)
class FileRows:
    """The rows of a matrix as its file has them."""

    type: str  # a name of ``FILE_KINDS``, such as ``Q4_K``, or what no kernels are for
    read: Callable[[slice | NDArray[np.int64]], NDArray[np.uint8]]  # some rows -> uint8 [rows, bytes]
    order: NDArray[np.int64] | None = None  # the model's input at each place of a row, [k]; None = they are in order


@runtime_checkable
class Blocked(Protocol):
    """A tensor whose file has blocks that can be taken as they are."""

    def blocks(self) -> FileRows | None:
        """Return its rows as stored; None = reading changes the values."""
        ...


class Temporary:
    """Temporary folder for the small files of a model that has no folder; it is deleted with this object.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="edgespec-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass
class Opened:
    """A source model."""

    # the folder of config.json and the tokenizer: the model's own, or for a GGUF file or an adapter a temporary one
    # that lasts as long as this object
    path: Path
    config: dict[str, Any] = field(repr=False)  # the parsed config.json
    tensors: Mapping[str, Stored] = field(default_factory=dict, repr=False)  # what is stored, by Hugging Face name
    notes: list[str] = field(default_factory=list, repr=False)  # messages for the user about how it is read
    temporary: Temporary | None = field(default=None, repr=False)  # where ``path`` is, if it is a temporary folder
    tokenizer_bytes: int = 0  # estimated size of a tokenizer.json that was not written; 0 = it was, or unknown


def span(part: slice | None, length: int) -> tuple[int, int]:
    """Begin and end of a slice without a step."""
    start, stop, step = (slice(None) if part is None else part).indices(length)
    if step != 1:
        raise ValueError(f"expected a slice without a step, got {part}")
    return start, max(start, stop)


@dataclass(frozen=True)
class Plain:
    """A tensor of a safetensors file."""

    file: Path  # the file
    name: str  # of the tensor in it
    dtype: str  # as safetensors names it, such as ``BF16``
    shape: tuple[int, ...]  # of the tensor
    offset: int  # of its first byte in the file

    def raw(self, rows: slice = slice(None), columns: slice | None = None) -> NDArray[Any]:
        """Return a part as it is stored: ``rows`` of the first dimension, ``columns`` of a matrix.

        Whole rows are read, because mapping the file takes longer than reading a small tensor.  If columns are left
        out, the file is mapped only for this read, so that its pages do not stay in the process.
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
        if self.dtype not in ("F64", "F32", "F16", "BF16"):
            raise self._unreadable()
        return self.raw(rows, columns).astype(np.float32)

    def blocks(self) -> FileRows | None:
        """Return the rows of a matrix of floats; None of others."""
        if len(self.shape) != 2 or self.dtype not in ("F32", "F16", "BF16"):
            return None
        return FileRows(self.dtype, self._bytes)

    def _bytes(self, rows: slice | NDArray[np.int64]) -> NDArray[np.uint8]:  # [rows, bytes]
        if isinstance(rows, slice):
            return self.raw(rows).view(np.uint8)
        if not len(rows):
            return self.raw(slice(0, 0)).view(np.uint8)
        first = int(rows.min())
        return self.raw(slice(first, int(rows.max()) + 1)).view(np.uint8)[rows - first]

    def _unreadable(self) -> ExportError:
        return ExportError(
            f"{self.file}: tensor {self.name} is stored as {self.dtype}; expected float32, float16 or bfloat16",
            UNQUANTIZED,
        )


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """Return the numpy dtype of a safetensors dtype; None for one that is never read."""
    import ml_dtypes

    known: dict[str, Any] = {
        "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
        "U8": np.uint8,
    }  # fmt: skip
    return np.dtype(known[name]) if name in known else None


SINGLE, LISTING = "model.safetensors", "model.safetensors.index.json"
STRAY = ("adapter_", "optimizer", "scheduler", "training_args")  # files next to a model that are not part of it
MISTRAL = "consolidated"  # mistral's own files, with mistral's names of tensors


def safetensors_in(folder: Path) -> dict[str, Plain]:
    """All tensors of a folder: of model.safetensors, else of the shards of its index, else of every other file.

    Raises:
        ExportError: no weights, only pickles, a missing or damaged file, or a tensor that is in two files.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / LISTING).is_file():
        return _indexed(folder / LISTING)
    found: dict[str, Plain] = {}
    for file in _unlisted(folder):
        for name, tensor in read_header(file).items():
            if name in found:
                raise ExportError(
                    f"{folder}: tensor {name} is in {found[name].file.name} and in {file.name}",
                    "keep the files of one model in the folder, or its model.safetensors.index.json",
                )
            found[name] = tensor
    return found


def _indexed(listing: Path) -> dict[str, Plain]:
    try:
        names = json_file.read_object(listing, ExportError)["weight_map"]
        shards = {str(name): listing.parent / file for name, file in names.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{listing}: expected a weight_map of file names: {error!r}") from error
    if outside := [str(file) for file in names.values() if Path(file).name != file]:
        raise ExportError(f"{listing}: names {outside[0]!r}, which is not a file of this folder")
    held: dict[Path, dict[str, Plain]] = {}
    for file in sorted(set(shards.values())):
        if not file.is_file():
            raise ExportError(f"{file}: named in {listing.name} but missing", "download all shards")
        held[file] = read_header(file)
    for name, file in shards.items():
        if name not in held[file]:
            raise ExportError(
                f"{file}: has no tensor {name}, which {listing.name} says it holds",
                "the files belong to different models, or one is old: download the shards and the index again",
            )
    return {name: held[file][name] for name, file in shards.items()}


def _unlisted(folder: Path) -> list[Path]:
    named = sorted(folder.glob("*.safetensors"))
    files = [file for file in named if file.is_file() and not file.name.startswith(STRAY)]  # a pipe would never end
    if shards := [file for file in files if file.name.startswith("model-")]:
        return shards
    if plain := [file for file in files if not file.name.startswith(MISTRAL)]:
        return plain
    if files:
        raise ExportError(
            f"{folder}: has only {files[0].name}, in mistral's own format; expected model.safetensors",
            "download the model-*.safetensors of the same repository",
        )
    pickles = sorted(
        file.name
        for kind in ("*.bin", "*.pt", "*.pth")
        for file in folder.glob(kind)
        if not file.name.startswith(STRAY)
    )
    if pickles:
        raise ExportError(
            f"{folder}: weights only as pickle ({pickles[0]}), which can run code when opened",
            "convert it once with `model.save_pretrained(folder, safe_serialization=True)`",
        )
    raise ExportError(f"{folder}: has no *.safetensors", "give a folder with safetensors weights, or a .gguf file")


def read_header(file: Path) -> dict[str, Plain]:
    """Read the tensors of one safetensors file, by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):  # checks that header and file fit together
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ExportError(f"{file}: not a readable safetensors file: {error}", "download it again") from error
    header.pop("__metadata__", None)
    return {
        name: Plain(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_object(file: Path, hint: str) -> dict[str, Any]:
    """Read the object in a JSON file; numbers may be infinite, as transformers writes them.

    Args:
        hint: what to do where it is missing.
    """
    if not file.is_file():
        raise ExportError(f"{file.parent}: has no {file.name}", hint)
    return json_file.read_object(file, ExportError, infinite=True)
