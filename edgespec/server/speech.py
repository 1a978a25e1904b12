"""OpenAI's speech: what is asked, and how sound is written as its codes come."""

from __future__ import annotations

import asyncio
import io
from array import array
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from edgespec.decoding.loop import check_prompt
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.speaking import windows
from edgespec.errors import InvalidRequest, install_hint
from edgespec.runtimes.audio.spoken import Samples, pcm, speech_prompt, wav_header
from edgespec.runtimes.files.codes import CodesPart
from edgespec.runtimes.text.codec import TextCodec
from edgespec.server.requests import SEED, Name, Number, Strict
from edgespec.server.scheduler import Event

MOST_INPUT = 4096  # characters, as OpenAI takes
CODED = {"mp3": ("MP3", None), "flac": ("FLAC", None), "opus": ("OGG", "OPUS")}  # by libsndfile, of the whole speech
KINDS = {"wav": "audio/wav", "pcm": "audio/pcm", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg"}


class Voice(Strict):
    """A voice by its id."""

    id: Name


class SpeechRequest(Strict):
    """``POST /v1/audio/speech``."""

    ignored: ClassVar[tuple[str, ...]] = ("user",)
    model: Name
    input: Annotated[str, Field(min_length=1, max_length=MOST_INPUT)]
    voice: Name | Voice | None = None
    response_format: Literal["wav", "pcm", "mp3", "flac", "opus"] = "wav"
    speed: Annotated[float, Field(ge=1, le=1, strict=False)] = 1.0
    instructions: None = None
    stream_format: Literal["audio"] = "audio"
    temperature: Annotated[Number, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-SEED, le=SEED)] | None = None
    method: Name | None = None

    def read(
        self, codes: CodesPart | None, codec: TextCodec, vocab: int, context: int
    ) -> tuple[dict[str, Any], array[int]]:
        """Read it for a model with such codes -> plain data, and the token ids of its prompt.

        Raises:
            InvalidRequest: the model does not speak, or not this.
        """
        sound = codes.sound if codes else None
        if sound is None:
            raise InvalidRequest(f"model {self.model!r} does not speak", "ask for one like Orpheus")
        voice = self.voice.id if isinstance(self.voice, Voice) else self.voice
        prompt = speech_prompt(sound, codec, self.input, voice)
        check_prompt(prompt, SamplingParams(), vocab, context)
        told = self.model_dump(include={"model", "response_format", "temperature", "seed", "method"})
        return told, array("i", prompt)


def speech_settings(engine: Engine, asked: dict[str, Any], tokens: int) -> Settings:
    """Make the settings of a request; ``tokens``: most of an answer."""
    given = {name: asked[name] for name in ("temperature", "seed", "method") if asked[name] is not None}
    return engine.speaking.changed(
        max_new_tokens=tokens, acceptance="coupled" if "seed" in given else "rejection", **given
    )


async def spoken(
    engine: Engine, seed: int | None, events: asyncio.Queue[Event], cancel: Callable[[], None]
) -> AsyncIterator[Samples]:
    """Yield the sound of a text's codes as they come, decoded in threads; leaving cancels the text."""
    try:
        sound = await asyncio.to_thread(windows, engine, seed)
        while (event := await events.get()).chunk is not None:
            tokens = event.chunk.round.tokens if event.chunk.round else []
            for piece in await asyncio.to_thread(lambda new: list(sound.push(new)), tokens):
                yield piece
        if event.error is not None:
            raise event.error
        for piece in await asyncio.to_thread(lambda: list(sound.finish())):
            yield piece
    finally:
        cancel()


async def answered(pieces: AsyncIterator[Samples], form: str, rate: int) -> Response:
    """Answer with sound as it comes, or coded once all of it is there; what fails before the first is no answer.

    Raises:
        InvalidRequest: a form that this server cannot write.
    """
    if form in CODED:
        sound = [piece async for piece in pieces] or [np.zeros(1, np.float32)]
        return Response(await asyncio.to_thread(_coded, np.concatenate(sound), form, rate), media_type=KINDS[form])
    first = [] if (piece := await anext(pieces, None)) is None else [piece]

    async def stream() -> AsyncIterator[bytes]:
        yield (wav_header(rate) if form == "wav" else b"") + b"".join(map(pcm, first))
        async for piece in pieces:
            yield pcm(piece)

    return StreamingResponse(stream(), media_type=KINDS[form])


def require_coder(form: str) -> Any:
    """Give the library that writes a form of ``CODED``; None = it needs none.

    Raises:
        InvalidRequest: it is not installed.
    """
    if form not in CODED:
        return None
    try:
        return import_module("soundfile")
    except (ImportError, OSError) as error:
        raise InvalidRequest(f"response_format {form}: this server lacks libsndfile to write it; wav and pcm need none",
                             install_hint("audio")) from error  # fmt: skip


def _coded(sound: Samples, form: str, rate: int) -> bytes:
    file, (kind, subtype) = io.BytesIO(), CODED[form]
    require_coder(form).write(file, sound, rate, subtype, format=kind)
    return file.getvalue()
