"""Transcriptions and translations over HTTP, as OpenAI's own client asks for them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from edgespec.cli.app import cli
from edgespec.engine.loading import load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from tests.server.conftest import Later, Served, start, stop
from tests.support import hearing
from tests.support.whisper import DIGITS, SAID

if TYPE_CHECKING:
    import openai
else:
    openai = Later("openai")

TALK = DIGITS / "en.wav"


@pytest.fixture(scope="module")
def server(digits: Path) -> Iterator[Served]:
    running = start(digits, "--name", "ear")
    yield running
    stop(running)


def test_every_form_of_a_transcript_is_the_engines(client: openai.OpenAI, digits: Path) -> None:
    with load(digits, threads=1) as engine:
        wanted = engine.transcribe(TALK)
    create: Any = partial(client.audio.transcriptions.create, model="ear", file=TALK)
    segments: list[Any] = ["segment"]
    told: Any = create(response_format="verbose_json", timestamp_granularities=segments, language="en")
    assert (told.text, told.language, told.duration) == (SAID["en"], "en", wanted.duration)
    assert [(one.start, one.end, one.tokens) for one in told.segments] == [
        (one.start, one.end, one.tokens) for one in wanted.segments
    ]
    assert create().text == SAID["en"]
    forms: list[Any] = ["srt", "vtt", "text"]
    assert [create(response_format=form) for form in forms] == [
        wanted.write("srt"), wanted.write("vtt"), f"{SAID['en']}\n"
    ]  # fmt: skip
    assert create(prompt="one two", temperature=0.1, extra_body={"method": "speculative"}).text


@pytest.mark.filterwarnings("ignore:deprecated")
@pytest.mark.usefixtures("native")
def test_a_chat_has_pictures_and_recordings(tmp_path: Path) -> None:
    source, folder = hearing.write_case(tmp_path / "source", "gemma4"), tmp_path / "bundle"
    export_model(ExportOptions(str(source), folder, format="int8", threads=1, quick=True), golden=False)
    png = Path(__file__).parents[1] / "data" / "print" / "line.png"
    with load(folder, threads=1) as engine:
        parts = [{"type": "image", "image": png}, {"type": "audio", "audio": TALK}, {"type": "text", "text": "what"}]
        answer = engine.chat([{"role": "user", "content": parts}], max_new_tokens=16, temperature=0.0).text
    running = start(folder, "--name", "both")
    encoded = [base64.b64encode(file.read_bytes()).decode() for file in (png, TALK)]
    said: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded[0]}"}},
        {"type": "input_audio", "input_audio": {"data": encoded[1], "format": "wav"}},
        {"type": "text", "text": "what"},
    ]
    try:
        with running.openai() as client:
            create: Any = partial(client.chat.completions.create, model="both", temperature=0, max_tokens=16)
            assert create(messages=[{"role": "user", "content": said}]).choices[0].message.content == answer
            streamed = create(messages=[{"role": "user", "content": said}], stream=True)
            assert "".join(one.choices[0].delta.content or "" for one in streamed if one.choices) == answer
    finally:
        stop(running)


@pytest.mark.filterwarnings("ignore:deprecated")
@pytest.mark.usefixtures("native")
def test_a_decoder_that_hears_answers_as_its_engine_does(tmp_path: Path) -> None:
    source = hearing.write_case(tmp_path / "source", "qwen3_asr")
    folder, base64_of = tmp_path / "bundle", base64.b64encode(TALK.read_bytes()).decode()
    export_model(ExportOptions(str(source), folder, format="int8", threads=1, quick=True), golden=False)
    with load(folder, threads=1) as engine:
        wanted = engine.transcribe(TALK, language="de").text
        said: Any = [{"role": "user", "content": [{"type": "audio", "audio": TALK}, {"type": "text", "text": "what"}]}]
        answer = engine.chat(said, max_new_tokens=16, temperature=0.0).text
    assert wanted
    result = CliRunner().invoke(cli, ["run", str(folder), "--audio", str(TALK), "--language", "German", "--json"])
    assert json.loads(result.stdout)["text"] == wanted
    asked = ["--audio", str(TALK), "--chat", "--prompt", "what", "--temperature", "0", "--max-new-tokens", "16"]
    assert json.loads(CliRunner().invoke(cli, ["run", str(folder), *asked, "--json"]).stdout)["text"] == answer
    running = start(folder, "--name", "ear")
    try:
        with running.openai() as client:
            assert client.audio.transcriptions.create(model="ear", file=TALK, language="de").text == wanted
            with pytest.raises(openai.BadRequestError, match="does not translate"):
                client.audio.translations.create(model="ear", file=TALK)
            create: Any = partial(client.chat.completions.create, model="ear", temperature=0, max_tokens=16)
            for kind, part, words in (
                ("input_audio", {"data": base64_of, "format": "wav"}, None),
                ("input_audio", {"data": "UklGRg==", "format": "wav"}, "expected a sound file"),
                ("input_audio", {"data": "?"}, "the recording is no base64"),
                ("image_url", {"url": "data:image/png;base64,AA"}, "expected text and input_audio"),
            ):
                messages = [{"role": "user", "content": [{"type": kind, kind: part}, {"type": "text", "text": "what"}]}]
                if words is None:
                    assert create(messages=messages).choices[0].message.content == answer
                    continue
                with pytest.raises(openai.BadRequestError, match=words):
                    create(messages=messages)
    finally:
        stop(running)


@pytest.mark.filterwarnings("ignore:deprecated")  # OpenAI's client warns about its own call
def test_a_translation_is_into_english(client: openai.OpenAI) -> None:
    create: Any = partial(client.audio.translations.create, model="ear", file=DIGITS / "fr.wav")
    assert create().text == "three two zero zero six"
    with pytest.raises(openai.BadRequestError, match="always into English"):
        create(extra_body={"language": "de"})


def test_a_stream_tells_segments_and_then_all(client: openai.OpenAI) -> None:
    *deltas, done = client.audio.transcriptions.create(model="ear", file=TALK, stream=True)
    assert [event.type for event in deltas] == ["transcript.text.delta"]
    assert done.type == "transcript.text.done"
    assert done.text == SAID["en"] == "".join(event.delta for event in deltas).strip()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"file": b"no sound"}, "sound file"),
        ({"language": "xx"}, "no language 'xx'"),
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": 2}, "temperature"),
        ({"timestamp_granularities": ["word"]}, "times of words"),
        ({"extra_body": {"volume": 1}}, "volume"),
        ({"extra_body": {"method": "magic"}}, "magic"),
    ],
)
def test_what_cannot_be_transcribed_is_refused_by_name(
    client: openai.OpenAI, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.audio.transcriptions.create(**{"model": "ear", "file": TALK, **asked})


def test_models_that_hear_say_so_and_others_refuse(client: openai.OpenAI, bundles: Callable[..., Path]) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'ear'"):
        client.audio.transcriptions.create(model="eye", file=TALK)
    (told,) = client.models.list().data
    assert told.model_extra is not None
    assert told.model_extra["edgespec"]["hears"]
    with pytest.raises(openai.APIStatusError, match="multipart/form-data"):
        client.post("/audio/transcriptions", body={"model": "ear"}, cast_to=object)
    running = start(bundles("native"), "--name", "poet")
    other = running.openai()
    with other, pytest.raises(openai.BadRequestError, match="not sound"):
        other.audio.transcriptions.create(model="poet", file=TALK)
    stop(running)
