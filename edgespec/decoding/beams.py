"""Beam search: several texts at once, the likeliest of which continue (Graves, arXiv 1211.3711; Wu et al., 1609.08144).

Scores, length penalty and ends are those of Hugging Face transformers, so that the text is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.declared import Range, check, count, number, setting
from edgespec.decoding.sampling import SamplingParams, adjusted, best_of, not_finite
from edgespec.errors import InvalidRequest

_NEVER = np.float32(-1e9)  # the score of a token that is excluded
MOST_BEAMS = 64


def _early(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


@dataclass(frozen=True)
class BeamOptions:
    """How beams are searched; a value outside its range is an ``InvalidRequest``.  None = as the model has it."""

    beams: int = setting(4, count(1, MOST_BEAMS), "texts that are searched at once")
    length_penalty: float | None = setting(
        None,
        number("a number from -100 to 100", -100, 100),
        "beams: a text's score is its log-probability over its length to this power; else the model's own, or 1",
        set=float,
    )
    # True: it ends when as many texts as beams are finished; False: when none that continues can, at its length, be
    # better than the worst of them; "never": nor at any length
    early_stopping: bool | Literal["never"] | None = setting(
        None,
        Range("true, false or never", lambda value: value in (True, False, "never")),
        "beams: true, false or never, when a search ends; else the model's own, or false",
        set=_early,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Beam:
    """A text, and the sum of its tokens' log-probabilities; of a finished one over its length penalty."""

    tokens: tuple[int, ...]
    score: np.float32
    finished: bool = False


@dataclass
class BeamSearch:
    """A search, step by step: the caller runs the model and passes ``step`` the logits after the running texts."""

    begin: Sequence[int]  # tokens that all texts begin with
    options: BeamOptions
    sampling: SamplingParams  # bias, penalties and constraint; temperature and what follows it play no part
    eos: Collection[int]  # tokens that end a text
    longest: int  # tokens that a text may come to have, its beginning included
    counted: int = 1  # tokens of the beginning that the length penalty does not count
    going: list[Beam] = field(init=False)  # the running texts, the best first
    parents: list[int] = field(init=False, default_factory=list)  # which of those before each of them continues
    done: list[Beam] = field(init=False)  # the best finished texts, the best first; at most as many as beams
    over: bool = field(init=False, default=False)
    _improves: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        if not 0 < len(self.begin) < self.longest:
            raise InvalidRequest(f"beams of {self.longest} tokens, {len(self.begin)} of them given: expected more")
        first = tuple(self.begin)
        self.going = [Beam(first, np.float32(0))]
        self.done = [Beam(first, _NEVER)] * self.options.beams

    @property
    def _penalty(self) -> float:
        return 1.0 if self.options.length_penalty is None else self.options.length_penalty

    @property
    def _full(self) -> bool:
        return self.options.early_stopping is True and all(beam.finished for beam in self.done)

    @property
    def best(self) -> Beam:
        """The best finished text, or before there is one the best running text."""
        return self.done[0] if self.done[0].finished else self.going[0]

    def step(self, logits: NDArray[np.float32]) -> None:
        """Continue the running texts by one token.

        Args:
            logits: float32 [running texts, vocab], the model's rows after them.

        Raises:
            EdgespecError: NaN or infinity.
        """
        beams, length = self.options.beams, len(self.going[0].tokens) + 1
        scores = np.stack([self._scores(beam, row) for beam, row in zip(self.going, logits, strict=True)])
        kept = max(2, 1 + len(self.eos)) * beams
        flat = scores.ravel()
        order = best_of(flat, kept)
        vocab = scores.shape[1]
        found = [(int(at) // vocab, int(at) % vocab, flat[at]) for at in order]
        ends = [token in self.eos or length >= self.longest for _, token, _ in found]
        going = [item for item, ended in zip(found, ends, strict=True) if not ended][:beams]
        self._finish(found[:beams], ends, length)
        if not going:
            self.over = True
            return
        self.parents = [parent for parent, _, _ in going]
        self.going = [Beam((*self.going[parent].tokens, token), score) for parent, token, score in going]
        self._improves = self._improves and self._can_improve(length)
        self.over = not self._improves or self._full

    def _scores(self, beam: Beam, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [vocab]: the scores of a text with each token after it."""
        shifted = row - row.max()
        chances = shifted - np.log(np.exp(shifted).sum(dtype=np.float32))
        if not np.isfinite(chances).any():
            raise not_finite()
        constraint = self.sampling.constraint
        if constraint is not None and (forced := constraint.forced(beam.tokens, 1)):  # costs nothing
            chances[:] = -np.inf
            chances[forced[0]] = 0
        else:
            chances = adjusted(chances, self.sampling, beam.tokens)
        return np.asarray(chances + beam.score, np.float32)

    def _finish(self, found: Sequence[tuple[int, int, np.float32]], ends: Sequence[bool], length: int) -> None:
        """Keep the best continuations that end a text."""
        if self._full or not self._improves:
            return
        power = np.float32((length - self.counted) ** self._penalty)
        for (parent, token, score), ended in zip(found, ends, strict=False):
            if ended:
                self.done.append(Beam((*self.going[parent].tokens, token), np.float32(score / power), True))
        self.done = sorted(self.done, key=lambda beam: -beam.score)[: self.options.beams]

    def _can_improve(self, length: int) -> bool:
        """Whether a running text may still become better than the worst finished one."""
        never = self.options.early_stopping == "never" and self._penalty > 0
        hoped = (self.longest if never else length) - self.counted
        best = self.going[0].score / np.float32(hoped**self._penalty)
        return not all(beam.finished for beam in self.done) or bool(best > self.done[-1].score)
