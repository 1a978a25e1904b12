"""OpenAI's API for speech generation."""

from __future__ import annotations

import asyncio
import io
import secrets
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from edgespec.decoding.loop import check_prompt
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest, install_hint
from edgespec.plugins.speaking.speech import OUTPUT, sound_part, windows
from edgespec.runtimes.audio.spoken import Samples, pcm, speech_prompt, wav_header
from edgespec.server.apis import Api
from edgespec.server.call import Call, Jobs, ModelTokens
from edgespec.server.requests import SEED, Name, Number, StrictModel
from edgespec.server.scheduler import Event
from edgespec.server.waiting import cancel_on_disconnect

MOST_INPUT = 4096  # characters, as OpenAI takes
CODED = {"mp3": ("MP3", None), "flac": ("FLAC", None), "opus": ("OGG", "OPUS")}  # by libsndfile, of the whole speech
KINDS = {"wav": "audio/wav", "pcm": "audio/pcm", "mp3": "audio/mpeg", "flac": "audio/flac", "opus": "audio/ogg"}


class Voice(StrictModel):
    """A voice by its id."""

    id: Name


class SpeechRequest(StrictModel):
    """``POST /v1/audio/speech``."""

    ignored: ClassVar[Sequence[str]] = ("user",)
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


def read(tokens: ModelTokens, sent: SpeechRequest) -> tuple[dict[str, Any], list[array[int]]]:
    """Read a request, as plain data, and the token ids of its prompt.

    Raises:
        InvalidRequest: the model does not speak, or not this text.
    """
    known = tokens.known
    sound = known.codes.sound if known.codes else None
    if sound is None:
        raise InvalidRequest(f"model {sent.model!r} does not speak", "ask for one like Orpheus")
    voice = sent.voice.id if isinstance(sent.voice, Voice) else sent.voice
    prompt = speech_prompt(sound, tokens.codec, sent.input, voice)
    check_prompt(prompt, SamplingParams(), known.vocab, known.context)
    return sent.model_dump(include={"response_format", "temperature", "seed", "method"}), [array("i", prompt)]


async def respond(jobs: Jobs, call: Call) -> Response:
    """Answer with sound while its codes arrive."""
    engine, (prompt,) = jobs.engine, call.prompts
    settings = speech_settings(engine, call.asked, jobs.scheduler.limits.tokens)
    engine.choose_for(settings)
    events: asyncio.Queue[Event] = asyncio.Queue()
    form, rate = call.asked["response_format"], sound_part(engine.bundle.manifest)[1].rate
    require_coder(form)
    ticket = jobs.submit(prompt, settings, events.put_nowait, call.client, secrets.token_hex(12))
    pieces = spoken(engine, call.asked["seed"], events, ticket.cancel)
    return await cancel_on_disconnect(call.request, answered(pieces, form, rate))


def speech_settings(engine: Engine, asked: dict[str, Any], tokens: int) -> Settings:
    """Make the settings of a request; ``tokens``: maximum length of an answer."""
    given = {name: asked[name] for name in ("temperature", "seed", "method") if asked[name] is not None}
    return OUTPUT.defaults(engine).changed(
        max_new_tokens=tokens, acceptance="coupled" if "seed" in given else "rejection", **given
    )


async def spoken(
    engine: Engine, seed: int | None, events: asyncio.Queue[Event], cancel: Callable[[], None]
) -> AsyncIterator[Samples]:
    """Yield the sound of a text's codes while they arrive, decoded in threads; closing it cancels the text."""
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
    """Send sound while it arrives, or encode the complete sound; an error before the first piece sends no sound.

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
    """Import the library that writes a form of ``CODED``; None = it needs none.

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


FILE = {"type": "string", "contentMediaType": "application/octet-stream"}
API = Api(
    "/v1/audio/speech",
    "Speech",
    SpeechRequest,
    "Failure",
    read=read,
    respond=respond,
    content=dict.fromkeys(KINDS.values(), FILE),
)
