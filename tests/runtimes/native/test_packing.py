"""Packed rows of ggml's blocks are the numbers that ggml's package dequantizes, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.export.quantization.native_packing import pack_rows, unpack_rows
from edgespec.runtimes.files.formats import FILE_KINDS, GGML, TILE, Kind
from edgespec.runtimes.files.packing import Packed

gguf = pytest.importorskip("gguf")


class Held:
    """Rows in memory."""

    def __init__(self, rows: NDArray[np.uint8]) -> None:
        self.rows = rows

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        return self.rows[rows]


def random_rows(name: str, n: int, k: int) -> NDArray[np.uint8]:  # [n, bytes]
    """Make rows of a type of any bits whatever, but of finite scales, small or subnormal ones among them."""
    random, kind = np.random.default_rng(5), gguf.GGMLQuantizationType[name]
    size, length = gguf.GGML_QUANT_SIZES[kind]
    if name in ("F16", "BF16"):
        numbers = random.normal(size=(n, k)).astype(np.float32)
        return np.ascontiguousarray(gguf.quantize(numbers, kind)).view(np.uint8).reshape(n, -1)
    blocks = random.integers(0, 256, (n, k // size, length), np.uint8)
    halves = random.normal(size=(n, k // size, 2)) * random.choice([1, 1e-3, 1e-7], (n, k // size, 2))
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(name, (0, 2))
    two = name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
    for i, place in enumerate(places[: 2 if two else 1]):
        blocks[:, :, place : place + 2] = halves[:, :, i : i + 1].astype("<f2").view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = random.choice([0, 1, 2, 100, 127, 128, 254, 255], (n, k // size))
    return blocks.reshape(n, -1)


def expected(name: str, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name])
    return np.asarray(values, np.float32)


GGML_TYPES = [name for name, kind in FILE_KINDS.items() if not kind.startswith("u")]


@pytest.mark.parametrize("name", [name for name in GGML_TYPES if name != "F32"])
@pytest.mark.parametrize("head_dim", [0, 24])
def test_packed_rows_are_those_of_the_file(name: str, head_dim: int) -> None:
    k, n = 512 if GGML.get(FILE_KINDS[name], GGML["q4_1"]).group > 32 else 96, 72
    first, second = random_rows(name, n - 24, k), random_rows(name, 24, k)
    packed = Packed(FILE_KINDS[name], n, k, head_dim, (("a", n - 24), ("b", 24)))
    pieces = list(pack_rows(packed, [Held(first), Held(second)]))
    data = np.concatenate([piece for piece, _ in pieces])
    low = None if pieces[0][1] is None else np.concatenate([low for _, low in pieces if low is not None])
    assert len(data) == packed.nbytes
    assert (0 if low is None else len(low)) == packed.low_nbytes
    found = unpack_rows(packed, data, low, slice(0, packed.rows))
    with np.errstate(all="ignore"):
        wanted = np.concatenate([expected(name, first), expected(name, second)])
    there = np.ones(packed.rows, bool)
    if head_dim:
        size = -(-head_dim // TILE) * TILE
        there = np.arange(packed.rows) % size < head_dim
    else:
        there[n:] = False
    np.testing.assert_array_equal(found[there].view(np.uint32), wanted.view(np.uint32))
    assert not found[~there].any()


def test_resident_bytes_stay_near_those_of_the_file() -> None:
    for name in GGML_TYPES:
        size, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        packed = Packed(FILE_KINDS[name], 1024, 1536)
        assert packed.nbytes + packed.low_nbytes <= 1.05 * 1024 * 1536 // size * length, name


@pytest.mark.parametrize(
    "kind, bits, size", [("u4x32", 4, 32), ("u4x64", 4, 64), ("u4x128", 4, 128), ("u8x32", 8, 64), ("u8x128", 8, 128)]
)
def test_resident_bytes_stay_near_those_of_a_checkpoint(kind: Kind, bits: int, size: int) -> None:
    """Such a checkpoint has a float16 scale and a packed zero point a group."""
    assert Packed(kind, 1024, 1536).nbytes <= 1.05 * 1024 * 1536 * (bits + (16 + bits) / size) / 8
