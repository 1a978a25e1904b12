"""Run an encoder over a source, and fill a decoder's cross-attention cache with its output.

An encoder's pass runs all rows of a source at once, as they see each other.  The layers run in order, and none reads
another layer's keys and values, so they all share the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgespec.decoding.target import Ids, Rows
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import Attention
from edgespec.runtimes.files.images import WindowsPart
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.slots.cross_attention import CrossAttentionCache, CrossAttentionPool
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_runner import PARENT, PLACE, POSITION, SLOT, TOKEN, VISIBLE
from edgespec.runtimes.slots.shared import Bound, Model, own_pages


def encoder_attention_name(part: ModelPart) -> Attention:
    """How an encoder keeps keys and values during a pass, unless something else is asked for.

    Those of int4 and int8 lose nothing by int8 (docs/dev/log.md), and passes over hundreds of rows are faster.
    """
    return "f32" if part.format == "fp32" else "int8"


def encoder_attention(part: ModelPart) -> KvFormat:
    """Return the formats of ``encoder_attention_name``."""
    return ATTENTION[encoder_attention_name(part)]


class Encoder:
    """An encoder, ready to run.

    Args:
        model: of a part of the manifest that is some decoder's ``encoder``, native operators, ``encoder_attention``.
        windows: of a vision encoder some of whose layers see only parts of a picture.

    Attributes:
        longest: maximum rows of a source.
        width: numbers of an output row.
        columns: numbers of an input row, if it reads features.
    """

    def __init__(self, model: Model, windows: WindowsPart | None = None) -> None:
        if model.graph.operators != "native":
            raise InvalidRequest("an encoder runs on native operators alone", "use `--operators native`")
        self.longest, self.width = model.facts.context, model.facts.hidden
        self.columns: int = model.given["hidden_in"]
        self._slot, self._windows = _EncoderSlot(model), windows

    def encode(self, source: Ids | Rows, places: Ids | None = None) -> Rows:
        """Run the encoder over a source.

        Args:
            source: int64 [S] token ids, or float32 [S, columns] rows of features.
            places: int64 [2, S], line and column of each row, for a vision encoder with rotary positions.

        Returns:
            float32 [S, width], a copy, followed by the rows of each tapped layer in more columns.

        Raises:
            InvalidRequest: no rows, more than the model was exported for, or rows of another width.
        """
        if not 0 < len(source) <= self.longest:
            raise InvalidRequest(f"a source of {len(source)} rows: expected 1 to {self.longest}", "cut it into parts")
        if self._windows is None or places is None:
            return self._slot.encode(source, places)
        return self._in_windows(np.asarray(source, np.float32), places, self._windows)

    def _in_windows(self, source: Rows, places: Ids, windows: WindowsPart) -> Rows:
        """Run the layers that see windows, and those between them, each in separate passes."""
        lines, columns = places // windows.side
        numbers = lines * (int(columns.max()) + 1) + columns
        order = np.argsort(numbers, kind="stable")
        rows, places, numbers = source[order], places[:, order], np.unique(numbers[order], return_inverse=True)[1]
        layers = self._slot.layers
        edges = sorted({0, layers, *windows.full, *(layer + 1 for layer in windows.full)})
        for first, last in pairwise(edges):
            given = np.zeros((len(rows), self.columns), np.float32)
            given[:, : rows.shape[1]] = rows
            apart = None if first in windows.full else numbers
            rows = self._slot.encode(given, places, range(first, last), apart)
        found = np.empty_like(rows)
        found[order] = rows
        return found

    def encode_texts(self, texts: Sequence[Ids], positions: Sequence[Ids]) -> list[Rows]:
        """Run the encoder over several texts in one pass; a text has the same rows alone.

        Args:
            texts: int64 [S] token ids each.
            positions: int64 [S] each, rows of learned positions, or positions to rotate by.

        Returns:
            float32 [S, width] each, views of a copy.
        """
        lengths = [len(text) for text in texts]
        if len(texts) == 1:
            return [self._slot.encode(texts[0], positions=positions[0])]
        apart = np.repeat(np.arange(len(texts)), lengths)
        rows = self._slot.encode(np.concatenate(texts), apart=apart, positions=np.concatenate(positions))
        return np.split(rows, np.cumsum(lengths)[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that a pass works with."""
        return self._slot.kv_bytes

    def close(self) -> None:
        """Free what it holds; it is of no use afterwards."""
        self._slot.close()


