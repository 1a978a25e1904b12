"""Choose the heads of a bundle, and the tokens that a cut LM head scores: those most frequent in a text.

Other tokens are never drafted, so q is 0 there and the text does not change.  A head of 8,000 rows instead of 150,000
costs a twentieth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import needing
from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.drafters.heads import CUT, CUT_BIAS, HeadPlan, TrainedHeads, check_heads, read_heads
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, chosen_rows, extended, rows_of
from edgespec.export.source.source import BUILTIN, builtin_heads, resolve_heads
from edgespec.runtimes.files.manifest import HeadVocab
from edgespec.runtimes.text.codec import TextCodec

HEAD_TOKENS = "head_vocab.bin"  # stored with the weights


def frequent_tokens(
    tokens: Sequence[int], size: int, vocab: int, always: Iterable[int], option: str
) -> NDArray[np.int64]:  # [size], ascending
    """Return the ``size`` most frequent tokens; after those of the text the lowest ids, which tokenizers learn first.

    Args:
        always: tokens that must be among them: those that end a text.
        option: for messages, ``--draft-vocab`` or ``--head-vocab``.

    Raises:
        ExportError: a size outside 2 to the vocabulary.
    """
    check_size(size, vocab, option)
    counts = Counter(tokens)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys([*(token for token in always if token < vocab), *frequent, *range(vocab)])
    return np.sort(np.fromiter(chosen, np.int64, size))


def check_size(size: int, vocab: int, option: str) -> None:
    """Refuse a number of tokens that a cut LM head cannot score."""
    if not 2 <= size <= vocab:
        raise ExportError(f"{option} {size}: expected 2 to {vocab}, the model's vocabulary")


def head_vocab(prefix: str, tokens: NDArray[np.int64] | None) -> HeadVocab | None:
    """Name the file of a cut LM head's tokens, int64 [size], in the folder ``prefix``; None = the head is whole."""
    return None if tokens is None else HeadVocab(file=prefix + HEAD_TOKENS, size=len(tokens))


def write_tokens(folder: Path, tokens: NDArray[np.int64] | None) -> None:
    """Write the tokens, int64 [size], of a cut LM head next to the weights; None = the head is whole."""
    if tokens is not None:
        tokens.astype("<i4").tofile(folder / HEAD_TOKENS)


@dataclass(frozen=True)
class HeadChoice:
    """The heads of a bundle."""

    trained: dict[str, TrainedHeads]  # by method
    tokens: NDArray[np.int64] | None = None  # int64 [size], what their cut LM head scores; None = the whole vocabulary
    tapped: tuple[int, ...] = ()  # where a drafter looks at the model

    @property
    def plan(self) -> HeadPlan | None:
        """Heads of the graphs; None = they have none."""
        if not (self.trained or self.tapped):
            return None
        groups = tuple(group for heads in self.trained.values() for group in heads.file.groups)
        return HeadPlan(groups, cut=self.tokens is not None, tapped=self.tapped)

    def extend(self, arch: Architecture) -> None:
        """Add the heads' tensors to the model."""
        extra: dict[str, Extra] = {}
        for heads in self.trained.values():
            for name, tensor in heads.tensors.items():
                own = name.endswith(".lm_head.weight")
                extra[name] = rows_of(tensor, self.tokens) if own and self.tokens is not None else tensor
        if self.tokens is not None:
            extra |= _cut_rows(arch, self.tokens)
        if extra:
            arch.source = ExtendedCheckpoint(arch.source, extra)


def choose_heads(
    model: str, folders: Sequence[str], methods: Sequence[str], arch: Architecture, codec: TextCodec
) -> dict[str, TrainedHeads]:
    """Read and check the heads that the methods need, by method; see ``given_heads``.

    Raises:
        ExportError: missing heads, two of a kind, heads of no wanted method, or of another model.
    """
    found = given_heads(model, folders, methods, read_heads, arch, codec)
    if missing := [kind for kind in needing("heads") if kind in methods and kind not in found]:
        raise ExportError(
            f"method {missing[0]} needs trained heads",
            f"train them with `edgespec train {missing[0]} MODEL -o DIR`, then add --heads DIR",
        )
    return found


def given_heads(
    model: str,
    folders: Sequence[str],
    methods: Sequence[str],
    read: Callable[[Path], TrainedHeads],
    arch: Architecture,
    codec: TextCodec | None,
) -> dict[str, TrainedHeads]:
    """Read heads from folders, and those of an embedded model; a plan (no codec) compares only sizes."""
    found: dict[str, TrainedHeads] = {}
    folders_read = [(name, read(resolve_heads(name))) for name in folders]
    if model.startswith(BUILTIN):
        given = {heads.file.kind for _, heads in folders_read}
        own = [f"{model}-{kind}" for kind in needing("heads") if kind in methods and kind not in given]
        if codec is None:  # a plan assumes what is not trained yet
            own = [name for name in own if name.removeprefix(BUILTIN) in builtin_heads()]
        folders_read += [(name, read(resolve_heads(name))) for name in own]
    for name, heads in folders_read:
        kind = heads.file.kind
        if kind in found:
            raise ExportError(f"{name}: the second {kind} heads: expected one folder of each kind")
        if kind not in methods:
            raise ExportError(f"{name}: holds {kind} heads, but not --method {kind}", f"add --method {kind}")
        check_heads(heads, arch, codec, resolve_heads(name))
        found[kind] = heads
    return found


def cut_draft(draft: Architecture, tokens: NDArray[np.int64]) -> HeadPlan:
    """Leave only some rows, int64 [size], of a draft's LM head."""
    draft.source = extended(draft.source, _cut_rows(draft, tokens))
    return HeadPlan(cut=True, only=True)


def _cut_rows(arch: Architecture, tokens: NDArray[np.int64]) -> dict[str, Extra]:
    """Return the LM head's rows of these tokens, [size], and their biases."""
    source, head = arch.source, arch.head
    found = {CUT: chosen_rows(source, head.weight, tokens, arch.facts.hidden)}
    if (bias := head.bias) is not None:
        found[CUT_BIAS] = Extra(lambda: (len(tokens),), lambda rows, columns: source.read(bias)[tokens][rows])
    return found
