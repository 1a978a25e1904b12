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
from edgespec.runtimes.files.images import ImagePart
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
    """Reader of the images, or of the recordings, of a bundle's prompts.

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
        part = self._model.sense
        assert part is not None
        self.part: ImagePart | SoundPart = part
        self._left = left
        self._of_draft: MediaReader | None = None  # reader of the draft, which encodes the same images
        self._limit = prompt_limit() if keep else 0
        files = {name: entry.sha256 for name, entry in bundle.manifest.files.items()}
        sides = [[files.get(one.weights), one.high_alone] for one in self._model.front]
        facts = [part.model_dump(mode="json", exclude={"proof"}), sides]
        self._facts = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self._folders: dict[str | None, PromptFolder | None] = {}
        draft = bundle.manifest.draft if name == "target" else None
        self._keeps = draft is not None and draft.sense is not None  # images and recordings, which the draft also reads

    def prompt(self, codec: TextCodec, parts: Sequence[str | Image | Audio]) -> MultimodalTokens:
        written = self.part.prompt_template.written or self.part.prompt_template.placeholder
        text = "".join(part if isinstance(part, str) else written for part in parts)
        return self._encoded(codec, text, [part for part in parts if not isinstance(part, str)], True)

    def chat(
        self, codec: TextCodec, messages: Sequence[Any], tools: Sequence[Any] | None, **how: Any
    ) -> MultimodalTokens:
        plain, held = apart(messages, self.kind)
        written = codec.render_chat(plain, tools, also=self.part.prompt_template.placeholder, **how)
        images = [self.of(one) for one in held]
        texts = self._texts(images)
        written = written.changed(lambda text: expanded(text, self.part.prompt_template, texts))
        return self.place(codec.encode_chat(written), images)

    def ask(self, codec: TextCodec, around: tuple[str, str], part: Image | Audio) -> MultimodalTokens:
        text = (self.part.prompt_template.written or self.part.prompt_template.placeholder).join(around)
        return self._encoded(codec, text, [part], False, keep=False)

    def _encoded(
        self, codec: TextCodec, text: str, images: Sequence[Any], special: bool, keep: bool = True
    ) -> MultimodalTokens:
        text = expanded(text, self.part.prompt_template, self._texts(images))
        return self.place(codec.encode(text, special=special), images, keep=keep)

    def _texts(self, images: Sequence[Any]) -> list[str]:
        """List the placeholders of images or recordings in a text."""
        if other := {image.kind for image in images} - {self.kind}:
            raise InvalidRequest(f"got {KINDS[other.pop()]}, and this model reads text and {self.kind} alone")
        return [image.text(self.part) for image in images]

    def place(
        self, tokens: Sequence[int], images: Sequence[Image | Audio], owner: str | None = None, keep: bool = True
    ) -> MultimodalTokens:
        start = time.perf_counter()
        made = [self.rows_of(image, owner, keep) for image in images]
        own, found = [token for one in made for token in one.tokens], list(tokens)
        at = [number for number, token in enumerate(found) if token == self.part.prompt_template.id]
        if len(at) != len(own):
            raise InvalidRequest(
                f"a text with {len(at)} places for the {len(own)} rows of {len(images)} parts of type {self.kind}",
                f"leave {self.part.prompt_template.token!r} out of what you write",
            )
        for number, token in zip(at, own, strict=True):
            found[number] = token
        if found and found[-1] >= INSERTED:
            raise InvalidRequest(f"the prompt ends with {KINDS[self.kind]}", "add a question after it")
        return MultimodalTokens(found, made, self.rows, 1000 * (time.perf_counter() - start))

    def draft_rows(self, name: str) -> EmbeddingSpanCache:
        if self._of_draft is None:
            own = type(self)(self._bundle, self._threads, EmbeddingSpanCache(), False, self._left, name)
            own.rows = DraftEmbeddingSpans(self.rows, own.made_for)
            self._of_draft = own
        return self._of_draft.rows

    def made_for(self, item: EmbeddingSpan) -> EmbeddingSpan:
        """Make this model's embeddings of a span in the target's text."""
        with self._lock:
            return self._made(item.source, item.digest)

    # -- from images to rows -------------------------------------------------------------------------------------------

    def rows_of(self, image: Image | Audio, owner: str | None = None, keep: bool = True) -> EmbeddingSpan:
        digest = hashlib.sha256(f"{self._facts} {owner}".encode() + image.digest).digest()
        with self._lock:
            known = self.rows.known(digest) or self._read(digest, owner)
            if known is None:
                start = time.perf_counter()
                known = self._made(image, digest)
                if keep and time.perf_counter() - start >= WORTH:
                    self._write(known, owner)
                if (left := self._left()) is not None and left < 0:
                    self.close()
            if self._keeps:
                known.source = image
            image.forget()
            self.rows.hold([known])  # the first ones of a text must not make room for the last ones
            self.rows.let_go([known])
        return known

    def _made(self, image: Any, digest: bytes) -> EmbeddingSpan:
        """Run towers and projectors over an image or a recording."""
        raise NotImplementedError

    # -- on the disk ---------------------------------------------------------------------------------------------------

    @cached_property
    def _origin(self) -> dict[str, str]:
        """Origin of rows on the disk."""
        library = native_library().path
        made = "" if library is None else sha256(library)
        return {"images": self._facts, "edgespec": __version__, "library": made}

    def _folder(self, owner: str | None) -> PromptFolder | None:
        if owner not in self._folders:
            root = root_of(self._origin, owner) if self._limit else None
            self._folders[owner] = None if root is None else PromptFolder(root)
        return self._folders[owner]

    def _read(self, digest: bytes, owner: str | None) -> EmbeddingSpan | None:
        """Read the stored rows of an image; None = missing or damaged."""
        folder = self._folder(owner)
        if folder is None:
            return None
        path = folder.path / f"{digest.hex()}.rows"
        try:
            found = _unpacked(digest, folder.read(path, np.zeros(0, np.uint8), 0))
        except (Damaged, OSError):
            return None
        touch([path])
        return found

    def _write(self, made: EmbeddingSpan, owner: str | None) -> None:
        folder = self._folder(owner)
        if folder is None:
            return
        data = _packed(made)
        with suppress(OSError, EdgespecError):  # no space, no rights: it is computed again
            most = room_for(self._limit)
            if data.nbytes > most // 2:
                return
            trim(most, data.nbytes)
            target, path = self._model, self._bundle.path
            folder.make(path / (target.tower or target).weights, {"bundle": str(path.resolve())})
            folder.write(f"{made.digest.hex()}.rows", [], data)

    def close(self) -> None:
        super().close()
        if self._of_draft is not None:
            self._of_draft.close()


class ImageReader(MediaReader):
    """Reader of images."""

    kind = "image"
    part: ImagePart
    _places: Rows | None = None  # the tower's learnt positions

    def of(self, given: Any) -> Image:
        from edgespec.runtimes.images.image import Image

        return Image.of(given)

    def _made(self, image: Image, digest: bytes) -> EmbeddingSpan:
        from edgespec.runtimes.images.processing import merged_grid, piece_rows, read_places

        target, part = self._model, self.part
        if self._places is None:
            self._places = read_places(self._bundle.path, part)
        assert target.tower is not None
        most = target.tower.facts.context
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


class AudioReader(MediaReader):
    """Reader of recordings."""

    kind = "audio"
    part: SoundPart

    def of(self, given: Any) -> Audio:
        from edgespec.runtimes.audio.audio import Audio

        return Audio.of(given)

    def _made(self, audio: Audio, digest: bytes) -> EmbeddingSpan:
        from edgespec.runtimes.audio.processing import sound_features, sound_rows

        rows = sound_rows(sound_features(audio.samples, self.part.front), self.part, self._encode)
        return EmbeddingSpan(digest, rows, (len(rows),))


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
