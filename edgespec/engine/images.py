"""Images and recordings of prompts: from parts of messages to embedding spans, in memory and on the disk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.text import INSERTED
from edgespec.engine.input import MultimodalTokens
from edgespec.engine.spans import Rows, SpanReader
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.planning.budget import prompt_limit
from edgespec.runtimes.files.bundle import Bundle, sha256
from edgespec.runtimes.files.images import ImagePart, ImageWords
from edgespec.runtimes.files.manifest import Sense
from edgespec.runtimes.files.prompts import Damaged, PromptFolder, room_for, root_of, touch, trim
from edgespec.runtimes.files.sound import SoundPart
from edgespec.runtimes.images.prompt import apart, expanded
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.inserted import DraftEmbeddingSpans, EmbeddingSpan, EmbeddingSpanCache
from edgespec.version import __version__

if TYPE_CHECKING:
    from typing import TypeGuard

    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image
    from edgespec.runtimes.text.codec import TextCodec

KINDS = {"image": "an image", "audio": "a recording"}  # of parts of messages
WORTH = 0.25  # seconds: rows that are computed faster are not written


def has_images(messages: Sequence[Any]) -> bool:
    """Tell whether a conversation has parts that are images or recordings."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, (list, tuple)) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") in KINDS for part in parts)


def is_parts(prompt: Any) -> TypeGuard[Sequence[str | Image | Audio]]:
    """Whether a prompt is a list of texts and images or recordings."""
    if not isinstance(prompt, (list, tuple)) or not prompt or isinstance(prompt[0], int):
        return False
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image

    return any(isinstance(part, (Image, Audio)) for part in prompt) and all(
        isinstance(part, (str, Image, Audio)) for part in prompt
    )


