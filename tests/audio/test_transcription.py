"""Long recordings are transcribed as by transformers' sequential long-form generation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.ngram import NGram
from edgespec.engine.transcript import Segment
from edgespec.engine.transcription import Transcription, TranscriptionSettings
from edgespec.errors import InvalidRequest
from edgespec.runtimes.audio.features import log_mel
from tests.support.whisper import BINS, FRAMES, GREEDY, SPEECH, TorchListener, expected, told, torch_model

torch = pytest.importorskip("torch", reason="needs edgespec[train]")
pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture(scope="module")
def features(sound: Any) -> Any:
    """7 s: three windows and a half, or more."""
    return log_mel([sound], BINS, least=0)[:700]


def segments(listener: TorchListener, features: Any, settings: TranscriptionSettings) -> list[Segment]:
    return list(Transcription(listener, features, len(features), settings))


@pytest.mark.parametrize("seed, before", [(0, True), (0, False), (2, True)])
def test_texts_times_and_windows_are_those_of_transformers(features: Any, seed: int, before: bool) -> None:
    model = torch_model(seed)
    listener = TorchListener(model)
    found = segments(listener, features, GREEDY.changed(previous_text=before))
    assert told(found) == expected(model, features, condition_on_prev_tokens=before)
    assert len(listener.windows) > 3
    assert any(len(prompt) > 20 for prompt in listener.prompts) == before


def test_the_language_the_prompt_and_windows_without_speech_are_those_of_transformers(
    model: Any, features: Any
) -> None:
    listener = TorchListener(model)
    running = Transcription(listener, features, len(features), GREEDY.changed(language=None, prompt="ABCD"))
    found, words = list(running), torch.tensor([SPEECH.previous, *listener.encode(" ABCD")])
    assert told(found) == expected(model, features, language=None, prompt_ids=words, condition_on_prev_tokens=True)
    code = running.transcript.language
    logits = listener.row([SPEECH.start])
    assert code is not None
    assert SPEECH.languages[code] == listener.prompts[0][7]
    assert running.transcript.language_probability is not None
    assert logits[SPEECH.languages[code]] >= max(logits[token] for token in SPEECH.languages.values())
    quiet = GREEDY.changed(least_logprob=-1.3, most_silence=0.0)  # every unlikely window is one
    found = segments(listener, features, quiet)
    thresholds = {"logprob_threshold": -1.3, "no_speech_threshold": 0.0, "condition_on_prev_tokens": True}
    assert told(found) == expected(model, features, **thresholds)
    assert 0 < len(found) < len(segments(listener, features, GREEDY))


def test_a_recording_shorter_than_a_window(model: Any) -> None:
    """The rest of the window is silence, and nothing is heard behind the sound."""
    sound = np.asarray(np.random.default_rng(1).standard_normal(16_000) / 9, np.float32)
    whole = log_mel([sound], BINS, least=FRAMES * 160)
    listener = TorchListener(model)
    found = list(Transcription(listener, whole, 100, GREEDY))
    assert (listener.windows[0] == whole).all()
    (first,) = (one for one in expected(model, whole)[:1])
    assert told(found)[0] == first
    assert all(one.seek < 100 for one in found)


def test_a_text_that_is_unlikely_or_repeats_itself_is_written_again(model: Any, features: Any) -> None:
    asked = GREEDY.changed(temperatures=(0.0, 0.4, 0.8), least_logprob=0.0)  # which no text is
    listener = TorchListener(model)
    running = Transcription(listener, features[:FRAMES], FRAMES, asked, SamplingParams(seed=3))
    assert {one.temperature for one in running} == {0.8}
    repeats = asked.changed(least_logprob=None, most_compression=1.5)
    for one in segments(TorchListener(model), features[:FRAMES], repeats):
        assert one.compression_ratio <= 1.5 or one.temperature == 0.8
    later = list(Transcription(listener, features[:450], 450, asked, SamplingParams(seed=3)))
    assert later
    assert all(prompt[0] == SPEECH.start for prompt in listener.prompts)  # such a text is no prompt


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_guesses_do_not_change_a_transcript(model: Any, features: Any, temperature: float) -> None:
    asked = GREEDY.changed(temperatures=(temperature,))
    alone, guessing = TorchListener(model), TorchListener(model, NGram())
    texts = [
        told(list(Transcription(listener, features[:600], 600, asked, SamplingParams(seed=1, acceptance="coupled"))))
        for listener in (alone, guessing)
    ]
    assert texts[0] == texts[1]
    assert temperature or guessing.rounds < alone.rounds


def test_without_times_a_segment_is_a_window(model: Any, features: Any) -> None:
    listener, heard = TorchListener(model), list[str]()
    running = Transcription(listener, features, 700, GREEDY.changed(timestamps=False), on_text=heard.append)
    found = list(running)
    assert [(one.start, one.end) for one in found] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert all(prompt[-1] == SPEECH.no_timestamps for prompt in listener.prompts)
    assert heard[-1] == found[-1].text
    assert running.transcript.text == "".join(one.text for one in found)


@pytest.mark.parametrize(
    "changes, message",
    [({"language": "xx"}, "language 'xx'"), ({"task": "sing"}, "task 'sing'"), ({"temperatures": ()}, "temperatures"),
     ({"volume": 1}, "volume")],
)  # fmt: skip
def test_what_cannot_be_asked_for(model: Any, features: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Transcription(TorchListener(model), features, 700, GREEDY.changed(**changes))
    english = TorchListener(model)
    english.speech = SPEECH.model_copy(update={"languages": {}, "tasks": {}, "previous": None})
    for asked, why in (
        ({"language": "de"}, "English"),
        ({"task": "translate"}, "translate"),
        ({"prompt": "x"}, "prompt"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            Transcription(english, features, 700, GREEDY.changed(**{"language": None, **asked}))
