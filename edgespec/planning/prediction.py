"""Seconds: how fast a bundle decodes, from what was measured on the device and the acceptance in the manifest.

A round of B sequences is a pass over the rows of all of them, and their drafts run one after the other:

    speed-up = E / (B (f + (steps - 1) c) / v(B) + v(B rows) / v(B))          E: tokens of a round of one of them

f being the first step of a round, as control takes it to be (``Adaptive.set_width``).  Control drafts what it estimates
to be fastest, and nothing where nothing is faster.  That it estimates by chance, and looks now and then, is left out:
it moves no pick (docs/project/log.md).  ``tests/planning/test_gains.py`` holds this against control itself, on dice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from edgespec.drafters.heads import MOST_NODES
from edgespec.drafters.registry import AR, METHODS, Prior
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import expected_tokens, rising
from edgespec.formulas.tree import grow
from edgespec.planning.costs import Costs, PassTimes, assumed, calibrated, exported, is_of, line, plain_points, scaled
from edgespec.planning.cut import typical_share
from edgespec.planning.profiles import Profile, Trial, export_busy
from edgespec.runtimes.files.manifest import Manifest, MethodPart
from edgespec.runtimes.options import GAMMA, RunOptions

Curve = Callable[[float], float]  # rows -> time; a mean of passes need not be of whole rows


@dataclass(frozen=True)
class Guessing:
    """How a method guesses.

    Attributes:
        rates: P(accepted | put to the test) by position; the last one goes on.
        ranks: of trees, [head][rank]; empty = chains.
        at_once: whether a look at heads makes all guesses, so that their number costs nothing.
        most: most guesses.
        fixed: (guesses, tokens) of a round of a drafter that stops by itself; None = control decides.
    """

    rates: Sequence[float]
    most: int
    ranks: Sequence[Sequence[float]] = field(default_factory=list)
    at_once: bool = False
    fixed: tuple[float, float] | None = None


@dataclass(frozen=True)
class Gain:
    """What is predicted: speed over plain decoding, guesses and tokens of a round."""

    speedup: float
    gamma: int = 0
    tokens: float = 1.0


def best_gain(guessing: Guessing, c: float, v: Curve, width: int = 1, first: float | None = None) -> Gain:
    """Find what control makes of a method.

    Args:
        guessing: what is guessed, and how often it is right.
        c: time of a draft step in rounds of plain decoding of one sequence.
        v: rows -> time of a round over them in the same unit; v(1) may be above 1 (padding).
        width: sequences whose rows share a pass.
        first: time of a round's first draft step; None = ``c``.
    """
    options = _options(guessing, c, v, width, c if first is None else first)
    found = [Gain(tokens / time, gamma, tokens) for gamma, tokens, time in options]
    best = max([Gain(1.0), *found], key=lambda gain: gain.speedup)
    return replace(best, speedup=best.speedup / v(1))  # the graph of all methods may be slower than plain decoding's


def _options(guessing: Guessing, c: float, v: Curve, width: int, first: float) -> list[tuple[int, float, float]]:
    """(guesses, tokens, time in plain rounds) of the rounds that can be made."""
    whole = v(width)
    begin, further = first * width / whole, c * width / whole
    if guessing.fixed is not None:
        guesses, tokens = guessing.fixed
        return [(max(1, round(guesses)), tokens, v(width * (1 + guesses)) / whole)]
    if guessing.ranks:
        trees = _trees(guessing)
        return [(nodes, tokens, begin + v(width * (1 + nodes)) / whole) for nodes, tokens in trees]
    found = []
    for gamma in range(1, guessing.most + 1):
        more = 0 if guessing.at_once else gamma - 1
        time = begin + more * further + v(width * (1 + gamma)) / whole
        found.append((gamma, expected_tokens(guessing.rates, gamma), time))
    return found


def _trees(guessing: Guessing) -> list[tuple[int, float]]:
    """(nodes, tokens of a round) of the best trees of every size."""
    found, tokens = [], 1.0
    for nodes, (_, chance) in enumerate(grow(guessing.ranks, guessing.most), 1):
        tokens += chance
        found.append((nodes, tokens))
    return found


# from best to worst: measured with this bundle on this device; its figures for another bundle, scaled; what the
# exporting machine measured; formulas with assumptions alone
Basis = Literal["calibrated", "scaled", "exported", "assumed"]


@dataclass(frozen=True)
class Speed:
    """A prediction.

    Attributes:
        speedup: over the fastest plain decoding of the same bundle on the same device, of as many sequences.
        tokens_per_second: of one sequence after the prefill; None = nothing is known of the device.
        plain_tokens_per_second: the same of plain decoding.
        prefill_tokens_per_second: None = not known.
        gamma: guesses a round that it was predicted for; 0 = none pays.
        tokens_per_round: expected.
        acceptance: of the first guess; None = the method was timed as a whole, or drafts nothing.
        basis: what it rests on.
        assumed: what of it is assumed rather than measured, in words; empty = nothing.
    """

    speedup: float
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    prefill_tokens_per_second: float | None
    gamma: int
    tokens_per_round: float
    acceptance: float | None
    basis: Basis
    assumed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return asdict(self) | {"assumed": list(self.assumed)}


def speed_of(
    manifest: Manifest, use: RunOptions, profile: Profile | None = None, *, depth: float | None = None
) -> Speed:
    """How fast a bundle decodes in this way on the device of ``profile``; None = nothing is known of the device.

    Figures of a busy machine, in a profile or from the export, are not used; ``assumed`` says so.

    Args:
        manifest: of the bundle, or of one that is planned.
        use: how it is to be run.
        profile: of the device: of this bundle, or of another one.
        depth: tokens before a pass, on average; None = half of the context.

    Raises:
        InvalidRequest: the bundle does not have the method.
    """
    if use.method not in manifest.methods:
        raise InvalidRequest(
            f"method {use.method!r} is not in this bundle; it has: {', '.join(manifest.methods)}",
            "export it with that method",
        )
    at = use.context / 2 if depth is None else depth
    unused = profile.busy if profile is not None else ""
    if unused:
        profile = None
    costs, basis = _costs(manifest, use, profile, at)
    notes = _notes(manifest, costs, basis, unused)
    width = use.batch if use.operators == "native" and use.device == "cpu" else 1
    turns = use.batch if width < use.batch else 1  # they take turns
    plain = 1000 / (costs.plain * width_factor(costs, width) + costs.other) / turns if costs.known else None
    if width > 1:
        notes.append("rows of several sequences take what as many rows of one do")

    def speed(gain: float, gamma: int, tokens: float, acceptance: float | None) -> Speed:
        fast, why = None if plain is None else plain * gain, tuple(dict.fromkeys(notes))
        return Speed(gain, fast, plain, costs.prefill, gamma, tokens, acceptance, basis, why)

    if use.method == AR:
        return speed(1 / costs.v(1), 0, 1.0, None)
    trial = profile.trials.get(use.method) if profile is not None and _same_text(profile, manifest) else None
    if not use.greedy:
        notes.append("guesses are accepted as in greedy decoding")
    if trial is not None and basis == "calibrated" and profile is not None:
        if width == 1:
            gain = moved(trial, profile, costs, use.method, at)
            return speed(gain, _gamma(trial), trial.tokens_per_round, _first(trial.acceptance))
    elif trial is not None and profile is not None:
        notes.append(f"guesses are accepted as in {profile.name}")
    prior = METHODS[use.method].prior
    if prior is None and trial is None:
        known = manifest.methods[use.method].predicted_speedup
        notes.append("the gain is the exporting machine's" if known else "no gain: how often it is right is not known")
        return speed(max(known or 1.0, 1.0) / costs.v(1), 0, 1.0, None)
    guessing = _guessing(manifest, use, trial, prior, notes)
    found = best_gain(guessing, costs.c(use.method), costs.controlled, width, costs.c(use.method, first=True))
    return speed(found.speedup, found.gamma, found.tokens, _first(guessing.rates))


def _notes(manifest: Manifest, costs: Costs, basis: Basis, unused: str) -> list[str]:
    """List what is assumed of costs, and which times were not used and why; ``unused``: why a profile was not."""
    if unused:
        return [*costs.assumed, f"the calibration is not used, because {unused}"]
    busy = export_busy(manifest.cost) if basis == "assumed" else ""
    return [*costs.assumed, *([f"the export's times are not used, because {busy}"] if busy else [])]


def moved(trial: Trial, profile: Profile, costs: Costs, method: str, depth: float) -> float:
    """Move the speed-up of a trial to another depth: its passes and drafts grow as measured, what it guesses stays.

    Where guessing no longer pays there, control stops.
    """
    passes, before = PassTimes(profile.passes), trial.depth
    now = sum(count * costs.pass_ms(rows) for rows, count in trial.rows.items())
    then = sum(count * passes.ms(rows, before) for rows, count in trial.rows.items())
    drafts = profile.drafts.get(method)
    grown = line(rising(drafts), depth) / line(rising(drafts), before) if drafts else 1.0
    # a round of plain decoding, there and here
    plain = trial.speedup * trial.round_ms / trial.tokens_per_round
    plain = max(plain + costs.plain - line(plain_points(profile), before), plain / 2)
    speedup = trial.tokens_per_round * plain / (trial.draft_ms * grown + trial.verify_ms * now / then + trial.other_ms)
    return max(speedup, min(1 / costs.controlled(1), trial.speedup))


def width_factor(costs: Costs, width: int) -> float:
    """Compare a plain pass over the rows of ``width`` sequences with one of a single sequence."""
    return costs.pass_ms(width) / costs.pass_ms(1)


# -- parts -----------------------------------------------------------------------------------------------------------


def _costs(manifest: Manifest, use: RunOptions, profile: Profile | None, depth: float) -> tuple[Costs, Basis]:
    """Choose the best that is known of passes and drafts."""
    if profile is not None:
        if is_of(profile, manifest, use):
            return calibrated(manifest, use, profile, depth), "calibrated"
        return scaled(manifest, use, profile, depth), "scaled"
    found = exported(manifest, use, depth)
    return (found, "exported") if found else (assumed(manifest, use, depth), "assumed")


def _same_text(profile: Profile, manifest: Manifest) -> bool:
    """Whether what was accepted in a profile's trials says something of this bundle: it is the same model."""
    return profile.facts == manifest.target.facts


