"""Several requests at once: on native operators the passes of all of them are one run, which reads the weights once.

Requests end at different times; a waiting one takes the place of one that has ended (continuous batching).  Prefills
and drafts are each request's own and run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import TypeVar, cast

from edgespec.decoding.loop import PrefillRequest, Round, run_pass
from edgespec.decoding.settings import Settings
from edgespec.decoding.target import Pass
from edgespec.engine.input import Input
from edgespec.engine.inputs import Prompt
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.pool import SessionPool
from edgespec.engine.request import Request
from edgespec.engine.reservation import heaviest
from edgespec.engine.result import Chunk, Result
from edgespec.errors import BudgetError
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.slots.native_batch import BatchSlot, NativeBatch
from edgespec.runtimes.slots.slot import Slot

Answer = Chunk | Exception
T = TypeVar("T")
MOST_WIDTHS = 2  # of batches whose KV is kept


class BatchSessions:
    """``width`` sessions over the slots of a batch, kept from batch to batch with what their drafters have learned."""

    def __init__(self, engine: LoadedBundle, width: int) -> None:
        self.batch = NativeBatch(engine.model, width, context=engine.context)
        self.pool: SessionPool = SessionPool(lambda: engine.new_session(self._free()), width, width, together=True)
        self._pools = engine.reservations.pools  # memory of a batch counts like any other
        self._pools.append(self.pool)

    def close(self) -> None:
        """Free them and their memory."""
        self._pools.remove(self.pool)
        self.pool.close()
        self.batch.close()

    def _free(self) -> Slot:
        """Return a slot without a session; the caller has the pool's lock."""
        taken = [session.target for session in self.pool.sessions]
        return next(slot for slot in self.batch.slots if slot not in taken)


class Batches:
    """Batches of an engine; idle sessions of the latest widths are kept, with what their drafters have learned."""

    def __init__(self) -> None:
        self._idle: dict[int, BatchSessions] = {}

    def close(self) -> None:
        """Free all."""
        for sessions in self._idle.values():
            sessions.close()
        self._idle.clear()

    def run(
        self,
        engine: LoadedBundle,
        prompts: Sequence[Input],
        settings: Sequence[Settings],
        cancel: threading.Event | None = None,
        on_result: Callable[[int, Result], None] | None = None,
    ) -> list[Result]:
        """Complete prompts, as many at a time as were asked for or fit the memory; see ``Engine.generate_batch``.

        ``settings``: of each prompt; only their seeds and adapters differ.
        """
        engine = engine.usable
        if not prompts:
            return []
        width = _width(engine, prompts, settings[0])
        together = engine.operators.kind == "native" and len(prompts) > 1 and not settings[0].guided
        sessions = self._take(engine, width) if together else None
        running, numbers = RunningBatch(engine, width, own=False, sessions=sessions), dict[Request, int]()
        results: dict[int, Result] = {}
        waiting = list(range(len(prompts)))[::-1]
        try:
            while len(results) < len(prompts):
                while waiting and running.room:
                    try:
                        request = running.join(prompts[waiting[-1]], settings[waiting[-1]], cancel)
                    except BudgetError:
                        if not running.requests:
                            raise
                        break  # it fits once another one has ended
                    numbers[request] = waiting.pop()
                for request, answer in running.round(wait=True):
                    if isinstance(answer, Exception):
                        raise answer
                    if request.ended:
                        number = numbers.pop(request)
                        results[number] = request.result
                        if on_result:
                            on_result(number, request.result)
            return [results[number] for number in range(len(prompts))]
        finally:
            running.close()
            if sessions:
                self._give_back(engine, width, sessions)

    def _give_back(self, engine: LoadedBundle, width: int, sessions: BatchSessions) -> None:
        with engine.lock:
            gone = [] if width not in self._idle else [self._idle.pop(width)]
            self._idle[width] = sessions
            while len(self._idle) > (0 if engine.closed else MOST_WIDTHS):
                gone.append(self._idle.pop(next(iter(self._idle))))
            for old in gone:
                old.close()

    def _take(self, engine: LoadedBundle, width: int) -> BatchSessions:
        """Idle sessions of a batch of that width, or new ones."""
        with engine.lock:
            idle = self._idle.pop(width, None)
        return idle or BatchSessions(engine, width)


def _width(engine: LoadedBundle, prompts: Sequence[Input], settings: Settings) -> int:
    """Return the number of sequences that are decoded together: the requested one, or as many as fit the memory."""
    longest = max(map(len, prompts)) + engine.most_new(settings)
    method, tokens = heaviest(engine.choose_for(settings)), min(engine.context, longest)
    return engine.memory_budget.width(settings.batch, tokens, method, settings.sampling.greedy)


