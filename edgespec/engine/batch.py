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
from edgespec.engine.admission import heaviest
from edgespec.engine.encoding import Source, begun
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.pool import SessionPool
from edgespec.engine.request import Stream
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
        self._pools = engine.places.pools  # memory of a batch counts like any other
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
        prompts: Sequence[list[int] | Source],
        settings: Sequence[Settings],
        cancel: threading.Event | None = None,
        on_result: Callable[[int, Result], None] | None = None,
    ) -> list[Result]:
        """Complete prompts, as many at a time as were asked for or fit the memory; see ``Engine.generate_batch``.

        ``settings``: of each prompt; only their seeds differ.
        """
        engine = engine.usable
        if not prompts:
            return []
        width = _width(engine, prompts, settings[0])
        together = engine.operators.kind == "native" and len(prompts) > 1 and not settings[0].guided
        sessions = self._take(engine, width) if together else None
        running, numbers = RunningBatch(engine, width, own=False, sessions=sessions), dict[Stream, int]()
        results: dict[int, Result] = {}
        waiting = list(range(len(prompts)))[::-1]
        try:
            while len(results) < len(prompts):
                while waiting and running.room:
                    try:
                        stream = running.join(prompts[waiting[-1]], settings[waiting[-1]], cancel)
                    except BudgetError:
                        if not running.streams:
                            raise
                        break  # when one of them has ended there is room
                    numbers[stream] = waiting.pop()
                for stream, answer in running.round(wait=True):
                    if isinstance(answer, Exception):
                        raise answer
                    if stream.ended:
                        number = numbers.pop(stream)
                        results[number] = stream.result
                        stream.close()
                        if on_result:
                            on_result(number, stream.result)
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


def _width(engine: LoadedBundle, prompts: Sequence[Sequence[int] | Source], settings: Settings) -> int:
    """Sequences that are decoded together: what was asked for, or as many as fit the memory."""
    longest = max(len(begun(prompt)) for prompt in prompts) + engine.most_new(settings)
    method, tokens = heaviest(engine.choose_for(settings)), min(engine.context, longest)
    return engine.allowance.width(settings.batch, tokens, method, settings.sampling.greedy)


class RunningBatch:
    """Requests that are decoded together, a round of each at a time.  One thread drives it.

    ``width``: most requests at once.  It makes sessions of its ``own``, and lets what is read of prompts be kept on the
    disk; or requests decode on those that are given, None = take turns, a round each.
    """

    def __init__(
        self, engine: LoadedBundle, width: int, *, own: bool = True, sessions: BatchSessions | None = None
    ) -> None:
        self.width = width
        self.streams: list[Stream] = []
        self._engine, self._own, self._sessions = engine, own, sessions
        if own and engine.operators.kind == "native" and width > 1:
            self._sessions = BatchSessions(engine, width)

    @property
    def room(self) -> int:
        """How many more requests may join now."""
        return self.width - len(self.streams)

    def join(
        self,
        prompt: Sequence[int] | Source,
        settings: Settings,
        cancel: threading.Event | None = None,
        owner: str | None = None,
    ) -> Stream:
        """Begin a request, for which there is room; its first tokens come with the next round.

        ``owner``: whose it is; what was computed of the texts of others is not taken up.  Raises as ``Engine.stream``,
        and a ``BudgetError`` where it does not fit the memory with the others.
        """
        pool = self._sessions.pool if self._sessions else None
        if self._engine.encoding is not None and not isinstance(prompt, Source):
            prompt = self._engine.source(prompt, settings)
        stream = Stream(self._engine.usable, prompt, settings, cancel, sessions=pool, owner=owner)
        if not self._own:
            stream.keep_nothing()  # many texts, each read once
        self.streams.append(stream)
        return stream

    def round(self, wait: bool = False) -> Iterator[tuple[Stream, Answer]]:
        """One round of every request: its text, or the error that ended it, and it alone; it is in the batch no longer.

        ``wait``: decode only what all can decode together, when every prompt is read.
        """
        for stream, got in self._answers(wait):
            if isinstance(got, Exception) or stream.ended:
                if not isinstance(got, Exception):
                    got = Chunk(got.text + stream.end(), got.round, got.pieces)
                stream.close()
                self.streams.remove(stream)
            yield stream, got

    def _answers(self, wait: bool) -> list[tuple[Stream, Answer]]:
        """Decode a round of every request that has read its prompt: its text, or the error that it met.

        One of those that have not reads a piece of it, whichever has waited longest.
        """
        reading = sorted((stream for stream in self.streams if stream.reading), key=lambda one: one.read_at)[:1]
        decoding = [stream for stream in self.streams if not stream.reading]
        if self._sessions is None:
            turns = reading if wait and reading else reading + decoding
            took = ((stream, _tried(stream.step)) for stream in turns)
            return [(stream, got or _NOTHING) for stream, got in took if not isinstance(got, PrefillRequest)]
        answers: list[tuple[Stream, Answer]] = []
        with self._engine.lock:
            for stream in reading:
                asked = _tried(partial(stream.read, len(self.streams)))
                if isinstance(asked, Pass):
                    decoding.append(stream)
                elif not isinstance(asked, PrefillRequest):
                    answers.append((stream, asked or _NOTHING))
            if wait and any(stream.reading and not stream.ended for stream in self.streams):
                return answers
            return answers + list(_joint(decoding, self._sessions.batch))

    def close(self) -> None:
        """End all requests at once."""
        for stream in self.streams:
            stream.close()
        self.streams.clear()
        if self._own:
            self._engine.usable.prompts.finish()
            if self._sessions is not None:
                self._sessions.close()
                self._sessions = None