def _guessing(
    manifest: Manifest, use: RunOptions, trial: Trial | None, prior: Prior | None, notes: list[str]
) -> Guessing:
    """How a method guesses here: as in a trial, as the export measured, or as the literature has it."""
    method, part = use.method, manifest.methods[use.method]
    most = use.gamma if use.gamma < GAMMA else part.gamma
    if METHODS[method].needs == "text" and trial is not None:
        return Guessing(trial.acceptance, most, fixed=(trial.drafted / trial.rounds, trial.tokens_per_round))
    if prior is None:  # it was tried
        assert trial is not None
        return Guessing(trial.acceptance or [0.0], most, at_once=METHODS[method].at_once)
    if prior.fixed is not None:
        notes.append(f"guesses: {prior.source}")
        return Guessing([prior.acceptance], most, fixed=prior.fixed)
    if prior.ranks:
        ranks = part.ranks
        if not ranks:
            notes.append(f"how often heads are right: {prior.source}")
            ranks = prior.ranks
        nodes = use.gamma if use.gamma < GAMMA else MOST_NODES
        return Guessing([ranks[0][0]], nodes, ranks, at_once=True)
    rates = trial.acceptance if trial is not None else _measured(part)
    if not rates:
        notes.append(f"acceptance: {prior.source}")
        small = manifest.beside(METHODS[method].needs)
        rates = [prior.acceptance * typical_share(small)]
    return Guessing(rates, most, at_once=METHODS[method].at_once)


def _measured(part: MethodPart) -> list[float]:
    return list(part.measured[0].acceptance) if part.measured else []


def _first(rates: Sequence[float]) -> float | None:
    return rates[0] if rates else None


def _gamma(trial: Trial) -> int:
    """Guesses of most of its drafted rounds; 0 = it mostly decoded plainly."""
    drafted = {rows: count for rows, count in trial.rows.items() if rows > 1}
    if not drafted or 2 * sum(drafted.values()) < trial.rounds:
        return 0
    return max(drafted, key=lambda rows: drafted[rows]) - 1
