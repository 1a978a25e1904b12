"""Where a prompt may be gone back to: lengths at which a slot keeps a checkpoint of states, which cannot be cropped.

A text that is cropped to before the states is read again from the last checkpoint that is still a prefix of it.  A
checkpoint holds the matrices, and only the rows of the ring that the next tokens see; keys and values stay in the
cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

ASKING = 32  # maximum tokens of a template's request for an answer


def ends_of_turns(tokens: Sequence[int], eos: Collection[int]) -> list[int]:
    """List lengths of a prompt's likely common prefixes with other prompts: its first turn, its last one, or all of it.

    Templates end a turn with a token that also ends an answer.  The part after the last one only asks for the answer,
    and often differs in the next prompt.
    """
    ends = [at for at, token in enumerate(tokens[:-1], 1) if token in eos]
    whole = len(tokens) - 1
    return [*dict.fromkeys((*ends[:1], *ends[-1:], *([whole] if whole - max(ends, default=0) > ASKING else [])))]


def end_of_question(tokens: Sequence[int], eos: Collection[int]) -> int:
    """Length of a prompt without what only asks for an answer: up to its last turn's end, else all of it."""
    least = len(tokens) - ASKING
    return next((at for at in range(len(tokens), max(least, 0), -1) if tokens[at - 1] in eos), len(tokens))
