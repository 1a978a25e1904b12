"""Seconds: how fast a bundle decodes, from what was measured on the device and the acceptance in the manifest.

A round of B sequences is a pass over the rows of all of them, and their drafts run one after the other:

    speed-up = E / (B (f + (steps - 1) c) / v(B) + v(B rows) / v(B))          E: tokens of a round of one of them

f being the first step of a round, as control takes it to be (``Control._steps``).  Control drafts what it estimates
to be fastest, and nothing where nothing is faster.  That it estimates by chance, and looks now and then, is left out:
it moves no pick (docs/dev/log.md).  ``tests/planning/test_gains.py`` holds this against control itself, on dice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgespec.drafters.heads import MOST_NODES
from edgespec.drafters.registry import AR, METHODS, Prior, prior_of
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import expected_tokens, rising
from edgespec.formulas.tree import grow
from edgespec.planning.costs import Basis, Costs, PassTimes, line, plain_points
from edgespec.planning.cut import typical_share
from edgespec.planning.profiles import Profile, Trial
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import GAMMA, RunOptions

Curve = Callable[[float], float]  # rows -> time; a mean of passes need not be of whole rows


@dataclass(frozen=True)
class DraftProfile:
    """How a method guesses."""

    rates: Sequence[float]  # P(accepted | put to the test) by position; the last one goes on
    most: int  # most guesses
    ranks: Sequence[Sequence[float]] = ()  # of trees, [head][rank]; empty = chains
    at_once: bool = False  # whether a look at heads makes all guesses, so that their number costs nothing
    # (guesses, tokens) of a round of a drafter that stops by itself; None = control decides
    fixed: tuple[float, float] | None = None


class SpeedupPrediction(NamedTuple):
    """What is predicted: speed over plain decoding, guesses and tokens of a round."""

    speedup: float
    gamma: int = 0
    tokens: float = 1.0


def best_gain(
    guessing: DraftProfile, c: float, v: Curve, width: int = 1, first: float | None = None
) -> SpeedupPrediction:
    """Find what control makes of a method.

    Args:
        guessing: what is guessed, and how often it is right.
        c: time of a draft step in rounds of plain decoding of one sequence.
        v: rows -> time of a round over them in the same unit; v(1) may be above 1 (padding).
        width: sequences whose rows share a pass.
        first: time of a round's first draft step; None = ``c``.
    """
    whole = v(width)
    begin, further = (c if first is None else first) * width / whole, c * width / whole
    tokens, found = 1.0, [SpeedupPrediction(1.0)]
    if guessing.fixed is not None:
        guesses, tokens = guessing.fixed
        found.append(SpeedupPrediction(tokens / (v(width * (1 + guesses)) / whole), max(1, round(guesses)), tokens))
    elif guessing.ranks:  # the best trees of every size
        for nodes, (_, chance) in enumerate(grow(guessing.ranks, guessing.most), 1):
            tokens += chance
            found.append(SpeedupPrediction(tokens / (begin + v(width * (1 + nodes)) / whole), nodes, tokens))
    else:
        for gamma in range(1, guessing.most + 1):
            tokens, more = expected_tokens(guessing.rates, gamma), 0 if guessing.at_once else gamma - 1
            time = begin + more * further + v(width * (1 + gamma)) / whole
            found.append(SpeedupPrediction(tokens / time, gamma, tokens))
    best = max(found, key=lambda gain: gain.speedup)
    return best._replace(speedup=best.speedup / v(1))  # the graph of all methods may be slower than plain decoding's


@dataclass(frozen=True)
class Speed:
    """A prediction; a plan's JSON has these keys."""

    speedup: float  # over the fastest plain decoding of the same bundle on the same device, of as many sequences
    tokens_per_second: float | None  # of one sequence after the prefill; None = nothing is known of the device
    plain_tokens_per_second: float | None  # the same of plain decoding
    prefill_tokens_per_second: float | None  # None = not known
    gamma: int  # guesses a round that it was predicted for; 0 = plain decoding is fastest
    tokens_per_round: float  # expected
    acceptance: float | None  # of the first guess; None = the method was timed as a whole, or drafts nothing
    basis: Basis  # what it rests on
    assumed: tuple[str, ...] = ()  # what of it is assumed rather than measured, in words; empty = nothing


