"""OpenAI's transcriptions and translations: request fields, and formats of transcripts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.transcript import Segment, Transcript
from edgespec.engine.transcription import TranscriptionSettings
from edgespec.runtimes.files.speech import Task
from edgespec.server.errors import Failure, misread
from edgespec.server.queues import FairWorkQueue
from edgespec.server.requests import Name, StrictModel
from edgespec.server.writer import as_json, sse

MOST_BODY = 25 << 20  # bytes of a form with a recording, as OpenAI takes
MOST_FIELDS, MOST_FIELD = 32, 1 << 16  # fields of a form without the recording, and bytes of one field
MOST_WAITING, MOST_OF_ONE = 16, 12  # recordings that wait for a model; of one client
Form = Literal["json", "text", "srt", "verbose_json", "vtt"]
Kind = Literal["transcriptions", "translations"]
PATHS: dict[Kind, str] = {kind: f"/v1/audio/{kind}" for kind in ("transcriptions", "translations")}
Tell = Callable[[Segment], object]
TASKS: dict[Kind, Task] = {"transcriptions": "transcribe", "translations": "translate"}


class AudioRequest(StrictModel):
    """Validate the fields of ``POST /v1/audio/transcriptions`` and ``translations``, without the recording, ``file``.

    Form fields are text.  A ``temperature`` of 0 rises step by step when a transcript looks degenerate.
    """

    model: Name
    language: Annotated[str, Field(max_length=16)] | None = None
    prompt: Annotated[str, Field(max_length=MOST_FIELD)] | None = None
    response_format: Form = "json"
    temperature: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    timestamp_granularities: list[Literal["segment"]] = Field(default_factory=list, max_length=2)
    stream: Annotated[bool, Field(strict=False)] = False
    method: Name | None = None

    def settings(self, task: Task) -> TranscriptionSettings:
        """Make the settings of a transcription."""
        asked = TranscriptionSettings(language=self.language or None, task=task, initial_prompt=self.prompt)
        return asked.changed(temperatures=(self.temperature,)) if self.temperature else asked


def read_form(body: bytes, content_type: bytes, kind: Kind) -> tuple[AudioRequest, bytes]:
    """Read a form: what is asked, and the recording.

    Args:
        body: of the request.
        content_type: its header.
        kind: of the request.

    Raises:
        Failure: no form, no recording, or a field that is unknown or has no such value.
    """
    _, how = parse_options_header(content_type)
    if how.get(b"charset", b"utf-8").lower() != b"utf-8":  # some decode in quadratic time
        raise Failure("expected a form in UTF-8, without another charset in its Content-Type", 415)

    async def whole() -> AsyncGenerator[bytes, None]:
        yield body

    parser = _Form(Headers(raw=[(b"content-type", content_type)]), whole(), max_files=1, max_fields=MOST_FIELDS,
                   max_part_size=MOST_FIELD)  # fmt: skip
    try:
        return asyncio.run(_read(parser, kind))
    except MultiPartException as error:
        raise Failure(f"this is no form that can be read: {error.message}") from error


class _Form(MultiPartParser):
    spool_max_size = MOST_BODY << 8  # nothing is written to the disk


async def _read(parser: MultiPartParser, kind: Kind) -> tuple[AudioRequest, bytes]:
    form = await parser.parse()
    fields: dict[str, Any] = {}
    sounds: list[bytes] = []
    try:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "file":
                    raise Failure(f"{name[:80]}: expected one recording, as the file `file`", param=name[:80])
                sounds.append(await value.read())
            elif name == "timestamp_granularities[]":
                fields.setdefault("timestamp_granularities", []).append(value)
            else:
                fields[name] = value
    finally:
        await form.close()
    if not sounds:
        raise Failure("expected a recording, as the file `file` of a form", param="file")
    if kind == "translations" and "language" in fields:
        raise Failure("language: a translation is always into English", param="language")
    try:
        return AudioRequest(**fields), sounds[0]
    except ValidationError as error:
        found = misread(error)
        hint = "; times of words are not told" if (found.param or "").startswith("timestamp_granularities") else ""
        raise Failure(f"{found.message}{hint}", param=found.param) from error


def run_of(
    engine: Engine, sound: bytes, asked: AudioRequest, task: Task, tell: Tell = lambda _: None
) -> Callable[[threading.Event], Transcript]:
    """Return a function that transcribes a recording in a thread, passing segments to ``tell``."""

    def run(cancel: threading.Event) -> Transcript:
        running = engine.transcription(sound, asked.settings(task), Settings(method=asked.method), cancel=cancel)
        for segment in running:
            tell(segment)
        return running.transcript

    return run


async def as_it_comes(
    turns: FairWorkQueue, client: str, make: Callable[[Tell], Callable[[threading.Event], Transcript]]
) -> AsyncIterator[Segment | Transcript]:
    """Yield segments as they come, and the whole transcript at the end; leaving ends it."""
    segments: asyncio.Queue[Segment | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(segment: Segment) -> None:
        with suppress(RuntimeError):  # the event loop has ended, so no client is waiting
            loop.call_soon_threadsafe(segments.put_nowait, segment)

    whole = asyncio.create_task(turns.results(client, [make(tell)]))
    whole.add_done_callback(lambda _: segments.put_nowait(None))
    try:
        while (segment := await segments.get()) is not None:
            yield segment
        yield (await whole)[0]
    finally:
        whole.cancel()


def written(found: Transcript, form: Form) -> tuple[str, str]:
    """Write a transcript -> the text and its content type."""
    if form == "text":
        return f"{found.text}\n", "text/plain"
    if form in ("srt", "vtt"):
        return found.write(form), "text/vtt" if form == "vtt" else "text/plain"
    said: dict[str, Any] = {"text": found.text, "usage": _usage(found), "edgespec": found.how}
    if form == "verbose_json":
        said = {name: value for name, value in found.as_dict().items() if name != "how"} | said
    return as_json(said), "application/json"


def events(found: Segment | Transcript) -> Iterator[bytes]:
    """Write what came as server-sent events, as OpenAI's streams of transcripts have."""
    if isinstance(found, Segment):
        yield sse({"type": "transcript.text.delta", "delta": found.text})
    else:
        yield sse({"type": "transcript.text.done", "text": found.text, "usage": _usage(found)})


def _usage(found: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(found.duration, 2)}
