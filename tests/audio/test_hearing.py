"""A bundle of Whisper writes transformers' transcripts: the engine, every method, the command line."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.transcript import FORMATS
from edgespec.engine.transcription import Transcription, TranscriptionSettings
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.audio.features import log_mel
from edgespec.runtimes.audio.reading import pieces
from edgespec.runtimes.slots.native import NativeSlot
from tests.cli.conftest import Command
from tests.cli.conftest import command as command
from tests.support.whisper import BINS, DIGITS, GREEDY, SAID, SPEECH, expected, told, write_whisper


@pytest.fixture(scope="module")
def trained(digits: Path) -> Iterator[Engine]:
    with load(digits, threads=1) as made:
        yield made


def test_a_bundle_says_what_transcripts_begin_with(engine: Engine) -> None:
    assert engine.bundle.manifest.speech == SPEECH


@pytest.mark.parametrize("method, before", [(None, True), ("ar", False), ("ngram", True)])
def test_transcripts_are_those_of_transformers_by_every_method(
    engine: Engine, model: Any, sound: Any, method: str | None, before: bool
) -> None:
    wanted = expected(model, log_mel([sound], BINS, least=0), condition_on_prev_tokens=before)
    found = engine.transcribe(
        sound, GREEDY.changed(condition_on_previous_text=before), settings=Settings(method=method)
    )
    assert told(found.segments) == wanted
    assert (found.how["lossless"], found.how["exact"]) == (True, True)
    assert found.how["tokens"] >= found.how["rounds"] > 0


@pytest.mark.parametrize("method", [None, "ar", "ngram", "speculative"])
def test_digits_are_heard_in_four_languages(trained: Engine, method: str | None) -> None:
    always, accepted = Settings(method=method, adaptive=method is None, fallback=method is None), 0
    for language, text in SAID.items():
        found = trained.transcribe(DIGITS / f"{language}.wav", settings=always)
        assert (found.text, found.language) == (text, language)
        assert (found.language_probability or 0) > 0.9
        (segment,) = found.segments
        assert segment.start < found.duration - 0.5 < segment.end < found.duration + 0.1
        assert found.how["exact"]
        accepted += found.how["accepted"]
    assert method != "speculative" or accepted > 5
    assert trained.transcribe(DIGITS / "fr.wav", language="French", task="translate").text == "three two zero zero six"


@pytest.mark.parametrize("method", ["ar", "speculative"])
def test_a_window_written_again_does_not_read_its_prompt_again(
    digits: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    read, prefill = list[int](), NativeSlot.prefill

    def counted(slot: NativeSlot, tokens: Sequence[int]) -> None:
        read.append(len(tokens))
        prefill(slot, tokens)

    monkeypatch.setattr(NativeSlot, "prefill", counted)
    asked = TranscriptionSettings(initial_prompt="one two three " * 5, logprob_threshold=0.0, no_speech_threshold=None)
    fixed = Settings(method=method, adaptive=False)  # what control decides depends on time
    rows = []
    for temperatures in ((0.0,), (0.0, 0.2, 0.4, 0.6)):
        with load(digits, threads=1) as engine:  # one that holds nothing of the recording
            engine.transcribe(DIGITS / "de.wav", settings=fixed)
            read.clear()
            found = engine.transcribe(DIGITS / "en.wav", asked.changed(temperatures=temperatures),
                                      settings=fixed.changed(seed=1))  # fmt: skip
        assert found.how["texts"] == len(temperatures)
        rows.append(sum(read))
    assert rows[0] > 10
    assert rows[1] < rows[0] + 4


def test_a_draft_with_the_targets_encoder_runs_it_once(model: Any, sound: Any, tmp_path: Path) -> None:
    """As distil-whisper's: fewer layers of the decoder, and the same encoder."""
    draft = copy.deepcopy(model)
    draft.model.decoder.layers, draft.config.decoder_layers = draft.model.decoder.layers[:1], 1
    source, small = write_whisper(tmp_path / "model", model), write_whisper(tmp_path / "draft", draft)
    options = ExportOptions(str(source), tmp_path / "bundle", ["speculative"], "fp32", draft=str(small), threads=1)
    manifest = export_model(options, golden=False)
    assert manifest.draft is not None
    assert manifest.draft.source is not None
    assert manifest.draft.source.shares_encoder
    assert manifest.draft.encoder is None
    with load(tmp_path / "bundle", threads=1) as both:
        always = Settings(method="speculative", adaptive=False, fallback=False)
        found = both.transcribe(sound, GREEDY, settings=always)
    assert told(found.segments) == expected(model, log_mel([sound], BINS, least=0), condition_on_prev_tokens=True)
    assert found.how["drafted"] > found.how["accepted"] > 0