def speed_of(
    manifest: Manifest, use: RunOptions, profile: Profile | None = None, *, depth: float | None = None
) -> Speed:
    """How fast a bundle decodes in this way on the device of ``profile``; None = nothing is known of the device.

    The profile is of this bundle or of another one.  Figures of a busy machine, in it or from the export, are not used;
    ``assumed`` says so.  ``depth``: tokens before a pass, on average; None = half of the context.

    Raises:
        InvalidRequest: the bundle does not have the method.
    """
    if use.method not in manifest.methods:
        raise InvalidRequest(
            f"method {use.method!r} is not in this bundle; it has: {', '.join(manifest.methods)}",
            "export it with that method",
        )
    at = use.context / 2 if depth is None else depth
    costs = Costs(manifest, use, profile, at)
    notes, basis = list(costs.notes), costs.basis
    width = use.batch if use.operators == "native" and use.device == "cpu" else 1
    if width > 1:
        notes.append("rows of several sequences take what as many rows of one do")
    plain = None
    if profile is not None and basis in ("calibrated", "scaled"):
        step = costs.plain * (costs.pass_ms(width) / costs.pass_ms(1)) + costs.other
        plain = 1000 / step / (use.batch // width)  # or they take turns

    def speed(gain: float, gamma: int = 0, tokens: float = 1.0, rates: Sequence[float] = ()) -> Speed:
        fast, why = None if plain is None else plain * gain, tuple(dict.fromkeys(notes))
        return Speed(gain, fast, plain, costs.prefill, gamma, tokens, rates[0] if rates else None, basis, why)

    if use.method == AR:
        return speed(1 / costs.v(1))
    if not use.greedy:
        notes.append("guesses are accepted as in greedy decoding")
    trial = None
    # what was accepted in a profile's trials says something of this bundle where it is the same model
    if plain and profile and profile.facts == manifest.target.facts and (trial := profile.trials.get(use.method)):
        if basis == "calibrated" and width == 1:
            gain = _moved(trial, profile, costs)
            return speed(gain, trial.gamma, trial.tokens_per_round, trial.acceptance)
        if basis != "calibrated":
            notes.append(f"guesses are accepted as in {profile.name}")
    prior = prior_of(use.method, manifest.methods[use.method])
    if prior is None and trial is None:
        known = manifest.methods[use.method].predicted_speedup
        notes.append("the gain is the exporting machine's" if known else "no gain: how often it is right is not known")
        return speed(max(known or 1.0, 1.0) / costs.v(1))
    guessing = _guessing(manifest, use, trial, prior, notes)
    found = best_gain(guessing, costs.c(use.method), costs.controlled, width, costs.c(use.method, first=True))
    return speed(found.speedup, found.gamma, found.tokens, guessing.rates)


def _moved(trial: Trial, profile: Profile, costs: Costs) -> float:
    """Move the speed-up of a trial to another depth: its passes and drafts grow as measured, what it guesses stays.

    Where guessing no longer helps there, control stops.
    """
    passes, before = PassTimes(profile.passes), trial.depth
    now = sum(count * costs.pass_ms(rows) for rows, count in trial.rows.items())
    then = sum(count * passes.ms(rows, before) for rows, count in trial.rows.items())
    drafts = profile.drafts.get(costs.use.method)
    grown = line(rising(drafts), costs.depth) / line(rising(drafts), before) if drafts else 1.0
    # a round of plain decoding, there and here
    plain = trial.speedup * trial.round_ms / trial.tokens_per_round
    plain = max(plain + costs.plain - line(plain_points(profile), before), plain / 2)
    speedup = trial.tokens_per_round * plain / (trial.draft_ms * grown + trial.verify_ms * now / then + trial.other_ms)
    return max(speedup, min(1 / costs.controlled(1), trial.speedup))


def _guessing(
    manifest: Manifest, use: RunOptions, trial: Trial | None, prior: Prior | None, notes: list[str]
) -> DraftProfile:
    """How a method guesses here: as in a trial, as the export measured, or as the literature has it."""
    method, part = use.method, manifest.methods[use.method]
    most = use.gamma if use.gamma < GAMMA else part.gamma
    if METHODS[method].needs == "text" and trial is not None:
        return DraftProfile(trial.acceptance, most, fixed=(trial.drafted / trial.rounds, trial.tokens_per_round))
    if prior is None:  # it was tried
        assert trial is not None
        return DraftProfile(trial.acceptance or [0.0], most, at_once=METHODS[method].at_once)
    if prior.fixed is not None:
        notes.append(f"guesses: {prior.source}")
        return DraftProfile([prior.acceptance], most, fixed=prior.fixed)
    if prior.ranks:
        ranks = part.ranks
        if not ranks:
            notes.append(f"how often heads are right: {prior.source}")
            ranks = prior.ranks
        nodes = use.gamma if use.gamma < GAMMA else MOST_NODES
        return DraftProfile([ranks[0][0]], nodes, ranks, at_once=True)
    rates = trial.acceptance if trial is not None else list(part.measured[0].acceptance) if part.measured else []
    if not rates:
        notes.append(f"acceptance: {prior.source}")
        rates = [prior.acceptance * typical_share(manifest.beside(METHODS[method].needs))]
    return DraftProfile(rates, most, at_once=METHODS[method].at_once)
