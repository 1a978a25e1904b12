"""An engine's data about a bundle's methods: acceptance, costs, and the speed that control starts from.

A calibration of this machine comes first, then measurements of the export, then published figures of the method.
``info``, method auto and the first decision of control all read it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgespec.control.adaptive import PRIOR, WEIGHT_ENGINE
from edgespec.control.estimator import Evidence, best_length, measured, posterior, scaled
from edgespec.control.learned import Learned
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.registry import AR, METHODS, prior_of
from edgespec.engine.pass_record import PassRecord, Times
from edgespec.formulas.cost import CostModel
from edgespec.planning.profiles import Profile, Trial, export_busy
from edgespec.runtimes.files.manifest import Manifest, MethodPart

LONGEST = 8  # guesses that a speed is predicted for
_PUBLISHED = 4.0  # weight of a published acceptance, in guesses, against the export's
_TRIED = 4 * WEIGHT_ENGINE  # the maximum number of guesses that count from a calibration


@dataclass
class Experience:
    """Keeps measurements of an engine's requests, by method and options; all its sessions share it."""

    profile: Profile | None = None  # a calibration of this machine
    record: PassRecord | None = None  # of earlier processes
    methods: dict[tuple[str, DraftOptions], Learned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        earlier = self.record.times if self.record else {}
        self.times: Times = earlier | known_times(self.profile)  # measured ones join them

    def add_times(self, kind: str, times: dict[int, float]) -> None:
        """Add times that were measured now, for later processes too."""
        self.times[kind] = times
        if self.record is not None:
            self.record.keep_times(kind, times)

    def of(self, method: str, options: DraftOptions) -> Learned:
        """Return the data about a method; at first those of a calibration."""
        key = method, replace(options, proposers=())
        if key not in self.methods:
            self.methods[key] = learned = Learned()
            if (seen := tried(self.profile.trials.get(method) if self.profile else None)).tested:
                learned.evidence[0] = seen
        return self.methods[key]


def known_times(profile: Profile | None) -> Times:
    """Take milliseconds of passes by rows, and of one draft step by method, from a calibration at its least depth."""
    if profile is None:
        return {}
    times = {"verify": dict(profile.passes[min(profile.passes)])}
    for suffix, drafts in (("", profile.drafts), (", first", profile.first_drafts)):
        times |= {f"{name}{suffix}": {1: steps[min(steps)]} for name, steps in drafts.items() if steps}
    return times


def known_rates(name: str, part: MethodPart) -> list[float]:
    """Estimate the acceptance at each position, as the export measured it or as it is published."""
    prior = prior_of(name, part) if name in METHODS and METHODS[name].needs != "text" else None
    published = PRIOR if prior is None else prior.acceptance
    if not part.measured:
        return [published]
    found = part.measured[0]
    return posterior([published], _PUBLISHED, measured(found.acceptance, found.positions), len(found.acceptance))


def tried(trial: Trial | None) -> Evidence:
    """Take the guesses that a calibration put to the test as evidence, of no more weight than a few requests."""
    if trial is None or not trial.drafted_at:
        return Evidence()
    seen = Evidence(tuple(map(float, trial.drafted_at)), tuple(map(float, trial.accepted_at)))
    return scaled(seen, min(1.0, _TRIED / max(trial.drafted_at[0], 1)))


def expected_speeds(manifest: Manifest, profile: Profile | None = None) -> dict[str, float]:
    """Predict the speed of each method over plain decoding; those of which nothing is known are left out."""
    found = {}
    for name, part in manifest.methods.items():
        if name == AR:
            continue
        if profile is not None and name in profile.trials:
            found[name] = profile.trials[name].speedup
        elif part.predicted_speedup:
            found[name] = part.predicted_speedup
        # worth trying, because times on a busy machine are unreliable
        elif part.measured and export_busy(manifest.cost):
            found[name] = max(_speed(manifest, name, part), 1.0)
    return found


def _speed(manifest: Manifest, name: str, part: MethodPart) -> float:
    """Predict the speed at the best length, of chains, from acceptance and the export's prices."""
    saved: Mapping[str, float] | None = None if export_busy(manifest.cost) else manifest.cost.get("verify_ms")
    verify = {int(rows): ms for rows, ms in saved.items()} if saved else None
    costs = CostModel(verify, part.draft_cost, part.first_cost)
    at_once = METHODS[name].at_once
    prices = [1.0, *(costs.d(1 if at_once else n) + costs.v(n + 1) for n in range(1, LONGEST + 1))]
    rates = known_rates(name, part)
    return best_length(posterior(rates, 1.0, Evidence(), LONGEST), prices)[2]
