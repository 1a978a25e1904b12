"""Several drafters asked in turn: the first with something to offer has its proposal verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from edgespec.control.adaptive import Adaptive
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import Pass

_STRIDE = 1 << 20  # bucket = number of the proposer * _STRIDE + its own bucket


class Compose:
    """Asks its proposers in order; the first whose proposal has guesses, or layers already run, wins the round.

    Each proposer may be inside an ``Adaptive`` of its own, which offers only what is predicted to pay: a cheap one must
    then promise more than the costly ones after it, so that a vague guess from the text does not take the place of a
    good draft.  The winner observes the round as it was.  For the others it is a round without guesses whose pending
    token is the last one accepted: row 0 of their pass is that token's, so what they follow (hidden states, their own
    slot) stays right.  One that always runs layers (early exits) belongs at the end.

    A proposer that fails is left out for the rest of the request.

    Args:
        proposers: at least one.

    Attributes:
        won: rounds by proposer.
        failed: why proposers were left out, by name.
    """

    name = "chain"

    def __init__(self, proposers: Sequence[Drafter]) -> None:
        if not proposers:
            raise ValueError("expected at least one proposer, got none")
        self.proposers = list(proposers)
        self.wants_hidden = any(getattr(proposer, "wants_hidden", False) for proposer in proposers)
        self.trees = any(getattr(proposer, "trees", False) for proposer in proposers)
        self.won = [0] * len(proposers)
        self.failed: dict[str, str] = {}
        self.proposer = self.name  # of the last proposal, for statistics
        self._out: set[int] = set()
        self._took = [0.0] * len(proposers)  # milliseconds of each in this round

    def bind(self, params: SamplingParams, noise: Noise) -> None:
        """Pass on how this request samples; every proposer is in again."""
        self._out, self.failed = set(), {}
        for at, proposer in enumerate(self.proposers):
            if bind := getattr(proposer, "bind", None):
                try:
                    bind(params, noise)
                except Exception as error:
                    self._leave_out(at, error)

    def begin(self, tokens: list[int]) -> None:
        """Pass the prompt on."""
        for at, proposer in self._in():
            if begin := getattr(proposer, "begin", None):
                try:
                    begin(tokens)
                except Exception as error:
                    self._leave_out(at, error)

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """The first proposal; its bucket says whose it is."""
        self._took = [0.0] * len(self.proposers)
        for at, proposer in self._in():
            start = perf_counter()
            try:
                if isinstance(proposer, Adaptive):
                    proposer.floor = self._bar(at, budget)
                proposal = proposer.propose(tokens, budget)
            except Exception as error:
                self._leave_out(at, error)
                continue
            finally:
                self._took[at] = 1000 * (perf_counter() - start)
            if len(proposal) or proposal.resume is not None:
                self.won[at] += 1
                self.proposer = str(getattr(proposer, "proposer", proposer.name))
                return replace(proposal, bucket=at * _STRIDE + proposal.bucket)
        return EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Pass) -> None:
        """The winner learns from its proposal; the others learn where the text has gone."""
        winner, bucket = self._whose(proposal)
        last = verdict.path[-1] + 1 if len(verdict.path) else 0
        elsewhere = Verdict((), verdict.next_token)
        for at, proposer in self._in():
            try:
                if at == winner:
                    proposer.observe(replace(proposal, bucket=bucket), verdict, output)
                else:
                    proposer.observe(EMPTY, elsewhere, _row(output, last))
            except Exception as error:
                self._leave_out(at, error)

    def timed(self, proposal: Proposal, draft_ms: float, verify_ms: float) -> None:
        """Everyone learns what the pass took; time spent on looking belongs to whoever looked.

        A pass that began while drafting says nothing to the others.
        """
        winner, bucket = self._whose(proposal)
        for at, proposer in self._in():
            try:
                if at == winner:
                    own = replace(proposal, bucket=bucket)
                    if timed := getattr(proposer, "timed", None):
                        timed(own, self._took[at], verify_ms)
                elif proposal.resume is not None:
                    continue
                elif watched := getattr(proposer, "watched", None):
                    watched(len(proposal) + 1, self._took[at], verify_ms)
                elif timed := getattr(proposer, "timed", None):
                    timed(EMPTY, self._took[at], verify_ms)
            except Exception as error:
                self._leave_out(at, error)

    # -- saying it ---------------------------------------------------------------------------------------------------

    @property
    def reason(self) -> str:
        """What became of every proposer, in words."""
        words = []
        for proposer, won in zip(self.proposers, self.won, strict=True):
            why = self.failed.get(proposer.name) or getattr(proposer, "reason", "")
            words.append(f"{proposer.name} won {won} rounds" + (f" ({why})" if why else ""))
        return "; ".join(words)

    def used_summary(self) -> dict[str, object]:
        """Counts by proposer, for JSON; the keys are stable."""
        found: dict[str, object] = {}
        for proposer, won in zip(self.proposers, self.won, strict=True):
            summary: dict[str, object] = getattr(proposer, "used_summary", dict)()
            found[proposer.name] = {"won": won, "failed": self.failed.get(proposer.name)} | summary
        return found

    # -- parts -------------------------------------------------------------------------------------------------------

    def _in(self) -> list[tuple[int, Drafter]]:
        return [(at, proposer) for at, proposer in enumerate(self.proposers) if at not in self._out]

    def _leave_out(self, at: int, error: Exception) -> None:
        self._out.add(at)
        self.failed[self.proposers[at].name] = f"left out: {type(error).__name__}: {error}"

    def _whose(self, proposal: Proposal) -> tuple[int, int]:
        """(number of the proposer, its own bucket); nobody's is -1."""
        if not len(proposal) and proposal.resume is None:
            return -1, 0
        return divmod(proposal.bucket, _STRIDE)

    def _bar(self, at: int, budget: int) -> float:
        """The speed that the costly proposers after this one promise; 1 = plain decoding's."""
        later = [self.proposers[i] for i in range(at + 1, len(self.proposers)) if i not in self._out]
        return max((other.promised(budget) for other in later if isinstance(other, Adaptive)), default=1.0)


def _row(output: Pass, row: int) -> Pass:
    """The pass as if it had been over this row alone."""
    at = slice(row, row + 1)
    best = None if output.best is None else (output.best[0][at], output.best[1][at])
    return Pass(output.logits[at], None if output.hidden is None else output.hidden[at], best)
