"""A transcription handles windows without sound, uncertain languages, and texts that go astray.

A scripted listener replaces the model, so that each rule applies; ``test_transcription.py`` compares with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.loop import Round
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.transcription import SOUNDLESS, Transcription, TranscriptionSettings
from edgespec.errors import InvalidRequest
from tests.support.whisper import CONTEXT, EOS, FRAMES, SPEECH, VOCAB

FIRST = SPEECH.first_time
SPACE, WORD = 0, 10
LOUD = 1.0


class Scripted:
    """A listener: ``texts`` by window and try, ``rows`` by window; a text is its tokens and their log-probability."""

    speech, frames, vocab, context, eos = SPEECH, FRAMES, VOCAB, CONTEXT, frozenset({EOS})

    def __init__(
        self, texts: dict[int, list[tuple[list[int], float]]], rows: dict[int, tuple[str, float, float]]
    ) -> None:
        self.texts, self.rows = texts, rows
        self.at = -1  # number of the window, which its first feature says
        self.prompts: list[list[int]] = []
        self.most: list[int] = []
        self.temperatures: list[float] = []
        self.tries: dict[int, int] = {}
        self.heard: list[int] = []
        self.windows: list[NDArray[np.float32]] = []

    def hear(self, window: NDArray[np.float32]) -> None:
        self.at = round(1000 * float(window[0, 1]))
        self.heard.append(self.at)
        self.windows.append(window)

    def row(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        language, sure, silent = self.rows.get(self.at, ("en", 0.9, 0.1))
        row = np.full(VOCAB, -30.0, np.float32)
        others = [code for code in SPEECH.languages if code != language]
        for code in others:
            row[SPEECH.languages[code]] = math.log((1 - silent) * (1 - sure) / len(others))
        row[SPEECH.languages[language]] = math.log((1 - silent) * sure)
        assert SPEECH.no_speech is not None
        row[SPEECH.no_speech] = math.log(silent)
        return row

    def write(self, tokens: Sequence[int], sampling: SamplingParams, most: int) -> Iterator[Round]:
        number = self.tries[self.at] = self.tries.get(self.at, 0) + 1
        self.prompts.append(list(tokens))
        self.most.append(most)
        self.temperatures.append(sampling.temperature)
        made, logprob = self.texts[self.at][number - 1]
        yield Round([*made, EOS], [], 0, [], [], [logprob] * (len(made) + 1), "eos")

    def encode(self, text: str) -> list[int]:
        return [WORD] * len(text.split())

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(" " if token == SPACE else f" w{token}" for token in tokens)


def features(*levels: float) -> NDArray[np.float32]:
    """Give windows as loud as ``levels``; each says its number."""
    made = np.full((len(levels) * FRAMES, 80), -9.0, np.float32)
    for number, level in enumerate(levels):
        part = made[number * FRAMES : (number + 1) * FRAMES]
        part[:, 0] = level
        part[:, 1] = number / 1000 if level > max(SOUNDLESS, max(levels) - 2.0) else -9.0
    return made


def run(listener: Any, sound: NDArray[np.float32], **changes: Any) -> Transcription:
    running = Transcription(listener, sound, len(sound), TranscriptionSettings().changed(**changes))
    list(running)
    return running


def said(*tokens: int, begin: int = 0, end: int = 100) -> list[int]:
    return [FIRST + begin, *tokens, FIRST + end]


GOOD = said(WORD, 11, 12)


def test_windows_without_sound_are_not_asked_about() -> None:
    quiet = Scripted({}, {})
    running = run(quiet, features(SOUNDLESS, -5.0, SOUNDLESS))
    assert (running.segments, running.language, quiet.heard) == ([], None, [])
    between = Scripted({0: [(GOOD, -0.1)], 2: [(GOOD, -0.1)]}, {})
    assert len(run(between, features(LOUD, LOUD - 2.0, LOUD)).segments) == 2  # 80 dB below the loudest
    assert set(between.heard) == {0, 2}
    asked = Scripted({0: [(GOOD, -0.1)]}, {})
    assert run(asked, features(0.5 + SOUNDLESS)).segments


def test_with_the_threshold_off_every_window_is_written() -> None:
    listener = Scripted({-9000: [(GOOD, -0.1)]}, {})
    sound = features(SOUNDLESS)
    assert len(run(listener, sound, no_speech_threshold=None, language="en").segments) == 1


def test_a_language_comes_from_the_first_window_with_speech() -> None:
    rows = {0: ("ko", 0.99, 0.95), 1: ("de", 0.8, 0.2), 2: ("en", 0.9, 0.1)}
    texts = {0: [([SPACE], -3.0)], 1: [(GOOD, -0.1)], 2: [(GOOD, -0.1)]}
    running = run(Scripted(texts, rows), features(LOUD, LOUD, LOUD))
    assert running.language == "de"
    assert running.language_probability == pytest.approx(0.8, abs=0.01)


def test_a_language_that_is_not_sure_is_looked_for_in_further_windows() -> None:
    texts = {number: [(GOOD, -0.1)] for number in range(6)}
    sure_later = {0: ("ko", 0.4, 0.1), 1: ("de", 0.45, 0.1), 2: ("de", 0.7, 0.1)}
    assert run(Scripted(texts, sure_later), features(*[LOUD] * 4)).language == "de"
    rows = {0: ("ko", 0.4, 0.1), 1: ("de", 0.4, 0.1), 2: ("de", 0.45, 0.1), 3: ("en", 0.49, 0.1), 4: ("ko", 0.9, 0.1)}
    running = run(Scripted(texts, rows), features(*[LOUD] * 6))
    assert (running.language, round(running.language_probability or 0, 2)) == ("de", 0.45)
    assert run(Scripted(texts, rows), features(*[LOUD] * 6), language_detection_segments=1).language == "ko"
    assert run(Scripted(texts, rows), features(*[LOUD] * 6), language_detection_threshold=0.3).language == "ko"
    nobody = {0: ("ko", 0.45, 0.9), 1: ("de", 0.9, 0.9)}
    assert run(Scripted(texts, nobody), features(LOUD, LOUD)).language == "ko"


@pytest.mark.parametrize("empty", [said(SPACE), [FIRST + 30, WORD, FIRST + 30]], ids=["a space", "no time"])
def test_segments_that_say_nothing_are_not_in_the_next_prompt(empty: list[int]) -> None:
    texts = {0: [([*said(WORD, end=30), *empty], -0.1)], 1: [(GOOD, -0.1)]}
    listener = Scripted(texts, {})
    running = run(listener, features(LOUD, LOUD))
    assert [one.text for one in running.segments] == [" w10", " w10 w11 w12"]
    before = listener.prompts[1][: listener.prompts[1].index(SPEECH.start)]
    assert before == [SPEECH.previous, *said(WORD, end=30)]


def test_where_every_temperature_fails_the_likeliest_text_without_a_loop_is_taken() -> None:
    loop = said(*[WORD, 11] * 20)
    texts = {0: [(loop, -0.1), (said(20, 21, 22), -2.0), (said(30, 31, 32), -1.5), (loop, -0.2)], 1: [(GOOD, -0.1)]}
    listener = Scripted(texts, {})
    running = run(listener, features(LOUD, LOUD), temperatures=(0.0, 0.2, 0.4, 0.6))
    first = running.segments[0]
    assert (first.text, first.temperature) == (" w30 w31 w32", 0.6)
    assert listener.prompts[-1][0] == SPEECH.start  # no prompt after the last temperature
    kept = Scripted({0: [(loop, -0.3), (loop, -0.2)]}, {})
    assert run(kept, features(LOUD), temperatures=(0.0, 0.2)).segments[0].avg_logprob == pytest.approx(-0.2)


def test_a_prompt_ends_above_the_temperature_that_is_said() -> None:
    bad = said(20, 21)
    texts = {0: [(bad, -2.0), (GOOD, -0.1)], 1: [(GOOD, -0.1)]}
    for reset, prompted in ((0.5, True), (0.1, False)):
        listener = Scripted(texts, {})
        run(listener, features(LOUD, LOUD), prompt_reset_on_temperature=reset)
        assert listener.temperatures == [0.0, 0.2, 0.0]
        assert (listener.prompts[-1][0] == SPEECH.previous) == prompted


def test_above_that_temperature_a_text_is_written_without_the_one_before_it() -> None:
    """Otherwise each is the same copy of the earlier text: Whisper (section 4.5) conditions only below .5."""
    loop = said(*[WORD, 11] * 20)
    texts = {0: [(GOOD, -0.1)], 1: [(loop, -0.1), (loop, -0.1), (GOOD, -0.2)]}
    for reset, prompted in ((0.5, [True, True, False]), (1.0, [True, True, True]), (0.0, [True, False, False])):
        listener = Scripted(texts, {})
        run(listener, features(LOUD, LOUD), temperatures=(0.0, 0.4, 0.6), prompt_reset_on_temperature=reset)
        assert [prompt[0] == SPEECH.previous for prompt in listener.prompts[1:]] == prompted
    drawn = Scripted({0: [(GOOD, -0.1)], 1: [(GOOD, -0.1)]}, {})
    run(drawn, features(LOUD, LOUD), temperatures=(0.8,), initial_prompt="two words")
    assert drawn.prompts[0][:3] == [SPEECH.previous, WORD, WORD]  # the user's own prompt stays
    assert drawn.prompts[1][0] == SPEECH.start


def test_behind_a_recording_features_are_zeros_in_the_first_window_and_the_last() -> None:
    """As the reference fills windows up; those of silence are another sound to the model, and other words."""
    sound = features(LOUD, LOUD)  # longer than the recordings
    for frames in (FRAMES // 2, FRAMES, FRAMES + FRAMES // 2):
        listener = Scripted({0: [(GOOD, -0.1)], 1: [(GOOD, -0.1)]}, {})
        list(Transcription(listener, sound, frames, TranscriptionSettings()))
        last, held = listener.windows[-1], (frames - 1) % FRAMES + 1
        assert last.shape == (FRAMES, 80)
        assert np.array_equal(last[:held], sound[frames - held : frames])
        assert not last[held:].any()


def test_a_text_has_half_of_the_context_at_most() -> None:
    listener = Scripted({0: [(GOOD, -0.1)]}, {})
    run(listener, features(LOUD))
    assert listener.most == [CONTEXT // 2]
    crowded = Scripted({0: [(GOOD, -0.1)]}, {})
    run(crowded, features(LOUD), initial_prompt="a " * 100)
    assert crowded.most == [CONTEXT - len(crowded.prompts[0])]


def test_unlikely_texts_of_windows_where_nobody_speaks_are_left_out() -> None:
    unlikely, likely = [(said(20, 21), -2.0)], [(GOOD, -0.5)]
    listener = Scripted({0: unlikely, 1: likely}, {0: ("en", 0.9, 0.7), 1: ("en", 0.9, 0.7)})
    running = run(listener, features(LOUD, LOUD))
    assert [one.seek for one in running.segments] == [FRAMES]
    assert listener.tries == {0: 1, 1: 1}  # and not written again


def test_windows_to_look_for_a_language_in_are_at_least_one() -> None:
    with pytest.raises(InvalidRequest, match="language_detection_segments is 0"):
        TranscriptionSettings(language_detection_segments=0)
