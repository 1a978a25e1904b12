"""Folders of CTranslate2 hold what the model had that they were converted from."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures import architecture
from edgespec.export.architectures.seq2seq import EncoderDecoder
from edgespec.export.source.ct2_files import read_ct2, spec_of
from edgespec.export.source.source import Checkpoint
from tests.support.ct2 import CASES, unpacked

EXACT = {
    None: 0.0,
    "float32": 0.0,
    "float16": 1e-3,
    "bfloat16": 1e-2,
    "int16": 2e-3,
}  # of the largest weight of a tensor


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_sizes_are_those_of_the_origin(tmp_path: Path, name: str) -> None:
    folder, origin = unpacked(tmp_path, name)
    found, wanted = architecture(Checkpoint.open(folder)), architecture(Checkpoint.open(origin))
    assert type(found) is type(wanted)
    assert isinstance(found, EncoderDecoder)
    case, marian = CASES[name], CASES[name].config["model_type"] == "marian"
    for mine, theirs in ((found, wanted), (found.encoder, wanted.encoder)):
        assert isinstance(mine, EncoderDecoder)
        assert isinstance(theirs, EncoderDecoder)
        told = {"context", "eos", "bos"} if marian else set()  # as many positions as its converter wrote
        assert mine.facts.model_dump(exclude=told) == theirs.facts.model_dump(exclude=told)
        assert mine.activation == theirs.activation
        assert mine.logits == theirs.logits
        assert mine.on(mine.scaled) == theirs.on(theirs.scaled)
        ours, given = mine.derived(mine.source), theirs.derived(theirs.source)
        names = set(given) | {one for one in theirs.source.index if "layer" in one}
        assert len(names) > 20
        assert given.keys() <= ours.keys()
        for tensor in names:
            a, b = (source.read(tensor) if tensor not in made else made[tensor].read(slice(None), None)
                    for source, made in ((mine.source, ours), (theirs.source, given)))  # fmt: skip
            rows = len(b) - 1 if marian and a.shape[0] == case.config["vocab_size"] else len(b)
            assert a.shape == b.shape or "embed_positions" in tensor
            near = EXACT.get(case.quantization, 0.02) * max(1.0, float(np.abs(b).max()))
            assert np.abs(a[:rows] - b[:rows]).max() <= near + 1e-6, tensor


def test_a_marian_gets_back_the_token_that_it_begins_with(tmp_path: Path) -> None:
    folder, _ = unpacked(tmp_path, "marian")
    found = Checkpoint.open(folder)
    assert not found.read("model.shared.weight")[59].any()
    assert found.read("final_logits_bias")[0, 59] < -1e8
    assert found.read("final_logits_bias", slice(None), slice(57, 60)).shape == (1, 3)
    assert found.read("model.shared.weight", slice(58, 60)).shape == (2, 16)
    told = json.loads((found.path / "generation_config.json").read_text("utf-8"))
    assert (told["decoder_start_token_id"], told["bad_words_ids"], told["eos_token_id"]) == (59, [[59]], 2)


def test_rules_of_a_whisper_come_from_its_config(tmp_path: Path) -> None:
    folder, _ = unpacked(tmp_path, "whisper")
    source = Checkpoint.open(folder)
    told = json.loads((source.path / "generation_config.json").read_text("utf-8"))
    assert (told["suppress_tokens"], told["begin_suppress_tokens"]) == ([3, 4], [5])
    assert (told["decoder_start_token_id"], told["no_timestamps_token_id"], told["eos_token_id"]) == (41, 46, 40)


@pytest.mark.parametrize("name", ["whisper_int8_float16", "t5", "m2m_100"])
def test_parts_are_parts_of_the_whole(tmp_path: Path, name: str) -> None:
    folder, _ = unpacked(tmp_path, name)
    source = Checkpoint.open(folder)
    for tensor in source.index:
        whole = source.read(tensor)
        assert np.array_equal(source.read(tensor, slice(3, 9)), whole[3:9])
        if whole.ndim == 2:
            assert np.array_equal(source.read(tensor, slice(1, 7), slice(2, 5)), whole[1:7, 2:5])


def test_what_a_quantized_one_loses_is_noted(tmp_path: Path) -> None:
    folder, _ = unpacked(tmp_path, "marian_int8")
    (note,) = Checkpoint.open(folder).notes
    assert note.startswith("the file is quantized (int8)")
    assert Checkpoint.open(unpacked(tmp_path, "marian")[0]).notes == []


def test_files_that_end_early_or_hold_nonsense_are_refused(tmp_path: Path) -> None:
    folder, _ = unpacked(tmp_path, "marian_int8")
    file = folder / "model.bin"
    whole = file.read_bytes()
    for size in (7, 20, 30, 200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ExportError, match=r"model\.bin|safetensors|pickle"):
            Checkpoint.open(folder)
    rng = np.random.default_rng(0)
    for _ in range(200):
        broken = bytearray(whole)
        for at in rng.integers(0, 4000, 3):
            broken[at] = int(rng.integers(256))
        file.write_bytes(broken)
        with contextlib.suppress(ExportError):  # and nothing else
            source = Checkpoint.open(folder)
            for name in source.index:
                source.read(name)


@pytest.mark.parametrize(
    ("spec", "said"), [("TransformerDecoderSpec", "expected WhisperSpec"), ("Wav2Vec2Spec", "Wav2Vec2Spec of")]
)
def test_other_models_are_refused_by_name(tmp_path: Path, spec: str, said: str) -> None:
    name = spec.encode() + b"\0"
    (tmp_path / "model.bin").write_bytes(struct.pack("<IH", 6, len(name)) + name + struct.pack("<III", 1, 0, 0))
    (tmp_path / "config.json").write_text("{}", "utf-8")
    with pytest.raises(UnsupportedModel, match=said) as raised:
        Checkpoint.open(tmp_path)
    assert "pickle" not in str(raised.value)
    assert "converted from" in (raised.value.hint or "")


def test_weights_in_four_bits_and_other_versions_are_refused(tmp_path: Path) -> None:
    folder, _ = unpacked(tmp_path, "marian_int8")
    told = json.loads((folder / "config.json").read_text("utf-8")) | {"quantization_type": 1, "quantization_bits": 4}
    (folder / "config.json").write_text(json.dumps(told), "utf-8")
    with pytest.raises(UnsupportedModel, match="AWQ in 4 bits"):
        Checkpoint.open(folder)
    file = folder / "model.bin"
    file.write_bytes(struct.pack("<I", 9) + file.read_bytes()[4:])
    with pytest.raises(UnsupportedModel, match="version 9"):
        Checkpoint.open(folder)


def test_a_translator_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder, _ = unpacked(tmp_path, "m2m_100")
    held = read_ct2(folder / "model.bin").variables["decoder/position_encodings/encodings"]
    with (folder / "model.bin").open("r+b") as file:
        file.seek(held.offset)
        file.write(np.full(16 * 4, 0.7, np.float32).tobytes())
    with pytest.raises(UnsupportedModel, match="none of Marian, T5"):
        Checkpoint.open(folder)


def test_files_of_the_tokenizer_that_are_missing_are_named(tmp_path: Path) -> None:
    for name, said in (("marian", "source.spm and no target.spm"), ("t5", "spiece.model"),
                       ("whisper", "tokenizer.json"), ("m2m_100", "sentencepiece.bpe.model")):  # fmt: skip
        folder, _ = unpacked(tmp_path, name)
        (folder / "tokenizer.json").unlink(missing_ok=True)
        with pytest.raises(ExportError, match=said) as raised:
            Checkpoint.open(folder)
        assert "into the folder" in (raised.value.hint or "")


def test_a_pickle_is_none(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    assert spec_of(tmp_path) is None
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00.")
    assert spec_of(tmp_path) is None
    assert spec_of(tmp_path / "nothing") is None
