"""Levels of few bits in 32-bit words: the checkpoints of GPTQ and AWQ.

GPTQ checkpoints (https://arxiv.org/abs/2210.17323) in the layout of AutoGPTQ and GPTQModel.

A matrix [n, k] is ``qweight`` int32 [k * bits / 32, n], packed down the inputs; ``qzeros`` int32 [groups, n * bits /
32], packed along the outputs; ``scales`` [groups, n]; ``g_idx`` int32 [k], the group of each input. The first format,
"gptq", stores every zero point less one, modulo 2^bits; "gptq_v2" stores it as it is.

AWQ checkpoints (https://arxiv.org/abs/2306.00978) in the "gemm" layout of AutoAWQ, 4 bits.

A matrix [n, k] is ``qweight`` int32 [k, n / 8] and ``qzeros`` int32 [groups, n / 8], both packed along the outputs,
eight levels a word in the order 0 2 4 6 1 3 5 7 from the lowest bits on; ``scales`` [groups, n].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.groups import GroupedRows, is_half, without_kernels
from edgespec.export.source.stored import UNQUANTIZED, FileRows, Plain, Stored, span


def unpack(words: NDArray[np.int32], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Levels of words, int32 [..., m] -> uint8 [..., m * 32 / bits], the lowest bits first.

    Args:
        bits: of a level; divides 32.
        order: for each level of a word, in which place it is; None = in its own.
    """
    bytes_ = words.view(np.uint8)  # [..., 4 m]
    mask = np.uint8((1 << bits) - 1)
    levels = np.stack([bytes_ >> np.uint8(shift) & mask for shift in range(0, 8, bits)], -1)
    if order is not None:
        levels = levels.reshape(*words.shape, 32 // bits)[..., list(order)]
    return levels.reshape(*words.shape[:-1], words.shape[-1] * (32 // bits))


def _joined(low: NDArray[np.uint32], high: NDArray[np.uint32]) -> NDArray[np.uint8]:  # [...] both -> [..., 8]
    """Join the eight nibbles of two words in bytes."""
    even = low & np.uint32(0x0F0F0F0F) | (high & np.uint32(0x0F0F0F0F)) << np.uint32(4)
    odd = low >> np.uint32(4) & np.uint32(0x0F0F0F0F) | high & np.uint32(0xF0F0F0F0)
    out = np.empty((*even.shape, 4, 2), np.uint8)
    for at, words in enumerate((even, odd)):
        out[..., at] = words.view(np.uint8).reshape(*words.shape, 4)
    return out.reshape(*even.shape, 8)


def dequantize(
    levels: NDArray[np.generic], zeros: NDArray[np.float32], scales: NDArray[np.float32], group: NDArray[np.int64]
) -> NDArray[np.float32]:
    """(level - zero) * scale in float32.

    Args:
        levels: integers [n, k].
        zeros: [n, groups]. scales: [n, groups].
        group: of every column, [k].
    """
    values = levels.astype(np.float32)
    values -= zeros[:, group]
    values *= scales[:, group]
    return values


@dataclass(frozen=True)
class Scaled:
    """A matrix of float8 or int8 with one scale for each block: ``(level - zero) * scale``."""

    levels: Plain  # [n, k]
    scale: Plain  # as many as there are blocks; any shape
    zero: Plain | None  # like ``scale``; None = 0
    block: tuple[int, int]  # rows and columns of a block; the last ones may be cut off

    @property
    def file(self) -> Path:
        return self.levels.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.levels.shape

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        n, k = self.shape
        grid = -(-n // self.block[0]), -(-k // self.block[1])
        down = np.arange(*span(rows, n)) // self.block[0]
        across = np.arange(*span(columns, k)) // self.block[1]
        values = self.levels.raw(rows, columns).astype(np.float32)
        if self.zero is not None:
            values -= self.zero.raw().astype(np.float32).reshape(grid)[np.ix_(down, across)]
        values *= self.scale.raw().astype(np.float32).reshape(grid)[np.ix_(down, across)]
        return values

    def blocks(self) -> FileRows:
        """Return its rows, with a type that has no kernels where levels are not integers."""
        return self._blocks

    @cached_property
    def _blocks(self) -> FileRows:
        (n, k), (high, wide) = self.shape, self.block
        if self.levels.dtype != "I8":
            return without_kernels(self.levels.dtype)
        grid = -(-n // high), -(-k // wide)
        scales = self.scale.raw().astype(np.float32).reshape(grid)
        zeros = np.zeros(grid, np.int16) if self.zero is None else self.zero.raw().astype(np.int16).reshape(grid)

        def levels(rows: slice) -> tuple[NDArray[np.uint8]]:
            return (self.levels.raw(rows).view(np.uint8) ^ np.uint8(128),)

        def others(rows: slice) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
            down = np.arange(*span(rows, n)) // high
            return zeros[down] + 128, scales[down]

        rows = GroupedRows(self.file, 8, np.arange(k) // wide, not zeros.any(), levels, others)
        return rows.as_blocks(is_half(scales))


@dataclass(frozen=True)
class PackedMatrix:
    """Levels in 32-bit words: ``(level - zero) * scale``, a scale and a zero point for each row and group of inputs."""

    words: Plain  # int32, the levels. zeros: int32, the zero points, None = half of the range. scales: floats
    zeros: Plain | None
    scales: Plain
    group: NDArray[np.int64]  # of each input, [k]
    bits: int  # of a level
    axes: tuple[int, int]  # along which words and zeros are packed
    turned: bool = True  # whether all of them are stored with inputs, or groups, as the first axis
    places: tuple[int, ...] | None = None  # see ``unpack``
    add: int = 0  # to a stored zero point, modulo 2^bits

    @property
    def file(self) -> Path:
        return self.words.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scales.shape[int(self.turned)], len(self.group)

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        columns = slice(*span(columns, self.shape[1]))
        (levels,), (zeros, scales) = self._read(rows, columns), self._scales(rows)
        return dequantize(levels, zeros.astype(np.float32), scales, self.group[columns])

    def blocks(self) -> FileRows:
        """Return its rows, with a type that has no kernels where they cannot be taken as they are."""
        return self._blocks

    @cached_property
    def _blocks(self) -> FileRows:
        middle = (1 << (self.bits - 1)) - self.add
        symmetric = self.bits > 2 and (self.zeros is None or _all_zeros_are(self, middle))
        rows = GroupedRows(self.file, self.bits, self.group, symmetric, lambda rows: self._read(rows, slice(None)),
                           self._scales, self._pairs if self.bits == 4 else None)  # fmt: skip
        return rows.as_blocks(self.scales.dtype == "F16" or is_half(self.scales.raw().astype(np.float32)))

    def _read(self, rows: slice, columns: slice) -> tuple[NDArray[np.uint8]]:
        """Read levels [rows, columns]."""
        rows, columns = slice(*span(rows, self.shape[0])), slice(*span(columns, self.shape[1]))
        return (self._levels(self.words, self.axes[0], rows, columns),)

    def _scales(self, rows: slice) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Read zero points and scales [rows, groups]."""
        rows, every = slice(*span(rows, self.shape[0])), slice(None)
        scales = self.scales.raw(*((every, rows) if self.turned else (rows,))).astype(np.float32)
        scales = scales.T if self.turned else scales
        zeros = np.full(scales.shape, 1 << (self.bits - 1), np.uint8)
        if self.zeros is not None:
            points = self._levels(self.zeros, self.axes[1], rows, every) + np.uint8(self.add)
            zeros = points & np.uint8((1 << self.bits) - 1)
        return zeros, scales

    def _pairs(self, rows: slice) -> tuple[NDArray[np.uint8]]:  # [rows, k / 2]
        """Put levels i and i + 16 of each 32 inputs into a byte, word by word; k is a multiple of 32."""
        (start, stop), groups = span(rows, self.shape[0]), self.shape[1] // 32
        if self.axes[0] == 1 and self.turned:  # a word has levels of eight rows
            words = self.words.raw(slice(None), slice(start // MANY, -(-stop // MANY))).view(np.uint32)
            words = words.reshape(groups, 2, 16, -1)
            found = _joined(words[:, 0], words[:, 1])[..., list(self.places or range(MANY))]  # [groups, 16, words, 8]
            found = found.reshape(groups, 16, -1)[..., start % MANY :][..., : stop - start].transpose(2, 0, 1)
        elif self.turned:
            words = self.words.raw(slice(None), slice(start, stop)).view(np.uint32).reshape(groups, 2, 2, -1)
            found = _joined(words[:, 0], words[:, 1]).transpose(2, 0, 1, 3)  # [rows, groups, 2, 8]
        else:
            words = self.words.raw(slice(start, stop)).view(np.uint32).reshape(stop - start, groups, 2, 2)
            found = _joined(words[:, :, 0], words[:, :, 1])
        return (np.ascontiguousarray(found).reshape(stop - start, -1),)

    def _levels(self, part: Plain, axis: int, rows: slice, across: slice) -> NDArray[np.uint8]:
        """Unpack the part of some rows -> [rows, inputs or groups]."""
        region, many = [across, rows] if self.turned else [rows, across], 32 // self.bits
        start, stop = region[axis].start, region[axis].stop
        region[axis] = slice(start // many, -(-stop // many))
        words = part.raw(*region)
        found = unpack(np.ascontiguousarray(words if axis else words.T), self.bits, self.places)
        found = found[:, start % many :][:, : stop - start]
        return found.T if (axis == 0) != self.turned else found


FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is to be added to a stored zero point
LOOKED_AT, SAMPLE = 9, 1 << 18  # modules, and words of each, that tell how zero points are stored


def gptq(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a GPTQ checkpoint, ``settings`` being its quantization_config."""
    bits, form = settings.get("bits"), settings.get("checkpoint_format") or settings.get("format")
    if settings.get("is_marlin_format"):
        form = "marlin"
    if form not in (None, *FORMATS):
        raise UnsupportedModel(
            f"GPTQ checkpoint format {form!r} is not supported; supported: {', '.join(FORMATS)}", UNQUANTIZED
        )
    if bits not in (2, 4, 8) or settings.get("pack_dtype", "int32") != "int32":
        packed = settings.get("pack_dtype", "int32")
        raise UnsupportedModel(
            f"GPTQ of {bits} bits in {packed} is not supported; supported: 2, 4 and 8 bits in int32", UNQUANTIZED
        )
    mixed = bool(settings.get("dynamic"))  # modules may have different bits, which follow from their shapes

    def matrix(module: str) -> PackedMatrix:
        return _gptq_matrix(stored, module, None if mixed else int(bits), settings.get("group_size"))

    found = _unpacked(stored, matrix)
    add = _stored_less([one for one in found.values() if isinstance(one, PackedMatrix)], form)
    return {name: replace(one, add=add) if isinstance(one, PackedMatrix) else one for name, one in found.items()}


def _stored_less(matrices: list[PackedMatrix], form: str | None) -> int:
    """Return what is to be added to stored zero points: 1 in the first format, 0 in the second.

    Zero points that are all the middle of the range, or all one less, tell it for sure.  Of others the levels tell it:
    weights are zero on average, so levels are on average their zero points.  Tools name the format or do not
    (``form``), and some name a wrong one.

    Raises:
        ExportError: neither the file's numbers nor its settings say it, or they contradict each other.
    """
    if not matrices:
        return 0
    for name, add in FORMATS.items():
        if all(_all_zeros_are(one, (1 << (one.bits - 1)) - add) for one in matrices):
            return FORMATS[name]
    apart = [found for one in matrices[:: -(-len(matrices) // LOOKED_AT) or 1] if (found := _levels_above(one))]
    middle, error = (float(np.median([at[side] for at in apart])) if apart else 1.0 for side in (0, 1))
    clear = 4 * error / max(1, len(apart)) ** 0.5
    seen = {name: add for name, add in FORMATS.items() if abs(middle - add) + clear < 0.45}
    if form is None and not seen:
        raise ExportError(
            "quantization_config does not say how zero points are stored, and the weights do not tell it",
            'add "checkpoint_format" to it: "gptq" (stored less one, as AutoGPTQ does) or "gptq_v2" (as they are)',
        )
    if form is not None and seen and form not in seen:
        raise ExportError(
            f"checkpoint_format is {form}, but the zero points are those of {next(iter(seen))}: with them weights are "
            "zero on average",
            f'set "checkpoint_format" of quantization_config to "{next(iter(seen))}", or export the unquantized model',
        )
    return FORMATS[form or next(iter(seen))]


def _all_zeros_are(matrix: PackedMatrix, zero: int) -> bool:
    """Whether every stored zero point is that number."""
    assert matrix.zeros is not None
    word = sum(zero << at for at in range(0, 32, matrix.bits))
    return bool((matrix.zeros.raw().view(np.uint32) == np.uint32(word)).all())


def _levels_above(matrix: PackedMatrix) -> tuple[float, float] | None:
    """Return by how much levels are above stored zero points on average, and the error of that."""
    assert matrix.zeros is not None
    many = 32 // matrix.bits
    rows = max(1, min(matrix.words.shape[0], SAMPLE // max(1, matrix.words.shape[1])))
    levels = unpack(np.ascontiguousarray(matrix.words.raw(slice(0, rows), slice(None)).T), matrix.bits)
    zeros = unpack(matrix.zeros.raw(), matrix.bits)[matrix.group[: rows * many]].T  # [n, inputs]
    if not levels.size:
        return None
    above = levels.astype(np.float32) - zeros
    return float(above.mean()), float(above.std() / above.size**0.5)


def _unpacked(stored: Mapping[str, Plain], matrix: Callable[[str], PackedMatrix]) -> dict[str, Stored]:
    """Replace the parts of packed matrices by the matrices, named by module."""
    found: dict[str, Stored] = dict(stored)
    for name in [name for name in stored if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        found[f"{module}.weight"] = matrix(module)
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            found.pop(f"{module}.{part}", None)
    return found


def _gptq_matrix(stored: Mapping[str, Plain], module: str, bits: int | None, group_size: Any) -> PackedMatrix:
    qweight, qzeros, scales = (packed_part(stored, f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
    bits = bits or next((bits for bits in (2, 4, 8) if qzeros.shape[1] * 32 == qweight.shape[1] * bits), 4)
    k, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    groups = scales.shape[0]
    expect_shape(scales, (groups, n), f"{bits} bits")
    expect_shape(qzeros, (groups, n * bits // 32), f"{bits} bits")
    index = stored.get(f"{module}.g_idx")
    if index is not None and index.shape != (0,):
        expect_shape(index, (k,), f"{bits} bits")
        group = index.raw().astype(np.int64)
    else:
        size = k if group_size == -1 else group_size
        if group_size is None:  # the number of scales says it, unless several sizes fit
            fitting = [size for size in (16, 32, 64, 128, 256, 512, 1024) if -(-k // size) == groups]
            size = k if groups == 1 else fitting[0] if len(fitting) == 1 else None
        if not isinstance(size, int) or size < 1 or -(-k // size) != groups:
            raise ExportError(
                f"{qweight.file}: {module} has {groups} groups of scales for {k} inputs, but group_size {group_size}",
                "quantization_config and the weights do not belong together",
            )
        group = np.arange(k) // size
    if group.size and not 0 <= group.min() <= group.max() < groups:
        raise ExportError(
            f"{qweight.file}: {module} has {groups} groups of scales, but its inputs name groups {group.min()} to "
            f"{group.max()}",
            "the checkpoint is damaged, or config.json has another group_size: download it again",
        )
    return PackedMatrix(qweight, qzeros, scales, group, bits, (0, 1))


def packed_part(stored: Mapping[str, Plain], name: str) -> Plain:
    """Return a part of a packed matrix, which must be there, of two dimensions, and of int32 or floats."""
    part = stored.get(name)
    if part is None:
        raise ExportError(f"tensor {name} is missing from the checkpoint", "download it again")
    kinds = ("F16", "BF16", "F32") if name.endswith("scales") else ("I32",)
    if part.dtype not in kinds or len(part.shape) != 2:
        raise ExportError(
            f"{part.file}: {name} is {part.dtype} of shape {list(part.shape)}; expected two dimensions of "
            f"{' or '.join(kinds)}",
            "it is not packed the way its quantization_config says: export from the unquantized checkpoint",
        )
    return part


def expect_shape(part: Plain, shape: tuple[int, ...], why: str) -> None:
    """Check one part of a packed matrix against the others."""
    if part.shape != shape:
        raise ExportError(
            f"{part.file}: {part.name} has shape {list(part.shape)}, expected {list(shape)} for {why}",
            "quantization_config and the weights do not belong together",
        )


MANY = 8  # levels in a word
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where level i of a word is: the inverse of 0 2 4 6 1 3 5 7


def awq(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of an AWQ checkpoint, ``settings`` being its quantization_config."""
    version = str(settings.get("version", settings.get("format", "gemm"))).lower()
    bits = settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise UnsupportedModel(
            f"AWQ version {version!r} of {bits} bits is not supported; supported: gemm, 4 bits", UNQUANTIZED
        )
    if any(name.endswith(".act.scales") for name in stored):
        raise UnsupportedModel("AWQ with scaled activations (act.scales) is not supported", UNQUANTIZED)
    group_size = settings.get("group_size", settings.get("q_group_size", 128))
    return _unpacked(stored, lambda module: _awq_matrix(stored, module, group_size))


def _awq_matrix(stored: Mapping[str, Plain], module: str, group_size: Any) -> PackedMatrix:
    qweight, qzeros, scales = (packed_part(stored, f"{module}.{part}") for part in ("qweight", "qzeros", "scales"))
    k, words = qweight.shape
    size = k if group_size == -1 else group_size
    if not isinstance(size, int) or size <= 0:
        raise ExportError(f"quantization_config: expected a positive group_size or -1, got {group_size!r}")
    groups = -(-k // size)
    expect_shape(scales, (groups, words * MANY), f"group_size {size}")
    expect_shape(qzeros, (groups, words), f"group_size {size}")
    return PackedMatrix(qweight, qzeros, scales, np.arange(k) // size, 4, (1, 1), places=PLACES)
