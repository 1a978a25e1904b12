"""Models that speak: sound of codes against the authors' code, and from a text to sound."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.engine.loading import load
from edgespec.errors import BundleError, EdgespecError, ExportError
from edgespec.export.codes import read_codes, write_codes
from edgespec.plugins.speaking.speech import windows
from edgespec.runtimes.audio.spoken import pcm, wav_header
from edgespec.runtimes.text.codec import TextCodec
from tests.cli.conftest import Command
from tests.cli.conftest import command as command
from tests.support import hf
from tests.support.snac import ARCHIVE, CUSTOM, EOT, FIRST, LEVELS, PLACES, codes, write_snac

GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 60, "ignore_eos": True}


def test_sound_is_that_of_the_authors_code_and_streams_as_orpheus_does(orpheus: Path) -> None:
    frames = codes()
    tokens = (frames + FIRST + LEVELS * np.arange(PLACES)).reshape(-1).tolist()
    with load(orpheus, threads=1) as engine, np.load(ARCHIVE) as wanted:
        noisy = windows(engine, seed=0)
        whole = noisy._decode(frames, 0)
        assert np.abs(whole[::8] - wanted["sound"]).max() < 1e-5
        heard = [*noisy.push([3, *tokens[:40], tokens[3]]), *noisy.push(tokens[40:]), *noisy.finish()]
        assert [len(piece) for piece in heard] == [4096, 2048, 2048, 2048, 4096]
        ours = np.frombuffer(pcm(np.concatenate(heard)[2048:-4096]), np.int16).reshape(wanted["heard"].shape)
        assert np.abs(ours.astype(np.int32) - wanted["heard"]).max() <= 1
        short = windows(engine, seed=0)
        assert list(short.push(tokens[:20])) == []
        assert [len(piece) for piece in short.finish()] == [4096]


def test_a_text_becomes_codes_and_sound(orpheus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(orpheus, threads=1) as engine:
        speech = engine.speak("hello there", voice="leo", **GREEDY)
        pieces = list(speech)
        tokens = speech.result.tokens
        said = engine.codec.encode("leo: hello there")
        prompt = [CUSTOM + 3, *said, EOT, CUSTOM + 4, CUSTOM + 5, CUSTOM + 1]
        assert speech.stream.tokens[: len(prompt)] == prompt
        assert all(FIRST + LEVELS * (at % PLACES) <= token < FIRST + LEVELS * (at % PLACES + 1)
                   for at, token in enumerate(tokens))  # fmt: skip
        assert speech.rate == 24_000
        assert sum(map(len, pieces)) == 2048 * (60 // PLACES)
        assert {piece.dtype for piece in pieces} == {np.dtype(np.float32)}
        for method in engine.methods:
            other = engine.speak("hello there", voice="leo", method=method, **GREEDY)
            assert np.array_equal(np.concatenate(list(other)), np.concatenate(pieces)) or not other.result.exact, method
        left = engine.speak("hello there", voice="leo", method="ar", **GREEDY)
        assert np.array_equal(next(iter(left)), pieces[0])
        assert (left.result.finish, len(left.result.tokens)) == ("cancelled", 4 * PLACES)
        assert engine.speech_defaults.sampling.repetition_penalty == 1.3
        with pytest.raises(EdgespecError, match="empty"):
            engine.speak(" ")
        monkeypatch.setattr(engine.code_decoder, "run", lambda *_, **__: np.zeros(5, np.float32))
        with pytest.raises(BundleError, match="no sound of whole frames"):
            list(engine.speak("hello there", voice="leo", **GREEDY))
        with pytest.raises(EdgespecError, match="expected a name, such as tara"):
            engine.speak("hello", voice="a: b")


def test_what_does_not_speak_is_refused_by_name(tmp_path: Path, bundles: Callable[..., Path]) -> None:
    codec = TextCodec(hf.write_checkpoint(tmp_path / "text", hf.CONFIGS["llama_tied_gqa"], 0))
    with pytest.raises(ExportError, match="no <custom_token_3>"):
        write_codes(*read_codes(write_snac(tmp_path / "snac")), tmp_path, codec)
    with pytest.raises(ExportError, match="attn_window_size 32: expected None"):
        write_codes(*read_codes(write_snac(tmp_path / "other", attn_window_size=32)), tmp_path, codec)
    with load(bundles("native"), threads=1) as engine, pytest.raises(EdgespecError, match="does not speak"):
        engine.speak("hello")


def test_a_wav_file_says_what_it_holds() -> None:
    sound = np.linspace(-1, 1, 100, dtype=np.float32)
    with wave.open(io.BytesIO(wav_header(24_000, 100) + pcm(sound))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        assert np.array_equal(np.frombuffer(file.readframes(200), np.int16), (sound * 32767).astype(np.int16))


def test_the_command_writes_a_wav_file(command: Command, orpheus: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "speech.wav", ("run", orpheus, "--prompt", "well then", "--threads", 1)
    told = command(*run, "--voice", "leo", "--seed", 0, "-o", file, "--json").json
    with load(orpheus, threads=1) as engine:
        sound = b"".join(map(pcm, engine.speak("well then", "leo", seed=0)))
    with wave.open(str(file)) as made:
        assert made.readframes(1 << 20) == sound
    assert told["seconds"] == len(sound) / 48_000
    assert "s of speech" in command(*run, "-o", file).err
    for words, why in ((), "-o speech.wav"), (("-o", "a.mp3"), "ends with .wav"), (("-o", file, "--chat"), "--chat"):
        command(*run, *words).refused(2, why)