class RunningBatch:
    """Requests that are decoded together, one round of each at a time.  One thread drives it.

    ``width``: maximum number of requests at once.  With ``own`` it makes its own sessions, and prompts may be cached on
    disk.  Otherwise requests decode on the given ``sessions``; None = they take turns, a round each.
    """

    def __init__(
        self, engine: LoadedBundle, width: int, *, own: bool = True, sessions: BatchSessions | None = None
    ) -> None:
        self.width = width
        self.requests: list[Request] = []
        self._engine, self._own, self._sessions = engine, own, sessions
        if own and engine.operators.kind == "native" and width > 1:
            self._sessions = BatchSessions(engine, width)

    @property
    def room(self) -> int:
        """How many more requests may join now."""
        return self.width - len(self.requests)

    def join(
        self,
        prompt: Prompt,
        settings: Settings,
        cancel: threading.Event | None = None,
        owner: str | None = None,
    ) -> Request:
        """Make a request, and begin it; see ``Request`` and ``begin``."""
        return self.begin(Request(self._engine, prompt, settings, cancel, owner))

    def begin(self, request: Request) -> Request:
        """Begin a request that fits in; its first tokens come with the next round.

        Raises the errors of ``Engine.stream``, and BudgetError if it does not fit the memory with the others.
        """
        request.begin(self._sessions.pool if self._sessions else None)
        if not self._own:
            request.keep_nothing()  # many texts, each read once
        self.requests.append(request)
        return request

    def round(self, wait: bool = False) -> Iterator[tuple[Request, Answer]]:
        """Run one round of every request -> its text, or the error that ended it.

        An error ends only its request, which leaves the batch.

        ``wait``: decode only what all can decode together, when every prompt is read.
        """
        for request, got in self._answers(wait):
            if isinstance(got, Exception) or request.ended:
                if not isinstance(got, Exception):
                    got = Chunk(got.text + request.end(), got.round, got.pieces)
                request.close()
                self.requests.remove(request)
            yield request, got

    def _answers(self, wait: bool) -> list[tuple[Request, Answer]]:
        """Decode a round of every request that has read its prompt: its text, or the error that it met.

        One of those that have not reads a piece of it, whichever has waited longest.
        """
        reading = sorted((request for request in self.requests if request.reading), key=lambda one: one.read_at)[:1]
        decoding = [request for request in self.requests if not request.reading]
        if self._sessions is None:
            turns = reading if wait and reading else reading + decoding
            took = ((request, _tried(request.step)) for request in turns)
            return [(request, got or _NOTHING) for request, got in took if not isinstance(got, PrefillRequest)]
        answers: list[tuple[Request, Answer]] = []
        with self._engine.lock:
            for request in reading:
                asked = _tried(partial(request.read, len(self.requests)))
                if isinstance(asked, Pass):
                    decoding.append(request)
                elif not isinstance(asked, PrefillRequest):
                    answers.append((request, asked or _NOTHING))
            if wait and any(request.reading and not request.ended for request in self.requests):
                return answers
            return answers + list(_joint(decoding, self._sessions.batch))

    def close(self) -> None:
        """End all requests at once."""
        for request in self.requests:
            request.close()
        self.requests.clear()
        if self._own:
            self._engine.usable.prompts.finish()
            if self._sessions is not None:
                self._sessions.close()
                self._sessions = None


_NOTHING = Chunk("", None)  # of a request that was cancelled


def _tried(step: Callable[[], T]) -> T | Exception:
    """Return the result of a step, or its error, so that failures stay within one request."""
    try:
        return step()
    except Exception as error:
        return error


def _joint(requests: Sequence[Request], batch: NativeBatch) -> Iterator[tuple[Request, Answer]]:
    """Decode a round of requests whose passes are one."""
    gathered: list[tuple[Request, Pass]] = []
    for request in requests:
        asked = _tried(partial(request.ask, len(requests)))
        assert not isinstance(asked, Round)
        if isinstance(asked, Pass):
            if asked.inputs is None:
                gathered.append((request, asked))
            else:  # the rest of a pass that a drafter began is another one than whole ones
                yield request, _tried(partial(_alone, request, asked))
        elif not isinstance(asked, PrefillRequest):
            yield request, asked or _NOTHING
    while gathered:
        rows = taken = 0
        while taken < len(gathered) and rows + _rows(gathered[taken][1]) <= LONGEST_PASS:
            rows += _rows(gathered[taken][1])
            taken += 1
        yield from _together(gathered[: max(taken, 1)], batch)
        del gathered[: max(taken, 1)]


def _alone(request: Request, asked: Pass) -> Chunk:
    return request.answer(run_pass(request.target, asked))


def _together(gathered: Sequence[tuple[Request, Pass]], batch: NativeBatch) -> Iterator[tuple[Request, Answer]]:
    """Run passes as one, and hand each its part."""
    if len(gathered) == 1:
        ((request, asked),) = gathered
        yield request, _tried(partial(_alone, request, asked))
        return
    passes = [(cast(BatchSlot, request.target), asked) for request, asked in gathered]
    start = perf_counter()
    try:
        outputs = batch.run(passes)
    except Exception as error:  # the KV state is undefined after a failed pass: fail all
        yield from ((request, error) for request, _ in gathered)
        return
    ms = 1000 * (perf_counter() - start)
    rows = sum(_rows(asked) for _, asked in gathered)
    for (request, asked), output in zip(gathered, outputs, strict=True):
        output.ms, output.other_rows = ms, rows - _rows(asked)
        yield request, _tried(partial(request.answer, output))


def _rows(asked: Pass) -> int:
    assert asked.tokens is not None
    return len(asked.tokens)