class MediaReader(SpanReader):
    """Reader of the images, and of the recordings, of a bundle's prompts.

    Args:
        bundle, threads, rows, name: see ``SpanReader``.
        keep: whether rows are written to the disk.
        left: returns the bytes of a budget that are left; None = without a budget.
    """

    def __init__(
        self,
        bundle: Bundle,
        threads: int | None,
        rows: EmbeddingSpanCache,
        keep: bool,
        left: Callable[[], int | None],
        name: str = "target",
    ) -> None:
        super().__init__(bundle, threads, rows, name)
        files, first = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}, 0
        self.makers: dict[str, SpanMaker] = {}  # by the type of parts
        for sense in self._model.senses:
            sides = [[files.get(one.weights), one.high_alone] for one in sense.front]
            facts = [sense.part.model_dump(mode="json", exclude={"proof"}), sides]
            facts_digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
            self.makers[sense.kind] = MAKERS[sense.kind](self, sense, first, facts_digest)
            first += len(sense.front)
        self.kinds = tuple(self.makers)
        self._left = left
        self._of_draft: MediaReader | None = None  # reader of the draft, which encodes the same images
        self._limit = prompt_limit() if keep else 0
        self._folders: dict[tuple[str, str | None], PromptFolder | None] = {}
        draft = bundle.manifest.draft if name == "target" else None
        self._keeps = draft is not None and bool(draft.senses)  # images and recordings, which the draft also reads

    def prompt(self, codec: TextCodec, parts: Sequence[str | Image | Audio]) -> MultimodalTokens:
        text = "".join(part if isinstance(part, str) else self._maker(part).written for part in parts)
        return self._encoded(codec, text, [part for part in parts if not isinstance(part, str)], True)

    def chat(
        self, codec: TextCodec, messages: Sequence[Any], tools: Sequence[Any] | None, **how: Any
    ) -> MultimodalTokens:
        plain, held = apart(messages, self.kinds)
        also = [maker.words.placeholder for maker in self.makers.values()]
        written = codec.render_chat(plain, tools, also=also, **how)
        images = [self.of(*one) for one in held]
        written = written.changed(lambda text: self._expanded(text, images))
        return self.place(codec.encode_chat(written), images)

    def ask(self, codec: TextCodec, around: tuple[str, str], part: Image | Audio) -> MultimodalTokens:
        return self._encoded(codec, self._maker(part).written.join(around), [part], False, keep=False)

    def _encoded(
        self, codec: TextCodec, text: str, images: Sequence[Any], special: bool, keep: bool = True
    ) -> MultimodalTokens:
        return self.place(codec.encode(self._expanded(text, images), special=special), images, keep=keep)

    def _expanded(self, text: str, images: Sequence[Any]) -> str:
        """Put the placeholders of images and recordings into a text."""
        given: dict[str, list[str]] = {kind: [] for kind in self.makers}
        for image in images:
            given[image.kind].append(image.text(self._maker(image).part))
        for kind, texts in given.items():
            text = expanded(text, self.makers[kind].words, texts)
        return text

    def _maker(self, image: Image | Audio) -> SpanMaker:
        if image.kind not in self.makers:
            read = " and ".join(self.makers)
            raise InvalidRequest(f"got {KINDS[image.kind]}, and this model reads text and {read} alone")
        return self.makers[image.kind]

    def place(
        self, tokens: Sequence[int], images: Sequence[Image | Audio], owner: str | None = None, keep: bool = True
    ) -> MultimodalTokens:
        start = time.perf_counter()
        made = [self.rows_of(image, owner, keep) for image in images]
        found = list(tokens)
        for kind, maker in self.makers.items():
            here = [one for one, image in zip(made, images, strict=True) if image.kind == kind]
            own = [token for one in here for token in one.tokens]
            at = [number for number, token in enumerate(found) if token == maker.words.id]
            if len(at) != len(own):
                raise InvalidRequest(
                    f"a text with {len(at)} places for the {len(own)} rows of {len(here)} parts of type {kind}",
                    f"leave {maker.words.token!r} out of what you write",
                )
            for number, token in zip(at, own, strict=True):
                found[number] = token
        if found and found[-1] >= INSERTED:
            last = images[-1].kind
            raise InvalidRequest(f"the prompt ends with {KINDS[last]}", "add a question after it")
        return MultimodalTokens(found, made, self.rows, 1000 * (time.perf_counter() - start))

    def of(self, kind: str, given: Any) -> Image | Audio:
        return self.makers[kind].of(given)

    def draft_rows(self, name: str) -> EmbeddingSpanCache:
        if self._of_draft is None:
            own = type(self)(self._bundle, self._threads, EmbeddingSpanCache(), False, self._left, name)
            own.rows = DraftEmbeddingSpans(self.rows, own.made_for)
            self._of_draft = own
        return self._of_draft.rows

    def made_for(self, item: EmbeddingSpan) -> EmbeddingSpan:
        """Make this model's embeddings of a span in the target's text."""
        with self._lock:
            return self._maker(item.source).make(item.source, item.digest)

    # -- from images to rows -------------------------------------------------------------------------------------------

    def rows_of(self, image: Image | Audio, owner: str | None = None, keep: bool = True) -> EmbeddingSpan:
        maker = self._maker(image)
        digest = hashlib.sha256(f"{maker.facts} {owner}".encode() + image.digest).digest()
        with self._lock:
            known = self.rows.known(digest) or self._read(maker, digest, owner)
            if known is None:
                start = time.perf_counter()
                known = maker.make(image, digest)
                if keep and time.perf_counter() - start >= WORTH:
                    self._write(maker, known, owner)
                if (left := self._left()) is not None and left < 0:
                    self.close()
            if self._keeps:
                known.source = image
            image.forget()
            self.rows.hold([known])  # the first ones of a text must not make room for the last ones
            self.rows.let_go([known])
        return known

    # -- on the disk ---------------------------------------------------------------------------------------------------

    @cached_property
    def _library(self) -> str:
        library = native_library().path
        return "" if library is None else sha256(library)

    def _folder(self, maker: SpanMaker, owner: str | None) -> PromptFolder | None:
        key = maker.facts, owner
        if key not in self._folders:
            origin = {"images": maker.facts, "edgespec": __version__, "library": self._library}
            root = root_of(origin, owner) if self._limit else None
            self._folders[key] = None if root is None else PromptFolder(root)
        return self._folders[key]

    def _read(self, maker: SpanMaker, digest: bytes, owner: str | None) -> EmbeddingSpan | None:
        """Read the stored rows of an image; None = missing or damaged."""
        folder = self._folder(maker, owner)
        if folder is None:
            return None
        path = folder.path / f"{digest.hex()}.rows"
        try:
            found = _unpacked(digest, folder.read(path, np.zeros(0, np.uint8), 0))
        except (Damaged, OSError):
            return None
        touch([path])
        return found

    def _write(self, maker: SpanMaker, made: EmbeddingSpan, owner: str | None) -> None:
        folder = self._folder(maker, owner)
        if folder is None:
            return
        data = _packed(made)
        with suppress(OSError, EdgespecError):  # no space, no rights: it is computed again
            most = room_for(self._limit)
            if data.nbytes > most // 2:
                return
            trim(most, data.nbytes)
            path = self._bundle.path
            folder.make(path / (maker.front or [self._model])[0].weights, {"bundle": str(path.resolve())})
            folder.write(f"{made.digest.hex()}.rows", [], data)

    def close(self) -> None:
        super().close()
        if self._of_draft is not None:
            self._of_draft.close()


