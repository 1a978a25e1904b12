"""Kinds of inputs that a bundle reads: only text, text with embedding spans, or an encoder's source.

``open_inputs`` makes one ``Inputs`` for a bundle.  It turns every prompt into an ``Input``, and sets up slots and
drafts for such inputs.  Other code does not depend on the kind of a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Union

from edgespec.decoding.settings import Settings
from edgespec.decoding.text import INSERTED
from edgespec.engine.captions import CaptionReader
from edgespec.engine.encoders import no_encoder
from edgespec.engine.encoding import Encoding, Source
from edgespec.engine.images import MediaReader, has_images, is_parts
from edgespec.engine.input import Input
from edgespec.engine.spans import SpanReader
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.slots.inserted import EmbeddingSpanCache
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.slots.text_encoder import TextEncoder
from edgespec.runtimes.text.chat import Message
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.sources import SourceTexts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image

Prompt = Union[str, Sequence[int], "Sequence[str | Image | Audio]", "NDArray[np.float32]", Source]


class Inputs:
    """Inputs of a decoder that reads only text.

    Attributes:
        kinds: of the parts of messages that it may read in addition to text, ``image`` and ``audio``.
        sourced: whether passes also read the output of an encoder: texts with the same tokens need not be the same.
        sources: how texts for the encoder become tokens; None = without an encoder, or it reads features.
        nbytes: bytes of encoders and of their outputs that decoders attend over.
        encoder: the model itself, if it is an encoder.
    """

    kinds: tuple[str, ...] = ("image",)
    sourced: ClassVar[bool] = False
    sources: SourceTexts | None = None
    nbytes = 0
    encoder: TextEncoder | None = None

    def __init__(self, bundle: Bundle, codec: TextCodec) -> None:
        self._bundle, self._manifest, self.codec = bundle, bundle.manifest, codec

    def shared(self) -> Inputs:
        """Return inputs of another engine over the same bundle, with the same encoders."""
        return self

    # -- from a prompt to an input -------------------------------------------------------------------------------------

    def read(self, prompt: Prompt, settings: Settings) -> Input:
        """Turn a prompt into an input; see ``Engine.encode``."""
        if isinstance(prompt, Source):
            raise InvalidRequest("got a source, but this model is a decoder alone: expected a prompt")
        if settings.source_language or settings.target_language or settings.prefix_tokens:
            raise InvalidRequest(
                "languages and prefix_tokens are for encoder-decoders, and this model is a decoder alone"
            )
        return self.text(prompt)

    def text(self, prompt: Prompt) -> Input:
        """Return the token ids of a text, of given ids, or of a list of texts and images."""
        if isinstance(prompt, Input):
            return prompt
        if isinstance(prompt, str):
            _refuse_empty(prompt)
            return Input(self.codec.encode(prompt))
        if is_parts(prompt):
            return self.reader.prompt(self.codec, prompt)
        try:
            if not isinstance(prompt, (bytes, bytearray)):
                return self.ids(list(map(index, prompt)))
        except TypeError:
            pass
        raise InvalidRequest(f"the prompt is {type(prompt).__name__}: expected text, or token ids")

    def ids(self, tokens: Sequence[int]) -> Input:
        """Find what token ids stand for; an ``InvalidRequest``: rows of an image that do not exist."""
        return Input(tokens) if max(tokens, default=0) < INSERTED else self.reader.find(tokens)

    def chat(self, messages: Sequence[Message], tools: Sequence[Any] | None, **how: Any) -> Input:
        """Render a conversation; for the arguments see ``TextCodec.chat``."""
        seen = has_images(messages)
        messages = self.codec.adapted(messages, tools)
        if seen:
            return self.reader.chat(self.codec, messages, tools, **how)
        return Input(self.codec.chat(messages, tools, **how))

    @property
    def reader(self) -> SpanReader:
        """The reader of images, recordings or captions; raises InvalidRequest if the model has none."""
        if self._manifest.target.tower is not None:
            raise InvalidRequest(
                "only native operators on the CPU read images, sound and captions",
                "use `--operators native --device cpu`",
            )
        raise InvalidRequest(
            "this bundle's model reads only text, and got an image or a recording",
            "export one that reads images, such as SmolVLM2, or recordings, such as Qwen3-ASR",
        )

    # -- for sessions --------------------------------------------------------------------------------------------------

    def require_decoder(self, otherwise: str, hint: str | None = None) -> None:
        """Raise ``InvalidRequest`` with this message for an encoder-decoder."""

    def attend(self, slots: Mapping[str, Slot], given: Input) -> float:
        """Let slots attend over the content of an input; ``Input()``: over a placeholder, to time passes.

        Args:
            slots: by the names of their models, ``target`` or ``draft``.
            given: the input.

        Returns:
            the milliseconds that reading the input took, its spans included.
        """
        return given.encode_ms

    def prepare_draft(self, name: str, model: Model) -> None:
        """Set up a draft for the texts of the target."""
        senses = self._manifest.target.senses
        if senses and (word := senses[0].part.prompt_template.id) < model.facts.vocab:
            model.inserted.instead = word

    def close(self) -> None:
        """Free the encoders and their outputs."""


class EncoderInputs(Inputs):
    """Inputs of an encoder: texts, of which it writes none."""

    def __init__(self, bundle: Bundle, codec: TextCodec, encoder: TextEncoder) -> None:
        super().__init__(bundle, codec)
        self.encoder: TextEncoder = encoder

    def read(self, prompt: Prompt, settings: Settings) -> Input:
        raise no_encoder()

    def chat(self, messages: Sequence[Message], tools: Sequence[Any] | None, **how: Any) -> Input:
        raise no_encoder()

    @property
    def reader(self) -> SpanReader:
        raise no_encoder()

    def require_decoder(self, otherwise: str, hint: str | None = None) -> None:
        raise no_encoder()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.encoder.nbytes

    def close(self) -> None:
        self.encoder.close()


class SpanInputs(Inputs):
    """Inputs of a decoder that also reads images, recordings or captions."""

    def __init__(self, bundle: Bundle, codec: TextCodec, reader: SpanReader, shared: bool) -> None:
        super().__init__(bundle, codec)
        self._reader, self._shared, self.kinds = reader, shared, reader.kinds

    def shared(self) -> Inputs:
        return SpanInputs(self._bundle, self.codec, self._reader, True)

    @property
    def reader(self) -> SpanReader:
        return self._reader

    def prepare_draft(self, name: str, model: Model) -> None:
        super().prepare_draft(name, model)
        if model.part.senses and "inserted" in model.given:
            model.inserted = self._reader.draft_rows(name)

    def close(self) -> None:
        if not self._shared:
            self._reader.close()


class SourceInputs(Inputs):
    """Inputs of an encoder-decoder: the encoder reads the prompt, and the decoder begins with a few tokens."""

    sourced = True

    def __init__(self, bundle: Bundle, codec: TextCodec, encoding: Encoding) -> None:
        super().__init__(bundle, codec)
        text, source = bundle.manifest.text, bundle.manifest.target.source
        self._encoding = encoding
        if text is not None and source is not None and source.kind == "text":
            self.sources = SourceTexts(bundle.path, text, codec, bundle.checked)

    def shared(self) -> Inputs:
        return SourceInputs(self._bundle, self.codec, self._encoding.shared())

    def read(self, prompt: Prompt, settings: Settings) -> Input:
        if isinstance(prompt, Source):
            self._encoding.check(prompt)
            return prompt
        content: Any = prompt
        if isinstance(prompt, str):
            if self.sources is None:
                raise InvalidRequest(
                    "got a text, but this model reads rows of features", "use transcribe, or edgespec run --audio FILE"
                )
            _refuse_empty(prompt)
            content = self.sources.encode(prompt, settings.source_language, settings.target_language)
        elif not (hasattr(prompt, "ndim") and prompt.ndim > 1):
            content = self.text(prompt)
        source = Source.of(content, self._begin(settings))
        self._encoding.check(source)
        return source

    def _begin(self, settings: Settings) -> tuple[int, ...]:
        """Return the decoder's first tokens, in the languages of the settings."""
        text, speech = self._manifest.text, self._manifest.speech
        if settings.prefix_tokens is not None:
            return settings.prefix_tokens
        if self.sources is not None:
            return tuple(self.sources.begin(settings.source_language, settings.target_language))
        if speech is not None:
            return tuple(speech.begin())
        return tuple(token for token in text.prefix_tokens if isinstance(token, int)) if text else ()

    def require_decoder(self, otherwise: str, hint: str | None = None) -> None:
        raise InvalidRequest(otherwise, hint)

    def attend(self, slots: Mapping[str, Slot], given: Input) -> float:
        start = perf_counter()
        for name, slot in slots.items():
            self._encoding.attend(name, slot, given)
        return 1000 * (perf_counter() - start)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._encoding.nbytes

    def close(self) -> None:
        self._encoding.close()


