"""Checkpoints of states: copies at chosen lengths of a text, because a state cannot be cropped.

A text that is cropped to before the states is read again from the last checkpoint that is still a prefix of it.  A
checkpoint holds the matrices, and only the rows of the ring that the next tokens see; keys and values stay in the
cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.files.formats import CHECKPOINTS, STATE_ROWS
from edgespec.runtimes.files.kv import state_bytes, state_width
from edgespec.runtimes.files.manifest import ModelFacts

LEAST = 16  # tokens: shorter beginnings are read again as fast
ASKING = 32  # maximum tokens of a template's request for an answer


class Checkpoints:
    """The checkpoints of one slot of a model with states.

    ``most`` are kept: the first one, usually the end of the system prompt, and the newest ones.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._facts, self.most = facts, CHECKPOINTS
        self._kept: dict[int, NDArray[np.float32]] = {}  # by length, ascending

    @property
    def lengths(self) -> list[int]:
        """Tokens of the text at each."""
        return list(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(states.nbytes for states in self._kept.values())

    def take(self, cache: NDArray[np.uint8], tokens: int) -> None:  # [bytes]
        """Copy the states of a cache; they hold exactly ``tokens`` tokens, more than any checkpoint's."""
        self.crop(tokens - 1)
        if tokens < LEAST or not self.most:
            return
        self._kept[tokens] = copy_states(self._facts, cache, tokens)
        self._bound()

    def restore(self, cache: NDArray[np.uint8], most: int) -> int:  # [bytes]
        """Restore the states of the longest checkpoint of at most ``most`` tokens -> its length, or 0 if there is none.

        Later checkpoints are dropped, because the text will continue differently.
        """
        self.crop(most)
        length = max(self._kept, default=0)
        if length:
            put_states(self._facts, cache, length, self._kept[length])
        return length

    def crop(self, most: int) -> None:
        """Forget those of more tokens."""
        self._kept = {length: states for length, states in self._kept.items() if length <= most}

    def share(self, other: Checkpoints, most: int) -> None:
        """Share the checkpoints of another text with the same first ``most`` tokens; they are never written to."""
        self._kept = {length: states for length, states in other._kept.items() if length <= most}
        self._bound()

    def limit(self, most: int) -> None:
        """Keep at most this many from now on."""
        self.most = most
        self._bound()

    def _bound(self) -> None:
        while len(self._kept) > self.most:
            del self._kept[self.lengths[min(1, self.most - 1) if self.most else 0]]


def copy_states(facts: ModelFacts, cache: NDArray[np.uint8], tokens: int) -> NDArray[np.float32]:  # [bytes] -> [n]
    """Copy the part of a cache's states that is read after ``tokens`` tokens, which they hold exactly."""
    rows, rest, seen = *_views(facts, cache), _seen(facts, tokens)
    cut = len(rows) * len(seen) * rows.shape[2]
    made = np.empty(cut + rest.size, np.float32)
    made[:cut].reshape(len(rows), len(seen), -1)[:] = rows[:, seen]
    made[cut:].reshape(rest.shape)[:] = rest
    return made


def put_states(facts: ModelFacts, cache: NDArray[np.uint8], tokens: int, saved: NDArray[np.float32]) -> bool:
    """Restore the states that ``copy_states`` saved at ``tokens`` tokens -> whether the size is right."""
    rows, rest, seen = *_views(facts, cache), _seen(facts, tokens)
    cut = len(rows) * len(seen) * rows.shape[2]
    if saved.size != cut + rest.size:
        return False
    rows[:, seen] = saved[:cut].reshape(len(rows), len(seen), -1)
    rest[:] = saved[cut:].reshape(rest.shape)
    return True


def _seen(facts: ModelFacts, tokens: int) -> NDArray[np.int64]:  # [at most taps - 1]
    """Rows of the ring that the next token sees."""
    return np.arange(max(0, tokens - facts.taps + 1), tokens) % STATE_ROWS


def _views(facts: ModelFacts, cache: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """View the ring [layers, 144, width], and what else there is of each layer, [layers, numbers]."""
    width = state_width(facts)
    layers = cache[: state_bytes(facts)].view(np.float32).reshape(len(facts.convolutions), -1)
    return layers[:, : STATE_ROWS * width].reshape(-1, STATE_ROWS, width), layers[:, STATE_ROWS * width :]


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
