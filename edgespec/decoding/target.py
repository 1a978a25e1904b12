"""The contract between decoding and a model: a pass, what it gives, and the target that runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]


@dataclass(frozen=True)
class SkipSet:
    """Sub-layers that a self-draft skips, attention and MLP separately, and low planes of int8 weights.

    If a target has no planes (its attribute ``planes``), naming them, or rows of the head, changes nothing.  A pass
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
        """Read only the high planes, of everything."""
        every = tuple(range(layers))
        return cls(high_attention=every, high_mlp=every, high_head=True)

    @classmethod
    def every_other(cls, layers: int) -> SkipSet:
        """Skip every other layer, except the first and the last (arXiv 2410.06916)."""
        odd = tuple(range(1, layers - 1, 2))
        return cls(odd, odd)


class Pass(NamedTuple):
    """One pass of a model: its rows, the parts of the model that run over them, and what is wanted of them.

    By default, the rows are a chain after the slot's text that runs through the whole model and waits for
    ``Target.keep``.  A tuple, because every round makes one: a frozen dataclass takes four times as long.
    """

    tokens: Ids | None = None  # int64 [n]; None: the rows begin with ``inputs`` alone
    parents: Ids | None = None  # int64 [n], an earlier row that a row continues, -1: the slot's text; None = a chain
    # the likeliest tokens of each row that ``Output.best`` is to give, of the LM head one; 0 = all logits
    top: int = 0
    hidden: bool = False  # whether ``Output.hidden`` is wanted
    aux_hidden: bool = False  # whether ``Output.aux_hidden`` is wanted
    scored: int | None = None  # rows, the last ones, that reach the LM head or the heads; None = all
    read: bool = False  # the rows, a chain, are part of the slot at once, without ``keep``
    draft: bool = False  # nothing is kept: the next pass overwrites it, and a coarser copy of the keys will do
    offset: int = 0  # rows of earlier passes, after the slot's text and not kept, that these rows continue
    fused: bool = False  # ``inputs`` are a target's hidden states, which a drafter fuses before its layers
    layers: tuple[int, int] | None = None  # the first layer to run, and the one after the last; None = all
    skip: SkipSet | None = None  # what is left out
    group: str = ""  # heads, by name, that run instead of layers and LM head; nothing of the slot changes
    block: bool = False  # every row sees all others
    # int64 [n], tokens of the slot's text that each row sees, and no row is kept; None = all
    visible: Ids | None = None
    inputs: Rows | None = None  # float32 [n, columns]: what the layers read instead of the tokens' embeddings
    of: Target | None = None  # a slot whose keys and values are read, as far as they are ``visible``, not this one's
    adapters: Ids | None = None  # int64 [n], the number of each row's LoRA adapter, 0 = none; None = the slot's

    @property
    def whole(self) -> bool:
        """Whether it is a pass of rows through the whole model, as every round runs."""
        plain = self.inputs is None and self.visible is None and self.of is None and self.adapters is None
        return plain and self[5:14] == _WHOLE


_WHOLE = Pass()[5:14]


@dataclass(slots=True)
class Output:
    """Output of a pass.  Arrays are views of the model's buffers: valid until the next pass over the same model."""

    # float32 [rows, vocab] of the rows that were scored; of a group of heads [count, rows, size].  Where only the best
    # were wanted, there may be no rows.
    logits: Rows
    # float32 [n, hidden], the residual stream of every row after the last layer that ran, before the final norm
    hidden: Rows | None = None
    # (int64 [rows], float32 [rows]): the likeliest token of each row and its logit; of heads [count, rows, top] each,
    # the best first
    best: tuple[Ids, Rows] | None = None
    # float32 [rows], of heads [count, rows]: the probability of the best; where the target chooses (``DRAFT_BEST``)
    chance: Rows | None = None
    # float32 [n, k * hidden], auxiliary hidden states: the residual stream after some layers, joined
    aux_hidden: Rows | None = None
    tokens: Ids | None = None  # int64 [size], of heads: the token of each column; None = column i is token i
    share: float = 1.0  # of the model's layers that ran
    ms: float = 0.0  # measured by the caller that runs the pass
    other_rows: int = 0  # rows of other requests in the same run
    waited_ms: float = 0.0  # for weights that the run read from a disk
    read: float = 0.0  # bytes that those were