def open_inputs(
    bundle: Bundle,
    codec: TextCodec,
    model: Model,
    threads: int | None,
    rows: EmbeddingSpanCache | None,
    keep: bool,
    left: Callable[[], int | None],
) -> Inputs:
    """Make the inputs of a bundle.

    Args:
        bundle: the bundle.
        codec: of its texts.
        model: the target.
        threads: of encoders.
        rows: the storage of the target's embedding spans; None = its operators read only text.
        keep: whether spans that took long are written to the disk.
        left: returns the bytes of a budget that are left; None = without a budget.
    """
    manifest = bundle.manifest
    draws = manifest.codes and manifest.codes.image
    if manifest.is_encoder:
        return EncoderInputs(bundle, codec, TextEncoder(bundle, model))
    if manifest.target.source is not None:
        return SourceInputs(bundle, codec, Encoding(bundle, threads))
    if rows is None:
        return Inputs(bundle, codec)
    if manifest.target.senses:
        return SpanInputs(bundle, codec, MediaReader(bundle, threads, rows, keep, left), False)
    if draws and draws.caption:
        return SpanInputs(bundle, codec, CaptionReader(bundle, threads, rows, draws.caption), False)
    return Inputs(bundle, codec)


def _refuse_empty(prompt: str) -> None:
    if not prompt.strip():
        raise InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")
