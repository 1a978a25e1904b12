"""A loaded bundle: generate, stream, chat."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions, Settings, SettingsChanges
from edgespec.decoding.stats import Stats
from edgespec.engine.asynchronous import AsyncStream, in_thread
from edgespec.engine.batch import Batches
from edgespec.engine.beams import search_beams
from edgespec.engine.conversation import Conversation
from edgespec.engine.embedding import Ranked, embed
from edgespec.engine.input import Input
from edgespec.engine.inputs import Prompt
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.ranking import rerank
from edgespec.engine.request import Request, check_cancel
from edgespec.engine.result import Chunk, Result
from edgespec.engine.saved import restore_session, save_session
from edgespec.engine.stream import Stream
from edgespec.engine.transcription import TranscriptionSettings
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.text.chat import Message
from edgespec.runtimes.text.prompted import Prompted
from edgespec.signatures import takes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from edgespec.engine.audio_windows import WindowedTranscription
    from edgespec.engine.outputs import Picture, Speech
    from edgespec.engine.transcript import Transcript
    from edgespec.engine.transcription import Transcription
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.audio.reading import Sound
    from edgespec.runtimes.files.manifest import Pooling
    from edgespec.runtimes.images.image import Image

STATS_EVERY = 16  # rounds
MODELS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings whose defaults a model may bring."""
takes_settings = takes(
    SettingsChanges, Settings, SamplingParams, DraftOptions, omit=("constraint", "prompt"), model=MODELS
)
takes_transcription = takes(TranscriptionSettings)
for _function in (Settings.changed, Conversation.ask, Conversation.stream):
    takes_settings(_function)
takes_transcription(TranscriptionSettings.changed)
PUBLIC = (
    "generate", "stream", "agenerate", "astream", "generate_batch", "chat", "chat_prompt", "conversation",
    "embed", "rerank", "encode", "transcribe", "transcription", "speak", "draw", "save_session", "restore_session",
    "close", "approximations", "bundle", "closed", "context", "defaults", "device", "methods", "options", "strict",
)  # fmt: skip
"""The public API of an engine; other names are for other modules, and completion does not show them."""


class _Completed(type):
    """Metaclass that shows only public names in completion and ``help``."""

    def __dir__(cls) -> list[str]:
        return [*PUBLIC, *(name for name in super().__dir__() if name.startswith("__"))]


