"""Speech over HTTP, as OpenAI's own client asks for it."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from edgespec.engine.loading import load
from edgespec.runtimes.audio.spoken import pcm
from tests.server.conftest import Later, Served, start, stop

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

TEXT = "well then"


@pytest.fixture(scope="module")
def server(orpheus: Path, bundles: Callable[..., Path]) -> Iterator[Served]:
    running = start(orpheus, "--name", "voice", "--name", "poet", str(bundles("native")))
    yield running
    stop(running)


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with server.openai(timeout=60) as made:
        yield made


def test_speech_is_the_engines_in_every_form(client: openai.OpenAI, orpheus: Path) -> None:
    with load(orpheus, threads=1) as engine:
        wanted = b"".join(map(pcm, engine.speak(TEXT, "leo", seed=0, acceptance="coupled")))
    asked: dict[str, Any] = {"model": "voice", "input": TEXT, "voice": "leo", "extra_body": {"seed": 0}}
    with client.audio.speech.with_streaming_response.create(response_format="pcm", **asked) as told:
        assert told.headers["content-type"] == "audio/pcm"
        assert b"".join(told.iter_bytes()) == wanted
    found = client.audio.speech.create(**asked).content
    with wave.open(io.BytesIO(found)) as file:
        assert file.getframerate() == 24_000
        assert file.readframes(len(wanted) // 2) == wanted
    soundfile = pytest.importorskip("soundfile", reason="needs edgespec[audio]")
    forms: list[Any] = ["flac", "mp3", "opus"]
    for form in forms:
        sound, _ = soundfile.read(io.BytesIO(client.audio.speech.create(response_format=form, **asked).content))
        assert len(sound) >= 0.9 * (len(wanted) // 2), form
    (told_model, other) = client.models.list().data
    assert [one.model_extra["edgespec"]["speaks"] for one in (told_model, other) if one.model_extra] == [True, False]


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"response_format": "aac"}, "response_format"),
        ({"speed": 2}, "speed"),
        ({"instructions": "whisper"}, "instructions"),
        ({"stream_format": "sse"}, "stream_format"),
        ({"voice": "a: b"}, "expected a name"),
        ({"input": " "}, "empty"),
        ({"model": "poet"}, "does not speak"),
        ({"extra_body": {"method": "magic"}}, "magic"),
    ],
)
def test_what_cannot_be_spoken_is_refused_by_name(client: openai.OpenAI, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.audio.speech.create(**{"model": "voice", "input": TEXT, "voice": "tara", **asked})
