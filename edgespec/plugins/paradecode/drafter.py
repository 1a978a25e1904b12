"""Early exits whose skipped layers are computed together: AdaDecode / ParaDecode (Wei et al., arXiv 2506.03700).

A token runs the first layers and computes an exit.  If that is confident, its draft token starts immediately as the
next token, and the layers above are deferred.  If not, the token continues to the top, together with the deferred rows
of all tokens before it.  This is one pass over the upper layers, from their stored hidden states, and its logits verify
every draft token.  Nothing runs twice, and keys and values end as in plain decoding.

::

    layers   pending   d1        d2        d3
    upper    [         one pass, all rows          ]  -> verify
    exit     sure: d1  sure: d2  sure: d3  not sure
    lower    run       run       run       run
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.proposal import Proposal
from edgespec.decoding.sampling import support
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.target import DRAFT_BEST, Pass, Runner, Target
from edgespec.decoding.text import Prefix
from edgespec.drafters.draw import Draw, DrawingDrafter
from edgespec.drafters.registry import Parts
from edgespec.errors import EdgespecError
from edgespec.runtimes.files.manifest import MethodPart

_THRESHOLD = 0.6  # of a bundle that names none; the paper finds .4 to .9 about equal
_MOST = 8  # tokens in flight


class Resumed:
    """The pass over a chain whose first ``layer`` layers have run.

    ``hidden``: float32 [n, hidden], the residual stream of its rows before that layer; their keys and values are in the
    cache up to there.  A pass over only the first rows is allowed.
    """

    def __init__(self, target: Target, hidden: NDArray[np.float32], layer: int) -> None:
        self._target, self._hidden, self._layer = target, hidden, layer

    def forward(self, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None, best: bool = False) -> Pass:
        """See ``Target.forward``."""
        output = self._target.forward_from(tokens, self._hidden[: len(tokens)], self._layer, best)
        output.share = 1 - self._layer / self._target.layers
        return output


class ParaDecode(DrawingDrafter):
    """Drafts from early exits, and keeps their layers for verification.

    ``exits``: after how many layers, ascending; ``threshold``: the confidence (largest probability) from which a
    token is drafted; ``most``: maximum tokens in flight, for every budget.
    """

    name = "paradecode"
    runs_ahead = True

    def __init__(self, target: Target, exits: Sequence[int], threshold: float = _THRESHOLD, most: int = _MOST) -> None:
        self.target, self.exits, self.threshold, self.most = target, tuple(exits), threshold, most
        self.vocab = target.vocab_size
        self._hidden: NDArray[np.float32] | None = (
            None  # [n, hidden] of the last proposal's rows, before the last layers
        )

    def through(self, target: Target) -> Runner:
        """Resume after the layers that the last proposal ran."""
        assert self._hidden is not None
        return Resumed(target, self._hidden, self.exits[-1])

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Draft while exits are confident, and keep the hidden states of the rows before the last layers."""
        most, edges = min(budget, self.most), (0, *self.exits)
        segments = len(self.exits)
        # waiting[s]: rows that have run s segments and wait for a row that continues to the top, oldest first
        waiting: list[list[NDArray[np.float32]]] = [[] for _ in range(segments + 1)]  # [1, hidden] each
        guesses: list[int] = []
        probs: list[NDArray[np.float64]] = []  # [vocab] each
        while True:
            newest, at = len(guesses), 0
            row: NDArray[np.float32] | None = None
            sure = False
            while at < segments and not sure:
                together = waiting[at]
                waiting[at] = []
                fed: NDArray[np.int64] | NDArray[np.float32]
                if row is None:
                    fed = np.array([guesses[-1] if guesses else tokens[-1]], np.int64)  # [1]
                else:
                    fed = np.concatenate([*together, row])  # [n, hidden]
                out = self.target.forward_layers(fed, newest + 1 - len(fed), edges[at], edges[at + 1])
                waiting[at + 1] += [out[i : i + 1] for i in range(len(out) - 1)]
                row = out[-1:]
                at += 1
                sure = newest < most and self._ask(at - 1, row, self.how(tokens), guesses, probs)
            assert row is not None
            waiting[at].append(row)
            if not sure:
                break
        self._hidden = hidden = np.concatenate(waiting[segments])
        if not np.isfinite(hidden.sum()):  # else they would be the failure of the target's own pass
            raise EdgespecError("expected finite hidden states to resume from, got NaN or infinity")
        drawn = np.stack(probs) if probs else None  # [n, vocab]
        return Proposal(np.array(guesses, np.int64), None, drawn)

    def _ask(
        self, at: int, row: NDArray[np.float32], how: Draw, guesses: list[int], probs: list[NDArray[np.float64]]
    ) -> bool:
        """Compute an exit for the newest row, [1, hidden]; if it is confident, add its token."""
        params, choosing = how.params, DRAFT_BEST in self.target.can
        best_will_do = choosing and params.plain_greedy
        found = self.target.forward_heads(f"exit.{self.exits[at]}", row, int(best_will_do))
        if best_will_do:
            assert found.best is not None
            assert found.chance is not None
            best, chance = int(found.best[0][0, 0, 0]), float(found.chance[0, 0])
        else:
            assert found.logits is not None
            logits = found.logits[0, 0]  # [size]
            best = int(logits.argmax())
            chance = 1 / float(np.exp(logits - logits[best]).sum()) if np.isfinite(logits[best]) else np.nan
            best = best if found.tokens is None else int(found.tokens[best])
        if not np.isfinite(chance):
            raise EdgespecError("expected finite logits of an exit, got NaN or infinity")
        # confidence is the largest probability, not the sampled token's: otherwise the offer would depend on sampling
        if chance <= self.threshold:
            return False
        if params.plain_greedy:
            guesses.append(best)
            return True
        if found.tokens is not None:
            logits = np.full(self.vocab, -np.inf, np.float32)
            assert found.logits is not None
            logits[found.tokens] = found.logits[0, 0]
        prefix = Prefix(how.tokens, guesses)
        choice = support(logits, params, prefix)
        guesses.append(choice.draw(how.noise, len(prefix), how.stream))
        if params.rejects:
            q = np.zeros(self.vocab)
            q[choice.ids] = choice.probs()
            probs.append(q)
        return True

    def dry_step(self, first: bool = False) -> bool:
        if first:
            return False
        hidden = self.target.forward_layers(np.zeros(1, np.int64), 0, 0, self.exits[0])
        self.target.forward_heads(f"exit.{self.exits[0]}", hidden)
        return True


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> ParaDecode:
    """Use the exits and the threshold that export found best, unless the request names others."""
    exits = [group.layer for group in parts.manifest.target.heads if group.name in part.heads]
    threshold = options.threshold if options.threshold is not None else part.threshold
    return ParaDecode(parts.target, sorted(exits), _THRESHOLD if threshold is None else threshold)
