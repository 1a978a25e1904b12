"""A loaded bundle: generate, stream, chat."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions, Settings, SettingsChanges
from edgespec.decoding.stats import Stats
from edgespec.engine.asynchronous import AsyncStream, in_thread
from edgespec.engine.batch import Batches
from edgespec.engine.beams import search_beams
from edgespec.engine.conversation import Conversation
from edgespec.engine.embedding import embed
from edgespec.engine.encoding import Source
from edgespec.engine.images import Placed, has_images, is_parts
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.request import Stream, check_cancel
from edgespec.engine.result import Chunk, Result
from edgespec.engine.saved import restore_session, save_session
from edgespec.engine.transcription import TranscriptionSettings
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.text.chat import Message
from edgespec.signatures import takes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from edgespec.engine.drawing import Drawing
    from edgespec.engine.speaking import Speech
    from edgespec.engine.transcript import Transcript
    from edgespec.engine.transcription import Transcription
    from edgespec.engine.windows import WindowedTranscription
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.audio.reading import Sound
    from edgespec.runtimes.files.manifest import Pooling
    from edgespec.runtimes.images.image import Image

Prompt = Union[str, Sequence[int], "Sequence[str | Image | Audio]", "NDArray[np.float32]", Source]
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
    "embed", "encode", "transcribe", "transcription", "speak", "draw", "save_session", "restore_session", "close",
    "approximations", "bundle", "closed", "context", "defaults", "device", "methods", "options", "strict",
)  # fmt: skip
"""What an engine offers to programs; the rest of it is for other modules, and no completion shows it."""


class _Completed(type):
    """Classes of which completion and ``help`` show the public names alone."""

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
            prompt: text, token ids, or texts and images or recordings (``edgespec.Image``, ``Audio``), one behind the
                other.  Of an encoder-decoder what its encoder reads: text, its token ids, or rows of features, float32
                [S, columns]; or a ``Source`` that was made before.
            settings: what to set; None = ``defaults``, which has the model's own sampling.  What follows is set on top.
            cancel: set it to end the request after the round at hand.
            on_stats: called with the statistics so far every ``stats_every`` rounds, and at the end; they change
                afterwards, so copy what is to be kept (``as_dict``).
            stats_every: rounds, >= 1.
            **changes: fields of ``Settings``, or of ``SamplingParams`` (temperature, top_k, ...), set on top.

        Returns:
            a ``Stream``: iterate for pieces; its ``result`` is there at the end.

        Raises:
            InvalidRequest: an empty or too long prompt, an unknown method, nonsense settings.
        """
        settings = (settings or self.defaults).changed(**changes)
        if stats_every < 1:
            raise InvalidRequest(f"stats_every {stats_every}: expected at least one round")
        if settings.beams is not None:
            raise InvalidRequest("a text that beams are searched for is there at the end", "use `generate`")
        return Stream(self.usable, self.encode(prompt, settings), settings, cancel, on_stats, stats_every)

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
            prompt: as for ``stream``: text, token ids, or parts.
            settings: what to set; None = ``defaults``, which has the model's own sampling.  What follows is set on top.
            on_chunk: called with every piece as it comes.
            cancel: set it to end the request after the round at hand.
            on_stats: called with the statistics so far every ``stats_every`` rounds, and at the end.
            stats_every: rounds, >= 1.
            **changes: fields of ``Settings``, or of ``SamplingParams`` (temperature, top_k, ...), set on top.

        Returns:
            the text, its tokens, how it was made, and figures.

        Raises:
            InvalidRequest: as for ``stream``.
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
        """Complete a prompt while an event loop goes on; the cancellation of the task ends the request.

        One thread decodes from the first token to the last.

        Args:
            prompt: as for ``stream``: text, token ids, or parts.
            settings: what to set; None = ``defaults``, which has the model's own sampling.  What follows is set on top.
            on_chunk: called with every piece as it comes, in the thread that decodes.
            cancel: set it to end the request after the round at hand; its result is returned then.
            **changes: fields of ``Settings``, or of ``SamplingParams`` (temperature, top_k, ...), set on top.

        Returns:
            the text, its tokens, how it was made, and figures.

        Raises:
            InvalidRequest: as for ``stream``.
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

        One thread decodes from the first token to the last, and nothing waits for who reads.

        Args:
            prompt: as for ``stream``: text, token ids, or parts.
            settings: what to set; None = ``defaults``, which has the model's own sampling.  What follows is set on top.
            **changes: fields of ``Settings``, or of ``SamplingParams`` (temperature, top_k, ...), set on top.

        Returns:
            an ``AsyncStream``: its ``result`` is there at the end; ``aclose`` and ``cancel`` end it early.

        Raises:
            InvalidRequest: as for ``stream``, when the first piece is waited for.
        """
        return AsyncStream(lambda cancel: self.stream(prompt, settings, cancel=cancel, **changes))

    @takes_settings
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        settings: Settings | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        cancel: threading.Event | None = None,
        on_result: Callable[[int, Result], None] | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> list[Result]:
        """Complete several prompts, ``Settings.batch`` at a time; results in the order of the prompts.

        On native operators the passes of all that run are one, so that the weights are read once; every text is that
        of the request alone.  On stock operators they take turns, a round each, and gain nothing.

        Args:
            prompts: texts, token ids, or parts, as for ``stream``.
            settings: of all of them; None = ``defaults``.
            seeds: one for each prompt; None = the seed of the settings for all.
            cancel: set it to end all of them after the round at hand; what was not begun has no tokens.
            on_result: called with the number of each prompt whose answer is complete, and the result, as they end.
            **changes: fields of ``Settings``, set on top for all of them.

        Raises:
            InvalidRequest: as for ``stream``, or seeds that are not one for each prompt.
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
        each = [common] * len(encoded) if seeds is None else [common.changed(seed=seed) for seed in seeds]
        if common.beams is None:
            return self._batches.run(self, encoded, each, cancel, on_result)
        results: list[Result] = []
        for prompt, own in zip(encoded, each, strict=True):  # the beams of each share its passes
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
            settings: what to set; None = ``defaults``.
            tools: JSON schemas of functions that the model may call.
            template_options: what else the template knows, such as ``{"enable_thinking": False}``.
            **changes: fields of ``Settings``, set on top.

        Raises:
            InvalidRequest: no template, one that refuses the messages, or as for ``stream``.
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
        """Write a conversation down by the model's own template -> token ids, with those of images.

        Args:
            messages: the content of one may be parts: ``{"type": "text", "text": ...}``, ``{"type": "image",
                "image": ...}`` with an ``Image``, a file or its bytes, or ``{"type": "audio", "audio": ...}``.
            tools: as for ``chat``.
            options: what else the template knows, such as ``{"enable_thinking": False}``.
            generation_prompt: end with what stands before an answer.
            continue_final: end within the last message, which the model is to go on with.

        Raises:
            InvalidRequest: the template refuses them, or an image cannot be read here.
        """
        how: dict[str, Any] = {"options": options, "generation_prompt": generation_prompt, "nulls": True}
        how["continue_final"] = continue_final
        seen = has_images(messages)
        messages = self.codec.adapted(messages, tools)
        if not seen:
            return self.codec.chat(messages, tools, **how)
        return self.reader().chat(self.codec, messages, tools, **how)

    def place(self, tokens: Sequence[int], images: Sequence[Image | Audio], owner: str | None = None) -> list[int]:
        """Put rows of images where a text has tokens that stand for them; see ``Images.place``.

        May be called from any thread, while others decode.  What it returns is good for requests as long as it is kept.
        """
        return self.reader().place(tokens, images, owner)

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
            messages: those so far, dicts with role and content.
            settings: of every turn; None = ``defaults``.
            tools: JSON schemas of functions that the model may call.
            template_options: what else the template knows, such as ``{"enable_thinking": False}``.
        """
        return Conversation(
            self.chat_prompt,
            self.stream,
            messages,
            settings or self.defaults,
            tools=tools,
            template_options=template_options,
            save=self.save_session,
            context=self.context,
        )

    def embed(
        self,
        texts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        cancel: threading.Event | None = None,
    ) -> NDArray[np.float32]:
        """Embed texts: the hidden states of each one's tokens behind the final norm, pooled -> float32 [n, dimensions].

        A row has length one, and the same bits whatever else is embedded or decoded.

        Args:
            texts: each a text, or token ids.
            pooling: ``mean`` of all tokens or the ``last`` one; None = as the model says, else mean.
            dimensions: only so many first numbers, for models that were trained for it (arXiv 2205.13147); None = all.
            cancel: set it to end with an error after the chunk at hand.

        Raises:
            BudgetError: the longest text does not fit the memory.
            InvalidRequest: a bundle that gives no hidden states (the hint says what to do), an empty or too long text.
        """
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
            raise InvalidRequest(f"embed got {type(texts).__name__}: expected a list of texts")
        if self.encoding is not None:
            raise InvalidRequest("this model reads a source and writes a text: it gives no embeddings")
        return embed(self, [self._tokens(text) for text in texts], pooling, dimensions, cancel)

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
        """Begin a transcription: iterate for segments as they come; its ``transcript`` has those that came.

        Args:
            sound: a file (wav, flac, ogg, mp3), its bytes, or samples [n] or [n, channels].
            asked: language, task, times and the like; None = ``TranscriptionSettings()``.
            settings: of its texts, such as the method; temperatures are those of ``asked``.
            rate: of samples, a second; a file has its own.
            on_text: called with the text of the 30 s at hand as it grows; it may begin anew.
            cancel: set it to end with an error at the next round.
            **changes: fields of ``TranscriptionSettings``, set on top.

        Raises:
            InvalidRequest: a bundle that hears nothing, no sound, a language or a task that the model does not know.
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
            settings: of its texts, such as the method; temperatures are those of ``asked``.
            rate: of samples, a second; a file has its own.
            on_text: called with the text of the 30 s at hand as it grows; it may begin anew.
            cancel: set it to end with an error at the next round.
            **changes: fields of ``TranscriptionSettings``, set on top.

        Raises:
            InvalidRequest: as for ``transcription``.
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
        """Begin to speak: iterate for float32 [n], samples of its ``rate`` a second, as they come.

        Args:
            text: what is to be said.
            voice: a name that the model knows; None = its usual one.
            settings: of the codes; None = ``speaking``.
            cancel: set it to end after the round at hand.
            **changes: fields of ``Settings``, set on top.

        Raises:
            InvalidRequest: a bundle that does not speak, an empty text, a voice that is no name, nonsense settings.
        """
        from edgespec.engine.speaking import Speech

        return Speech(self, text, voice, (settings or self.speaking).changed(**changes), cancel)

    @takes_settings
    def draw(
        self,
        prompt: str,
        settings: Settings | None = None,
        *,
        cancel: threading.Event | None = None,
        **changes: Unpack[SettingsChanges],
    ) -> Drawing:
        """Draw a picture: its ``pixels``, uint8 [height, width, 3], ``png()``, and the ``result`` of its codes.

        Args:
            prompt: what is to be drawn: text, or of models of classes the number of one.
            settings: of the codes; None = ``defaults``, with the model's own guidance.
            cancel: set it to end with an error after the round at hand.
            **changes: fields of ``Settings``, set on top.

        Raises:
            InvalidRequest: a bundle that does not draw, a prompt of words that it does not know, nonsense settings.
        """
        from edgespec.engine.drawing import draw

        return draw(self, prompt, (settings or self.defaults).changed(**changes), cancel)

    @property
    def speaking(self) -> Settings:
        """What speech gets that is asked for without settings: the sampling of Orpheus' own package."""
        return self.defaults.changed(temperature=0.6, top_p=0.8, repetition_penalty=1.3)

    # -- session files -----------------------------------------------------------------------------------------------

    def save_session(self, file: str | os.PathLike[str], prompt: Prompt, messages: Sequence[Message] = ()) -> None:
        """Write what passes left of a text, so that another process need not compute it again.

        Args:
            file: a session file; one that is there is replaced, whole or not at all.  It holds the text in a form that
                can be read back: only its owner may read it.
            prompt: text, or token ids; what no slot holds of it yet is computed first, without an answer.
            messages: of the conversation that it is, if it is one.

        Raises:
            BudgetError, InvalidRequest: as for ``stream``.
            SessionError: it cannot be written, or a device holds it.
        """
        if self.encoding is not None:
            raise InvalidRequest("what this model computes belongs to one source: there is no session to save")
        save_session(self.usable, Path(file), self._tokens(prompt), messages)

    def restore_session(self, file: str | os.PathLike[str]) -> list[Message]:
        """Take up a session file; a request whose prompt begins as its text computes nothing of that again.

        Args:
            file: of ``save_session``.

        Returns:
            the messages of its conversation; ``conversation`` goes on with them.

        Raises:
            BudgetError: it does not fit the memory.
            SessionError: none, damaged, or made with another bundle or other settings.
        """
        return restore_session(self.usable, Path(file))

    # -- the whole ---------------------------------------------------------------------------------------------------

    def plain(self) -> Engine:
        """Load the bundle's fastest plain decoding: its graph without gates and padding, or this model.

        Native operators have one graph, whose plain decoding is the fastest; so has a device.
        """
        self.require_open()
        native = self.operators.kind == "native"
        options = replace(
            self.options, strict=False, operators=self.operators.kind, draft_attention=None, prompt_cache=False
        )
        shared = native or not self.strict or self.device != "cpu"
        return Engine(self.bundle, options, graph="native" if native else "plain", share=self if shared else None)

    def close(self) -> None:
        """Free the model and all that lies on it, at once; a round at hand ends first.

        Requests that are running end with an error at their next round, as does whatever is asked for later; results
        of earlier ones stay.  What is to be kept of prompts is written first.
        """
        self.prompts.finish()
        self.usable.prompts.finish()
        with self.lock:
            self._batches.close()
            super().close()

    def encode(self, prompt: Prompt, settings: Settings | None = None) -> list[int] | Source:
        """Turn a prompt into token ids, or of an encoder-decoder into a source.

        Args:
            prompt: as for ``stream``.
            settings: with the languages of a source; None = ``defaults``.

        Raises:
            InvalidRequest: nothing, what is no prompt, or a language that the model lacks.
        """
        settings = settings or self.defaults
        if isinstance(prompt, Source):
            if self.encoding is None:
                raise InvalidRequest("got a source, but this model is a decoder alone: expected a prompt")
            self.encoding.check(prompt)
            return prompt
        if self.encoding is None:
            if settings.source_language or settings.target_language or settings.begin:
                raise InvalidRequest("languages and begin are for encoder-decoders, and this model is a decoder alone")
            return self._tokens(prompt)
        content: Any = prompt
        if isinstance(prompt, str):
            if self.sources is None:
                raise InvalidRequest(
                    "got a text, but this model reads rows of features", "use transcribe, or edgespec run --audio FILE"
                )
            _refuse_empty(prompt)
            content = self.sources.encode(prompt, settings.source_language, settings.target_language)
        elif not (hasattr(prompt, "ndim") and prompt.ndim > 1):
            content = self._tokens(prompt)
        return self.source(content, settings)

    def _tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or those that are given; of texts and images one behind the other."""
        if isinstance(prompt, str):
            _refuse_empty(prompt)
            return self.codec.encode(prompt)
        if isinstance(prompt, Placed):
            return prompt
        if is_parts(prompt):
            return self.reader().prompt(self.codec, prompt)
        try:
            if not isinstance(prompt, (bytes, bytearray, Source)):
                return [index(token) for token in prompt]  # type: ignore[arg-type]
        except TypeError:
            pass
        raise InvalidRequest(f"the prompt is {type(prompt).__name__}: expected text, or token ids")


def _refuse_empty(prompt: str) -> None:
    if not prompt.strip():
        raise InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")


def given_tokens(prompt: Sequence[int] | Sequence[str | Image | Audio] | NDArray[np.float32] | Source) -> list[int]:
    """Token ids of a prompt that is no text; of features and images there are none."""
    if isinstance(prompt, Source):
        return prompt.tokens
    if is_parts(prompt) or getattr(prompt, "ndim", 1) > 1:
        return []
    return [int(token) for token in prompt]  # type: ignore[arg-type]
