"""Checkpoints of compressed-tensors (llm-compressor): float8, int8, and integers packed in 32-bit words.

Layout: https://github.com/vllm-project/compressed-tensors. ``weight_scale`` has one value for the matrix, each row,
each block or each group of inputs; ``weight_packed`` int32 [n, k / (32 / bits)] holds level + 2^(bits - 1);
``weight_zero_point`` is packed the same way, but down the outputs; ``weight_g_idx`` [k] says the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.quantized.float8 import ASIDE, scaled
from edgespec.export.source.quantized.gptq import expect_shape
from edgespec.export.source.quantized.packing import dequantize, unpack
from edgespec.export.source.tensors.stored import Plain, Stored, span

FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense")
PARTS = ("scale", "zero_point", "packed", "shape", "g_idx")


@dataclass(frozen=True)
class PackedMatrix:
    """One matrix of packed integers; see the module.

    Attributes:
        words: int32 [n, k / many]. scales: [n, groups]. zeros: int32 [n / many, groups]; None = symmetric.
        group: of each input, [k].
        bits: of a level.
    """

    words: Plain
    scales: Plain
    zeros: Plain | None
    group: NDArray[np.int64]
    bits: int

    @property
    def file(self) -> Path:
        """See Stored."""
        return self.words.file

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, k]."""
        return self.words.shape[0], len(self.group)

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        """See Stored."""
        n, k = self.shape
        top, bottom = span(rows, n)
        left, right = span(columns, k)
        many = 32 // self.bits
        words = self.words.raw(slice(top, bottom), slice(left // many, -(-right // many)))
        levels = unpack(words, self.bits)[:, left % many :][:, : right - left]
        scales = self.scales.raw(slice(top, bottom)).astype(np.float32)
        zeros = np.full(scales.shape, 1 << (self.bits - 1), np.float32)
        if self.zeros is not None:
            packed = self.zeros.raw(slice(top // many, -(-bottom // many)))
            down = unpack(np.ascontiguousarray(packed.T), self.bits).T
            zeros = down[top % many :][: bottom - top].astype(np.float32)
        return dequantize(levels, zeros, scales, self.group[left:right])


def compressed(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a compressed-tensors checkpoint, ``settings`` being its quantization_config."""
    groups = settings.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    forms = {settings.get("format", "dense")} | {group["format"] for group in groups.values() if group.get("format")}
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if unknown := sorted(str(form) for form in (forms - {"mixed-precision"}) | {sparsity} if form not in FORMATS):
        raise UnsupportedModel(
            f"compressed-tensors format {unknown[0]!r} is not supported; supported: {', '.join(FORMATS)}",
            "export from the unquantized checkpoint",
        )
    blocks = {tuple(group["block_structure"]) for group in weights if group.get("block_structure")}
    aside = (*ASIDE, *(f".weight_{part}" for part in PARTS))
    found: dict[str, Stored] = {name: tensor for name, tensor in stored.items() if not name.endswith(aside)}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            found[name.removesuffix("_packed")] = _packed(stored, name.removesuffix("_packed"), weights)
        elif name.endswith(".weight") and tensor.dtype in ("F8_E4M3", "I8"):
            found[name] = _levels(stored, name, blocks)
    return found


def _levels(stored: Mapping[str, Plain], name: str, blocks: set[tuple[int, ...]]) -> Stored:
    """A matrix of float8 or int8."""
    scale, zero = stored.get(f"{name}_scale"), stored.get(f"{name}_zero_point")
    if scale is None:
        raise ExportError(f"tensor {name}_scale is missing from the checkpoint", "download it again")
    levels = stored[name]
    rows, columns = (*scale.shape, 1, 1)[:2]
    n, k = (*levels.shape, 1, 1)[:2]
    for block in blocks:
        if (-(-n // block[0]), -(-k // block[1])) == (rows, columns):
            return scaled(levels, scale, zero, block)
    if columns > 1 and rows == n and k % columns == 0:  # one a group of inputs
        return scaled(levels, scale, zero, (1, k // columns))
    return scaled(levels, scale, zero, None)  # one for the matrix, or one a row


def _packed(stored: Mapping[str, Plain], name: str, weights: list[Mapping[str, Any]]) -> Stored:
    """A matrix of packed integers."""
    parts = {part: stored.get(f"{name}_{part}") for part in PARTS}
    words, scales, shape, zeros = parts["packed"], parts["scale"], parts["shape"], parts["zero_point"]
    if words is None or scales is None or shape is None:
        missing = next(part for part in PARTS if part in ("scale", "packed", "shape") and parts[part] is None)
        raise ExportError(f"tensor {name}_{missing} is missing from the checkpoint", "download it again")
    n, k = (int(length) for length in shape.raw())
    fitting = [bits for bits in (4, 8) if words.shape == (n, -(-k * bits // 32))]
    bits = fitting[0] if fitting else 0
    if words.dtype != "I32" or not bits or all(group.get("num_bits", bits) != bits for group in weights):
        asked = ", ".join(str(group.get("num_bits")) for group in weights)
        raise UnsupportedModel(
            f"{words.file}: {words.name} is {words.dtype} of shape {list(words.shape)} for a matrix of {[n, k]} and "
            f"num_bits {asked}; supported: 4 and 8 bits in int32",
            "export from the unquantized checkpoint",
        )
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    expect_shape(scales, (n, groups), "one scale a row and group")
    if zeros is not None:
        expect_shape(zeros, (-(-n * bits // 32), groups), "one zero point a row and group")
    return PackedMatrix(words, scales, zeros, _groups(parts["g_idx"], k, groups, weights), bits)


def _groups(index: Plain | None, k: int, groups: int, weights: list[Mapping[str, Any]]) -> NDArray[np.int64]:
    """The group of each input, [k]."""
    if index is not None:
        expect_shape(index, (k,), "one group an input")
        group = index.raw().astype(np.int64)
        if not 0 <= group.min() <= group.max() < groups:
            raise ExportError(f"{index.file}: {index.name} names groups beyond the {groups} there are")
        return group
    sizes = {group["group_size"] for group in weights if group.get("group_size") and group["group_size"] > 0}
    size = next((size for size in sorted(sizes) if -(-k // size) == groups), k if groups == 1 else 0)
    if size == 0:
        raise ExportError(
            f"{groups} groups of scales for {k} inputs fit no group_size of the configuration ({sorted(sizes)})",
            "quantization_config and the weights do not belong together",
        )
    return np.arange(k, dtype=np.int64) // size
