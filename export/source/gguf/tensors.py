"""GGUF files of llama.cpp, dequantized a few rows at a time (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

What its converter does to the tensors is undone: the rows of llama's queries and keys are interleaved, because rotary
pairs are neighbours there and half a head apart here; gemma's norms are stored plus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.gguf.config import gguf_config
from edgespec.export.source.gguf.files import write_small_files
from edgespec.export.source.gguf.header import Entry, Header, read_gguf_header
from edgespec.export.source.gguf.names import hf_name
from edgespec.export.source.tensors.stored import LOSS, NONSENSE, TRUNCATED, Opened, Stored, Temporary, span

PLAIN = {"F32", "F16", "BF16"}
INSTALL = "pip install 'edgespec[gguf]'"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        file: the file. name: of the tensor in it.
        kind: number of its ggml type.
        shape: of the tensor, [k] or [n, k].
        offset: of its first byte in the file.
        block: values of a block, and its bytes.
        heads: heads whose rows are interleaved; 0 = none.
        plus: what was added to every value.
    """

    file: Path
    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int
    block: tuple[int, int]
    heads: int = 0
    plus: float = 0.0

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Stored."""
        if len(self.shape) == 1:
            values = self._values(slice(0, 1), 0, self.shape[0])[0]
            return (values if self.heads == 0 else values[self._stored_rows(0, len(values))])[rows]
        top, bottom = span(rows, self.shape[0])
        left, right = span(columns, self.shape[1])
        if self.heads == 0:
            return self._values(slice(top, bottom), left, right)
        return self._values(self._stored_rows(top, bottom), left, right)

    def _stored_rows(self, top: int, bottom: int) -> NDArray[np.int64]:  # [bottom - top]
        """Where the rows are: row h * half + i of a head is its row 2 * i + h in the file, h being 0 or 1."""
        row, size = np.arange(top, bottom), self.shape[0] // self.heads
        inside = row % size
        return row - inside + 2 * (inside % (size // 2)) + inside // (size // 2)

    def _values(self, rows: slice | NDArray[np.int64], left: int, right: int) -> NDArray[np.float32]:
        """Values of some rows, from column ``left`` to ``right``."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        size, length = self.block
        n, k = (1, *self.shape)[-2:]
        width = k // size * length
        try:
            mapped = np.memmap(self.file, np.uint8, "r", self.offset, (n, width))
        except (OSError, ValueError) as error:
            raise ExportError(f"{self.file}: cannot read {self.name}: {error}", TRUNCATED) from error
        first, last = left // size, -(-right // size)
        blocks = mapped.view(np.ndarray)[rows, first * length : last * length].copy()
        if blocks.size == 0:
            return np.zeros((len(blocks), right - left), np.float32)
        values = np.asarray(dequantize(blocks, GGMLQuantizationType(self.kind)), np.float32)
        values = values[:, left - first * size :][:, : right - left]
        return values - np.float32(self.plus) if self.plus else values


def open_gguf(file: Path) -> Opened:
    """Open a GGUF file: its tensors stay where they are, configuration and tokenizer are written to a temporary folder.

    Raises:
        ExportError: damaged, of an architecture, a type or a tokenizer that is not supported, or the package gguf is
            not installed.
    """
    package = _package(file)
    header = read_gguf_header(file)
    try:
        return _opened(file, header, package)
    except NONSENSE as error:
        raise ExportError(f"{file}: its metadata cannot be understood: {error!r}", TRUNCATED) from error


def _opened(file: Path, header: Header, package: Any) -> Opened:
    _refuse(file, header.metadata)
    stored = {name: _stored(file, entry, package) for name, entry in header.entries.items()}
    config = gguf_config(file, header.metadata, stored)
    tensors: dict[str, Stored] = {}
    for name, tensor in stored.items():
        if known := hf_name(file, name, str(config["model_type"])):
            tensors[known] = _undone(tensor, known, config)
    temporary = Temporary()
    folder = temporary.path / file.name
    folder.mkdir()
    notes = write_small_files(folder, file, header.metadata, config)
    kinds = sorted({package.GGMLQuantizationType(tensor.kind).name for tensor in stored.values()} - PLAIN)
    if kinds:
        notes = [f"the file is quantized ({', '.join(kinds)}): {LOSS}", *notes]
    return Opened(folder, config, tensors, notes, temporary)


def _package(file: Path) -> Any:
    """The package gguf, which knows the blocks of every type."""
    try:
        import gguf
        import gguf.quants

        return gguf
    except ModuleNotFoundError as error:
        raise ExportError(f"{file}: reading GGUF files needs the package gguf", INSTALL) from error


def _refuse(file: Path, metadata: Mapping[str, Any]) -> None:
    """Files that are no whole model."""
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UnsupportedModel(f"{file}: holds a GGUF {kind}, expected a model", "give the model's own file")
    if int(metadata.get("split.count") or 1) > 1:
        raise UnsupportedModel(
            f"{file}: is one of {metadata['split.count']} parts of a model; expected a whole file",
            "join them once: llama-gguf-split --merge FIRST-PART OUTPUT",
        )


def _stored(file: Path, entry: Entry, package: Any) -> GgufTensor:
    """A tensor as it is in the file."""
    try:
        kind = package.GGMLQuantizationType(entry.kind)
        size, length = (int(number) for number in package.GGML_QUANT_SIZES[kind])
        package.quants.dequantize(np.zeros((1, length), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{file}: tensor {entry.name} is of ggml type {entry.kind}, which the package gguf cannot dequantize",
            "update it (pip install -U gguf), or export from another quantization",
        ) from error
    if len(entry.shape) not in (1, 2):
        raise UnsupportedModel(
            f"{file}: tensor {entry.name} has shape {list(entry.shape)}; expected one or two lengths"
        )
    n, k = (1, *entry.shape)[-2:]
    if k % size or entry.offset + n * (k // size) * length > file.stat().st_size:
        raise ExportError(f"{file}: tensor {entry.name} of shape {list(entry.shape)} goes beyond its end", TRUNCATED)
    return GgufTensor(file, entry.name, entry.kind, entry.shape, entry.offset, (size, length))


def _undone(tensor: GgufTensor, name: str, config: Mapping[str, Any]) -> GgufTensor:
    """The tensor ``name`` of the checkpoint: without what the converter did to it."""
    if config["model_type"] == "llama" and (which := name.split(".")[-2]) in ("q_proj", "k_proj"):
        heads = int(config["num_attention_heads" if which == "q_proj" else "num_key_value_heads"])
        if tensor.shape[0] % (2 * heads):
            raise ExportError(f"{tensor.file}: {tensor.name} has {tensor.shape[0]} rows for {heads} heads", TRUNCATED)
        return replace(tensor, heads=heads)
    if str(config["model_type"]).startswith("gemma") and name.endswith("norm.weight"):
        return replace(tensor, plus=1.0)
    return tensor
