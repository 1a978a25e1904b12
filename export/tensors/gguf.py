"""GGUF files of llama.cpp, dequantized a few rows at a time (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

What its converter does to the tensors is undone: the rows of llama's queries and keys are interleaved, because rotary
pairs are neighbours there and half a head apart here; gemma's norms are stored plus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.tensors.base import LOSS, TRUNCATED, Opened, Stored, Temporary, span
from edgespec.export.tensors.gguf_config import Metadata, gguf_config
from edgespec.export.tensors.gguf_files import write_small_files
from edgespec.export.tensors.gguf_names import hf_name

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
    reader = _reader(file)
    metadata = _metadata(reader)
    _refuse(file, metadata)
    config = gguf_config(file, metadata, {str(tensor.name): tensor for tensor in reader.tensors})
    tensors: dict[str, Stored] = {}
    for tensor in reader.tensors:
        if name := hf_name(file, str(tensor.name), str(config["model_type"])):
            tensors[name] = _tensor(file, tensor, name, config)
    temporary = Temporary()
    folder = temporary.path / file.name
    folder.mkdir()
    notes = write_small_files(folder, file, metadata, config)
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors} - {"F32", "F16", "BF16"})
    if kinds:
        notes = [f"the file is quantized ({', '.join(kinds)}): {LOSS}", *notes]
    return Opened(folder, config, tensors, notes, temporary)


def _reader(file: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ExportError(f"{file}: reading GGUF files needs the package gguf", INSTALL) from error
    try:
        reader = gguf.GGUFReader(file)
    except Exception as error:  # the library trusts the file: a damaged one ends in any way
        raise ExportError(f"{file}: not a readable GGUF file: {error}", TRUNCATED) from error
    if reader.byte_order != "I":
        raise UnsupportedModel(f"{file}: a GGUF file of the other byte order is not supported")
    return reader


def _metadata(reader: Any) -> Metadata:
    return {name: field.contents() for name, field in reader.fields.items()}


def _refuse(file: Path, metadata: Mapping[str, Any]) -> None:
    """Files that are no whole model."""
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UnsupportedModel(f"{file}: holds a GGUF {kind}, expected a model", "give the model's own file")
    if int(metadata.get("split.count") or 1) > 1:
        raise UnsupportedModel(
            f"{file}: is one of {metadata['split.count']} parts of a model; expected a whole file",
            "join them once: llama-gguf-split --merge FIRST-PART OUTPUT",
        )


def _tensor(file: Path, tensor: Any, name: str, config: Mapping[str, Any]) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    kind = tensor.tensor_type
    shape = tuple(int(length) for length in reversed(tensor.shape))
    size, length = (int(number) for number in GGML_QUANT_SIZES[kind])
    try:
        dequantize(np.zeros((1, length), np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"{file}: tensor {tensor.name} is stored as {kind.name}, which the package gguf cannot dequantize",
            "export from another quantization, or from the unquantized checkpoint",
        ) from error
    if len(shape) not in (1, 2):
        raise UnsupportedModel(f"{file}: tensor {tensor.name} has shape {list(shape)}; expected a vector or a matrix")
    heads = 0
    if config["model_type"] == "llama" and (which := name.split(".")[-2]) in ("q_proj", "k_proj"):
        heads = int(config["num_attention_heads" if which == "q_proj" else "num_key_value_heads"])
        if shape[0] % (2 * heads):
            raise ExportError(f"{file}: tensor {tensor.name} has {shape[0]} rows for {heads} heads", TRUNCATED)
    plus = 1.0 if str(config["model_type"]).startswith("gemma") and name.endswith("norm.weight") else 0.0
    return GgufTensor(file, str(tensor.name), int(kind), shape, int(tensor.data_offset), (size, length), heads, plus)
