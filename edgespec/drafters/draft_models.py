"""Build the drafter of a bundle's draft model, with the target's tokenizer or another one."""

from __future__ import annotations

from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import Target
from edgespec.drafters.other_tokenizer import OtherTokenizer
from edgespec.drafters.registry import Parts
from edgespec.drafters.speculative import Speculative
from edgespec.runtimes.files.manifest import MethodPart
from edgespec.runtimes.text.translation import Translation


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Speculative:
    """Draft by the bundle's draft model."""
    slot = parts.draft("draft")
    return drafter_of(slot, parts.target.vocab_size, slot.model.translation, options.branch, part.head_rows or 0)


def drafter_of(
    model: Target,
    vocab: int,
    translation: Translation | None = None,
    branch: tuple[int, ...] | None = None,
    head_rows: int = 0,
) -> Speculative:
    """Draft by a model.

    Args:
        model: the draft.
        vocab: tokens of the target.
        translation: if the draft has another tokenizer.
        branch, head_rows: see ``Speculative``; a draft with another tokenizer always has its whole head.
    """
    if translation is not None:
        return OtherTokenizer(model, translation, branch)
    return Speculative(model, vocab, branch, head_rows)
