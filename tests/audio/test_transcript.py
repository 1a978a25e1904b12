"""Transcripts as text, subtitles and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.engine.transcript import Segment, Transcript
from edgespec.errors import InvalidRequest

SAID = Transcript(
    [
        Segment(0.0, 2.5, " Two roads --> diverged", [50_364, 5, 50_489], no_speech_prob=0.25),
        Segment(3599.9996, 3661.0416, " in a\n\nyellow wood.", [50_364, 6, 50_489]),
    ],
    "en",
    "transcribe",
    3700.0,
)


@pytest.mark.parametrize(
    "form, expected",
    [
        ("txt", "Two roads --> diverged\nin a\n\nyellow wood.\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:02,500\nTwo roads -> diverged\n\n"
                "2\n01:00:00,000 --> 01:01:01,042\nin a\nyellow wood.\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nTwo roads -> diverged\n\n"
                "01:00:00.000 --> 01:01:01.042\nin a\nyellow wood.\n\n"),
    ],
)  # fmt: skip
def test_forms(form: Any, expected: str) -> None:
    assert SAID.write(form) == expected


def test_json_has_the_names_of_openai() -> None:
    found = json.loads(SAID.write("json"))
    assert found["text"] == str(SAID) == "Two roads --> diverged in a\n\nyellow wood."
    assert {"task", "language", "duration", "segments"} <= found.keys()
    first = found["segments"][0]
    assert (first["id"], first["seek"], first["tokens"], first["no_speech_prob"]) == (0, 0, [50_364, 5, 50_489], 0.25)
    assert {"start", "end", "temperature", "avg_logprob", "compression_ratio"} <= first.keys()
    with pytest.raises(InvalidRequest, match="'srt'"):
        SAID.write("str")  # type: ignore[arg-type]
