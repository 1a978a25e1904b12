"""Letting a request in: with the method it wants where that fits the memory, else with a cheaper one."""

from __future__ import annotations

from dataclasses import replace

from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import needing
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.methods import MethodChoice, choose_method
from edgespec.planning.memory.allowance import Admission


def admit(
    engine: LoadedBundle, choice: MethodChoice, prompt: int, settings: Settings
) -> tuple[MethodChoice, Admission]:
    """How a request of ``prompt`` tokens may run.

    Raises:
        BudgetError: not even plain decoding fits.
    """
    tokens = min(engine.context, prompt + settings.max_new_tokens)
    if choice.candidates:
        fitting = engine.allowance.together([one.name for one in choice.candidates], tokens)
        choice = choice.among(fitting, "no room in memory")
    busy, idle = engine.sessions.held()
    method = heaviest(choice)
    # what several methods load stays while the request runs
    if several := [one.name for one in choice.proposers or choice.candidates if one.name != method]:
        busy += engine.allowance.extra(several, tokens)
    admission = engine.allowance.admit(
        method,
        tokens,
        gamma=settings.gamma or choice.gamma,
        greedy=settings.sampling.greedy and not settings.logprobs,
        methods=engine.methods,
        busy=busy,
        idle=idle,
    )
    if admission.crowded:
        engine.sessions.clear()
    if admission.method == method:
        return choice, admission
    cheaper = choose_method(engine.bundle.manifest, admission.method)
    return replace(cheaper, reason=admission.reason), admission


def heaviest(choice: MethodChoice) -> str:
    """The method whose memory counts: of several, the one that holds a model or heads of its own."""
    names = [one.name for one in choice.proposers or choice.candidates] or [choice.name]
    heavy = needing("draft", "drafter") + needing("heads")
    return next((name for name in heavy if name in names), names[0])
