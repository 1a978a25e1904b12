"""Long recordings are transcribed as by transformers' sequential long-form generation."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.hearing import EngineTranscriber
from edgespec.engine.transcription import Transcription
from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.features import log_mel
from tests.server.conftest import Later
from tests.support.whisper import BINS, FRAMES, GREEDY, SPEECH, expected, told

torch = Later("torch")  # which the fixture of the model needs
SEEDED = Settings(method="ar").changed(seed=3)


@pytest.fixture(scope="module")
def short(sound: Any) -> Any:
    """7 s: three windows and a half, or more."""
    return sound[:112_000]


@pytest.fixture(scope="module")
def features(short: Any) -> Any:
    return log_mel([short], BINS, least=0)


def test_the_language_the_prompt_and_windows_without_speech_are_those_of_transformers(
    engine: Engine, model: Any, short: Any, features: Any
) -> None:
    found = engine.transcribe(short, GREEDY.changed(language=None, initial_prompt="ABCD"))
    words = torch.tensor([SPEECH.previous, *engine.codec.encode(" ABCD", special=False)])
    wanted = expected(model, features, language=None, prompt_ids=words, condition_on_prev_tokens=True)
    assert told(found.segments) == wanted != expected(model, features, language=None, condition_on_prev_tokens=True)
    heard = model.detect_language(torch.from_numpy(features[None, :FRAMES].transpose(0, 2, 1).copy()))
    assert found.language is not None
    assert SPEECH.languages[found.language] == int(heard)
    assert found.language_probability
    thresholds = {"logprob_threshold": -1.3, "no_speech_threshold": 0.0, "condition_on_prev_tokens": True}
    quiet = engine.transcribe(
        short, GREEDY.changed(logprob_threshold=-1.3, no_speech_threshold=0.0)
    )  # unlikely windows are
    assert told(quiet.segments) == expected(model, features, **thresholds)
    assert 0 < len(quiet.segments) < len(engine.transcribe(short, GREEDY).segments)


def test_a_recording_shorter_than_a_window(engine: Engine, model: Any) -> None:
    """The rest of the window is zeros, and the transcript has nothing after the sound."""
    sound = np.asarray(np.random.default_rng(1).standard_normal(16_000) / 9, np.float32)
    found = engine.transcribe(sound, GREEDY).segments
    heard = np.pad(log_mel([sound], BINS, least=FRAMES * 160)[:100], ((0, FRAMES - 100), (0, 0)))
    assert told(found)[0] == expected(model, heard)[0]
    assert all(one.seek < 100 for one in found)


def test_a_text_that_is_unlikely_or_repeats_itself_is_written_again(engine: Engine, short: Any) -> None:
    asked = GREEDY.changed(temperatures=(0.0, 0.4, 0.8), logprob_threshold=0.0)  # which no text is
    one, other = (engine.transcribe(short, asked, settings=SEEDED) for _ in range(2))
    assert told(one.segments) == told(other.segments)
    assert {segment.temperature for segment in one.segments} == {0.8}
    apart = engine.transcribe(short, asked.changed(condition_on_previous_text=False), settings=SEEDED)
    assert told(apart.segments) == told(one.segments)  # the prompt never contains such a text
    repeats = asked.changed(logprob_threshold=None, compression_ratio_threshold=1.5)
    for segment in engine.transcribe(short, repeats, settings=SEEDED).segments:
        assert segment.compression_ratio <= 1.5 or segment.temperature == 0.8


def test_guesses_do_not_change_a_drawn_transcript(engine: Engine, short: Any) -> None:
    asked = GREEDY.changed(temperatures=(0.7,))
    coupled = Settings(adaptive=False, fallback=False).changed(seed=1, acceptance="coupled")
    alone, guessing = (
        engine.transcribe(short, asked, settings=coupled.changed(method=name)) for name in ("ar", "ngram")
    )
    assert told(alone.segments) == told(guessing.segments)
    assert guessing.how["drafted"]


def test_without_times_a_segment_is_a_window(engine: Engine, short: Any) -> None:
    heard = list[str]()
    running = engine.transcription(short, GREEDY.changed(timestamps=False), on_text=heard.append)
    found = list(running)
    assert [(one.start, one.end) for one in found] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert heard[-1] == found[-1].text
    assert running.transcript.text == "".join(one.text for one in found)


@pytest.mark.parametrize(
    "changes, message",
    [({"language": "xx"}, "language 'xx'"), ({"task": "sing"}, "task 'sing'"), ({"temperatures": ()}, "temperatures"),
     ({"volume": 1}, "volume")],
)  # fmt: skip
def test_what_cannot_be_asked_for(engine: Engine, features: Any, changes: dict[str, Any], message: str) -> None:
    listener = EngineTranscriber(engine.usable, Settings(), threading.Event())
    with pytest.raises(InvalidRequest, match=message):
        Transcription(listener, features, 700, GREEDY.changed(**changes))
    listener.speech = SPEECH.model_copy(update={"languages": {}, "tasks": {}, "previous": None})
    for asked, why in (
        ({"language": "de"}, "English"),
        ({"task": "translate"}, "translate"),
        ({"initial_prompt": "x"}, "prompt"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            Transcription(listener, features, 700, GREEDY.changed(**{"language": None, **asked}))
