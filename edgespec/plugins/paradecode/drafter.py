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
from edgespec.decoding.target import DRAFT_BEST, Output, Pass, Target
from edgespec.decoding.text import Prefix
from edgespec.drafters.registry import Parts
from edgespec.drafters.sampling_drafts import Draw, DrawingDrafter
from edgespec.errors import EdgespecError
from edgespec.runtimes.files.manifest import MethodPart

_THRESHOLD = 0.6  # of a bundle that names none; the paper finds .4 to .9 about equal
_MOST = 8  # tokens in flight


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

    def rest(self, whole: Pass) -> Pass:
        """Leave out the layers that the last proposal ran."""
        assert self._hidden is not None
        assert whole.tokens is not None
        rows = self._hidden[: len(whole.tokens)]
        return whole._replace(inputs=rows, layers=(self.exits[-1], self.target.layers))

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
                fed = None if row is None else np.concatenate([*together, row])  # [n, hidden]
                first = newest + 1 - (1 if fed is None else len(fed))
                out = self._run_layers([tokens[-1], *guesses][first:], first, fed, edges[at], edges[at + 1])
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

    def _run_layers(
        self, tokens: Sequence[int], offset: int, rows: NDArray[np.float32] | None, first: int, last: int
    ) -> NDArray[np.float32]:
        """Run layers over tokens [n] from what the layers before gave of them -> [n, hidden], a copy."""
        part, ids = (first, last), np.array(tokens, np.int64)
        output = self.target.run(Pass(ids, hidden=True, scored=0, offset=offset, inputs=rows, layers=part))
        assert output.hidden is not None
        return output.hidden.copy()

    def _run_exit(self, at: int, row: NDArray[np.float32], top: int) -> Output:
        """Ask an exit about a row [1, hidden]."""
        return self.target.run(Pass(inputs=row, top=top, group=f"exit.{self.exits[at]}"))

    def _ask(
        self, at: int, row: NDArray[np.float32], how: Draw, guesses: list[int], probs: list[NDArray[np.float64]]
    ) -> bool:
        """Compute an exit for the newest row, [1, hidden]; if it is confident, add its token."""
        params, choosing = how.params, DRAFT_BEST in self.target.can
        best_will_do = choosing and params.plain_greedy
        found = self._run_exit(at, row, int(best_will_do))
        if best_will_do:
            assert found.best is not None
            assert found.chance is not None
            best, chance = int(found.best[0][0, 0, 0]), float(found.chance[0, 0])
        else:
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
            logits[found.tokens] = found.logits[0, 0]
        prefix = Prefix(how.tokens, guesses)
        choice = support(logits, params, prefix)
        guesses.append(choice.draw(how.noise, len(prefix), how.stream))
        if params.rejects:
            q = np.zeros(self.vocab)
            q[choice.ids] = choice.probs()
            probs.append(q)
        return True

    def benchmark_step(self, first: bool = False) -> bool:
        if first:
            return False
        self._run_exit(0, self._run_layers([0], 0, None, 0, self.exits[0]), 0)
        return True


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> ParaDecode:
    """Use the exits and the threshold that export found best, unless the request names others."""
    exits = [group.layer for group in parts.manifest.target.heads if group.name in part.heads]
    threshold = options.threshold if options.threshold is not None else part.threshold
    return ParaDecode(parts.target, sorted(exits), _THRESHOLD if threshold is None else threshold)
