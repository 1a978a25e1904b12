"""The upper four of 8 bits are chosen for too (edgespec/export/quantization/planes.py)."""

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.export.quantization.levels import BLOCKS, Quantized, grouped, half, round_levels
from edgespec.export.quantization.mse import quantize_searched
from edgespec.export.quantization.planes import LEVEL_WEIGHT, RATIOS, drafted, levels_for_both
from edgespec.export.quantization.quantizer import QUANTIZERS

INT8 = BLOCKS["int8"]


def weights(k: int = 256, n: int = 64) -> NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal((n, k), np.float32)


def both(levels: NDArray[np.uint8], scales: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weights of both planes and of the high one, [n, k] each."""
    signed = levels.astype(np.float32) - 128
    exact, draft = (
        (each * scales[..., None]).reshape(len(levels), -1).astype(np.float32) for each in (signed, drafted(signed))
    )
    return exact, draft


def test_a_draft_takes_the_middle_of_the_levels_that_it_cannot_tell_apart() -> None:
    levels = np.arange(-128, 128, dtype=np.float32)
    assert (np.abs(levels - drafted(levels)) <= 7.5).all()
    assert (drafted(levels) == 16 * ((levels.astype(int) + 128) >> 4) - 120.5).all()  # as kernels read it


def test_searched_scales_suit_the_draft_at_hardly_any_cost() -> None:
    weight = weights()
    _, chosen = quantize_searched(weight, INT8)
    blocks = grouped(weight, INT8.size)

    def errors(scales: NDArray[np.float32]) -> list[float]:
        made = both(round_levels(blocks, scales, 8), scales)
        return [float(np.square(weight - each).sum()) for each in made]

    tried = [errors(half(chosen * np.float32(ratio))) for ratio in (1 / 1.05, 1 / 1.025, 1, *RATIOS)]
    mine = errors(chosen)
    assert mine[0] < 1.03 * min(own for own, _ in tried)
    assert mine[1] < min(draft for own, draft in tried if own < 1.03 * mine[0]) * 1.02


def test_levels_that_a_checkpoint_had_stay_exact() -> None:
    levels = np.random.default_rng(1).integers(-128, 128, (16, 8, 32)).astype(np.float32)
    levels[..., 0] = -128
    scales = half(np.random.default_rng(2).uniform(0.001, 0.01, (16, 8)).astype(np.float32))
    weight = (levels * scales[..., None]).reshape(16, -1)
    exact, _ = both(*quantize_searched(weight, INT8))
    assert (exact == weight).all()


@pytest.mark.parametrize("offset", [-20.0, -9.0, -1.0, 0.0, 3.0, 20.0])
def test_a_level_is_the_cheapest_of_all(offset: float) -> None:
    exact = np.linspace(-130, 130, 53, dtype=np.float32)
    draft = exact + np.float32(offset)
    every = np.arange(-128, 128, dtype=np.float32)[:, None]

    def cost(level: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.square(exact - level) + LEVEL_WEIGHT * np.square(draft - drafted(level))

    found = levels_for_both(exact, draft)
    assert ((found >= -128) & (found <= 127) & (found == np.rint(found))).all()
    assert np.allclose(cost(found), cost(every).min(0), rtol=1e-5)


def test_feedback_serves_both_planes() -> None:
    """Outputs of either plane lose less with feedback, on inputs whose channels go together."""
    random, weight = np.random.default_rng(5), weights()
    x = random.standard_normal((1024, 32), np.float32) @ random.standard_normal((32, 256), np.float32)
    x += 0.3 * random.standard_normal(x.shape, np.float32)
    products = x.T @ x / np.float32(len(x))

    def lost(made: Quantized) -> list[float]:
        return [float(np.square(x @ (weight - each).T).sum()) for each in both(*made)]

    searched, fed = (lost(QUANTIZERS[name].prepare(products)(weight, INT8)) for name in ("mse", "gptq"))
    assert fed[0] < 0.9 * searched[0]
    assert fed[1] < 0.8 * searched[1]
