"""Admission of a request: with its method if that fits in memory with the others, else with a cheaper one.

A request without a maximum length reserves memory in steps, so that unneeded memory stays free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.decoding.settings import MAX_NEW_TOKENS, Settings
from edgespec.drafters.registry import AR, needing
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.methods import MethodChoice, choose_method
from edgespec.engine.pool import Place, SessionPool
from edgespec.planning.allowance import Admission


def admit(
    engine: LoadedBundle,
    choice: MethodChoice,
    prompt: Sequence[int],
    settings: Settings,
    sessions: SessionPool | None,
    owner: str | None = None,
) -> tuple[MethodChoice, Admission, Place]:
    """How a request may run, and its session; it leaves its place with ``engine.places.leave``.

    A request without a session takes one from ``sessions`` here, so that the counted memory is the memory used.  The
    caller gives it back.  A request without a maximum length starts with ``MAX_NEW_TOKENS``; ``Room`` extends it.

    Raises:
        BudgetError: not even plain decoding fits with the running requests.
    """
    tokens = min(engine.context, len(prompt) + (settings.max_new_tokens or MAX_NEW_TOKENS))
    if choice.candidates:
        fitting = engine.allowance.together([one.name for one in choice.candidates], tokens)
        choice = choice.among(fitting, "no room in memory")
    method = heaviest(choice)
    grammar = engine.guidance.nbytes(settings.grammar) if settings.grammar else 0
    with engine.places.lock:
        busy, idle = held(engine, method)
        # the session that it takes is there already; beyond what the request itself needs it counts as all idle ones
        beside = engine.allowance.beside(method, tokens)
        idle -= min(sessions.next_bytes(prompt, owner), beside) if sessions else 0
        busy += grammar + _beside(engine, choice, method, tokens)
        admission = engine.allowance.admit(
            method,
            tokens,
            gamma=settings.gamma or choice.gamma,
            greedy=settings.sampling.greedy and not settings.logprobs,
            methods=list(engine.bundle.manifest.methods),
            busy=busy,
            idle=idle,
        )
        most = None if admission.spare is None else admission.spare + beside
        session = sessions.reserve(prompt, owner, not admission.crowded, most) if sessions else None
        place = Place(admission.method, tokens, grammar, session)
        engine.places.taken.append(place)
    try:
        if admission.crowded and admission.spare is not None:
            engine.forget_grammars()
            more = max(session.kv_bytes - beside, 0) if session else 0
            with engine.lock:  # a pass over the memory of a batch must not be at work
                engine.places.shrink(admission.spare - more)
        if sessions and session is None:
            place.session = sessions.new(prompt, owner)
    except BaseException:
        engine.places.leave(place)
        if sessions and session:
            sessions.give_back(session)
        raise
    if admission.method == method:
        return choice, admission, place
    cheaper = choose_method(engine.bundle.manifest, admission.method)
    return replace(cheaper, reason=admission.reason), admission, place


def held(engine: LoadedBundle, method: str = AR, own: Place | None = None, wait: bool = True) -> tuple[int, int]:
    """Bytes that requests other than ``own`` have or will come to need, and those that may be freed.

    ``method``: whose weights are counted elsewhere.  ``wait``: see ``SessionPool.held``.
    """
    places, allowance = engine.places, engine.allowance
    others = [place for place in places.taken if place is not own]
    busy = sum(
        place.grammar
        + max(allowance.beside(place.method, place.tokens), place.session.kv_bytes if place.session else 0)
        for place in others
    )
    pools = [pool.held(wait) for pool in places.pools]
    # sessions that are in use for something else, such as to be saved
    busy += sum(used for used, _ in pools) - sum(place.session.kv_bytes for place in places.taken if place.session)
    busy -= places.shared_bytes()
    loaded = sorted({place.method for place in others} - {method, AR})
    busy += sum(allowance.extra([name], 1) for name in loaded)
    return busy, engine.grammar_bytes + sum(idle for _, idle in pools)


def _beside(engine: LoadedBundle, choice: MethodChoice, method: str, tokens: int) -> int:
    """Bytes of the other methods of a choice of several; they stay loaded while the request runs."""
    several = [one.name for one in choice.proposers or choice.candidates if one.name != method]
    return engine.allowance.extra(several, tokens) if several else 0


def heaviest(choice: MethodChoice) -> str:
    """Name the method whose memory counts: of several, the one with its own model or heads."""
    names = [one.name for one in choice.proposers or choice.candidates] or [choice.name]
    heavy = needing("draft", "drafter") + needing("heads")
    return next((name for name in heavy if name in names), names[0])


BLOCK = 64  # tokens: the unit of counted memory


class Room:
    """The limit of a running request: ``most`` new tokens; its reservation grows with it."""

    def __init__(
        self, engine: LoadedBundle, choice: MethodChoice, admission: Admission, place: Place, settings: Settings
    ) -> None:
        self._choice, self._place, self._settings = choice, place, settings
        self._open = engine.ends_by_itself(settings)
        self.admission = admission
        self.most = engine.most_new(settings)

    def lasts(self, engine: LoadedBundle, held: int) -> bool:
        """Whether another round fits after ``held`` tokens; reserves more if the text has no maximum length."""
        after = held + (self._settings.gamma or self._choice.gamma) + 1  # the longest round
        if not self._open or self._place.tokens >= engine.context or after <= self._place.tokens:
            return True
        wanted = held + max(held // 2, MAX_NEW_TOKENS), -(-after // BLOCK) * BLOCK
        return any(self._grow(engine, min(engine.context, tokens)) for tokens in wanted)

    def _grow(self, engine: LoadedBundle, tokens: int) -> bool:
        """Reserve memory for more tokens of prompt and answer; False = none is left."""
        place, settings = self._place, self._settings
        with engine.places.lock:
            busy, idle = held(engine, place.method, place)
            found = engine.allowance.extended(
                self.admission,
                tokens,
                gamma=settings.gamma or self._choice.gamma,
                greedy=settings.sampling.greedy and not settings.logprobs,
                busy=busy + place.grammar + _beside(engine, self._choice, place.method, tokens),
                idle=idle,
            )
            if found is None:
                return False
            self.admission, place.tokens = found, tokens
        if found.crowded and found.spare is not None:
            engine.forget_grammars()
            with engine.lock:  # a pass over the memory of a batch must not be at work
                engine.places.shrink(found.spare)
        return True
