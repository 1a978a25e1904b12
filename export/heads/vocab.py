"""The tokens that a cut LM head scores: those most frequent in a text.

What it leaves out is never guessed, so q is 0 there and the text does not change; a head of 8,000 rows instead of
150,000 costs a twentieth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.runtimes.files.manifest import HeadVocab

HEAD_TOKENS = "head_vocab.bin"  # beside the weights


def frequent_tokens(
    tokens: Sequence[int], size: int, vocab: int, always: Iterable[int], option: str
) -> NDArray[np.int64]:  # [size], ascending
    """The ``size`` most frequent tokens; after those of the text the lowest ids, which tokenizers learn first.

    Args:
        tokens: a text.
        size: how many.
        vocab: of the model.
        always: tokens that must be among them: those that end a text.
        option: for messages, ``--draft-vocab`` or ``--head-vocab``.

    Raises:
        ExportError: a size outside 2 to the vocabulary.
    """
    check_size(size, vocab, option)
    counts = Counter(tokens)
    wanted = list(dict.fromkeys(token for token in always if token < vocab))
    wanted += sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys(wanted)
    for token in range(vocab):
        if len(chosen) >= size:
            break
        chosen[token] = None
    return np.sort(np.fromiter(chosen, np.int64)[:size])


def check_size(size: int, vocab: int, option: str) -> None:
    """Refuse a number of tokens that a cut LM head cannot score.

    Raises:
        ExportError: it is outside 2 to the vocabulary.
    """
    if not 2 <= size <= vocab:
        raise ExportError(f"{option} {size}: expected 2 to {vocab}, the model's vocabulary")


def write_tokens(folder: Path, prefix: str, tokens: NDArray[np.int64]) -> HeadVocab:  # [size]
    """Write the tokens beside the weights; ``prefix``: path of ``folder`` inside the bundle."""
    tokens.astype("<i4").tofile(folder / HEAD_TOKENS)
    return HeadVocab(file=prefix + HEAD_TOKENS, size=len(tokens))
