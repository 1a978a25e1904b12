"""Which method, format and context for a budget: candidates, and the pick with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.drafters.registry import AR
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import WORTH
from edgespec.planning.candidates import (
    CONTEXT,
    Goal,
    Option,
    PlannedRun,
    PlanRequest,
    contexts,
    largest_context,
    peak,
    planned_run,
    uses,
)
from edgespec.planning.memory.budget import show_bytes
from edgespec.planning.profile.record import Profile
from edgespec.runtimes.files.formats import FORMATS, SPECS

NEAR = 0.02  # speeds closer than that are taken for equal: the finer format wins, then the smaller one
PRECISION = [str(name) for name in sorted(FORMATS, key=lambda name: SPECS[name].native_bits)]  # from coarse to fine


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        request: what was asked for.
        candidates: all that were considered, those that fit first, the best first.
        pick: the best that fits; None = nothing does.
        reason: why, in words.
        hints: what would make it fit, or what else could be had.
    """

    request: PlanRequest
    candidates: tuple[PlannedRun, ...]
    pick: PlannedRun | None
    reason: str
    hints: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return {
            "budget": self.request.budget,
            "goal": self.request.goal,
            "pick": None if self.pick is None else self.pick.as_dict(),
            "reason": self.reason,
            "hints": list(self.hints),
            "candidates": [candidate.as_dict() for candidate in self.candidates],
            "profiles": [_identified(profile) for profile in self._profiles()],
        }

    def _profiles(self) -> list[Profile]:
        """What the speeds rest on, each once."""
        options = {id(candidate.option): candidate.option for candidate in self.candidates}.values()
        used = [option.profile or self.request.profile for option in options]
        return list({id(profile): profile for profile in used if profile is not None}.values())


def _identified(profile: Profile) -> dict[str, Any]:
    """What tells a profile from others."""
    return {"machine": profile.machine.model_dump(), "bundle": profile.name, "created": profile.created}


def make_plan(options: Sequence[Option], request: PlanRequest) -> Plan:
    """Choose among ways to run ``options`` within a budget.

    Raises:
        InvalidRequest: no option, a context that none of them has, or a batch below 1.
    """
    if not options:
        raise InvalidRequest("nothing to plan for: expected at least one bundle or model")
    if request.batch < 1:
        raise InvalidRequest(f"batch {request.batch}: expected at least one sequence")
    most = max(option.manifest.target.facts.context for option in options)
    if request.load.context is not None and not 1 < request.load.context <= most:
        raise InvalidRequest(f"context {request.load.context}: expected 2 to {most}, what the model was made for")
    for context in contexts(request, most):
        tried = [planned_run(option, use, request) for option in options for use in uses(option, request, context)]
        if any(candidate.fits for candidate in tried):
            break
    ranked = tuple(sorted(tried, key=lambda candidate: _order(candidate, request.goal)))
    fitting = [candidate for candidate in ranked if candidate.fits]
    if not fitting:
        return Plan(request, ranked, None, *_nothing_fits(ranked, options, request))
    pick = _pick(fitting, request.goal)
    ranked = (pick, *(candidate for candidate in ranked if candidate is not pick))
    return Plan(request, ranked, pick, *_why(pick, fitting, ranked, request, most))


# -- the pick ----------------------------------------------------------------------------------------------------------


def _order(candidate: PlannedRun, goal: Goal) -> tuple[float, ...]:
    """Sorts the best first: what fits, what keeps the bundle's own text, what can be run at once, then the goal."""
    first = (not candidate.fits, candidate.approximates)
    ready = candidate.use.method in candidate.option.needs
    if goal == "memory":
        return (*first, ready, candidate.memory.peak, -candidate.rate)
    if goal == "quality":
        return (*first, -PRECISION.index(candidate.format), ready, -candidate.rate)
    return (*first, ready, -candidate.rate, candidate.memory.peak)


def _pick(fitting: Sequence[PlannedRun], goal: Goal) -> PlannedRun:
    """The best that fits; plain decoding where nothing is clearly faster, the smaller one of equals."""
    best = fitting[0]
    rivals = [
        one
        for one in fitting
        if one.approximates == best.approximates
        and (one.use.method in one.option.needs) == (best.use.method in best.option.needs)
        and (goal != "quality" or one.format == best.format)
    ]
    if goal == "memory":
        # a little memory for a clearly faster method is no saving worth having
        return max((one for one in rivals if one.memory.peak <= 1.02 * best.memory.peak), key=lambda one: one.rate)
    plain = [one for one in rivals if one.use.method == AR]
    if plain and best.rate < WORTH * max(one.rate for one in plain):
        return max(plain, key=lambda one: one.rate)
    near = [one for one in rivals if one.rate >= (1 - NEAR) * best.rate]
    return min(near, key=lambda one: (-PRECISION.index(one.format), one.memory.peak))


