"""A caller's own proposer: any object that can propose the next tokens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index

import numpy as np

from edgespec.decoding.drafter import HIDDEN, NOTHING, Drafter, DraftRequest
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.proposer import Proposer
from edgespec.decoding.target import Output
from edgespec.errors import InvalidRequest, first_line


class UserDrafter(Drafter):
    """Wraps a caller's proposer.  Its output is checked: an invalid one ends the proposer, not the text."""

    wants = NOTHING

    def __init__(self, proposer: Proposer, vocab: int) -> None:
        self._own, self.vocab = proposer, vocab
        self.name = proposer_name(proposer)
        with _contained():
            self.cheap = bool(getattr(proposer, "cheap", True))
            self._observe = getattr(proposer, "observe", None)

    def begin(self, request: DraftRequest) -> None:
        """Call the proposer's ``bind`` and ``begin``, and read its ``wants_hidden``, as far as it has them."""
        with _contained():
            if bind := getattr(self._own, "bind", None):
                bind(request.params, request.noise)
            if begin := getattr(self._own, "begin", None):
                begin(list(request.tokens))
            self.wants = HIDDEN if getattr(self._own, "wants_hidden", False) else NOTHING

    def propose(self, tokens: list[int], budget: int) -> Proposal:
        """Ask for guesses; raises what ``Drafting`` drops a drafter for if they are none."""
        with _contained():
            return self._guesses(tokens, budget)

    def _guesses(self, tokens: list[int], budget: int) -> Proposal:
        found = self._own.propose(list(tokens), budget)
        if found is None:
            return EMPTY
        if isinstance(found, Proposal):
            found.check(self.vocab)  # before control cuts it
            return found.truncated(budget)
        if isinstance(found, (str, bytes)):
            raise TypeError("expected token ids or a Proposal, got text")
        guesses = [index(token) for token in found][:budget]
        return Proposal(np.array(guesses, np.int64)) if guesses else EMPTY

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        if self._observe is not None:
            with _contained():
                self._observe(proposal, verdict, output)


def proposer_name(proposer: Proposer) -> str:
    """Name a proposer for results; a name that cannot be read is an ``InvalidRequest``."""
    try:
        with _contained():
            return str(getattr(proposer, "name", type(proposer).__name__))
    except Exception as error:
        raise InvalidRequest(f"the proposer's name cannot be read: {first_line(error)}") from error


@contextmanager
def _contained() -> Iterator[None]:
    """Convert other exceptions of a proposer into a ``RuntimeError``, so that it costs only its draft tokens.

    These are ``sys.exit`` and panics of a library.  Ctrl-C passes through, and so do exceptions of a signal handler
    that runs in the proposer.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if _by_a_signal(error):
            raise
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error


def _by_a_signal(error: BaseException) -> bool:
    """Tell whether a handler of a signal raised it."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code not in handlers:
        at = at.tb_next
    return at is not None
