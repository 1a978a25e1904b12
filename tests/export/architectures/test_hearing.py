"""Decoders that hear equal transformers: features, and the rows that are made of a recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.quantization.reference import reference_rows
from edgespec.runtimes.audio.processing import Encode, frames_of, sound_features, sound_rows
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.slots.encoder import Encoder
from edgespec.runtimes.slots.shared import Model
from tests.support import hearing

Array = NDArray[np.float32]


def filled(rows: Array, columns: int) -> Array:
    return np.pad(rows, ((0, 0), (0, columns - rows.shape[1])))


def in_numpy(arch: Architecture) -> Encode:
    assert arch.hearing is not None
    sides = [arch.hearing.tower, *arch.hearing.projectors, *arch.hearing.convolutions]
    return lambda side, rows: reference_rows(sides[side], filled(rows, sides[side].input_width))[0]


def natively(folder: Path, part: ModelPart) -> Encode:
    made = [Encoder(Model(folder, one, "native", 1)) for one in part.front]
    return lambda side, rows: made[side].encode(filled(rows, made[side].columns))


@pytest.mark.parametrize("name", hearing.CASES)
def test_rows_of_recordings_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    known, arch = hearing.reference(name), open_model(hearing.write_case(tmp_path / "model", name), None)
    assert arch.hearing is not None
    sound = arch.hearing.sound
    part = write_model(tmp_path, arch, ModelSpec("fp32")).part
    assert (part.sound, part.image, arch.inserts) == (sound, None, arch.facts.hidden)
    for at, samples in enumerate(hearing.recordings()):
        features = sound_features(samples, sound.front)
        np.testing.assert_allclose(features[:: hearing.EVERY], known[f"features.{at}"], atol=1e-4, rtol=0)
        for encode in (in_numpy(arch), natively(tmp_path, part)):
            rows = sound_rows(features, sound, encode)
            assert len(rows) == known[f"count.{at}"] == sound.front.rows(frames_of(len(samples), sound.front))
            np.testing.assert_allclose(rows[:: hearing.EVERY], known[f"sound.{at}"], atol=1e-4, rtol=0)