def _why(
    pick: PlannedRun, fitting: Sequence[PlannedRun], ranked: Sequence[PlannedRun], request: PlanRequest, most: int
) -> tuple[str, tuple[str, ...]]:
    """The reason, and hints."""
    goals = {
        "auto": "the fastest that fits",
        "chat": "the fastest for one sequence that fits",
        "batch": f"the most tokens a second for {request.batch} sequences",
        "memory": "the least memory",
        "quality": "the finest format that fits, and the fastest with it",
    }
    words = [goals[request.goal]]
    if request.goal in ("auto", "chat", "batch") and any(one.rate > pick.rate for one in fitting):
        words = ["as fast as the fastest that fits, as far as a prediction tells"]
    words += [f"predicted peak {show_bytes(pick.memory.peak)} of {show_bytes(request.budget)}"]
    if pick.use.method == AR:
        words.append("no method is predicted to be clearly faster than plain decoding")
    else:
        words.append(f"predicted {pick.speed.speedup:.2f}x plain decoding ({pick.speed.basis})")
    better = [one for one in ranked if not one.fits and one.rate > WORTH * pick.rate and not one.approximates]
    if better:
        best = max(better, key=lambda one: one.rate)
        words.append(f"{best.format} {best.use.method} would be faster but needs {show_bytes(best.memory.peak)}")
    if request.load.context is None and pick.use.context < min(CONTEXT, most):
        words.append(f"context cut to {pick.use.context} tokens to fit")
    if pick.approximates:
        words.append("with the bundle's own keys nothing fits: int8 keys and values change its text a little")
    if pick.speed.assumed:
        words.append(f"assumed: {', '.join(pick.speed.assumed)}")
    room, whole = largest_context(pick.option, pick.use, request), pick.option.manifest.target.facts.context
    all_of_it = f"the model's whole context of {whole} tokens fits this budget"
    hints = [all_of_it if room == whole else f"room for {room} tokens of context in this budget"]
    if busy := _busy(request, ranked):
        hints.append(f"{busy}: its times are not used; calibrate again when nothing else runs")
    for one in ranked:
        need = one.option.needs.get(one.use.method)
        if need and one.fits and one.rate > WORTH * pick.rate and not one.approximates:
            hints.append(f"{one.format} {one.use.method}: predicted {one.speed.speedup:.2f}x, but {need}")
            break
    return "; ".join(words), tuple(hints)


def _busy(request: PlanRequest, ranked: Sequence[PlannedRun]) -> str:
    """Why a profile's times are not used, in words; empty = they are, or there is none."""
    profiles = (request.profile, *(one.option.profile for one in ranked))
    return next((profile.busy for profile in profiles if profile is not None and profile.busy), "")


def _nothing_fits(
    ranked: Sequence[PlannedRun], options: Sequence[Option], request: PlanRequest
) -> tuple[str, tuple[str, ...]]:
    """What is closest, and what would make it fit."""
    closest = min(ranked, key=lambda candidate: candidate.memory.peak)
    own = min((one for one in ranked if not one.approximates), key=lambda one: one.memory.peak)
    reason = (
        f"nothing fits {show_bytes(request.budget)}: closest is {own.format} {own.use.method} with a context of "
        f"{own.use.context} tokens, which needs {show_bytes(own.memory.peak)}"
    )
    hints = []
    coarser = replace(own.use, attention="int8")
    if room := largest_context(closest.option, closest.use, request):
        hints.append(
            f"a shorter context: --context {room} fits with {closest.format} {closest.use.method}"
            + (" and --attention int8" if closest.approximates else "")
        )
    elif request.load.attention not in (None, "int8") and peak(own.option, coarser, request) <= request.budget:
        hints.append("keys and values in 8 bits: --attention int8")
    if request.batch > 1:
        alone = peak(own.option, replace(own.use, batch=1), request)
        hints.append(f"one sequence at a time needs {show_bytes(alone)}")
    finest = min(PRECISION.index(option.manifest.target.format) for option in options)
    if finest > PRECISION.index("int4"):
        hints.append("a smaller format: export with --format int4")
    if own.use.method != AR and own.memory.peak < max(one.memory.peak for one in ranked):
        hints.append(f"without extras: method {own.use.method} is the smallest of this model")
    hints.append(f"a budget of {show_bytes(closest.memory.peak)}")
    return reason, tuple(hints)


def label(candidate: PlannedRun) -> str:
    """A candidate in a few words."""
    use = candidate.use
    keys = f" {use.attention} keys" if use.attention else ""
    return f"{candidate.format} {use.method}{keys}"
