"""The merges of a BPE tokenizer: as a GGUF file lists them, or from the scores of a SentencePiece vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError

Merges = list[tuple[str, str]]


def split_merges(file: Path, merges: Any) -> Merges:
    """``"left right"`` strings as pairs, in the order of their ranks.

    Raises:
        ExportError: none, or one without a space.
    """
    if not isinstance(merges, list):
        raise ExportError(
            f"{file}: has no tokenizer.ggml.merges", "put the model's tokenizer.json beside the file: it is then used"
        )
    pairs = [(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ExportError(f"{file}: a merge of its tokenizer is not two tokens", "download it again")
    return pairs


def sentencepiece_merges(tokens: Sequence[str], ranks: Sequence[float], usable: Sequence[bool]) -> Merges:
    """The merges of a SentencePiece BPE vocabulary, which has none of its own: at every step it joins the two pieces
    that make the best token, so every way to cut a token into two tokens is a merge, ranked as the token is.

    Args:
        tokens: by id. ranks: of each token, the lowest first. usable: whether text can become it.
    """
    number = {token: at for at, token in enumerate(tokens) if usable[at]}
    found: list[tuple[float, int, int, int]] = []
    for token, at in number.items():
        for cut in range(1, len(token)):
            left, right = number.get(token[:cut]), number.get(token[cut:])
            if left is not None and right is not None:
                found.append((ranks[at], at, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(found)]
