"""Decoders with audio encoders equal transformers: features, and the embeddings of a recording."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.errors import EdgespecError
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, front_of, open_model
from edgespec.export.foreign.model import is_foreign
from edgespec.export.quantization.reference import reference_rows
from edgespec.runtimes.audio.processing import Encode, frames_of, sound_features, sound_rows
from edgespec.runtimes.files.formats import Format
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
    made = [Encoder(Model(folder, one, "native", 1)) for one in part.senses[-1].front]
    return lambda side, rows: made[side].encode(filled(rows, made[side].columns))


@pytest.mark.parametrize("name", hearing.CASES)
def test_rows_of_recordings_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    known, arch = hearing.reference(name), open_model(hearing.write_case(tmp_path / "model", name), None)
    assert arch.hearing is not None
    sound = arch.hearing.sound
    assert sound is not None
    part = write_model(tmp_path, arch, ModelSpec("fp32")).part
    assert (part.hearing, part.image is not None) == (sound, name == "gemma4")
    assert arch.inserts == arch.facts.hidden
    for at, samples in enumerate(hearing.recordings()):
        features = sound_features(samples, sound.front)
        np.testing.assert_allclose(features[:: hearing.EVERY], known[f"features.{at}"], atol=1e-4, rtol=0)
        for encode in (in_numpy(arch), natively(tmp_path, part)):
            rows = sound_rows(features, sound, encode)
            assert len(rows) == known[f"count.{at}"] == sound.front.rows(frames_of(len(samples), sound.front))
            np.testing.assert_allclose(rows[:: hearing.EVERY], known[f"sound.{at}"], atol=1e-4, rtol=0)


def test_checkpoints_of_the_authors_have_the_same_tensors(tmp_path: Path) -> None:
    for name in ("qwen3_asr", "qwen3_asr_tied"):
        one, other = (
            open_model(write(tmp_path / name / write.__name__, name), None)
            for write in (hearing.write_case, hearing.write_as_the_authors_do)
        )
        assert one.hearing is not None
        assert other.hearing is not None
        assert not is_foreign(other.source.path)
        assert one.hearing.sound == other.hearing.sound
        sides = [[arch, *front_of(arch).values()] for arch in (one, other)]
        for first, second in zip(*sides, strict=True):
            assert first.tensors == second.tensors
            for tensor in first.tensors:
                np.testing.assert_array_equal(first.source.read(tensor), second.source.read(tensor))


@pytest.mark.parametrize(
    "file, change, words",
    [
        ("preprocessor_config.json", {"sampling_rate": 8000}, "sampling_rate 8000: expected 16000"),
        ("preprocessor_config.json", {"hop_length": 320}, "hop_length 320: expected 160"),
        ("config.json", {"audio_config": {"n_window": "x"}}, "n_window"),
        ("config.json", {"architectures": ["Qwen3ASRForTokenClassification"]}, "a forced aligner"),
        ("config.json", {"audio_config": hearing.CHUNKS | {"d_model": 24}}, "belong to different models"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, file: str, change: dict[str, object], words: str
) -> None:
    path = hearing.write_case(tmp_path, "qwen3_asr") / file
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    path.write_text(json.dumps(known | change), "utf-8")
    with pytest.raises(EdgespecError) as caught:
        open_model(tmp_path, None)
    assert words in f"{caught.value.message} {caught.value.hint}"
    assert open_model(tmp_path, None, text_only=True).hearing is None


@pytest.mark.parametrize("form", ["int8", "int4", "w8a8"])
def test_quantized_towers_give_nearly_the_same(tmp_path: Path, form: Format) -> None:
    arch = open_model(hearing.write_case(tmp_path / "model", "qwen3_asr"), None)
    part = write_model(tmp_path, arch, ModelSpec(form)).part
    assert arch.hearing is not None
    sound = arch.hearing.sound
    assert sound is not None
    assert [side.format for side in part.front] == ["int8" if form == "int4" else form] * 5
    features = sound_features(hearing.recordings()[0], sound.front)
    exact, near = (sound_rows(features, sound, one) for one in (in_numpy(arch), natively(tmp_path, part)))
    assert np.abs(near - exact).mean() < 0.05 * exact.std()
