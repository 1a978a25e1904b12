"""Cut texts for training and measurement into windows of tokens, and order them; needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import TrainingError
from edgespec.runtimes.files.json_file import parse_json
from edgespec.runtimes.text.codec import TextCodec

HELD_OUT_SHARE = 0.05
MANY = 20  # from this many texts on, whole texts are held out; with fewer, the end of each
LEAST = 8  # tokens of a window that is worth training on
FORMS = "a text file, .jsonl with `text`, `prompt` or `turns`, or a folder of such"


@dataclass(frozen=True)
class Windows:
    """Token sequences of different lengths in one array."""

    tokens: NDArray[np.int64]  # int64 [N, T], zeros after a sequence's end
    lengths: NDArray[np.int64]  # int64 [N]
    read: NDArray[np.int64] | None = None  # of an encoder-decoder: the source of each, int64 [N, S], -1 after its end

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], length: int) -> Windows:
        """Make windows of sequences, each cut to ``length`` tokens."""
        tokens = np.zeros((len(sequences), length), np.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        return cls(tokens, np.array([len(sequence) for sequence in sequences], np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Windows]) -> Windows:
        """Join several windows, padded to the longest."""
        found = [part for part in parts if len(part)]
        if not found:
            return cls(np.zeros((0, 0), np.int64), np.zeros(0, np.int64))
        read = [part.read for part in found if part.read is not None]
        lengths = np.concatenate([part.lengths for part in found])
        return cls(_stacked([part.tokens for part in found], 0), lengths, _stacked(read, -1) if read else None)

    def take(self, rows: NDArray[np.int64]) -> Windows:
        """Return some of the windows, cut to the longest."""
        lengths = self.lengths[rows]
        read = None if self.read is None else self.read[rows]
        return Windows(self.tokens[rows, : int(lengths.max(initial=0))], lengths, read)

    def parts(self, size: int) -> Iterator[Windows]:
        """Yield ``size`` windows at a time, at their full width."""
        for at in range(0, len(self), size):
            read = None if self.read is None else self.read[at : at + size]
            yield Windows(self.tokens[at : at + size], self.lengths[at : at + size], read)

    def first(self, count: int) -> Windows:
        """Return the first windows."""
        return self.take(np.arange(min(count, len(self)), dtype=np.int64))


def data_files(given: Sequence[Path]) -> list[Path]:
    """List files, and those in folders by name."""
    return [file for each in given for file in (sorted(each.iterdir()) if each.is_dir() else [each])]


def _stacked(parts: Sequence[NDArray[np.int64]], empty: int) -> NDArray[np.int64]:
    """Stack rows [N, T], padded to the longest."""
    length = max(part.shape[1] for part in parts)
    padded = [np.pad(part, ((0, 0), (0, length - part.shape[1])), constant_values=empty) for part in parts]
    return np.concatenate(padded)


def read_texts(files: Sequence[Path], sources: bool = False) -> list[str]:
    """Read texts from files: a .jsonl, or .json of Ray's, has one per line, other files are one text.

    A line has ``text``, what was written after its ``prompt``, or ``prompt`` or Spec-Bench's ``turns`` alone.

    Args:
        sources: for what an encoder-decoder reads: a .jsonl's ``prompt`` alone, and each line of other files.

    Raises:
        TrainingError: a file cannot be read, or none of them has text.
    """
    texts: list[str] = []
    for file in files:
        try:
            content = file.read_text("utf-8-sig")
            if file.suffix in (".jsonl", ".json"):
                texts += [_of_json(parse_json(line), sources) for line in content.splitlines() if line.strip()]
            else:
                texts += content.splitlines() if sources else [content]
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise TrainingError(f"{file}: cannot read texts: {error}", f"give {FORMS}, in UTF-8") from error
    texts = [text for text in texts if text.strip()]
    if files and not texts:
        raise TrainingError(f"{', '.join(map(str, files))}: no text in there", f"give {FORMS}")
    return texts


def _of_json(item: dict[str, object], source: bool) -> str:
    turns = item.get("turns")
    if isinstance(turns, list):
        return str(turns[0])
    if source and "prompt" in item:
        return str(item["prompt"])
    return f"{item.get('prompt', '')}{item['text']}" if "text" in item else str(item["prompt"])


def files_digest(files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file's content, in order."""
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def split_texts(texts: Sequence[str], codec: TextCodec, length: int, seed: int) -> tuple[Windows, Windows]:
    """Split texts into windows to train on, and held-out ones.

    Every window begins with what the tokenizer puts in front of a text (BOS).  Of many texts whole ones are held out,
    of a few the end of each.

    Raises:
        TrainingError: not enough text for one window of each.
    """
    return split_tokens([codec.encode(text, special=False) for text in texts], codec.encode("")[:1], length, seed)


def split_tokens(
    texts: Sequence[Sequence[int]], begin: Sequence[int], length: int, seed: int
) -> tuple[Windows, Windows]:
    """Split token ids of texts as ``split_texts`` does; ``begin``: what every window begins with."""
    pieces = [piece for text in texts if (piece := _pieces(text, begin, length))]
    if len(pieces) >= MANY:
        order = np.random.Generator(np.random.PCG64([seed, 1])).permutation(len(pieces))
        chosen = set(order[: max(1, int(len(pieces) * HELD_OUT_SHARE))].tolist())
        train = [window for number, piece in enumerate(pieces) if number not in chosen for window in piece]
        held = [window for number, piece in enumerate(pieces) if number in chosen for window in piece]
    else:
        ends = [max(1, int(len(piece) * HELD_OUT_SHARE)) if len(piece) > 1 else 0 for piece in pieces]
        train = [window for piece, end in zip(pieces, ends, strict=True) for window in piece[: len(piece) - end]]
        held = [window for piece, end in zip(pieces, ends, strict=True) for window in piece[len(piece) - end :]]
    if not train or not held:
        total = sum(len(window) for piece in pieces for window in piece)
        raise TrainingError(
            f"the data has {total} tokens: expected at least two windows of {length} tokens, one to train on and one "
            "to measure on",
            "give more text, or a smaller --length",
        )
    return Windows.of(train, length), Windows.of(held, length)


def _pieces(tokens: Sequence[int], begin: Sequence[int], length: int) -> list[list[int]]:
    step = length - len(begin)
    found = [[*begin, *tokens[start : start + step]] for start in range(0, len(tokens), step)]
    return [piece for piece in found if len(piece) >= LEAST]


def without(windows: Windows, held: Windows, prompt: int) -> Windows:
    """Return the windows that do not begin like a held-out text, so that no text is both trained on and measured on.

    Args:
        prompt: tokens that make two texts the same: the sampled ones of a greedy text, otherwise all of them.
    """
    known = {tuple(row[:prompt].tolist()) for row in held.tokens}
    keep = [number for number, row in enumerate(windows.tokens) if tuple(row[:prompt].tolist()) not in known]
    return windows.take(np.array(keep, np.int64))


def batch_rows(count: int, batch: int, step: int, seed: int) -> NDArray[np.int64]:  # [batch]
    """Return the windows, out of ``count``, that step ``step`` (from 0) reads.

    Every pass has a different order.  The order depends only on the seed and the step, so a resumed training needs to
    know nothing but its step.
    """
    places = np.arange(step * batch, (step + 1) * batch)
    return np.array([_order(count, seed, int(at // count))[at % count] for at in places], np.int64)


@lru_cache(maxsize=4)
def _order(count: int, seed: int, turn: int) -> NDArray[np.int64]:  # [count]
    return np.random.Generator(np.random.PCG64([seed, 2, turn])).permutation(count)
