"""The packed layout of weights: what native operators multiply by, in place, on every processor (native/layout.h).

A tile is 16 output columns over all inputs, k padded to pairs of 32-blocks.  Packing and unpacking are exact inverses
on levels and scales, so a bundle stores one layout and either kind of operators can have its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from edgespec.runtimes.files.bounds import MOST_WIDTH, Vocab
from edgespec.runtimes.files.formats import BLOCK, BLOCK_FORMATS, GGML, HALVES, KINDS, SPECS, TILE, Format, Kind


@dataclass(frozen=True)
class Blocks:
    """A block format."""

    bits: int  # of a weight
    size: int = BLOCK  # weights of a row that share a scale

    def count(self, k: int) -> int:
        """Blocks of a row."""
        return -(-k // self.size)

    def stock_shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Return the shape of a matrix [n, k] for MatMulNBits: rows, blocks, bytes of a block's levels."""
        return n, -(-k // BLOCK), BLOCK * self.bits // 8

    def to_stock(
        self,
        levels: NDArray[np.uint8],  # [r, b, size]
        scales: NDArray[Any],  # [r, b]
        k: int,
    ) -> tuple[NDArray[np.uint8], NDArray[Any]]:  # packed levels [r, blocks, bytes], scales [r, blocks]
        """Return rows as MatMulNBits stores them."""
        blocks, levels = -(-k // BLOCK), levels.reshape(len(levels), -1, BLOCK)
        return pack_levels(levels[:, :blocks], self.bits), scales[:, :blocks]

    def from_stock(
        self,
        packed: NDArray[np.uint8],  # [r, blocks, bytes]
        scales: NDArray[Any],  # [r, blocks]
    ) -> tuple[NDArray[np.uint8], NDArray[Any]]:  # levels [r, b, size], scales [r, b]
        """Convert ``packed`` levels and ``scales`` of stock operators back from the form that ``to_stock`` made."""
        return unpack_levels(packed, self.bits), scales


PLANE = Blocks(4)  # one of two planes
BLOCKS: dict[Format, Blocks] = {name: Blocks(SPECS[name].bits, SPECS[name].size) for name in BLOCK_FORMATS}


@dataclass(frozen=True)
class Packed:
    """A matrix [n, k] in packed form; of kind p8, in two planes, each of 4 bits: the high one packed like q4."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Kind  # see ``FormatSpec``
    n: Vocab  # rows, heads not padded
    k: Vocab  # inputs
    # each group of this many rows starts a new tile (attention heads); 0 = no groups
    head_dim: Annotated[int, Field(ge=0, le=MOST_WIDTH)] = 0
    # the matrices stacked in it, (name, rows) of each
    parts: Annotated[tuple[tuple[str, Vocab], ...], Field(max_length=1 << 12)] = ()

    @property
    def rows(self) -> int:
        """Rows with every head padded to whole tiles."""
        if not self.head_dim:
            return self.n
        return self.n // self.head_dim * (-(-self.head_dim // TILE) * TILE)

    @property
    def form(self) -> Blocks:
        """Return the blocks of a kind in blocks."""
        spec = KINDS[self.kind]
        return Blocks(spec.bits, spec.size)

    @property
    def blocks(self) -> int:
        """32-blocks along k, an even number."""
        return -(-self.k // (2 * BLOCK)) * 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of 16 rows."""
        if self.kind in GGML:
            own = GGML[self.kind]
            return -(-(-(-self.k // own.group) * own.bytes * TILE) // 64) * 64
        if self.kind in HALVES:
            return self.k * TILE * 2
        spec = KINDS[self.kind]
        if spec.family == "floats":
            return self.k * TILE * 4
        levels = self.blocks * TILE * BLOCK * spec.bits // spec.planes // 8
        return levels + 4 * TILE * (-(-self.blocks * BLOCK // (2 * spec.size)) if spec.size else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, or of its high plane."""
        return -(-self.rows // TILE) * self.tile_bytes

    @property
    def low_nbytes(self) -> int:
        """Bytes of its low plane, which has no scales; 0 = it has none."""
        return -(-self.rows // TILE) * self._low_tile_bytes if self.kind == "p8" else 0

    @property
    def _low_tile_bytes(self) -> int:
        return self.blocks * TILE * BLOCK // 2

    # -- packing -------------------------------------------------------------------------------------------------------

    def pack_blocks(
        self,
        pieces: Iterable[tuple[NDArray[np.uint8], NDArray[Any]]],  # levels [r, blocks, size], scales [r, blocks]
    ) -> Iterator[NDArray[np.uint8]]:
        """Consecutive rows of levels (zero point in the middle) and scales -> bytes, tile by tile."""
        for levels, scales in self._tiled(pieces):
            yield _pack_blocks(levels, scales, self.form, self.blocks)

    def pack_planes(
        self,
        pieces: Iterable[tuple[NDArray[np.uint8], NDArray[Any]]],  # see ``pack_blocks``
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Consecutive rows of 8-bit levels and scales -> bytes of the high and of the low plane, tile by tile."""
        for levels, scales in self._tiled(pieces):
            high = _pack_blocks(levels >> np.uint8(4), scales, PLANE, self.blocks)
            yield high, _without_scales(_pack_blocks(levels & np.uint8(15), scales, PLANE, self.blocks))

    def pack_channels(
        self,
        pieces: Iterable[tuple[NDArray[np.int8], NDArray[np.float32]]],  # levels [r, k], scales [r]
    ) -> Iterator[NDArray[np.uint8]]:
        """Consecutive rows of int8 levels and a scale each -> bytes."""
        for levels, scales in self._tiled(pieces):
            rows = np.pad(levels.view(np.uint8), ((0, 0), (0, self.blocks * BLOCK - self.k))) ^ np.uint8(128)
            payload = _interleave(rows.reshape(-1, TILE, self.blocks, 8, 4))  # [tiles, blocks, 8, 16, 4]
            ends = scales.astype("<f4").reshape(-1, TILE).view(np.uint8)  # [tiles, 64]
            yield np.concatenate([payload.reshape(len(ends), -1), ends], 1).reshape(-1)

    def pack_floats(self, pieces: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.uint8]]:  # [r, k]
        """Consecutive rows of float32 -> bytes."""
        for (rows,) in self._tiled((piece,) for piece in pieces):
            tiles = rows.astype("<f4").reshape(-1, TILE, self.k).transpose(0, 2, 1)
            yield np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)

    def _tiled(self, pieces: Iterable[tuple[NDArray[Any], ...]]) -> Iterator[tuple[NDArray[Any], ...]]:
        """Regroup the rows of ``pieces`` into whole tiles; pad the end, and heads that do not fill their last tile."""
        padded_heads = bool(self.head_dim % TILE)
        held: tuple[NDArray[Any], ...] | None = None
        for piece in pieces:
            arrays = tuple(np.asarray(array) for array in piece)
            held = arrays if held is None else tuple(np.concatenate(pair) for pair in zip(held, arrays, strict=True))
            whole = 0 if padded_heads else len(held[0]) // TILE * TILE
            if whole:
                yield tuple(array[:whole] for array in held)
                held = tuple(array[whole:] for array in held)
        if held is None or not len(held[0]):
            return
        if padded_heads:
            held = tuple(self._pad_heads(array) for array in held)
        short = -len(held[0]) % TILE
        yield tuple(np.pad(array, ((0, short),) + ((0, 0),) * (array.ndim - 1)) for array in held)

    def _pad_heads(self, rows: NDArray[Any]) -> NDArray[Any]:  # [n, ...] -> [self.rows, ...]
        heads = rows.reshape(-1, self.head_dim, *rows.shape[1:])
        short = -self.head_dim % TILE
        return np.pad(heads, ((0, 0), (0, short)) + ((0, 0),) * (rows.ndim - 1)).reshape(self.rows, *rows.shape[1:])

    # -- unpacking -----------------------------------------------------------------------------------------------------

    def unpack(
        self, data: NDArray[np.uint8], tiles: slice, low: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[Any], ...]:
        """Return rows of some tiles, as they were given to the packing method; padding rows included.

        Args:
            data: uint8 [nbytes].
            tiles: a range of tiles.
            low: uint8 [low_nbytes], of a matrix in two planes; None = only its high plane, nibbles.

        Returns (levels, scales), or (rows,) for f32.
        """
        part = data.reshape(-1, self.tile_bytes)[tiles]
        if self.kind == "f32":
            rows = np.ascontiguousarray(part).view("<f4").reshape(-1, self.k, TILE).transpose(0, 2, 1)
            return (rows.reshape(-1, self.k),)
        if self.kind == "c8":
            payload = part[:, :-64].reshape(-1, self.blocks, 8, TILE, 4)
            levels = _interleave_back(payload).reshape(-1, self.blocks * BLOCK)[:, : self.k] ^ np.uint8(128)
            return levels.view(np.int8), np.ascontiguousarray(part[:, -64:]).view("<f4").reshape(-1)
        if self.kind != "p8":
            return _unpack_blocks(part, self.form, self.blocks)
        high, scales = _unpack_blocks(part, PLANE, self.blocks)
        if low is None:
            return high, scales
        rest = low.reshape(-1, self._low_tile_bytes)[tiles].reshape(len(part), self.blocks // 2, -1)
        alone = np.pad(rest, ((0, 0), (0, 0), (64, 0))).reshape(len(part), -1)
        return high << np.uint8(4) | _unpack_blocks(alone, PLANE, self.blocks)[0], scales

    def drop_padding(self, rows: NDArray[Any]) -> NDArray[Any]:  # [padded rows, ...] -> [n, ...]
        """Return the rows of the whole matrix without padding."""
        if self.head_dim % TILE:
            heads = rows[: self.rows].reshape(-1, -(-self.head_dim // TILE) * TILE, *rows.shape[1:])
            return heads[:, : self.head_dim].reshape(self.n, *rows.shape[1:])
        return rows[: self.n]


def _interleave(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:  # [tiles, 16, blocks, v, 4] -> [tiles, blocks, v, 16, 4]
    return np.ascontiguousarray(rows.transpose(0, 2, 3, 1, 4))


def _interleave_back(tiles: NDArray[np.uint8]) -> NDArray[np.uint8]:  # [tiles, blocks, v, 16, 4] -> [tiles, 16, ...]
    return np.ascontiguousarray(tiles.transpose(0, 3, 1, 2, 4))


def _pack_blocks(
    levels: NDArray[np.uint8], scales: NDArray[Any], form: Blocks, blocks: int
) -> NDArray[np.uint8]:  # [r, b, size], [r, b] -> bytes; blocks: of 32
    levels = levels.reshape(len(levels), -1, BLOCK)
    pairs, tiles = blocks // 2, len(levels) // TILE
    levels = np.pad(levels, ((0, 0), (0, blocks - levels.shape[1]), (0, 0)))
    scales = np.pad(scales.astype("<f2"), ((0, 0), (0, blocks - scales.shape[1])))
    payload = _interleave(levels.reshape(tiles, TILE, blocks, 8, 4))  # [tiles, blocks, 8, 16, 4]
    if form.bits == 4:
        payload = np.bitwise_or(payload[:, :, :4], payload[:, :, 4:] << np.uint8(4))
    ends = scales.reshape(tiles, TILE, blocks).transpose(0, 2, 1)  # [tiles, blocks, 16]
    heads = np.ascontiguousarray(ends).view(np.uint8).reshape(tiles, pairs, 64)
    return np.concatenate([heads, payload.reshape(tiles, pairs, -1)], 2).reshape(-1)


def _without_scales(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:  # q4's bytes, pair by pair of blocks
    return packed.reshape(-1, 64 + TILE * BLOCK)[:, 64:].reshape(-1)


def _unpack_blocks(
    part: NDArray[np.uint8], form: Blocks, blocks: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:  # [tiles, bytes] -> [r, b, size], [r, b]; blocks: of 32
    tiles, whole = len(part), part.reshape(len(part), blocks // 2, -1)
    scales = np.ascontiguousarray(whole[:, :, :64]).view("<f2").reshape(tiles, blocks, TILE).transpose(0, 2, 1)
    payload = np.ascontiguousarray(whole[:, :, 64:]).reshape(tiles, blocks, -1, TILE, 4)
    if form.bits == 4:
        payload = np.concatenate([payload & 15, payload >> 4], 2)
    levels = _interleave_back(payload).reshape(tiles * TILE, blocks, BLOCK)
    return levels, scales.reshape(tiles * TILE, blocks)


def pack_levels(levels: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:  # [.., BLOCK] -> [.., BLOCK * bits // 8]
    """Pack levels as MatMulNBits stores them: two 4-bit levels per byte, low nibble first."""
    if bits == 8:
        return levels
    return np.bitwise_or(levels[..., 0::2], np.left_shift(levels[..., 1::2], 4), dtype=np.uint8)


def unpack_levels(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:  # the reverse
    """Return the levels, one per byte."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
