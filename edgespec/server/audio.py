"""OpenAI's transcriptions and translations: what is asked, whose recording is next, and how transcripts are written."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.transcript import Segment, Transcript
from edgespec.engine.transcription import TranscriptionSettings
from edgespec.runtimes.files.speech import Task
from edgespec.server.errors import Busy, Refusal, Stopped
from edgespec.server.queues import OneByOne
from edgespec.server.requests import Name, Strict
from edgespec.server.scheduler import Limits
from edgespec.server.writer import as_json, sse

MOST_BODY = 25 << 20  # bytes of a form with a recording, as OpenAI takes
MOST_FIELDS, MOST_FIELD = 32, 1 << 16  # of a form beside the recording, and bytes of one
MOST_WAITING, MOST_OF_ONE = 16, 12  # recordings that wait for a model; of one client
Form = Literal["json", "text", "srt", "verbose_json", "vtt"]
Kind = Literal["transcriptions", "translations"]
PATHS: dict[Kind, str] = {kind: f"/v1/audio/{kind}" for kind in ("transcriptions", "translations")}
TASKS: dict[Kind, Task] = {"transcriptions": "transcribe", "translations": "translate"}


class AudioRequest(Strict):
    """``POST /v1/audio/transcriptions`` and ``translations``, but for the recording, ``file``.

    Fields of a form are texts.  A ``temperature`` of 0 is raised step by step where a text goes astray.
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
        asked = TranscriptionSettings(language=self.language or None, task=task, prompt=self.prompt)
        return asked.changed(temperatures=(self.temperature,)) if self.temperature else asked


async def read_form(form: FormData, kind: Kind) -> tuple[AudioRequest, bytes]:
    """Read a form: what is asked, and the recording.

    Raises:
        Refusal: no recording, or a field that is unknown or has no such value.
    """
    fields: dict[str, Any] = {}
    sound: bytes | None = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file" or sound is not None:
                raise Refusal(f"{name[:80]}: expected one recording, as the file `file`", param=name[:80])
            sound = await value.read()
        elif name == "timestamp_granularities[]":
            fields.setdefault("timestamp_granularities", []).append(value)
        else:
            fields[name] = value
    if sound is None:
        raise Refusal("expected a recording, as the file `file` of a form", param="file")
    if kind == "translations" and "language" in fields:
        raise Refusal("language: a translation is always into English", param="language")
    try:
        return AudioRequest(**fields), sound
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:80] for part in first["loc"])
        hint = "; times of words are not told" if where.startswith("timestamp_granularities") else ""
        raise Refusal(f"{where}: {first['msg'][:200]}{hint}", param=where) from error


@dataclass(eq=False)
class _Work:
    sound: bytes
    asked: AudioRequest
    task: Task
    deadline: float
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[Segment | Transcript | Exception] = field(default_factory=asyncio.Queue)
    cancel: threading.Event = field(default_factory=threading.Event)

    def tell(self, event: Segment | Transcript | Exception) -> None:
        """Hand over what came, from any thread."""
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


@dataclass(eq=False)
class Transcriber:
    """Transcribes recordings, one at a time, of each client in turn; beside it texts are decoded.

    Attributes:
        engine: of the model.
        limits: of the server.
    """

    engine: Engine
    limits: Limits
    _waiting: OneByOne[_Work] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = OneByOne(self._do)

    @property
    def busy(self) -> bool:
        """Whether a recording is not transcribed yet."""
        return self._waiting.busy

    async def run(
        self, client: str, sound: bytes, asked: AudioRequest, task: Task
    ) -> AsyncIterator[Segment | Transcript]:
        """Yield segments as they come, and the whole transcript at the end.  Leaving ends it.

        Raises:
            Busy: too many wait already, or it takes too long.
            InvalidRequest, BudgetError: as of ``Engine.transcription``.
        """
        if len(self._waiting) >= MOST_WAITING or self._waiting.of(client) >= MOST_OF_ONE:
            raise Busy(f"{len(self._waiting)} recordings wait already", "ask again in a moment")
        work = _Work(sound, asked, task, time.monotonic() + self.limits.seconds)
        self._waiting.add(client, "", work)
        try:
            while True:
                left = work.deadline - time.monotonic()
                event = await asyncio.wait_for(work.events.get(), max(0.0, left))
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Transcript):
                    return
        except asyncio.TimeoutError:
            raise Busy(f"not transcribed in {self.limits.seconds:g} s", "send a shorter recording") from None
        finally:
            self._waiting.remove(work)
            work.cancel.set()

    def stop(self) -> None:
        """End what waits and what runs."""
        for work in [*self._waiting, *([self._waiting.doing] if self._waiting.doing else [])]:
            work.cancel.set()
            work.tell(Stopped("the server was stopped", "ask again in a moment"))

    async def _do(self, work: _Work) -> None:
        if not work.cancel.is_set():
            await asyncio.to_thread(self._transcribe, work)

    def _transcribe(self, work: _Work) -> None:
        try:
            how = Settings(method=work.asked.method)
            running = self.engine.transcription(work.sound, work.asked.settings(work.task), how, cancel=work.cancel)
            for segment in running:
                work.tell(segment)
            work.tell(running.transcript)
        except Exception as error:
            work.tell(error)


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
