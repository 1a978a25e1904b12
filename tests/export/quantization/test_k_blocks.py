"""Rows in blocks of GGUF files: bytes that its own library reads, and searches that lose less."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from edgespec.export.quantization.gptq import feedback_factor
from edgespec.export.quantization.k_blocks import K_BLOCKS, KBlocks, k_values, quantize_k
from edgespec.export.quantization.levels import BLOCKS, Array, quantize_block
from edgespec.export.quantization.quantizer import QUANTIZERS, prepared, restored
from edgespec.runtimes.ort.native_library import native_library

K = 512
EVERY = pytest.mark.parametrize("form", K_BLOCKS.values(), ids=list(K_BLOCKS))


def weights(rows: int = 24, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_t(5, (rows, K)) * 0.02).astype(np.float32)


def products() -> Array:
    """Mean products of inputs whose channels depend on each other, and differ in size."""
    draw = np.random.default_rng(1)
    mixing = np.eye(K) + 0.05 * draw.normal(size=(K, K))
    x = draw.normal(size=(2 * K, K)) @ mixing * np.exp(draw.normal(size=K))
    return (x.T @ x / len(x)).astype(np.float32)


def lost(exact: Array, made: Array, of: Array) -> float:
    """Squared error of outputs, on inputs with these products."""
    error = (exact - made).astype(np.float64)
    return float(np.einsum("ij,jk,ik->", error, of, error))


@EVERY
@pytest.mark.parametrize("how", ["plain", "importance", "feedback"])
def test_the_library_of_gguf_reads_the_values(form: KBlocks, how: str) -> None:
    exact, of = weights(), products()
    importance = None if how == "plain" else np.diag(of).copy()
    rows, values = quantize_k(exact, form, importance, feedback_factor(of) if how == "feedback" else None)
    assert rows.shape == (len(exact), K // form.block * form.bytes)
    np.testing.assert_array_equal(dequantize(rows, GGMLQuantizationType[form.kind.upper()]), values)
    if native_library().path is not None:
        np.testing.assert_array_equal(k_values(rows, form), values)


@EVERY
def test_statistics_lower_the_error_of_outputs(form: KBlocks) -> None:
    exact, of = weights(), products()
    found = {name: restored(prepared(QUANTIZERS[name], of)(exact, form), form, K) for name in ("mse", "awq", "gptq")}
    errors = {name: lost(exact, made, of) for name, made in found.items()}
    assert errors["gptq"] < 0.7 * errors["awq"] < 0.7 * errors["mse"]
    assert np.square(exact - found["mse"]).sum() <= np.square(exact - found["awq"]).sum()


def test_four_bits_lose_less_than_symmetric_ones() -> None:
    """In the bytes of int4: 4.5 bits of a weight."""
    exact = weights(64)
    levels, scales = quantize_block(exact, form := BLOCKS["int4"])
    before = np.square(exact - restored((levels, scales), form, K)).sum()
    assert np.square(exact - quantize_k(exact, K_BLOCKS["q4_k"])[1]).sum() < 0.75 * before


@EVERY
@pytest.mark.parametrize(
    "row",
    [
        np.zeros(K),
        np.full(K, 0.25),
        np.full(K, -3.0),
        np.r_[np.zeros(K - 1), 1.0],
        np.r_[np.full(K - 1, 1e-7), 60000.0],
        np.full(K, 1e-9),
        np.full(K, 3e38),
        np.linspace(-1, 1, K),
        np.linspace(5, 6, K),
    ],
    ids=["zeros", "equal", "negative", "one", "small-and-large", "tiny", "huge", "even", "above"],
)
def test_odd_rows_stay_finite(form: KBlocks, row: Array) -> None:
    exact = np.tile(row.astype(np.float32), (3, 1))
    of = products()
    for extra in ((), (np.diag(of).copy(),), (np.diag(of).copy(), feedback_factor(of))):
        rows, values = quantize_k(exact, form, *extra)
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(dequantize(rows, GGMLQuantizationType[form.kind.upper()]), values)
        if len(extra) < 2:  # feedback moves weights of small channels far
            reach = min(float(np.abs(row).max()), 65504.0)
            assert np.abs(values).max() <= 1.2 * reach + 1e-6


def test_values_of_few_levels_come_back() -> None:
    levels = np.random.default_rng(3).integers(0, 16, (8, K)).astype(np.float32)
    levels[:, ::32], levels[:, 1::32] = 0, 15
    exact = levels * np.float32(0.125) - np.float32(1)
    np.testing.assert_allclose(quantize_k(exact, K_BLOCKS["q4_1"])[1], exact, atol=1e-6)
    np.testing.assert_allclose(quantize_k(exact, K_BLOCKS["q4_k"])[1], exact, atol=0.04)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    exact = weights(40)
    rows, _ = quantize_k(exact, K_BLOCKS["q4_k"])
    np.testing.assert_array_equal(quantize_k(exact[7:9], K_BLOCKS["q4_k"])[0], rows[7:9])
