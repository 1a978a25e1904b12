"""Where one method is clearly best, plan, auto and what control finds while it decodes agree; no clock is real."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.engine.methods import choose_method
from edgespec.planning.plan import Option, PlanRequest, make_plan
from edgespec.runtimes.options import LoadOptions
from tests.control.test_auto import Case, always, never
from tests.support.planning import manifest, predicting, profile, trial
from tests.support.timed_toy import INT4

METHODS = ("ar", "ngram", "speculative", "self-spec", "medusa")
GOOD = trial(tokens=270, accepted=170, drafted=190, drafted_at=[95, 95], accepted_at=[90, 80], speedup=2.1)
BAD = trial(tokens=105, accepted=5, drafted=100, drafted_at=[50, 50], accepted_at=[4, 1], speedup=0.8)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("best", ["speculative", "self-spec", "medusa"])
def test_the_method_that_is_clearly_best(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = manifest(methods=METHODS)
    trials = {name: GOOD if name == best else BAD for name in METHODS[1:]}
    drafts = {name: {0: 0.5 if name == best else 6.0, 1000: 0.5 if name == best else 6.0} for name in METHODS[2:]}
    known = profile(made, trials=trials, drafts=drafts)
    request = PlanRequest(4 << 30, "auto", 1, LoadOptions(operators="native", threads=2, context=1024))
    plan = make_plan([Option(made, "bundle", profile=known)], request)
    assert plan.pick is not None
    assert plan.pick.use.method == best
    gains = {one.use.method: one.speed.gain for one in plan.candidates if not one.approximates}
    assert choose_method(predicting(made, gains), None).name == best
    # measuring with a separate clock keeps it; a wrong promise is corrected, and remembered
    for promises in ({best: 1.8}, {name: 1.8 for name in METHODS[2:] if name != best} | {best: 1.3}):
        specs: list[Any] = [
            (name, always(0.85) if name == best else never, 0.05 if name == best else 0.4, promise, 0.7, False)
            for name, promise in promises.items()
        ]
        case = Case(INT4, specs)
        case.run(monkeypatch, 400)
        assert case.switch.used == best
        again = case.run(monkeypatch, 40, prompt=(5, 6))
        assert case.switch.used == best
        assert again.loss < 0
