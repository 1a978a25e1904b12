"""A request, from its prompt to its result: it waits, reads the prompt, decodes round by round, and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import (
    DecodeOptions,
    Driven,
    PrefillRequest,
    Round,
    check_prompt,
    check_tokens,
    decode,
    run_pass,
)
from edgespec.decoding.policy import Policy
from edgespec.decoding.settings import SHADOW, Settings
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, Pass
from edgespec.drafters.plain import Forced
from edgespec.drafters.predicted import Predicted
from edgespec.drafters.registry import AR, needing
from edgespec.engine.answer_text import AnswerText
from edgespec.engine.guiding import sessions_for
from edgespec.engine.inputs import Prompt
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.methods import kept_of_model
from edgespec.engine.pool import SessionPool
from edgespec.engine.prompt_cache import KeptPrompt
from edgespec.engine.prompt_reading import PromptReading, Step
from edgespec.engine.reservation import Reservation, reserve
from edgespec.engine.result import Chunk, Result
from edgespec.engine.rules import sampling_of, with_length
from edgespec.engine.sessions import Session
from edgespec.errors import DeviceError, InvalidRequest
from edgespec.runtimes.process import peak_bytes
from edgespec.runtimes.slots.checkpoints import end_of_question, ends_of_turns
from edgespec.runtimes.slots.slot import Slot


def check_cancel(cancel: object) -> None:
    """Raise InvalidRequest for an object that is not an event."""
    if not (cancel is None or (hasattr(cancel, "is_set") and hasattr(cancel, "set"))):
        raise InvalidRequest(f"cancel is {cancel!r}: expected a threading.Event")


@dataclass
class Decoding:
    """A request on a session: how it reads the prompt, who drafts, and its rounds."""

    session: Session
    unverified: list[str]  # why what the session holds cannot be vouched for
    reading: PromptReading
    policy: Policy
    first: dict[str, Drafter]  # drafters that are asked before the method's, by their names
    rounds: Driven


class Request:
    """A request.

    It waits until ``begin``, which reads the prompt, reserves memory and takes a session.  Then ``step`` decodes a
    round, or ``ask`` and ``answer`` do so in two halves, for a caller that runs the passes of several requests as one.

    Args:
        engine: that answers.
        prompt: see ``Engine.stream``.
        settings: the settings.
        cancel: set it to end the request after the current round.
        owner: whose it is; nothing that was computed for another owner is reused.
        on_stats: called with the statistics every ``stats_every`` rounds, and at the end.
        stats_every: rounds, >= 1.

    Attributes:
        given: what it reads.
        reservation: its memory.
        text: the answer so far.
        stats: counts and times.
        reading: whether some of the prompt is still to be read.
    """

    def __init__(
        self,
        engine: LoadedBundle,
        prompt: Prompt,
        settings: Settings,
        cancel: threading.Event | None = None,
        owner: str | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        stats_every: int = 1,
    ) -> None:
        check_cancel(cancel)
        self._engine, self._prompt, self._settings, self._owner = engine, prompt, settings, owner
        self._cancelled = cancel or threading.Event()
        self._on_stats, self._stats_every = on_stats or (lambda _: None), stats_every
        self._lost: str | None = None  # why the device was left
        self.reading, self.stats, self._cleanup = True, Stats(), ExitStack()

    def begin(self, sessions: SessionPool | None = None) -> Request:
        """Reserve memory, and begin to decode.

        Args:
            sessions: those of a batch, whose passes run together; None = the engine's own.

        Raises:
            BudgetError: it does not fit the memory with the requests that run.
            InvalidRequest: a prompt or settings that this bundle cannot answer.
        """
        engine = self._engine = self._engine.usable
        self.given = prompt = engine.inputs.read(self._prompt, self._settings)
        self._settings = settings = with_length(engine, self._settings, prompt)
        self._key, choice = prompt.cache_key(self._owner), engine.choose_for(settings)
        self._sampling = sampling_of(engine, settings, prompt)
        self._sessions = sessions or sessions_for(engine, settings)
        check_tokens(prompt, engine.bundle.manifest.target.facts.vocab)
        self.text, self.stats.image_rows = AnswerText(engine.codec, prompt, settings), prompt.span_rows
        self.reservation: Reservation = reserve(engine, choice, prompt, settings, self._sessions, self._key)
        with ExitStack() as undo:
            undo.callback(lambda: self._sessions.give_back(self.reservation.session))
            undo.callback(self.reservation.release)
            prompt.hold()  # as long as the request runs: some spans may be read again
            undo.callback(prompt.release)
            try:
                self._decoding = self._decode()
            except DeviceError as error:
                self._leave_device(error)
            undo.callback(self._end_decoding)
            self._cleanup = undo.pop_all()
        return self

    def _decode(self) -> Decoding:
        """Begin at the current point of the text, on the session of the reservation."""
        engine, settings, sessions = self._engine, self._settings, self._sessions
        session, admission = self.reservation.session, self.reservation.admission
        with engine.lock:  # a new drafter's costs are measured with a few passes
            engine.require_open()
            tokens, ends = self.tokens, ends_of_turns(self.tokens, engine.eos)
            self.stats.encode_ms, self.stats.source_rows = session.attend(self.given), len(self.given.content)
            session.chunk, session.asked = admission.chunk, end_of_question(tokens, engine.eos)
            unverified = session.begin(tokens)
            keeps = engine.prompts.on and session.keeps_prompts and not (unverified or engine.unverified())
            kept = KeptPrompt(engine.prompts if keeps else None, tokens, ends, self._key, self.reservation.tokens)
            session.listen(kept)
            session.target.mark([*ends, session.shared], admission.checkpoints)
            start = time.perf_counter()
            policy = session.policy_of(self.reservation.choice, settings)
            self.stats.setup_ms += 1000 * (time.perf_counter() - start)
        first, target = self._first_drafters(), session.decoding_target(self.given, settings)
        check_prompt(tokens, self._sampling, target.vocab_size, target.context)
        options, run = self._options(first), None if sessions.together else run_pass
        rounds = decode(target, policy, tokens, options, self.stats, run, pieces=True)
        reading = PromptReading(session, sessions, engine.paces, kept)
        self.reading = True
        return Decoding(session, unverified, reading, policy, first, rounds)

    def _first_drafters(self) -> dict[str, Drafter]:
        """Make the drafters of what the answer must or may contain, by their descriptions."""
        settings, constraint = self._settings, self._sampling.constraint
        found: dict[str, Drafter] = {}
        if settings.method != AR and constraint is not None and settings.grammar is not None:
            found["grammar"] = Forced(constraint)
        if settings.method != AR and settings.prediction:
            said = settings.prediction
            expected = self._engine.codec.encode(said, special=False) if isinstance(said, str) else said
            found["prediction"] = Predicted(expected, len(self.given))
        return found

    def _options(self, first: dict[str, Drafter]) -> DecodeOptions:
        settings, engine = self._settings, self._engine
        usual = 0 if settings.accept.lossless else SHADOW
        return DecodeOptions(
            max_new_tokens=self.reservation.most - len(self.text.tokens),
            gamma=settings.gamma or self.reservation.choice.gamma,
            eos=frozenset() if settings.ignore_eos else engine.eos,
            sampling=self._sampling,
            logprobs=settings.logprobs,
            top_logprobs=settings.top_logprobs,
            shadow=usual if settings.shadow is None else settings.shadow,
            accept=settings.accept.for_model(engine),
            source=self.given.tokens,
            first=tuple(first.values()),
        )

    def _leave_device(self, error: DeviceError) -> None:
        """Continue on the CPU from the committed tokens; the session on the device is gone."""
        self._lost = error.message
        self._sessions.drop(self.reservation.session)
        if self.stats.prompt_tokens:
            self.stats.prompt_tokens -= len(self.tokens)  # they are counted again
        self._engine = engine = self._engine.off_device(error.message)
        self._sessions = sessions_for(engine, self._settings)
        session = self._sessions.take(self.tokens, self._key)  # a device adds no adapters
        self.reservation.move(engine, session, engine.choose_for(self._settings))
        self._decoding = self._decode()

    # -- a round in two halves, for a caller that drives several requests and holds the engine's lock ------------------

    def ask(self, width: int = 1) -> Step | None:
        """Run to the next round, or to the next pass if passes are joint; read some of the prompt.

        Args:
            width: requests whose passes run together.

        Returns:
            a ``PrefillRequest`` if there is more to be read; None if the request has ended: it was cancelled, or no
            memory is left.
        """
        self._engine.require_open()
        decoding, place = self._decoding, self.reservation
        if self.cancelled:
            self.text.finish = "cancelled"
            return None
        before, target = place.tokens, decoding.session.target
        if not place.lasts(len(self.given) + len(self.text.tokens)):
            self.text.finish = "length"
            return None
        if not self.stats.rounds or place.tokens > before:
            target.reserve(min(target.context, place.tokens))
        decoding.policy.width = width
        reading = decoding.reading
        asked, reading.next = reading.next or next(decoding.rounds), None
        if isinstance(asked, PrefillRequest):
            asked = reading.read(asked, decoding.rounds, self.tokens)
        if isinstance(asked, PrefillRequest):
            reading.next = asked
        self.reading = reading.next is not None
        place.read = not self.reading
        return asked

    def read(self, width: int) -> Pass | PrefillRequest | None:
        """Read some of the prompt as ``ask`` does, but keep a pass: the next ``ask`` gives it again."""
        asked = self.ask(width)
        assert not isinstance(asked, Round)
        self._decoding.reading.next = asked
        return asked

    def answer(self, output: Output) -> Chunk:
        """Make the round of the pass that was asked for."""
        made = self._decoding.rounds.send(output)
        assert isinstance(made, Round)
        return self._take(made)

    def step(self) -> Chunk | PrefillRequest | None:
        """Decode a round, or read some of the prompt (-> a ``PrefillRequest``); None = the request has ended.

        The caller does not hold the engine's lock.
        """
        while True:
            try:
                with self._engine.lock:  # buffers are shared by all slots: one round at a time
                    made = self.ask()
                    assert not isinstance(made, Pass)
                    return self._take(made) if isinstance(made, Round) else made
            except DeviceError as error:
                self._decoding.rounds.close()
                self._leave_device(error)

    def _take(self, made: Round) -> Chunk:
        """Add the tokens of a round to the text."""
        if made.finish is None and self.stats.rounds % self._stats_every == 0:
            self._on_stats(self.stats)
        return self.text.take(made)

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether it is to end after the current round."""
        return self._cancelled.is_set()

    @property
    def ended(self) -> bool:
        """Whether the last round was made."""
        return self.text.finish is not None

    def cancel(self) -> None:
        """End the request after the current round; safe from another thread."""
        self._cancelled.set()

    def keep_nothing(self) -> None:
        """Write nothing of this request on the disk from now on."""
        self._decoding.reading.kept.stop()

    def end(self) -> str:
        """Give the session back and tell the last statistics; returns text held back until now."""
        self.close()
        self._on_stats(self.stats)
        return self.text.end()

    def close(self) -> None:
        """Give memory and session back, once: another request may have them already."""
        self._cleanup.close()

    def _end_decoding(self) -> None:
        """Save the prompt's state, and release the cross-attention caches of the session's slots."""
        decoding = self._decoding
        decoding.rounds.close()
        with self._engine.lock:
            if not self._engine.closed:
                kept = decoding.reading.kept
                if self.ended:
                    kept.end(self.tokens)
                kept.stop()
                decoding.session.leave()

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens so far."""
        return [*self.given, *self.text.tokens]

    @property
    def target(self) -> Slot:
        """The slot that its passes are of."""
        return self._decoding.session.target

    @property
    def read_at(self) -> float:
        """When some of the prompt was read last, by ``time.perf_counter``."""
        return self._decoding.reading.read_at

    @property
    def result(self) -> Result:
        """The result so far; complete once the request has ended."""
        engine, settings, stats, text = self._engine, self._settings, self.stats, self.text
        used = self._decoding.policy.used
        # the CPU rounds otherwise: up to where the device was lost the text is that of its plain decoding, not beyond
        exact = engine.strict and stats.exact and self._lost is None and (used == AR or engine.rows_exact())
        unverified = engine.unverified() + self._decoding.unverified
        return Result(
            text=text.text,
            tokens=list(text.tokens),
            finish=text.finish or "cancelled",
            stats=stats,
            method_requested=settings.method,
            method_used=used,
            reason=self._reason(),
            details=self._details(),
            lossless=None if unverified and stats.lossless else stats.lossless,
            exact=None if unverified and exact else exact,
            unverified=unverified,
            approximations=engine.approximations + settings.accept.approximations,
            operators=engine.operators.kind,
            device=engine.device,
            device_lost=self._lost,
            draft_attention=self._draft_attention,
            logprobs=text.logprobs,
            peak_bytes=peak_bytes(),
            predicted_bytes=self.reservation.admission.predicted,
            stop=text.stopped,
            model_sampling=kept_of_model(engine.bundle.manifest.sampling, settings.sampling),
        )

    @property
    def _draft_attention(self) -> str | None:
        """The coarser keys that this request's drafts read."""
        policy, attention = self._decoding.policy, self._engine.attention
        if attention.draft is None:
            return None
        methods = policy.methods if policy.switches else self.reservation.choice.methods
        return attention.draft if set(methods) & set(needing("layers")) else None

    def _reason(self) -> str:
        """Say in one line why the method was chosen, and whether drafting is faster."""
        policy, stats = self._decoding.policy, self.stats
        parts = [] if policy.switches and policy.reason else [self.reservation.choice.reason]
        parts.append(f"drafter dropped: {stats.dropped_reason}" if stats.dropped_reason else policy.reason)
        if self._lost:
            parts.append(f"continued on the CPU: {self._lost}")
        return "; ".join(filter(None, parts))

    def _details(self) -> list[str]:
        """Say the rest, a sentence each."""
        policy, stats = self._decoding.policy, self.stats
        said = [f"chosen: {self.reservation.choice.reason}"]
        if (experts := self._engine.experts) is not None:
            said.append(experts.words())
        if self._draft_attention and not stats.dropped_reason:
            said.append(f"drafts read {self._draft_attention} keys, verification {self._engine.attention.name}")
        won = policy.won
        said += [f"the {name} guessed in {won.get(one, 0)} rounds" for name, one in self._decoding.first.items()]
        said += policy.details
        if stats.drafted and (speed := stats.request_speedup) is not None:
            said.append(f"measured {speed:.2f}x in this request")
        return said
