"""Reservations of memory: a request asks once, with its method if that fits, else with a cheaper one.

A request without a maximum length reserves memory in steps, so that unneeded memory stays free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgespec.decoding.settings import MAX_NEW_TOKENS, Settings
from edgespec.drafters.registry import needing
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.methods import MethodChoice, choose_method
from edgespec.engine.pool import Reserved, SessionPool
from edgespec.engine.sessions import Session
from edgespec.planning.memory_budget import AdmissionDecision

BLOCK = 64  # tokens: the unit of counted memory


class Reservation(Reserved):
    """The memory that a running request may come to need; ``reserve`` makes one.

    Attributes:
        choice: the method that fits.
        admission: how it runs: rows of a prefill's pass, checkpoints, predicted bytes.
        most: the maximum number of new tokens.
    """

    def __init__(self, engine: LoadedBundle, choice: MethodChoice, settings: Settings, prompt: int) -> None:
        tokens = min(engine.context, prompt + (settings.max_new_tokens or MAX_NEW_TOKENS))
        if choice.candidates:
            fitting = engine.memory_budget.together([one.name for one in choice.candidates], tokens)
            choice = choice.among(fitting, "no room in memory")
        grammar = engine.guidance.nbytes(settings.grammar) if settings.grammar else 0
        super().__init__(heaviest(choice), tokens, grammar)
        self.choice, self.admission = choice, AdmissionDecision(self.method, 0, 0)
        self.most = engine.most_new(settings)
        self._engine, self._table, self._settings = engine, engine.reservations, settings
        self._grows = engine.ends_by_itself(settings)

    @property
    def session(self) -> Session:
        """The session of the request."""
        assert self.using is not None
        return self.using

    def move(self, engine: LoadedBundle, session: Session, choice: MethodChoice) -> None:
        """Continue on another engine, where a device was lost."""
        self._engine, self.using, self.choice = engine, session, choice

    def lasts(self, held: int) -> bool:
        """Whether another round fits after ``held`` tokens; reserves more if the text has no maximum length."""
        after, context = held + self._gamma + 1, self._engine.context  # the longest round
        if not self._grows or self.tokens >= context or after <= self.tokens:
            return True
        wanted = held + max(held // 2, MAX_NEW_TOKENS), -(-after // BLOCK) * BLOCK
        return any(self._grow(min(context, tokens)) for tokens in wanted)

    def _grow(self, tokens: int) -> bool:
        """Reserve memory for more tokens of prompt and answer; False = none is left."""
        with self._engine.reservations.lock:
            busy, idle = self._engine.reservations.held(self.method, self)
            memory_budget = self._engine.memory_budget
            found = memory_budget.extended(
                self.admission, tokens, busy=busy + self._own(tokens), idle=idle, **self._how()
            )
            if found is None:
                return False
            self.admission, self.tokens = found, tokens
        self._make_room(0)
        return True

    def admit(self, sessions: SessionPool | None, prompt: Sequence[int], owner: str | None) -> None:
        """Reserve the memory, and take a session for the prompt; see ``reserve``."""
        memory_budget, manifest = self._engine.memory_budget, self._engine.bundle.manifest
        with self._table.lock:
            busy, idle = self._table.held(self.method)
            adapter = self._engine.adapter_number(self._settings.adapter)
            match = sessions.match(prompt, owner, adapter) if sessions else None
            # the session that it takes exists already; beyond what the request itself needs it counts as idle ones do
            needed = memory_budget.beside(self.method, self.tokens)
            idle -= min(match.kv_bytes, needed) if match else 0
            busy, methods = busy + self._own(self.tokens), list(manifest.methods)
            found = memory_budget.admit(self.method, self.tokens, methods=methods, busy=busy, idle=idle, **self._how())
            if sessions and match:
                most = None if found.spare is None else found.spare + needed
                self.using = sessions.claim(match, not found.crowded, most)
            if found.method != self.method:
                self.choice = replace(choose_method(manifest, found.method), reason=found.reason)
            self.admission, self.method = found, found.method
            self._table.taken.append(self)
        try:
            self._make_room(max(self.using.kv_bytes - needed, 0) if self.using else 0)
            if sessions and match and not self.using:
                self.using = sessions.new(match)
        except BaseException:
            self.release()
            if sessions and self.using:
                sessions.give_back(self.using)
            raise

    def _make_room(self, used: int) -> None:
        """Free idle sessions where memory is short; ``used``: bytes of one that is idle no more."""
        admission, engine = self.admission, self._engine
        if admission.crowded and admission.spare is not None:
            engine.forget_grammars()
            with engine.lock:  # a pass over the memory of a batch must not be at work
                engine.reservations.shrink(admission.spare - used)

    def _own(self, tokens: int) -> int:
        """Bytes of its grammar, and of the other methods of a choice of several, which stay loaded while it runs."""
        members = self.choice.proposers or self.choice.candidates
        several = [one.name for one in members if one.name != self.method]
        return self.grammar + (self._engine.memory_budget.extra(several, tokens) if several else 0)

    @property
    def _gamma(self) -> int:
        return self._settings.gamma or self.choice.gamma

    def _how(self) -> dict[str, Any]:
        greedy = self._settings.sampling.greedy and not self._settings.logprobs
        return {"gamma": self._gamma, "greedy": greedy}

    def release(self) -> None:
        """Free the memory; the session stays in use.  Once is enough."""
        self._table.remove(self)


def reserve(
    engine: LoadedBundle,
    choice: MethodChoice,
    prompt: Sequence[int],
    settings: Settings,
    sessions: SessionPool | None = None,
    owner: str | None = None,
) -> Reservation:
    """Reserve the memory of a request, and take its session, so that the counted memory is the memory used.

    Args:
        engine: that answers.
        choice: the method; a cheaper one runs where this one does not fit.
        prompt: the tokens that it begins with.
        settings: the settings.  Without a maximum length it starts with ``MAX_NEW_TOKENS``, and grows.
        sessions: where its session is from, which the caller gives back; None = it needs none.
        owner: whose texts a session may hold.

    Raises:
        BudgetError: not even plain decoding fits with the running requests.
    """
    found = Reservation(engine, choice, settings, len(prompt))
    found.admit(sessions, prompt, owner)
    return found


def heaviest(choice: MethodChoice) -> str:
    """Name the method whose memory counts: of several, the one with its own model or heads."""
    names = [one.name for one in choice.proposers or choice.candidates] or [choice.name]
    heavy = needing("draft", "drafter") + needing("heads")
    return next((name for name in heavy if name in names), names[0])