class SpanMaker:
    """Makes the embedding spans of one type of parts.

    Args:
        reader: runs the encoders.
        sense: how they are made.
        first: the number of the tower among the reader's encoders.
        facts: identity of the encoders.
    """

    def __init__(self, reader: SpanReader, sense: Sense, first: int, facts: str) -> None:
        self.part: Any = sense.part
        self.front, self.facts = sense.front, facts
        self._reader, self._first = reader, first

    @property
    def words(self) -> ImageWords:
        """How a part is written down."""
        words: ImageWords = self.part.prompt_template
        return words

    @property
    def written(self) -> str:
        """Text that represents a part where there is no template."""
        return self.words.written or self.words.placeholder

    def of(self, given: Any) -> Any:
        """Return the content of a part of a message."""
        raise NotImplementedError

    def make(self, given: Any, digest: bytes) -> EmbeddingSpan:
        """Run tower and projectors over an image or a recording."""
        raise NotImplementedError

    def _encode(self, encoder: int, rows: Rows, inside: NDArray[np.int64] | None = None) -> Rows:
        return self._reader.encode(self._first + encoder, rows, inside)


class ImageMaker(SpanMaker):
    """Makes the spans of images."""

    part: ImagePart
    _places: Rows | None = None  # the tower's learnt positions

    def of(self, given: Any) -> Image:
        from edgespec.runtimes.images.image import Image

        return Image.of(given)

    def make(self, image: Image, digest: bytes) -> EmbeddingSpan:
        from edgespec.runtimes.images.processing import merged_grid, piece_rows, read_places

        part = self.part
        if self._places is None:
            self._places = read_places(self._reader.folder, part)
        most = self.front[0].facts.context
        parts: list[Rows] = []
        grids: list[NDArray[np.int64]] = []
        for piece in image.processed(part).pieces:
            if len(piece.patches) > most:
                height, width = image.pixels.shape[:2]
                raise InvalidRequest(
                    f"a picture of {width} x {height} pixels makes {len(piece.patches)} patches, and this model reads "
                    f"{most} at once",
                    "cut it, so that its sides are nearer to each other",
                )
            parts.append(piece_rows(piece, part, self._places, self._encode))
            height, across = merged_grid(piece.grid, part)
            grids.append(np.stack(np.divmod(np.arange(height * across), across)))
        grid = np.concatenate(grids, axis=1) if part.positions == "grid" else None
        return EmbeddingSpan(digest, np.concatenate(parts), tuple(map(len, parts)), grid)


class AudioMaker(SpanMaker):
    """Makes the spans of recordings."""

    part: SoundPart

    def of(self, given: Any) -> Audio:
        from edgespec.runtimes.audio.audio import Audio

        return Audio.of(given)

    def make(self, audio: Audio, digest: bytes) -> EmbeddingSpan:
        from edgespec.runtimes.audio.processing import sound_features, sound_rows

        rows = sound_rows(sound_features(audio.samples, self.part.front), self.part, self._encode)
        return EmbeddingSpan(digest, rows, (len(rows),))


MAKERS: dict[str, type[SpanMaker]] = {"image": ImageMaker, "audio": AudioMaker}


def _packed(made: EmbeddingSpan) -> NDArray[np.uint8]:  # [bytes]
    """Write rows down: how many, columns, blocks, whether there is a grid; then those, the grid, and the rows."""
    grid = np.zeros((2, 0), np.int64) if made.grid is None else made.grid
    head = np.array([*made.rows.shape, len(made.blocks), made.grid is not None, *made.blocks], np.int64)
    return np.concatenate([part.reshape(-1).view(np.uint8) for part in (head, np.ascontiguousarray(grid), made.rows)])


def _unpacked(digest: bytes, data: NDArray[np.uint8]) -> EmbeddingSpan:  # [bytes]
    """Read the output of ``_packed``; its seal was compared."""
    count, columns, blocks, gridded = data[:32].view(np.int64).tolist()
    at = 32 + 8 * blocks
    grid = data[at : at + 16 * count].view(np.int64).reshape(2, count).copy() if gridded else None
    rows = data[at + 16 * count * gridded :].view(np.float32).reshape(count, columns)
    return EmbeddingSpan(digest, rows, tuple(data[32:at].view(np.int64).tolist()), grid)