class Engine(LoadedBundle, metaclass=_Completed):
    """A loaded bundle that answers; ``edgespec.load`` makes one, and ``with`` closes it at the end.

    Requests may come from several threads; each keeps its own KV slot while it runs.

    Attributes:
        bundle: the opened bundle.
        options: how it was loaded.
        graph: which graph of the target; None = the one that can run every method.
        share: whose model to use; None = its own.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: LoadOptions | None = None,
        *,
        graph: str | None = None,
        share: LoadedBundle | None = None,
    ) -> None:
        super().__init__(bundle, options, graph=graph, share=share)
        self._batches = Batches()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __dir__(self) -> list[str]:
        return dir(type(self))

    def __repr__(self) -> str:
        target, name = self.bundle.manifest.target, self.bundle.path.resolve().name
        where = f"{self.operators.kind} operators" if self.device == "cpu" else self.device
        state = "closed" if self.closed else f"methods {', '.join(self.methods)}"
        return f"<Engine {name!r}: {target.format}, {where}, context {self.context}, {state}>"

    # -- requests ----------------------------------------------------------------------------------------------------

    @takes_settings
    def stream(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        cancel: threading.Event | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_every: int = STATS_EVERY,
        **changes: Unpack[SettingsChanges],
    ) -> Stream:
        """Start a request, which gives its text piece by piece.

        Args:
            prompt: text, token ids, or a list of texts, images and recordings (``edgespec.Image``, ``Audio``).
                For an encoder-decoder, the input of the encoder: text, token ids, rows of features (float32
                [S, columns]), or a ``Source`` made earlier.
            settings: the settings; None = ``defaults``, with the sampling that the model recommends.
            cancel: set it to end the request after the current round.
            on_stats: called with the statistics so far every ``stats_every`` rounds, and at the end; they change
                afterwards, so copy them to keep them (``as_dict``).
            stats_every: rounds, >= 1.
            **changes: fields of ``Settings`` or ``SamplingParams`` (temperature, ...); they override ``settings``.

        Returns:
            a ``Stream``: iterate over it for pieces; ``result`` is complete at the end.

        Raises:
            InvalidRequest: an empty or too long prompt, an unknown method, invalid settings.
        """
        settings = (settings or self.defaults).changed(**changes)
        if stats_every < 1:
            raise InvalidRequest(f"stats_every {stats_every}: expected at least one round")
        if settings.beams is not None:
            raise InvalidRequest("a text that beams are searched for is there at the end", "use `generate`")
        request = Request(self, prompt, settings, cancel, on_stats=on_stats, stats_every=stats_every)
        return Stream(request)

    @takes_settings
    def generate(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        cancel: threading.Event | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_every: int = STATS_EVERY,
        **changes: Unpack[SettingsChanges],
    ) -> Result:
        """Complete a prompt, and return the whole text.

        Args:
            prompt: text, token ids, or parts; see ``stream``.
            settings: the settings; None = ``defaults``, with the sampling that the model recommends.
            on_chunk: called with every piece.
            cancel: set it to end the request after the current round.
            on_stats: called with the statistics so far every ``stats_every`` rounds, and at the end.
            stats_every: rounds, >= 1.
            **changes: fields of ``Settings`` or ``SamplingParams`` (temperature, ...); they override ``settings``.

        Returns:
            the text, its tokens, the method and the statistics.

        Raises:
            InvalidRequest: see ``stream``.
        """
        settings = (settings or self.defaults).changed(**changes)
        if settings.beams is not None:
            result = search_beams(self.usable, self.encode(prompt, settings), settings, cancel)
            if on_chunk:
                on_chunk(Chunk(result.text, None))
            return result
        stream = self.stream(prompt, settings, cancel=cancel, on_stats=on_stats, stats_every=stats_every)
        for chunk in stream:
            if on_chunk:
                on_chunk(chunk)
        return stream.result

    @takes_settings
    async def agenerate(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        cancel: threading.Event | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> Result:
        """Complete a prompt without blocking the event loop; cancelling the task ends the request.

        One thread decodes all tokens.

        Args:
            prompt: text, token ids, or parts; see ``stream``.
            settings: the settings; None = ``defaults``, with the sampling that the model recommends.
            on_chunk: called with every piece, in the thread that decodes.
            cancel: set it to end the request after the current round; its result is returned then.
            **changes: fields of ``Settings`` or ``SamplingParams`` (temperature, ...); they override ``settings``.

        Returns:
            the text, its tokens, the method and the statistics.

        Raises:
            InvalidRequest: see ``stream``.
        """
        check_cancel(cancel)
        stop = cancel or threading.Event()
        work = partial(self.generate, prompt, settings, on_chunk=on_chunk, cancel=stop, **changes)
        return await in_thread(work, stop)

    @takes_settings
    def astream(
        self, prompt: Prompt, settings: Settings | None = None, **changes: Unpack[SettingsChanges]
    ) -> AsyncStream:
        """Start a request whose text an event loop reads with ``async for``; leaving it ends the request.

        One thread decodes all tokens; it does not wait for the reader.

        Args:
            prompt: text, token ids, or parts; see ``stream``.
            settings: the settings; None = ``defaults``, with the sampling that the model recommends.
            **changes: fields of ``Settings`` or ``SamplingParams`` (temperature, ...); they override ``settings``.

        Returns:
            an ``AsyncStream``: ``result`` is complete at the end; ``aclose`` and ``cancel`` end it early.

        Raises:
            InvalidRequest: see ``stream``, when the first piece is awaited.
        """
        return AsyncStream(lambda cancel: self.stream(prompt, settings, cancel=cancel, **changes))

    @takes_settings
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        settings: Settings | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        adapters: Sequence[str | None] | None = None,
        cancel: threading.Event | None = None,
        on_result: Callable[[int, Result], None] | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> list[Result]:
        """Complete several prompts, ``Settings.batch`` at a time; results in the order of the prompts.

        On native operators, one pass serves all running prompts and reads the weights once; each text is the same as
        that of a separate request.  On stock operators, the prompts take turns, one round each, without a speedup.

        Args:
            prompts: texts, token ids, or parts; see ``stream``.
            settings: for all of them; None = ``defaults``.
            seeds: one for each prompt; None = the seed of the settings for all.
            adapters: one for each prompt, None for the model without one; None = that of the settings for all.
            cancel: set it to end all of them after the current round; prompts not started have no tokens.
            on_result: called with the index of a prompt and its result when its answer is complete.
            **changes: fields of ``Settings`` for all of them; they override ``settings``.

        Raises:
            InvalidRequest: see ``stream``, or the number of seeds or adapters is not that of prompts.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
            raise InvalidRequest(
                f"generate_batch got {type(prompts).__name__}: expected a list of prompts",
                "use generate for one prompt",
            )
        check_cancel(cancel)
        common = (settings or self.defaults).changed(**changes)
        encoded = [self.encode(prompt, common) for prompt in prompts]
        if seeds is not None and len(seeds) != len(encoded):
            raise InvalidRequest(f"{len(seeds)} seeds for {len(encoded)} prompts: expected one for each prompt")
        if adapters is not None and len(adapters) != len(encoded):
            raise InvalidRequest(f"{len(adapters)} adapters for {len(encoded)} prompts: expected one for each prompt")
        each = [common] * len(encoded) if seeds is None else [common.changed(seed=seed) for seed in seeds]
        if adapters is not None:
            each = [own.changed(adapter=adapter) for own, adapter in zip(each, adapters, strict=True)]
        if common.beams is None:
            return self._batches.run(self, encoded, each, cancel, on_result)
        results: list[Result] = []
        for prompt, own in zip(encoded, each, strict=True):  # the beams of a prompt share its passes
            results.append(search_beams(self.usable, prompt, own, cancel))
            if on_result:
                on_result(len(results) - 1, results[-1])
        return results

    @takes_settings
    def chat(
        self,
        messages: Sequence[Message],
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> Result:
        """Answer a conversation, rendered by the model's own template.  Earlier turns still in a slot are reused.

        Args:
            messages: dicts with role and content.
            settings: the settings; None = ``defaults``.
            tools: JSON schemas of functions that the model may call.
            template_options: more variables for the template, such as ``{"enable_thinking": False}``.
            **changes: fields of ``Settings``; they override ``settings``.

        Raises:
            InvalidRequest: no template, the template rejects the messages, or a prompt that ``stream`` rejects.
        """
        return self.generate(self.chat_prompt(messages, tools, options=template_options), settings, **changes)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]:
        """Render a conversation with the template -> token ids, including those of images.

        Args:
            messages: the content of one may be a list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image",
                "image": ...}`` with an ``Image``, a file or its bytes, or ``{"type": "audio", "audio": ...}``.
            tools: see ``chat``.
            options: more variables for the template, such as ``{"enable_thinking": False}``.
            generation_prompt: end with the tokens that start an answer.
            continue_final: end within the last message, so that the model continues it.

        Raises:
            InvalidRequest: the template refuses the messages, or an image cannot be read.
        """
        how: dict[str, Any] = {"options": options, "generation_prompt": generation_prompt, "nulls": True}
        return self.inputs.chat(messages, tools, **how, continue_final=continue_final)

    def place(self, tokens: Sequence[int], images: Sequence[Image | Audio], owner: str | None = None) -> Input:
        """Put rows of images at their placeholder tokens; see ``SpanReader.place``.

        Any thread may call it during decoding.  The returned prompt is valid as long as the caller keeps it.
        """
        return self.inputs.reader.place(tokens, images, owner)

    def conversation(
        self,
        messages: Sequence[Message] = (),
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Begin a conversation of several turns, which keeps the messages.

        Args:
            messages: earlier messages, dicts with role and content.
            settings: for every turn; None = ``defaults``.
            tools: JSON schemas of functions that the model may call.
            template_options: more variables for the template, such as ``{"enable_thinking": False}``.
        """
        return Conversation(
            self.chat_prompt,
            self.stream,
            messages,
            settings or self.defaults,
            tools=tools,
            template_options=template_options,
            save=partial(self.save_session, adapter=(settings or self.defaults).adapter),
            context=self.context,
        )

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        prompt: str | None = None,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
        skips: Sequence[int] = (),
        cancel: threading.Event | None = None,
    ) -> NDArray[np.float32]:
        """Embed texts: pooled hidden states of each text after the final norm -> float32 [n, dimensions].

        The bits of a row do not depend on other texts or requests.

        Args:
            texts: each a text, or token ids.
            prompt: name of what the model wants before texts, such as ``query``; "" = nothing, None = its default.
            pooling: ``mean`` of all tokens, the ``last`` or first (``cls``) one, ``weighted`` by position, or ``max``;
                None = the default of the model, else mean.
            dimensions: keep only the first N numbers, for Matryoshka models (arXiv 2205.13147); None = all.
            normalize: whether rows have length one; None = as the model says, else yes.
            truncate: cut texts that are too long, instead of an error.
            skips: first tokens of each text that pooling leaves out; empty = those of a prompt that does not count.
            cancel: set it to end with an error after the current chunk.

        Raises:
            BudgetError: the longest text does not fit the memory.
            InvalidRequest: the bundle has no hidden states (the hint says what to do), an empty or too long text, or a
                prompt that the model does not have.
        """
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
            raise InvalidRequest(f"embed got {type(texts).__name__}: expected a list of texts")
        if self.inputs.sourced:
            raise InvalidRequest("this model reads a source and writes a text: it gives no embeddings")
        prompted = Prompted(self.codec, self.bundle.manifest.embedding, prompt, self.context, truncate)
        read = [prompted.tokens(text) if isinstance(text, str) else self.inputs.text(text) for text in texts]
        skips = skips or [prompted.skip if isinstance(text, str) else 0 for text in texts]
        return embed(self, read, pooling, dimensions, normalize, skips, cancel)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top: int | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Ranked]:
        """Rank documents by how well they answer a query, the best first; each score is that of the pair alone.

        A cross-encoder scores pairs, and a document that is too long for it loses its end.  Of other bundles a score is
        the product of both embeddings, with the model's prompts for queries and documents.

        Args:
            query: a text.
            documents: texts.
            top: return only the best N; None = all.
            cancel: set it to end with an error after the current pass.

        Returns:
            the number and the score of each document; of equal ones the earlier first.

        Raises:
            InvalidRequest: see ``embed``, or a query that is too long.
        """
        return rerank(self, query, documents, top, cancel)

    @takes_transcription
    def transcription(
        self,
        sound: Sound,
        asked: TranscriptionSettings | None = None,
        settings: Settings | None = None,
        *,
        rate: int = 16_000,
        on_text: Callable[[str], None] | None = None,
        cancel: threading.Event | None = None,
        **changes: Any,
    ) -> Transcription | WindowedTranscription:
        """Begin a transcription: iterate over it for segments; its ``transcript`` has those so far.

        Args:
            sound: a file (wav, flac, ogg, mp3), its bytes, or samples [n] or [n, channels].
            asked: language, task, times and the like; None = ``TranscriptionSettings()``.
            settings: for decoding, such as the method; temperatures come from ``asked``.
            rate: samples per second; a file states its rate.
            on_text: called with the text of the current 30 s as it grows; it may start again.
            cancel: set it to end with an error at the next round.
            **changes: fields of ``TranscriptionSettings``; they override ``asked``.

        Raises:
            InvalidRequest: not a speech model, no sound, or an unknown language or task.
        """
        from edgespec.engine.hearing import transcription

        asked = (asked or TranscriptionSettings()).changed(**changes)
        return transcription(self, sound, asked, settings or self.defaults, rate, on_text, cancel)

    @takes_transcription
    def transcribe(
        self,
        sound: Sound,
        asked: TranscriptionSettings | None = None,
        settings: Settings | None = None,
        *,
        rate: int = 16_000,
        on_text: Callable[[str], None] | None = None,
        cancel: threading.Event | None = None,
        **changes: Any,
    ) -> Transcript:
        """Transcribe a recording.

        Args:
            sound: a file (wav, flac, ogg, mp3), its bytes, or samples [n] or [n, channels].
            asked: language, task, times and the like; None = ``TranscriptionSettings()``.
            settings: for decoding, such as the method; temperatures come from ``asked``.
            rate: samples per second; a file states its rate.
            on_text: called with the text of the current 30 s as it grows; it may start again.
            cancel: set it to end with an error at the next round.
            **changes: fields of ``TranscriptionSettings``; they override ``asked``.

        Raises:
            InvalidRequest: see ``transcription``.
        """
        running = self.transcription(sound, asked, settings, rate=rate, on_text=on_text, cancel=cancel, **changes)
        for _ in running:
            pass
        return running.transcript

    @takes_settings
    def speak(
        self,
        text: str,
        voice: str | None = None,
        settings: Settings | None = None,
        *,
        cancel: threading.Event | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> Speech:
        """Start speech: iterate over it for samples, float32 [n], at ``rate`` samples per second.

        Args:
            text: the text to speak.
            voice: the name of a voice; None = the default of the model.
            settings: for the audio codes; None = ``speech_defaults``.
            cancel: set it to end after the current round.
            **changes: fields of ``Settings``; they override ``settings``.

        Raises:
            InvalidRequest: not a speech bundle, an empty text, an invalid voice name, invalid settings.
        """
        from edgespec.engine.outputs import output

        speech = output("speech")
        made: Speech = speech.make(
            self, text, (settings or speech.defaults(self)).changed(**changes), cancel, voice=voice
        )
        return made

    @takes_settings
    def draw(
        self,
        prompt: str,
        settings: Settings | None = None,
        *,
        cancel: threading.Event | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> Picture:
        """Draw a picture: its ``pixels``, uint8 [height, width, 3], ``png()``, and the ``result`` of its codes.

        Args:
            prompt: a description, or for class-conditional models the number of a class.
            settings: for the image codes; None = ``defaults``, with the guidance of the model.
            cancel: set it to end with an error after the current round.
            **changes: fields of ``Settings``; they override ``settings``.

        Raises:
            InvalidRequest: not an image bundle, a prompt of unknown words, invalid settings.
        """
        from edgespec.engine.outputs import output

        image = output("image")
        made: Picture = image.make(self, prompt, (settings or image.defaults(self)).changed(**changes), cancel)
        return made

    @property
    def speech_defaults(self) -> Settings:
        """Settings of speech for a request that names none."""
        from edgespec.engine.outputs import output

        return output("speech").defaults(self)

    # -- session files -----------------------------------------------------------------------------------------------

    def save_session(
        self,
        file: str | os.PathLike[str],
        prompt: Prompt,
        messages: Sequence[Message] = (),
        *,
        adapter: str | None = None,
    ) -> None:
        """Save the KV state of a text, so that another process can restore it without computing it.

        Args:
            file: a session file; an existing one is replaced atomically.  The text can be recovered from it, so only
                its owner may read it.
            prompt: text, or token ids; tokens that no slot holds are computed first.
            messages: those of the conversation, if it is one.
            adapter: name of the adapter that it was written with; None = none.

        Raises:
            BudgetError, InvalidRequest: see ``stream``.
            SessionError: the file cannot be written, or the state is on a device.
        """
        self.inputs.require_decoder("what this model computes belongs to one source: there is no session to save")
        number = self.usable.adapter_number(adapter)
        save_session(self.usable, Path(file), self.inputs.text(prompt), messages, number)

    def restore_session(self, file: str | os.PathLike[str]) -> list[Message]:
        """Restore a session file; a request whose prompt starts with its text does not compute that part.

        Args:
            file: a file that ``save_session`` wrote.

        Returns:
            the messages of its conversation; ``conversation`` continues from them.

        Raises:
            BudgetError: it does not fit the memory.
            SessionError: missing, damaged, or made with another bundle or other settings.
        """
        return restore_session(self.usable, Path(file))

    # -- the whole ---------------------------------------------------------------------------------------------------

    def plain(self) -> Engine:
        """Load the bundle's fastest plain decoding: its graph without gates and padding, or this model.

        Native operators and devices have one graph; its plain decoding is the fastest.
        """
        self.require_open()
        native = self.operators.kind == "native"
        options = replace(
            self.options, strict=False, operators=self.operators.kind, draft_attention=None, prompt_cache=False
        )
        shared = native or not self.strict or self.device != "cpu"
        return Engine(self.bundle, options, graph="native" if native else "plain", share=self if shared else None)

    def close(self) -> None:
        """Free the model and its memory at once; the current round ends first.

        Running requests end with an error at their next round, and later requests are refused; earlier results stay
        valid.  Prompts to keep are written first.
        """
        self.prompts.finish()
        self.usable.prompts.finish()
        with self.lock:
            self._batches.close()
            super().close()

    def encode(self, prompt: Prompt, settings: Settings | None = None) -> Input:
        """Turn a prompt into token ids, or for an encoder-decoder into a source.

        Args:
            prompt: see ``stream``.
            settings: with the languages of a source; None = ``defaults``.

        Returns:
            the tokens that the decoder begins with, and what else its passes need: images, or the encoder's input.

        Raises:
            InvalidRequest: an empty or invalid prompt, or a language that the model lacks.
        """
        return self.inputs.read(prompt, settings or self.defaults)
