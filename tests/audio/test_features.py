"""Log-mel features are those of transformers' feature extractor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.features import encoder_rows, log_mel
from edgespec.runtimes.audio.reading import RATE, pieces
from edgespec.runtimes.files.manifest import FeaturePart


@pytest.mark.parametrize("samples", [1000, 48_077, 30 * RATE, 30 * RATE + 12_345])
@pytest.mark.parametrize("bins", [80, 128])
def test_they_are_those_of_transformers(samples: int, bins: int) -> None:
    """Its numpy path computes in float64, the one over torch in float32, which differs from it by 1e-5."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    rng = np.random.default_rng(bins)
    sound = (rng.standard_normal(samples) * np.sin(np.arange(samples) / 3000) / 9).astype(np.float32)
    whole = np.pad(sound, (0, max(0, 30 * RATE - samples)))
    expected = transformers.WhisperFeatureExtractor(bins)._np_extract_fbank_features(whole[None], "cpu")[0].T
    found = log_mel(pieces(sound), bins)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(log_mel(np.array_split(sound, 7), bins) - found).max() < 1e-6  # however it comes


def test_silence_and_what_is_too_short() -> None:
    assert np.abs(log_mel([np.zeros(5, np.float32)], 80) + 1.5).max() < 1e-6
    with pytest.raises(InvalidRequest, match="more than 200"):
        log_mel([np.zeros(200, np.float32)], 80, least=0)


def test_rows_hold_what_two_convolutions_see() -> None:
    """Matrices over them give the convolutions' results, with zeros after both ends of each."""
    rng, (frames, bins, width, columns) = np.random.default_rng(0), (10, 4, 3, 16)
    features = np.asarray(rng.standard_normal((frames, bins)), np.float32)
    first, bias = rng.standard_normal((width, bins, 3)), rng.standard_normal(width)
    second = rng.standard_normal((width, width, 3))
    rows = encoder_rows(features, FeaturePart(bands=bins, frames=frames, columns=columns))
    assert rows.shape == (frames // 2, 3 * columns)

    def convolved(x: Any, weight: Any, bias: Any, step: int) -> Any:
        padded = np.pad(x, ((1, 1), (0, 0)))
        return np.array([np.einsum("oik,ki->o", weight, padded[at : at + 3]) + bias for at in range(0, len(x), step)])

    expected = convolved(np.tanh(convolved(features, first, bias, 1)), second, 0, 2)
    matrix = np.zeros((width, columns))
    matrix[:, : 3 * bins] = first.transpose(0, 2, 1).reshape(width, -1)
    matrix[:, 3 * bins] = bias
    parts = np.tanh(rows.reshape(-1, 3, columns) @ matrix.T)  # [frames // 2, 3, width]
    assert np.abs(np.einsum("oik,tki->to", second, parts) - expected).max() < 1e-5
