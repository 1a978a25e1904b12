"""Log-mel features are those of transformers' feature extractor."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.features import log_mel
from edgespec.runtimes.audio.reading import RATE, pieces

transformers = pytest.importorskip("transformers", reason="needs transformers")


@pytest.mark.parametrize("samples", [1000, 48_077, 30 * RATE, 30 * RATE + 12_345])
@pytest.mark.parametrize("bins", [80, 128])
def test_they_are_those_of_transformers(samples: int, bins: int) -> None:
    """Its numpy path computes in float64, the one over torch in float32, which differs from it by 1e-5."""
    rng = np.random.default_rng(bins)
    sound = (rng.standard_normal(samples) * np.sin(np.arange(samples) / 3000) / 9).astype(np.float32)
    whole = np.pad(sound, (0, max(0, 30 * RATE - samples)))
    expected = transformers.WhisperFeatureExtractor(bins)._np_extract_fbank_features(whole[None], "cpu")[0].T
    found = log_mel(pieces(sound), bins)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(log_mel(np.array_split(sound, 7), bins) - found).max() < 1e-6  # however it comes


def test_silence_and_what_is_too_short() -> None:
    assert (log_mel([np.zeros(5, np.float32)], 80) == -1.5).all()
    with pytest.raises(InvalidRequest, match="more than 200"):
        log_mel([np.zeros(200, np.float32)], 80, least=0)