_NOTHING = Chunk("", None)  # of a request that was cancelled


def _tried(step: Callable[[], T]) -> T | Exception:
    """Return what a step gives, or its error: a request that fails must not take others along."""
    try:
        return step()
    except Exception as error:
        return error


def _joint(streams: Sequence[Stream], batch: NativeBatch) -> Iterator[tuple[Stream, Answer]]:
    """Decode a round of requests whose passes are one."""
    gathered: list[tuple[Stream, Pass]] = []
    for stream in streams:
        asked = _tried(partial(stream.ask, len(streams)))
        assert not isinstance(asked, Round)
        if isinstance(asked, Pass):
            if asked.inputs is None:
                gathered.append((stream, asked))
            else:  # the rest of a pass that a drafter began is another one than whole ones
                yield stream, _tried(partial(_alone, stream, asked))
        elif not isinstance(asked, PrefillRequest):
            yield stream, asked or _NOTHING
    while gathered:
        rows = taken = 0
        while taken < len(gathered) and rows + _rows(gathered[taken][1]) <= LONGEST_PASS:
            rows += _rows(gathered[taken][1])
            taken += 1
        yield from _together(gathered[: max(taken, 1)], batch)
        del gathered[: max(taken, 1)]


def _alone(stream: Stream, asked: Pass) -> Chunk:
    return stream.answer(run_pass(stream.target, asked))


def _together(gathered: Sequence[tuple[Stream, Pass]], batch: NativeBatch) -> Iterator[tuple[Stream, Answer]]:
    """Run passes as one, and hand each its part."""
    if len(gathered) == 1:
        ((stream, asked),) = gathered
        yield stream, _tried(partial(_alone, stream, asked))
        return
    passes = [(cast(BatchSlot, stream.target), asked) for stream, asked in gathered]
    start = perf_counter()
    try:
        outputs = batch.run(passes)
    except Exception as error:  # the KV state is undefined after a failed pass: fail all
        yield from ((stream, error) for stream, _ in gathered)
        return
    ms = 1000 * (perf_counter() - start)
    rows = sum(_rows(asked) for _, asked in gathered)
    for (stream, asked), output in zip(gathered, outputs, strict=True):
        output.ms, output.other_rows = ms, rows - _rows(asked)
        yield stream, _tried(partial(stream.answer, output))


def _rows(asked: Pass) -> int:
    assert asked.tokens is not None
    return len(asked.tokens)
