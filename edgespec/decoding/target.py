"""The contract between decoding and a model: what the loop and the drafters may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest


@dataclass(frozen=True)
class SkipSet:
    """What a self-draft leaves out: sub-layers, attention and MLP apart, and low planes of int8 weights.

    Where a target has no planes (its attribute ``planes``), naming them, or rows of the head, changes nothing.  A pass
    with ``head_rows`` gives as many logits.
    """

    attention: tuple[int, ...] = ()  # layers whose attention is skipped, ascending
    mlp: tuple[int, ...] = ()  # layers whose MLP is skipped, ascending
    high_attention: tuple[int, ...] = ()  # layers of whose attention only the high planes are read, ascending
    high_mlp: tuple[int, ...] = ()  # the same of the MLP, or of the chosen experts
    high_head: bool = False  # the same of the LM head and of what leads from the layers to it
    head_rows: int = 0  # tokens, the first of the vocabulary, that the LM head scores; 0 = all

    def __len__(self) -> int:
        return len(self.attention) + len(self.mlp)

    @classmethod
    def all_high(cls, layers: int) -> SkipSet:
        """Read the high planes alone, of everything."""
        every = tuple(range(layers))
        return cls(high_attention=every, high_mlp=every, high_head=True)

    @classmethod
    def every_other(cls, layers: int) -> SkipSet:
        """Leave out every other layer, but for the first and the last (arXiv 2410.06916)."""
        odd = tuple(range(1, layers - 1, 2))
        return cls(odd, odd)


@dataclass
class Heads:
    """What a group of heads says of r rows.  Views of the runner's buffers, like a ``Pass``."""

    # float32 [count, r, size] over the heads' vocabulary ``tokens``; None where the best were asked for
    logits: NDArray[np.float32] | None
    tokens: NDArray[np.int64] | None = None  # int64 [size], the token of each column; None = column i is token i
    # (int64 [count, r, top], float32 [count, r, top]): tokens and their logits, the best first
    best: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    # float32 [count, r], the probability of the best; where the target chooses by itself (``DRAFT_BEST``)
    chance: NDArray[np.float32] | None = None


@dataclass
class Pass:
    """The output of one pass.

    The arrays are views of the runner's buffers: valid until the next pass over the same model.
    """

    # float32 [r, vocab], one row per requested row; no rows where only the best was asked for
    logits: NDArray[np.float32]
    # float32 [n, hidden], the residual stream of every row after the last layer, before the final norm; where the
    # target was told to keep it (``Target.keep_hidden``), else None
    hidden: NDArray[np.float32] | None = None
    # (int64 [r], float32 [r]): the likeliest token of each row and its logit, where only that was asked for
    best: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    chance: NDArray[np.float32] | None = None  # float32 [r], its probability; where the target chooses by itself
    # float32 [n, k * hidden], auxiliary hidden states: the residual stream after some layers, joined; where the
    # target was told to keep them (``Target.keep_aux_hidden``)
    aux_hidden: NDArray[np.float32] | None = None
    share: float = 1.0  # of the model's layers that it ran
    ms: float = 0.0  # measured by the caller that runs it
    other_rows: int = 0  # rows of other requests in the same run


AuxHiddenSink = Callable[
    [int, NDArray[np.float32]], None
]  # first row, and states [n, k * hidden] of it and the next ones
Ids = NDArray[np.int64]
Rows = NDArray[np.float32]

# what a target may have beside its own passes: see ``Target.can``
BEST, DRAFT_BEST, HYPOTHESES = "best", "draft best", "hypotheses"


class Runner(Protocol):
    """Runs a pass."""

    def forward(self, tokens: Ids, parents: Ids | None = None, best: bool = False) -> Pass:
        """See ``Target.forward``."""