class EncodedSources(CrossAttentionPool):
    """The cross-attention caches of one model, and filling them; see ``CrossAttentionPool`` for arguments."""

    def __init__(self, model: Model, most: int = 4) -> None:
        super().__init__(model, most)
        self._filler: _Filler | None = None

    def fill(self, rows: Rows, digest: bytes) -> CrossAttentionCache:
        """Make the cache of a source from rows [S, width] of the encoder, unless one of this ``digest`` is there.

        Raises:
            InvalidRequest: more rows than the model was exported for, none, or all places are in use.
        """
        if (found := self.find(digest)) is not None:
            return found
        made = self.take(digest, len(rows))
        try:
            if self._filler is None:
                self._filler = _Filler(self.model, reserve=1)
            self._filler.fill(made, rows)
        except BaseException:
            self.drop(made)
            raise
        self.filled(made)
        return made

    def close(self) -> None:
        if self._filler is not None:
            self._filler.close()
        super().close()


class _EncoderSlot(NativeSlot):
    """Runs an encoder's passes: its cache is what one layer needs of a pass, and no text is kept."""

    def __init__(self, model: Model) -> None:
        self._one = model.facts.model_copy(update={"layers": 1, "head_dims": []})
        super().__init__(model, reserve=0)
        self.columns = 0  # it has no LM head

    def reserve(self, tokens: int) -> None:
        self._room(1, tokens)

    def _room(self, windows: int, rows: int) -> None:
        """Make room for windows of at most ``rows`` rows each."""
        size = self.kv.nbytes(self._one, rows)
        have = (0, 0) if self._cache is None else self._cache.array.shape
        if have[0] < windows or have[1] < size:
            self._cache = self._bind("kv", Bound(own_pages((windows, size), np.uint8)))

    def encode(
        self,
        source: Ids | Rows,
        places: Ids | None = None,
        layers: range | None = None,
        apart: Ids | None = None,
        positions: Ids | None = None,
    ) -> Rows:
        """Run a pass of rows that see each other -> [S, width], a copy.

        Args:
            source, places: see ``Encoder.encode``.
            layers: those that are run; later than the first, they read the output of the layers before.  None = all.
            apart: int64 [S], ascending: rows see only those of the same number.
            positions: int64 [S], of each row; None = it is its place.
        """
        n, load = len(source), source.ndim > 1 and (layers is None or layers.start > 0)
        plan = self._nowhere(n)
        if source.ndim > 1:
            self._load(source, n)
        else:
            plan[TOKEN] = source
        plan[POSITION] = plan[PLACE] = np.arange(n)
        plan[VISIBLE], plan[PARENT] = n, -1
        if apart is None:
            self.reserve(n)
        else:
            counts = np.bincount(apart)
            self._room(len(counts), int(counts.max()))
            plan[SLOT], plan[VISIBLE] = apart, counts[apart]
            plan[PLACE] -= (np.cumsum(counts) - counts)[apart]
        if positions is not None:
            plan[POSITION] = positions
        if places is not None:
            self._offsets = np.concatenate([np.zeros((1, n), np.int64), places - plan[POSITION]])
        tapped = bool(self.model.part.aux_hidden_layers)
        self._select(self._at.load if load else self._at.embed, -2, (layers.start, layers.stop) if layers else None)
        output = self._launch(n, 0, hidden=True, aux_hidden=tapped)
        assert output.hidden is not None
        if output.aux_hidden is not None:
            return np.concatenate([output.hidden, output.aux_hidden], axis=1)
        return output.hidden.copy()


class _Filler(NativeSlot):
    """Runs the passes that fill cross-attention caches; it has no sequence."""

    def fill(self, memory: CrossAttentionCache, rows: Rows) -> None:
        """Fill a memory from rows [S, width]."""
        n = len(rows)
        self._nowhere(n)
        self._load(rows, n)
        self._see(n, memory.number, np.arange(n), memory.of.bound)
        self._select(self._at.fill, -2, (0, 0))
        self._launch(n, 0)
