"""Where a bundle differs from its source whatever its format: rotations chosen once, a text half taken alone."""

from __future__ import annotations

import copy

from edgespec.export.architectures.base import Architecture


def approximations(arch: Architecture) -> list[str]:
    """What differs from the source model whatever the format, in words for ``Result.approximations``."""
    found = [f"text alone: the source model also reads {arch.text_half_of}"] if arch.text_half_of else []
    if short := _short_texts(arch):
        found.append(
            f"the rotation of texts beyond {short} tokens for shorter ones, too: transformers changes it by length"
        )
    return found


def remedies(arch: Architecture) -> list[str]:
    """The same of rotations, for whoever exports: what to do about it."""
    if not (short := _short_texts(arch)):
        return []
    return [
        f"texts of up to {short} tokens come out otherwise than in transformers, because the rotation for longer ones "
        f"serves them, too: --context {short} exports with the one for such texts"
    ]


def as_used_for(arch: Architecture, length: int) -> Architecture:
    """The source as transformers runs it on a text of so many tokens; ``arch`` itself where that is no difference."""
    if length > _short_texts(arch):
        return arch
    made = copy.copy(arch)
    made.facts = arch.facts.model_copy(update={"context": length})
    return made


def _short_texts(arch: Architecture) -> int:
    """The longest texts that transformers rotates otherwise than an export of this context does; 0 = none.

    Transformers takes LongRoPE's short factors up to the length first trained on, and stretches the base of dynamic
    scaling by the text's length beyond the model's limit (``modeling_rope_utils.dynamic_rope_update``).
    """
    lengths = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
    chosen = (one.parameters for one in arch.rotaries.values() if one.parameters["rope_type"] in lengths)
    short = max((int(found[lengths[found["rope_type"]]]) for found in chosen), default=0)
    return short if arch.facts.context > short else 0