class Target:
    """A model with one KV slot.  ``tokens`` is what the slot holds; the caller's token list is the truth.

    In strict mode a row has the same bits in every pass, whatever stands beside it; the caller cannot see how.

    Attributes:
        vocab_size: of its logits.
        context: most tokens (prompt + new) one sequence may have.
        layers: of the model.
        tokens: committed tokens whose KV the slot holds.
        can: ``BEST``: say the likeliest tokens without writing all logits; ``DRAFT_BEST``: the same of draft passes,
            where logits are not worth the way to the host; ``HYPOTHESES``: ``forward_hypotheses``.
        trees: whether the rows of a pass may form a tree.
        exact_trees: whether each then has the bits that it has in a chain of its ancestors.
        planes: whether a ``SkipSet`` that names high planes changes a pass.
        stateful: more is left of a text than can be cut back.
        revocable: whether ``follow`` may take back what was kept, as of a draft's guesses.
        keep_hidden: fill ``Pass.hidden`` from now on.
        keep_aux_hidden: fill ``Pass.aux_hidden`` from now on.
        aux_hidden_sink: called for every chunk of a prefill; views, valid during the call.
    """

    vocab_size: int
    context: int
    layers: int = 1
    tokens: list[int]
    can: frozenset[str] = frozenset()
    trees, exact_trees = True, False
    planes = stateful = revocable = False
    keep_hidden = keep_aux_hidden = False
    aux_hidden_sink: AuxHiddenSink | None = None

    # -- the text ------------------------------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int]) -> int:
        """Crop the slot to its longest common prefix with ``tokens``; returns how many tokens stay."""
        raise NotImplementedError

    def crop(self, length: int) -> int:
        """Forget the tokens behind the first ``length``; returns how many stay, fewer where states go back further."""
        raise NotImplementedError

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the slot, in chunks, without computing logits."""
        raise NotImplementedError

    def forward(self, tokens: Ids, parents: Ids | None = None, best: bool = False) -> Pass:
        """Run rows after the slot's tokens; logits of every row.  They are not part of the slot until ``keep``.

        ``tokens``: int64 [n], the pending token and its proposal; ``parents``: int64 [n], parent row of each row, -1
        for row 0; None = a chain; ``best``: fill ``Pass.best`` instead of the logits, where it ``can``.
        """
        raise NotImplementedError

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last forward (ascending, a root path) and forget the others."""
        raise NotImplementedError

    # -- drafting for itself -------------------------------------------------------------------------------------------

    def forward_draft(self, tokens: Ids, offset: int = 0, skip: SkipSet | None = None, best: bool = False) -> Pass:
        """Run a chain of draft rows, int64 [n], with sub-layers left out -> logits of the LAST row only, [1, vocab].

        They stand ``offset`` rows after the slot's tokens: so many of the draft have run, whose approximate KV is
        read. Nothing is committed: the next ``forward`` overwrites whatever this wrote.  ``best``: fill ``Pass.best``
        and ``chance`` instead, where it can (``DRAFT_BEST``).
        """
        raise self._lacks("passes that leave layers out")

    def forward_hypotheses(self, tokens: Ids, visible: Ids, parents: Ids, skip: SkipSet | None = None) -> Pass:
        """Run rows that each continue some beginning of the slot's text -> logits of all, [n, vocab].

        Args:
            tokens: the rows.
            visible: how many of the slot's tokens a row sees; the same along a chain.
            parents: an earlier row that a row continues, -1: the slot's text; its position is ``visible`` + depth.
            skip: sub-layers to leave out.

        Nothing is committed.
        """
        raise self._lacks("hypotheses about its own text")

    # -- parts of the model --------------------------------------------------------------------------------------------

    def forward_heads(self, group: str, hidden: Rows, top: int = 0) -> Heads:
        """Compute a group of heads over ``hidden`` float32 [r, hidden], a residual stream before the final norm.

        ``top``: 0 = all logits, else only the best so many tokens of each row.  Nothing of the slot changes.
        """
        raise self._lacks("heads")

    def forward_layers(self, rows: Ids | Rows, offset: int, first: int, last: int) -> Rows:
        """Run layers ``first`` to ``last`` (exclusive) over a chain of rows -> float32 [n, hidden], a copy.

        ``rows``: int64 [n] tokens where ``first`` is 0, else float32 [n, hidden]: the residual stream before
        ``first``.  The first stands ``offset`` after the slot's tokens.  Their keys and values of these layers are in
        the cache afterwards; nothing is committed.
        """
        raise self._lacks("hidden states")

    def forward_from(self, tokens: Ids, hidden: Rows, layer: int, best: bool = False) -> Pass:
        """Run the layers from ``layer`` on, as ``forward`` of a chain does whose first layers have run.

        ``tokens``: int64 [n], the pending token and its guesses; ``hidden``: float32 [n, hidden], the residual stream
        of every row before ``layer``, with whose keys and values in the cache (``forward_layers``); ``best``: as for
        ``forward``.
        """
        raise self._lacks("hidden states")

    def embed(self, tokens: Ids) -> Rows:
        """Look up the residual stream of tokens [n] before the first layer -> float32 [n, hidden], a copy."""
        raise self._lacks("hidden states")

    def _lacks(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"expected a target with {what}, and this one has none", "use another method")


_BLOCK = 256  # tokens that are compared at once


def common_prefix(first: Sequence[int], second: Sequence[int], known: int = 0) -> int:
    """Length of the longest common prefix of two token lists, of which the first ``known`` are not looked at."""
    limit = min(len(first), len(second))
    same = min(known, limit)
    while same < limit and first[same : same + _BLOCK] == second[same : same + _BLOCK]:
        same += _BLOCK  # the last one may be shorter
    same = min(same, limit)
    while same < limit and first[same] == second[same]:
        same += 1
    return same
