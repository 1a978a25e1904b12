"""Weight formats as numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from edgespec.export.quantization import levels as quantize
from edgespec.export.quantization.levels import EMBEDDING_LEVELS, Blocks

Matrix = NDArray[np.float32]

MATRICES = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 31, 32, 33, 64, 70])).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-1e4, 1e4, width=32))
)
FORMS = Blocks(4), Blocks(8), Blocks(4, 64)
PROPERTIES = settings(max_examples=150, deadline=None)
VANISHING = 2.0**-25  # half of float16's smallest step: such scales may become 0


def blocks_of(weight: Matrix, size: int) -> Matrix:  # [n, k] -> [n, blocks, size]
    n, k = weight.shape
    return np.pad(weight, ((0, 0), (0, -k % size))).reshape(n, -1, size)


@PROPERTIES
@given(weight=MATRICES, form=st.sampled_from(FORMS))
@example(weight=np.array([[-1 / 3, 1 / 3]], np.float32), form=Blocks(4))
def test_the_error_of_a_block_is_half_a_step(weight: Matrix, form: Blocks) -> None:
    levels, scales = quantize.quantize_block(weight, form)
    (n, k), bits, size = weight.shape, form.bits, form.size
    blocks = -(-k // size)
    assert levels.shape == (n, blocks, size)
    assert quantize.pack_levels(levels, bits).shape == (n, blocks, size * bits // 8)
    np.testing.assert_array_equal(quantize.unpack_levels(quantize.pack_levels(levels, bits), bits), levels)
    assert scales.shape == (n, blocks)
    assert np.isfinite(scales).all()
    got = quantize.dequantize_block(levels, scales, k, bits)
    assert got.shape == weight.shape
    wide, step = blocks_of(weight, size).astype(np.float64), np.abs(scales.astype(np.float64))[..., None]
    error = np.abs(wide - blocks_of(got, size))
    # the side that has a level less may be clipped, by one step of the scale before float16 has rounded it
    last, most = np.sign(scales)[..., None] * wide > ((1 << (bits - 1)) - 1) * step, 1 << (bits - 1)
    assert (error <= np.where(last, 1 + most * 2.0**-11, 0.5) * step * (1 + 1e-5) + VANISHING * most).all()


@PROPERTIES
@given(weight=MATRICES, form=st.sampled_from(FORMS))
def test_the_largest_of_a_block_is_kept(weight: Matrix, form: Blocks) -> None:
    made = quantize.dequantize_block(*quantize.quantize_block(weight, form), weight.shape[1], form.bits)
    got = blocks_of(made, form.size)
    # to the precision of a float16 scale
    atol = VANISHING * (1 << (form.bits - 1))
    np.testing.assert_allclose(
        np.abs(got).max(-1), np.abs(blocks_of(weight, form.size)).max(-1), rtol=2.0**-11, atol=atol
    )


@PROPERTIES
@given(weight=MATRICES, form=st.sampled_from(FORMS))
def test_quantizing_twice_changes_nothing(weight: Matrix, form: Blocks) -> None:
    once = quantize.dequantize_block(*quantize.quantize_block(weight, form), weight.shape[1], form.bits)
    twice = quantize.dequantize_block(*quantize.quantize_block(once, form), weight.shape[1], form.bits)
    np.testing.assert_allclose(twice, once, rtol=1e-6, atol=VANISHING)


@PROPERTIES
@given(weight=MATRICES, limit=st.sampled_from([quantize.CHANNEL_LEVELS, EMBEDDING_LEVELS]))
def test_the_error_of_a_channel_is_half_a_step(weight: Matrix, limit: int) -> None:
    levels, scales = quantize.quantize_channel(weight, limit)
    assert levels.dtype == np.int8
    assert np.abs(levels.astype(int)).max() <= limit
    assert (scales > 0).all()
    got = quantize.dequantize_channel(levels, scales)
    assert (np.abs(got - weight) <= scales[:, None] * (0.5 + 1e-4)).all()
    twice = quantize.dequantize_channel(*quantize.quantize_channel(got, limit))
    np.testing.assert_allclose(twice, got, rtol=1e-6, atol=1e-40)


@PROPERTIES
@given(weight=MATRICES, form=st.sampled_from(FORMS))
def test_scales_are_float16_values(weight: Matrix, form: Blocks) -> None:
    """Both layouts hold the same numbers, and the packed one has room for float16."""
    huge = weight * np.float32(1e5)  # beyond what float16 holds, where it matters
    for matrix in (weight, huge):
        _, scales = quantize.quantize_block(matrix, form)
        assert scales.dtype == np.float32
        assert np.isfinite(scales).all()
        np.testing.assert_array_equal(scales.astype(np.float16).astype(np.float32), scales)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [1, 32, 45, 80])
def test_zeros_stay_zeros(form: Blocks, k: int) -> None:
    weight = np.zeros((3, k), np.float32)
    weight[1, 0] = 5
    got = quantize.dequantize_block(*quantize.quantize_block(weight, form), k, form.bits)
    np.testing.assert_array_equal(got, weight)
    np.testing.assert_array_equal(quantize.dequantize_channel(*quantize.quantize_channel(weight)), weight)


def test_levels_are_packed_low_nibble_first() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :3] = [-8, 7, 1]  # scale 1, zero point 8
    levels, scales = quantize.quantize_block(weight, Blocks(4))
    assert scales.tolist() == [[1.0]]
    assert quantize.pack_levels(levels, 4)[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 8 << 4]


def test_squared_error() -> None:
    weight, other = np.array([[3.0, 4.0]], np.float32), np.array([[3.0, 2.0]], np.float32)
    assert quantize.squared_error(weight, other) == (4.0, 25.0)
