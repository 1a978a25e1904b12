"""edgespec's own server in this process, and faults of speculation that a test switches on in it.

No fault touches plain decoding: a request without guesses stays right.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from edgespec.decoding import verify
from edgespec.decoding.noise import ACCEPT, BLOCK, Noise
from edgespec.decoding.verify import RowSampler
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.slots.books import Books
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.server.app import make_app
from edgespec.server.models import Models
from edgespec.server.scheduler import Limits
from edgespec.server.serving import Server, listen

SPECULATIVE = {"edgespec": {"method": "speculative", "gamma": 3, "adaptive": False, "fallback": False}}
PLAIN = {"edgespec": {"method": "ar"}}


@contextmanager
def serving(bundle: Path, threads: int = 1) -> Iterator[str]:
    """Serve a bundle from a thread of this process -> its URL."""
    ready = threading.Event()
    with listen("127.0.0.1", 0) as socket:
        models = Models({"demo": bundle}, LoadOptions(threads=threads), Limits(parallel=16, queue=400))
        models.open("demo")
        server = Server(make_app(models), socket, Limits(), lambda said: None, ready.set)
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert ready.wait(60)
            yield url
        finally:
            server.should_exit = True
            thread.join(60)


class _Eager(Noise):
    """Accepts guesses a tenth too often: with probability min(1, factor p / q)."""

    def __init__(self, right: Noise, factor: float) -> None:
        super().__init__(right.seed)
        self._factor = factor

    def uniform(self, position: int, stream: int) -> float:
        drawn = super().uniform(position, stream)
        return drawn / self._factor if ACCEPT <= stream < BLOCK else drawn


def generous(factor: float = 1.1) -> Any:
    """Accept guesses too often."""
    right = verify._reject

    def reject(proposal: Any, probs: Any, rows: RowSampler, noise: Noise, *rest: Any) -> Any:
        return right(proposal, probs, rows, _Eager(noise, factor), *rest)

    return patch.object(verify, "_reject", reject)


@contextmanager
def hot(factor: float = 1.05) -> Iterator[None]:
    """Sample at another temperature than requested, in passes with draft tokens."""
    start = RowSampler.__init__

    def init(self: RowSampler, *given: Any, **named: Any) -> None:
        start(self, *given, **named)
        if len(self.proposal.tokens) and not self.params.greedy:
            self.params = replace(self.params, temperature=self.params.temperature * factor)

    with patch.object(RowSampler, "__init__", init):
        yield


class _Planted(Books):
    """Books that move the row before to where the last accepted guess belongs."""

    wrong: tuple[int, int] | None = None  # from, to

    @property
    def waiting(self) -> int:
        return super().waiting + (self.wrong is not None)

    def moves(self, out: int, slot: int, read: int, revocable: bool) -> None:
        super().moves(out, slot, read, revocable)
        if self.wrong is not None:
            (ctypes.c_int64 * 3).from_address(out + 24 * super().waiting)[:] = [slot, *self.wrong]

    def moved(self) -> None:
        super().moved()
        self.wrong = None


def wrong_row() -> Any:
    """Leave the keys and values of the row before where those of the last accepted guess belong."""
    right = NativeSlot.keep

    def keep(self: NativeSlot, rows: Sequence[int]) -> None:
        past, books = len(self.tokens), self._books
        right(self, rows)
        books.__class__ = _Planted
        assert isinstance(books, _Planted)
        if len(rows) > 1:
            books.wrong, self._may_wait = (past + len(rows) - 2, past + len(rows) - 1), True

    return patch.object(NativeSlot, "keep", keep)


def bonus_off_by_one() -> Any:
    """Take the token after the last accepted guess from the row before."""
    right = RowSampler.choose

    def choose(self: RowSampler, row: int) -> int:
        return right(self, row - 1 if row and row == len(self.proposal.tokens) else row)

    return patch.object(RowSampler, "choose", choose)


@contextmanager
def rounded(spread: float = 0.1) -> Iterator[None]:
    """Add normal noise to logits so that passes with draft tokens round differently from single rows: not a fault."""
    start, random = RowSampler.__init__, np.random.default_rng(7)

    def init(
        self: RowSampler, logits: Any, tokens: Any, proposal: Any, params: Any, noise: Any, best: Any = None
    ) -> None:
        if len(proposal.tokens) and len(logits):
            logits, best = logits + random.normal(0, spread, logits.shape).astype(np.float32), None
        start(self, logits, tokens, proposal, params, noise, best)

    with patch.object(RowSampler, "__init__", init):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "acceptance a tenth too generous": generous,
    "temperature 5 % off": hot,
    "a row of the cache read from the wrong place": wrong_row,
    "the bonus token off by one": bonus_off_by_one,
}
