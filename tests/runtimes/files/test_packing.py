"""The packed layout of native operators: packing and unpacking are inverses, and the bytes are the documented ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.runtimes.files.formats import BLOCK, KINDS, TILE, Kind
from edgespec.runtimes.files.packing import Packed

PROPERTIES = settings(max_examples=60, deadline=None)
Matrix = tuple[NDArray[Any], ...]  # levels [n, blocks, size] and scales [n, blocks]; [n, k] and [n]; or [n, k] floats

# ragged rows and inputs; whole heads where there are any, of sizes on and off the tile
SHAPES = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(1, 140), st.just(0)),
    st.tuples(st.integers(1, 5), st.integers(1, 140), st.sampled_from([1, 8, 16, 20, 32, 40])).map(
        lambda shape: (shape[0] * shape[2], shape[1], shape[2])
    ),
)
KIND = st.sampled_from(list(KINDS))


def random_matrix(packed: Packed, seed: int = 0) -> Matrix:
    random, n, k = np.random.default_rng(seed), packed.n, packed.k
    if packed.kind == "f32":
        return (random.standard_normal((n, k), np.float32),)
    if packed.kind == "c8":
        return random.integers(-127, 128, (n, k)).astype(np.int8), random.standard_normal(n, np.float32)
    size, top = packed.form.size, 1 << packed.form.bits
    blocks = -(-k // size)
    levels = random.integers(0, top, (n, blocks, size)).astype(np.uint8)
    levels.reshape(n, -1)[:, packed.blocks * BLOCK :] = 1 << (packed.form.bits - 1)  # beyond what is stored
    return levels, random.standard_normal((n, blocks)).astype(np.float16)


def pack(packed: Packed, matrix: Matrix, cuts: list[int] | None = None) -> NDArray[np.uint8]:
    """All bytes, from pieces of these many rows; of two planes the high one first."""

    def pieces() -> Iterator[Matrix]:
        at, sizes = 0, cuts or [packed.n]
        for number in range(packed.n):
            size = sizes[number % len(sizes)]
            if at >= packed.n:
                return
            yield tuple(array[at : at + size] for array in matrix)
            at += size

    if packed.kind == "f32":
        found = packed.pack_floats(rows for (rows,) in pieces())
    elif packed.kind == "c8":
        found = packed.pack_channels((levels, scales) for levels, scales in pieces())
    elif packed.kind == "p8":
        planes = zip(*packed.pack_planes((levels, scales) for levels, scales in pieces()), strict=True)
        return np.concatenate([piece for plane in planes for piece in plane])
    else:
        found = packed.pack_blocks((levels, scales) for levels, scales in pieces())
    return np.concatenate(list(found))


def unpack(packed: Packed, data: NDArray[np.uint8], tiles: slice = slice(None)) -> Matrix:
    """Unpack what ``pack`` gave."""
    low = data[packed.nbytes :] if packed.low_nbytes else None
    return packed.unpack(data[: packed.nbytes], tiles, low)


# -- an independent reader: one number at a time, by the words of edgespec/runtimes/native/layout.h ------------------


def scalar_weight(packed: Packed, data: bytes, row: int, k: int) -> tuple[int, float] | float:
    """Level and scale (or the float) of one weight of the matrix with padded heads."""
    tile, c = divmod(row, 16)
    base = tile * packed.tile_bytes
    if packed.kind == "f32":
        return float(np.frombuffer(data, "<f4", 1, base + (k * 16 + c) * 4)[0])
    block, within = divmod(k, 32)
    pair, second = divmod(block, 2)
    if packed.kind == "c8":
        payload = base + block * 512
        level = data[payload + within // 4 * 64 + c * 4 + within % 4] - 128
        pairs = -(-packed.k // 64)
        return level, float(np.frombuffer(data, "<f4", 1, base + pairs * 1024 + c * 4)[0])
    size = 512 if packed.kind == "q8" else 256
    head = base + pair * (64 + 2 * size)
    scale_at, body = head + (second * 16 + c) * 2, head + 64 + second * size
    if (together := packed.form.size // 32) > 1:  # this many pairs after two rows of 16 scales
        group, place = divmod(pair, together)
        start = base + group * (64 + together * 512)
        scale_at = start + (place // (together // 2) * 16 + c) * 2
        body = start + 64 + place * 512 + second * 256
    scale = float(np.frombuffer(data, "<f2", 1, scale_at)[0])
    if packed.kind == "q8":
        return data[body + within // 4 * 64 + c * 4 + within % 4], scale
    place, shift = within % 16 // 4 * 64 + c * 4 + within % 4, 4 * (within >= 16)
    level = data[body + place] >> shift & 15
    if packed.kind == "p8":
        low = packed.nbytes + (tile * 2 * -(-packed.k // 64) + block) * 256
        level = 16 * level + (data[low + place] >> shift & 15)
    return level, scale


@PROPERTIES
@given(kind=KIND, shape=SHAPES, seed=st.integers(0, 99))
def test_the_bytes_are_the_documented_ones(kind: Kind, shape: tuple[int, int, int], seed: int) -> None:
    packed = Packed(kind, *shape)
    matrix = random_matrix(packed, seed)
    data = pack(packed, matrix).tobytes()
    assert len(data) == packed.nbytes + packed.low_nbytes
    random = np.random.default_rng(seed)
    for _ in range(20):
        row, k = int(random.integers(packed.n)), int(random.integers(packed.k))
        padded = row
        if packed.head_dim:  # every head starts a tile
            head, within = divmod(row, packed.head_dim)
            padded = head * (-(-packed.head_dim // 16) * 16) + within
        got = scalar_weight(packed, data, padded, k)
        if kind == "f32":
            assert got == matrix[0][row, k]
        elif kind == "c8":
            assert got == (matrix[0][row, k], matrix[1][row])
        else:
            size = KINDS[kind].size
            assert got == (matrix[0][row, k // size, k % size], matrix[1][row, k // size])


# -- inverses ----------------------------------------------------------------------------------------------------------


@PROPERTIES
@given(kind=KIND, shape=SHAPES, seed=st.integers(0, 99))
def test_unpacking_gives_back_what_was_packed(kind: Kind, shape: tuple[int, int, int], seed: int) -> None:
    packed = Packed(kind, *shape)
    matrix = random_matrix(packed, seed)
    back = unpack(packed, pack(packed, matrix))
    assert len(back) == len(matrix)
    for got, expected in zip(back, matrix, strict=True):
        rows = packed.drop_padding(got)
        if KINDS[kind].size == 32:
            rows = rows[:, : expected.shape[1]]  # blocks come in pairs
        assert rows.dtype == expected.dtype
        np.testing.assert_array_equal(rows, expected)


@PROPERTIES
@given(kind=KIND, shape=SHAPES, cuts=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_pieces_of_any_size_give_the_same_bytes(kind: Kind, shape: tuple[int, int, int], cuts: list[int]) -> None:
    packed = Packed(kind, *shape)
    matrix = random_matrix(packed)
    np.testing.assert_array_equal(pack(packed, matrix, cuts), pack(packed, matrix))


@PROPERTIES
@given(kind=KIND, shape=SHAPES, first=st.integers(0, 4), count=st.integers(1, 4))
def test_some_tiles_are_a_part_of_all(kind: Kind, shape: tuple[int, int, int], first: int, count: int) -> None:
    packed = Packed(kind, *shape)
    data = pack(packed, random_matrix(packed))
    first %= packed.nbytes // packed.tile_bytes
    tiles = slice(first, first + count)
    for part, whole in zip(unpack(packed, data, tiles), unpack(packed, data), strict=True):
        np.testing.assert_array_equal(part, whole[first * TILE : (first + count) * TILE])


@PROPERTIES
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_two_planes_are_the_bytes_of_one(shape: tuple[int, int, int], seed: int) -> None:
    """The high plane is a complete packed q4; both together take the bytes of q8."""
    packed = Packed("p8", *shape)
    matrix = levels, scales = random_matrix(packed, seed)
    data = pack(packed, matrix)
    nibbles = pack(Packed("q4", *shape), (levels >> 4, scales))
    np.testing.assert_array_equal(data[: packed.nbytes], nibbles)
    assert packed.nbytes + packed.low_nbytes == Packed("q8", *shape).nbytes
    high, same = packed.unpack(data[: packed.nbytes], slice(None))
    np.testing.assert_array_equal(packed.drop_padding(high)[:, : levels.shape[1]], levels >> 4)
    np.testing.assert_array_equal(packed.drop_padding(same)[:, : levels.shape[1]], scales)


# -- padding and sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n, head_dim", [(5, 0), (60, 20)])
def test_padding_multiplies_to_nothing(kind: Kind, n: int, head_dim: int) -> None:
    """Padding must not change a product: scales of zero, or floats of zero."""
    packed = Packed(kind, n, 45, head_dim)
    back = unpack(packed, pack(packed, random_matrix(packed)))
    rows = np.arange(len(back[0]))
    real = rows % 32 < 20 if head_dim else rows < n
    last = back[-1]  # scales, or the floats
    assert not last[~real].any()
    assert last[real].all()
    if KINDS[kind].size == 32:
        assert packed.blocks == 2
    elif kind == "c8":
        assert packed.blocks * BLOCK == 64


@pytest.mark.parametrize(
    "kind, k, expected",
    [
        ("q4", 64, 576),
        ("q4", 65, 1152),
        ("q8", 33, 1088),
        ("p8", 33, 576),
        ("c8", 64, 1088),
        ("f32", 7, 448),
    ],
)
def test_sizes(kind: Kind, k: int, expected: int) -> None:
    assert Packed(kind, 16, k).tile_bytes == expected
    assert Packed(kind, 17, k).nbytes == 2 * expected
    assert Packed(kind, 24, k, 24).rows == 32
    assert Packed(kind, 24, k).rows == 24