def test_methods_are_proven_on_a_recording(command: Command, digits: Path) -> None:
    told = command("verify", digits, "--prompts", DIGITS / "en.wav", "--threads", 1, "--max-new-tokens", 9, "--json")
    assert {"ngram", "speculative"} <= {proof["method"] for proof in told.json["methods"]}
    assert all(proof["exact"] for proof in told.json["methods"])
    command("verify", digits).refused(1, "holds no recordings")


def test_a_long_recording_of_several_windows(trained: Engine) -> None:
    """Each number and the pause after it fill a window of 6 s."""
    numbers = [np.concatenate(list(pieces(DIGITS / f"{code}.wav"))) for code in ("en", "en", "en")]
    whole = np.concatenate([np.pad(one, (0, 6 * 16_000 - len(one))) for one in numbers])
    found = trained.transcribe(whole, language="en", condition_on_previous_text=False)
    assert [(one.text.strip(), one.start) for one in found.segments] == [(SAID["en"], at) for at in (0.0, 6.0, 12.0)]
    assert found.duration == 18


def test_what_is_no_recording_and_who_hears_nothing(engine: Engine, bundles: Callable[..., Path], sound: Any) -> None:
    ended = threading.Event()
    ended.set()
    for wrong, why in ((b"nothing", "sound file"), (np.zeros(0, np.float32), "no samples"), ("nowhere.wav", "is none")):
        with pytest.raises(InvalidRequest, match=why):
            engine.transcribe(wrong)
    with pytest.raises(EdgespecError, match="cancelled"):
        engine.transcribe(sound, cancel=ended)
    with load(bundles("native"), threads=1) as reader, pytest.raises(InvalidRequest, match="not sound"):
        reader.transcribe(sound)
    assert isinstance(engine.transcription(sound), Transcription)


def test_the_command_writes_text_subtitles_and_json(command: Command, digits: Path, trained: Engine) -> None:
    run = "run", digits, "--audio", DIGITS / "de.wav", "--threads", 1
    wanted = trained.transcribe(DIGITS / "de.wav")
    for form in FORMATS:
        told = command(*run, "--format", form)
        assert told.code == 0
        assert "1.7 s of sound in" in told.err
        assert "de (100% sure)" in told.err
        if form != "json":
            assert told.out == wanted.write(form)
    assert json.loads(told.out)["text"] == SAID["de"]
    assert command(*run, "--json").json["segments"] == [one.as_dict(at) for at, one in enumerate(wanted.segments)]
    piped = "--audio", "-", "--threads", 1, "--no-timestamps", "--task", "translate", "--language", "de"
    told = command("run", digits, *piped, stdin=(DIGITS / "de.wav").read_bytes())
    assert told.out == "one six five nine\n"


@pytest.mark.parametrize(
    "words, code, why",
    [
        (("--language", "xx"), 1, "no language 'xx'"),
        (("--chat", "--prompt", "what?"), 1, "answers no questions"),
        (("--regex", "a"), 2, "grammar"),
        (("--prompt", "a", "--prompt", "b"), 2, "one --prompt"),
        (("--format", "doc"), 2, "--format"),
    ],
)
def test_what_does_not_go_with_a_recording(command: Command, digits: Path, words: Any, code: int, why: str) -> None:
    command("run", digits, "--audio", DIGITS / "en.wav", *words).refused(code, why)