EMBEDDING = "embedding"  # the group that looks tokens up
# abilities of a target besides fields of a pass: see ``Target.can``
BEST, DRAFT_BEST = "best", "draft best"
HYPOTHESES = "visible"
# fields of a pass that not every target takes, and what they stand for
OPTIONAL = {
    "parents": "trees of rows",
    "hidden": "hidden states",
    "aux_hidden": "auxiliary hidden states",
    "scored": "logits of some rows",
    "read": "rows that are kept at once",
    "draft": "drafts by the target itself",
    "offset": "rows after those of an earlier pass",
    "visible": "hypotheses about its own text",
    "inputs": "rows that begin with hidden states",
    "fused": "hidden states of another model",
    "layers": "passes over some of its layers",
    "skip": "passes that leave layers out",
    "group": "heads",
    "block": "blocks of rows that see each other",
    "of": "passes over the keys and values of another slot",
    "adapters": "LoRA adapters that are added row by row",
}


class Target:
    """A model with one KV slot.  ``tokens`` are those that the slot holds; the caller's token list is authoritative.

    In strict mode a row has the same bits in every pass, regardless of the other rows; the caller need not know how.

    Attributes:
        vocab_size: of its logits.
        context: maximum tokens (prompt + new) of one sequence.
        layers: of the model.
        tokens: committed tokens whose KV the slot holds.
        can: the fields of a ``Pass`` that it supports, of those in ``OPTIONAL``; and ``BEST``: it returns the likeliest
            tokens without writing all logits; ``DRAFT_BEST``: the same for draft passes, if copying logits to the host
            costs too much.
        exact_trees: whether the rows of a tree each have the bits that they have in a chain of their ancestors.
        planes: whether a ``SkipSet`` that names high planes changes a pass.
        stateful: whether it has states that cannot be cropped to any length.
        revocable: whether ``follow`` may take back kept tokens, such as a draft's own.
    """

    vocab_size: int
    context: int
    layers: int = 1
    tokens: list[int]
    can: frozenset[str] = frozenset({"parents"})
    exact_trees = planes = stateful = revocable = False

    # -- the text ------------------------------------------------------------------------------------------------------

    def follow(self, tokens: Sequence[int]) -> int:
        """Crop the slot to its longest common prefix with ``tokens``; returns how many tokens stay."""
        raise NotImplementedError

    def crop(self, length: int) -> int:
        """Forget the tokens after the first ``length``; returns how many remain, fewer if states go back further."""
        raise NotImplementedError

    def read(self, tokens: Sequence[int], aux_hidden: bool = False) -> Iterator[Output]:
        """Append ``tokens`` to the slot, in chunks, without logits -> what the pass over each chunk gave.

        ``aux_hidden``: give the auxiliary hidden states, where it can.
        """
        raise NotImplementedError

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the slot."""
        for _ in self.read(tokens):
            pass

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass (ascending, a root path) and forget the others."""
        raise NotImplementedError

    # -- a pass --------------------------------------------------------------------------------------------------------

    def run(self, wanted: Pass) -> Output:
        """Run a pass.

        Raises:
            InvalidRequest: it asks for what the target cannot do (``check``).
        """
        raise NotImplementedError

    def check(self, wanted: Pass) -> None:
        """Refuse a pass with a field that this target does not take, or over layers that it has not."""
        for at, usual in self._lacking:
            if wanted[at] is not usual:
                raise self.lacks(Pass._fields[at])
        if wanted.layers is not None and not 0 <= wanted.layers[0] <= wanted.layers[1] <= self.layers:
            first, last = wanted.layers
            raise InvalidRequest(f"layers {first} to {last}: expected a range within 0 to {self.layers}")
        if wanted.layers is not None and wanted.layers[0] and wanted.inputs is None:
            raise InvalidRequest(f"layers from {wanted.layers[0]} on: expected the hidden states before them, got none")

    @cached_property
    def _lacking(self) -> list[tuple[int, object]]:
        """Name the fields that it does not take, and their values in a pass that does not ask for them."""
        return [
            (at, value)
            for at, value in enumerate(Pass())
            if (name := Pass._fields[at]) in OPTIONAL and name not in self.can
        ]

    def lacks(self, field: str) -> InvalidRequest:
        """Make the error of a pass whose ``field`` it does not take."""
        return InvalidRequest(f"expected a target with {OPTIONAL[field]}, and this one has none", "use another method")

    @property
    def trees(self) -> bool:
        """Whether the rows of a pass may form a tree."""
        return "parents" in self.can

    def forward(self, tokens: Ids, parents: Ids | None = None, best: bool = False) -> Output:
        """Run rows after the slot's text; ``best``: only the likeliest token of each is wanted."""
        return self.run(Pass(tokens, parents, int(best)))

    def embed(self, tokens: Ids) -> Rows:
        """Look up the residual stream of tokens [n] before the first layer -> float32 [n, hidden], a copy."""
        hidden = self.run(Pass(tokens, hidden=True, scored=0, group=EMBEDDING)).hidden
        assert hidden is not None
        return hidden.copy()


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
