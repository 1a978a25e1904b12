"""A running request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import (
    DecodeOptions,
    Piece,
    PrefillRequest,
    Round,
    check_prompt,
    decode,
    run_pass,
)
from edgespec.decoding.settings import SHADOW, Settings
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, Pass, Target
from edgespec.decoding.text import INSERTED
from edgespec.drafters.hidden_state import HiddenStateDrafter
from edgespec.drafters.plain import Forced
from edgespec.drafters.predicted import Predicted
from edgespec.drafters.registry import AR, needing
from edgespec.engine.admission import Room, admit
from edgespec.engine.encoding import Source, begun
from edgespec.engine.guiding import guided, sessions_for
from edgespec.engine.images import Placed
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.methods import kept_of_model
from edgespec.engine.pool import SessionPool
from edgespec.engine.prompt_cache import KeptText
from edgespec.engine.result import Chunk, Finish, Result
from edgespec.engine.rules import ruled, with_length
from edgespec.engine.sharing import FIRST
from edgespec.errors import DeviceError, EdgespecError, InvalidRequest
from edgespec.runtimes.process import peak_bytes
from edgespec.runtimes.slots.checkpoints import end_of_question, ends_of_turns
from edgespec.runtimes.slots.inserted import Inserted
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.stream import StreamDecoder

_HANDOVER = 1e-4  # seconds


def check_cancel(cancel: object) -> None:
    """Refuse, by an ``InvalidRequest``, what cannot be asked whether it was set."""
    if not (cancel is None or (hasattr(cancel, "is_set") and hasattr(cancel, "set"))):
        raise InvalidRequest(f"cancel is {cancel!r}: expected a threading.Event")


class Stream:
    """A running request: iterate for text as it comes; ``result`` is there at the end, or after ``close``.

    Attributes:
        target: the slot that this request's passes are of.
        reading: whether some of the prompt is still to be read.
        read_at: when some of it was read last, by ``time.perf_counter``.
    """

    def __init__(
        self,
        engine: LoadedBundle,
        prompt: Sequence[int] | Source,
        settings: Settings,
        cancel: threading.Event | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_every: int = 1,
        sessions: SessionPool | None = None,
        owner: str | None = None,
    ) -> None:
        self._source, self._prompt = prompt if isinstance(prompt, Source) else None, begun(prompt)
        settings = with_length(engine, settings, self._prompt)
        self._engine, self._settings, self._places = engine, settings, engine.places
        check_cancel(cancel)
        self._cancel = cancel or threading.Event()
        self._reading = threading.Lock()  # held while a round is read, by the thread of this number
        self._reader = 0
        choice = engine.choose_for(settings)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None
        self._stats = Stats()
        self._on_stats, self._stats_every = on_stats, stats_every
        self._sampling = settings.sampling
        if settings.grammar is not None:
            constraint = engine.guidance.constraint(settings.grammar, len(self._prompt))
            self._sampling = replace(settings.sampling, constraint=constraint)
        self._sampling = ruled(engine, self._sampling, settings, self._prompt)
        if self._sampling.counts:
            self._sampling = replace(self._sampling, prompt=len(self._prompt))
        self._sessions, self._joint = sessions or sessions_for(engine, settings), sessions is not None
        # the KV of a text is useful only with the same source
        self._owner = owner = owner if self._source is None else f"{owner or ''} {self._source.digest.hex()}"
        self._choice, admission, self._place = admit(engine, choice, self._prompt, settings, self._sessions, owner)
        self._room = Room(engine, self._choice, admission, self._place, settings)
        assert self._place.session is not None
        self._session = self._place.session
        self._released = False
        self._kept: dict[str, KeptText] = {}  # what of each slot is on the disk
        self._lost: str | None = None  # why the device was left
        self._images: list[Inserted] = []
        try:
            self._images = engine.hold_images(prompt)  # as long as the request runs: some may be read again
            if self._images:
                self._stats.image_rows = sum(token >= INSERTED for token in self._prompt)
            if isinstance(prompt, Placed):
                self._stats.encode_ms = prompt.encode_ms
            try:
                self._begin()
            except DeviceError as error:
                self._leave_device(error)
            self._decoder = StreamDecoder(engine.codec, self._prompt, settings.stop, settings.markers)
        except BaseException:
            engine.places.leave(self._place)
            self._forget_images()
            self._sessions.give_back(self._session)
            raise
        self._chunks = self._run()

    def _forget_images(self) -> None:
        if self._images:
            self._engine.reader().rows.let_go(self._images)
            self._images = []

    def _begin(self) -> None:
        """Resume the request at its current point, on the existing session."""
        settings = self._settings
        self._asked: Pass | PrefillRequest | None = None  # what comes next, where that is known
        self.reading, self.read_at = True, 0.0
        with self._engine.lock:  # a new drafter's costs are measured with a few passes
            self._engine.require_open()
            session, tokens, eos = self._session, self.tokens, self._engine.eos
            self.target: Slot = session.target
            if self._source is not None:
                start = time.perf_counter()
                session.attend(self._source)
                self._stats.source_rows = len(self._source.content)
                self._stats.encode_ms = 1000 * (time.perf_counter() - start)
            session.chunk, session.asked = self._room.admission.chunk, end_of_question(tokens, eos)
            self._foreign = session.begin(tokens)
            ends = ends_of_turns(tokens, eos)
            self._take_up(tokens, ends)
            self.target.mark([*ends, session.shared], self._room.admission.checkpoints)
            how, start = (settings.gamma, settings.adaptive, settings.fallback), time.perf_counter()
            if settings.proposer is not None:
                self._policy = self._session.own(settings.proposer, *how)
            else:
                self._policy = self._session.policy(self._choice, *how, settings.drafts)
            self._stats.setup_ms += 1000 * (time.perf_counter() - start)
        constraint = self._sampling.constraint
        self._sure: dict[str, Drafter] = {}  # drafters asked before the method, by their descriptions
        drafts = settings.method != AR
        if drafts and constraint is not None and settings.grammar is not None:
            self._sure["grammar"] = Forced(constraint)
        if drafts and settings.prediction:
            said = settings.prediction
            expected = self._engine.codec.encode(said, special=False) if isinstance(said, str) else said
            self._sure["prediction"] = Predicted(expected, len(self._prompt))
        target: Target = self.target
        if settings.guided:
            target = guided(self._engine, self._session, self._prompt, settings)
        check_prompt(self.tokens, self._sampling, target.vocab_size, target.context)
        run = None if self._joint else run_pass
        self._rounds = decode(target, self._policy, self.tokens, self._options(), self._stats, run, pieces=True)

    def _take_up(self, tokens: list[int], ends: list[int]) -> None:
        """Let the slots hold what the disk has of the text; those of drafts do when a method asks for it."""
        prompts, owner, room = self._engine.prompts, self._owner, self._place.tokens

        def begin(name: str, slot: Slot) -> None:
            if name == "drafter":
                slot.on_begin = begin_rows
            else:
                keep(name, prompts.take_up(slot, tokens, owner, room, draft=name == "draft"))

        def begin_rows(drafter: HiddenStateDrafter, names: list[int]) -> None:
            if not drafter.cache.borrowed:
                keep("drafter", prompts.take_up_rows(drafter, tokens, names, owner, room), drafter.deferred_rows)

        def keep(name: str, found: KeptText | None, behind: int = 0) -> None:
            if found is not None:
                self._kept[name] = found
                found.watch(len(tokens), ends, behind)

        self._kept = {}
        # the owner of these keys and values would be unknown
        if self._foreign or not prompts.on or self._engine.unproven() or self._settings.guided:
            return
        self._session.on_draft = begin
        for name, slot in self._session.slots().items():
            begin(name, slot)

    def keep_nothing(self) -> None:
        """Write nothing of this request on the disk from now on."""
        self._kept = {}
        self._session.on_draft = None
        for slot in self._session.slots().values():
            slot.on_read = slot.on_begin = None

    def _leave_device(self, error: DeviceError) -> None:
        """Continue on the CPU from the committed tokens; the session on the device is gone."""
        self._lost = error.message
        self._sessions.drop(self._session)
        if self._stats.prompt_tokens:
            self._stats.prompt_tokens -= len(self.tokens)  # they are counted again
        self._engine = self._engine.off_device(error.message)
        self._sessions = sessions_for(self._engine, self._settings)
        self._choice = self._engine.choose_for(self._settings)
        self._session = self._place.session = self._sessions.take(self.tokens, self._owner)
        self._begin()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if not self._reading.acquire(blocking=False):
            raise InvalidRequest("this stream is being read already, as by another thread", "read it in one thread")
        self._reader = threading.get_ident()
        try:
            return next(self._chunks)
        finally:
            self._reader = 0
            self._reading.release()

    def cancel(self) -> None:
        """End the request after the current round; safe from another thread."""
        self._cancel.set()

    def close(self) -> None:
        """End the request now; the text so far is in ``result``.

        If another thread reads it, it ends after the current round.
        """
        if self._reader == threading.get_ident():
            raise InvalidRequest("a callback cannot close its own stream", "use cancel()")
        if self._reader:
            self._cancel.set()
        with self._reading:
            self._chunks.close()
        self._release()  # a stream that was never read

    def __repr__(self) -> str:
        state = self._finish or ("closed" if self._released else "running")
        return f"<Stream, {len(self._tokens)} tokens, {state}>"

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens so far."""
        return self._prompt + self._tokens

    @property
    def result(self) -> Result:
        """The result so far; complete once the stream has ended."""
        engine, settings, stats = self._engine, self._settings, self._stats
        used = self._policy.used
        # the CPU rounds otherwise: up to where the device was lost the text is that of its plain decoding, not beyond
        exact = engine.strict and stats.exact and self._lost is None and (used == AR or engine.rows_exact())
        unproven = engine.unproven()
        if self._foreign:
            unproven.append(self._foreign)
        return Result(
            text=self._decoder.text,
            tokens=list(self._tokens),
            finish=self._finish or "cancelled",
            stats=stats,
            method_requested=settings.method,
            method_used=used,
            reason=self._reason(),
            details=self._details(),
            lossless=None if unproven and stats.lossless else stats.lossless,
            exact=None if unproven and exact else exact,
            unproven=unproven,
            approximations=engine.approximations + settings.accept.approximations,
            operators=engine.operators.kind,
            device=engine.device,
            device_lost=self._lost,
            draft_attention=self._draft_attention,
            logprobs=self._logprobs if settings.logprobs else None,
            peak_bytes=peak_bytes(),
            predicted_bytes=self._room.admission.predicted,
            stop=self._decoder.stopped,
            model_sampling=kept_of_model(engine.bundle.manifest.sampling, settings.sampling),
        )

    @property
    def _draft_attention(self) -> str | None:
        """The coarser keys that this request's drafts read."""
        if self._engine.attention.draft is None:
            return None
        methods = self._policy.methods if self._policy.switches else self._choice.methods
        return self._engine.attention.draft if set(methods) & set(needing("layers")) else None

    def _options(self) -> DecodeOptions:
        settings, engine = self._settings, self._engine
        usual = 0 if settings.accept.lossless else SHADOW
        return DecodeOptions(
            max_new_tokens=self._room.most - len(self._tokens),
            gamma=settings.gamma or self._choice.gamma,
            eos=frozenset() if settings.ignore_eos else engine.eos,
            sampling=self._sampling,
            logprobs=settings.logprobs,
            top_logprobs=settings.top_logprobs,
            shadow=usual if settings.shadow is None else settings.shadow,
            accept=settings.accept.for_model(engine),
            source=self._source.tokens if self._source else (),
            first=tuple(self._sure.values()),
        )

    # -- a round in two halves, for who drives several requests; the caller holds the engine's lock --------------------

    @property
    def ended(self) -> bool:
        """Whether the last round was made."""
        return self._finish is not None

    def ask(self, width: int = 1) -> Pass | PrefillRequest | Round | None:
        """Run to the next round, or to the next pass if passes are joint; read some of the prompt.

        ``width``: requests whose passes run together.  Returns None if the request was cancelled, a ``PrefillRequest``
        if there is more to be read.
        """
        self._engine.require_open()
        if self._cancel.is_set():
            self._finish = "cancelled"
            return None
        before = self._place.tokens
        if not self._room.lasts(self._engine, len(self._prompt) + len(self._tokens)):
            self._finish = "length"
            return None
        if not self._stats.rounds or self._place.tokens > before:
            self.target.reserve(min(self.target.context, self._place.tokens))
        self._policy.width = width
        asked, self._asked = self._asked or next(self._rounds), None
        if isinstance(asked, PrefillRequest):
            asked = self._fill(asked)
        if isinstance(asked, PrefillRequest):
            self._asked = asked
        self.reading = self._asked is not None
        self._place.read = not self.reading
        return asked

    def read(self, width: int) -> Pass | PrefillRequest | None:
        """Read some of the prompt as ``ask`` does, but keep a pass: the next ``ask`` gives it again."""
        asked = self.ask(width)
        assert not isinstance(asked, Round)
        self._asked = asked
        return asked

    def _fill(self, asked: PrefillRequest) -> PrefillRequest | Pass | Round:
        """Read some of the prompt -> what comes next."""
        pace, start = self._engine.paces[asked.draft], time.perf_counter()
        taken = self._sessions.catch_up(self._session, self.tokens) if asked.anywhere and self._joint else 0
        left = asked.left - taken
        rows = left if left <= FIRST else pace.rows(self.target.chunk, self._sessions.busy < 2)
        if not asked.draft:
            rows = min([rows, *(kept.rows(rows) for name, kept in self._kept.items() if name != "draft")])
            held = len(self.target.tokens)
            rows = self.target.end_of_piece(self.tokens, held + min(rows, left)) - held
        found = self._rounds.send(Piece(min(rows, left), taken))
        self.read_at = time.perf_counter()
        if isinstance(found, PrefillRequest) and found.draft == asked.draft:  # and nothing else was done
            pace.took(rows, self.read_at - start)
        return found

    def answer(self, output: Output) -> Chunk:
        """Make the round of the pass that was asked for."""
        made = self._rounds.send(output)
        assert isinstance(made, Round)
        return self._take(made)

    def end(self) -> str:
        """Give the session back and tell the last statistics; returns text held back until now."""
        self._release()
        if self._on_stats:
            self._on_stats(self._stats)
        return self._decoder.finish()

    def step(self) -> Chunk | PrefillRequest | None:
        """Decode a round, or read some of the prompt (-> a ``PrefillRequest``); None = the request was cancelled.

        The caller does not hold the engine's lock.
        """
        while True:
            try:
                with self._engine.lock:  # buffers are shared by all slots: one round at a time
                    made = self.ask()
                    assert not isinstance(made, Pass)
                    return self._take(made) if isinstance(made, Round) else made
            except DeviceError as error:
                self._rounds.close()
                self._leave_device(error)

    def _run(self) -> Generator[Chunk, None, None]:
        try:
            while self._finish is None and (made := self.step()) is not None:
                if isinstance(made, Chunk):
                    yield made
                else:
                    time.sleep(_HANDOVER)  # let waiting threads take the lock
            if rest := self.end():
                yield Chunk(rest, None)
        finally:
            self._release()

    def _release(self) -> None:
        """Give the session back, once: another request may have it already."""
        if not self._released:
            self._released = True
            self._places.leave(self._place)
            self._rounds.close()
            with self._engine.lock:
                if not self._engine.closed:
                    if self._finish is not None:  # what a request that went well left in its slots is written
                        with suppress(EdgespecError):  # the text is there; another process reads it again
                            for kept in self._kept.values():
                                kept.end(self.tokens)
                    self.keep_nothing()
                    if self._source is not None:
                        self._session.leave()  # its memory may make room for another one
            self._forget_images()
            self._sessions.give_back(self._session)

    def _take(self, item: Round) -> Chunk:
        """Add a round's tokens; a stop string in the middle of it drops the tokens after."""
        if self._on_stats and item.finish is None and self._stats.rounds % self._stats_every == 0:
            self._on_stats(self._stats)
        pieces: list[str] = []
        self._finish = item.finish
        for at, token in enumerate(item.tokens):
            self._tokens.append(token)
            if item.logprobs is not None:
                self._logprobs.append(item.logprobs[at])
            ended = item.finish == "eos" and at == len(item.tokens) - 1
            pieces.append("" if ended else self._decoder.push([token]))  # EOS is not text, even if it is a word
            if self._decoder.stopped is not None:
                self._finish = "stop"
                break
        return Chunk("".join(pieces), item, tuple(pieces))

    def _reason(self) -> str:
        """Say in one line why the method was chosen, and whether drafting pays off."""
        parts = [] if self._policy.switches and self._policy.reason else [self._choice.reason]
        if self._stats.dropped_reason:
            parts.append(f"drafter dropped: {self._stats.dropped_reason}")
        else:
            parts.append(self._policy.reason)
        if self._lost:
            parts.append(f"continued on the CPU: {self._lost}")
        return "; ".join(filter(None, parts))

    def _details(self) -> list[str]:
        """Say the rest, a sentence each."""
        said = [f"chosen: {self._choice.reason}"]
        if self._draft_attention and not self._stats.dropped_reason:
            said.append(f"drafts read {self._draft_attention} keys, verification {self._engine.attention.name}")
        won = self._policy.won
        said += [f"the {name} guessed in {won.get(drafter, 0)} rounds" for name, drafter in self._sure.items()]
        said += self._policy.details
        if self._stats.drafted and (speed := self._stats.request_speedup) is not None:
            said.append(f"measured {speed:.2f}x in this request")
        return said
