"""What method auto expects: of this device's profile, of the export, or of nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.control.bandit import TRIED
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.registry import AUTO
from edgespec.engine.methods import CANDIDATES, choose_method
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import expected_tokens
from edgespec.planning import expectations as auto
from edgespec.planning.speed.prediction import Basis, Speed
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions
from tests.support.manifests import manifest
from tests.support.profiles import profile

ALL = ("ar", "ngram", "speculative", "self-spec", "swift", "medusa")


def speed(gain: float, basis: Basis = "calibrated") -> Speed:
    return Speed(gain, None, None, None, 4, 2.0, 0.7, basis)


def found(made: Manifest) -> dict[str, Speed]:
    return auto.predictions(made, RunOptions())


def test_without_a_profile_the_exports_predictions_count(cache: object) -> None:
    made = manifest(methods=ALL)
    predicted = found(made)
    assert predicted == auto.exported(made)
    assert {name: one.speedup for name, one in predicted.items()} == {"speculative": 1.6, "self-spec": 1.1}
    assert predicted["speculative"].tokens_per_round == expected_tokens([0.8, 0.7], 4)
    assert (predicted["self-spec"].acceptance, predicted["self-spec"].basis) == (0.8, "exported")
    assert found(manifest(methods=("ar", "ngram"))) == {}


def test_with_a_profile_it_is_this_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    made = manifest(methods=ALL)
    asked = []

    measured = profile(made)

    def speed_of(given: Manifest, use: object, known: object) -> Speed:
        assert given is made
        assert known is measured
        asked.append(use)
        method = use.method  # type: ignore[attr-defined]
        if method == "swift":
            raise InvalidRequest("nothing is known of it")
        return speed({"medusa": 1.3}.get(method, 0.9))

    monkeypatch.setattr(auto, "speed_of", speed_of)
    predicted = auto.predictions(made, RunOptions(context=16384, attention="f16"), measured)
    assert set(predicted) == {"ngram", "speculative", "self-spec", "medusa"}
    assert {use.context for use in asked} == {1024}  # type: ignore[attr-defined]
    choice = choose_method(made, None, predictions=predicted)
    assert (choice.name, choice.reason) == ("medusa", "predicted 1.30x on this device (calibrated)")


# -- the choice --------------------------------------------------------------------------------------------------------


def test_candidates_come_in_order_of_their_promise_and_ngrams_last() -> None:
    made = manifest(methods=ALL)
    for wanted in (None, AUTO):
        choice = choose_method(made, wanted)
        assert (choice.name, choice.reason) == ("speculative", "predicted 1.60x on the exporting machine")
        assert [one.name for one in choice.candidates] == ["speculative", "self-spec", "ngram"]
        assert [one.promise for one in choice.candidates] == [1.6, 1.1, 1.0]
        assert choice.gamma == max(one.gamma for one in choice.candidates)
        assert not any(one.candidates for one in choice.candidates)
    assert not choose_method(made, "speculative").candidates


def test_not_even_n_grams_where_looking_is_measured_to_cost() -> None:
    made = manifest(methods=ALL)
    chosen = choose_method(made, AUTO, predictions={"ngram": speed(0.9), "medusa": speed(0.8)})
    assert (chosen.name, chosen.candidates) == ("ar", ())
    assert "nothing pays: even ngram is predicted 0.90x on this device (calibrated)" in chosen.reason
    assert choose_method(made, AUTO, predictions={"ngram": speed(0.99)}).name == "ngram"
    assert choose_method(made, AUTO, predictions={"ngram": speed(0.9, "exported")}).name == "ngram"
    assert choose_method(made, AUTO, predictions={"ngram": speed(0.9), "medusa": speed(1.2)}).name == "medusa"


def test_no_more_than_a_few_and_none_without_promise() -> None:
    made = manifest(methods=ALL)
    gains = {"speculative": 1.2, "self-spec": 1.1, "swift": TRIED, "medusa": 1.5}
    predicted = {name: speed(gain) for name, gain in gains.items()}
    names = [one.name for one in choose_method(made, AUTO, predictions=predicted).candidates]
    assert names == ["medusa", "speculative", "ngram"]
    assert len(names) == CANDIDATES
    three = predicted | {"ngram": speed(1.3)}
    assert [one.name for one in choose_method(made, AUTO, predictions=three).candidates] == [
        "medusa", "ngram", "speculative",
    ]  # fmt: skip
    low = {name: speed(TRIED - 0.01) for name in gains}
    choice = choose_method(made, AUTO, predictions=low)
    assert [one.name for one in choice.candidates] == ["ngram"]
    assert choice.reason == "default: costs little where text does not repeat"


def test_what_cannot_run_here_is_no_candidate() -> None:
    made = manifest(methods=ALL)
    predicted = {name: speed(1.5) for name in ("swift", "medusa")}
    names = [one.name for one in choose_method(made, None, predictions=predicted, without=("swift",)).candidates]
    assert names == ["medusa", "ngram"]


def test_what_does_not_fit_into_memory_is_no_candidate_and_that_is_said() -> None:
    choice = choose_method(manifest(methods=ALL), None)
    fitting = choice.among(["self-spec", "ngram"], "no room in memory")
    assert fitting.name == "self-spec"
    assert [one.name for one in fitting.candidates] == ["self-spec", "ngram"]
    assert fitting.reason == "speculative: no room in memory; predicted 1.10x on the exporting machine"
    assert choice.among([], "no room") is choice
    assert choice.among(ALL, "no room") is choice
    asked = choose_method(manifest(methods=ALL), "speculative")
    assert asked.among([], "no room") is asked


def test_proposers_belong_to_chains() -> None:
    made, drafts = manifest(methods=ALL), DraftOptions(proposers=("ngram",))
    with pytest.raises(InvalidRequest, match="method auto and proposers ngram: expected one of them"):
        choose_method(made, AUTO, drafts)
    assert choose_method(made, None, drafts).name == "chain"


def test_where_a_prediction_holds() -> None:
    assert auto.where(speed(1.2)) == "on this device (calibrated)"
    assert auto.where(replace(speed(1.2), basis="scaled")) == "on this device (scaled)"
    assert auto.where(speed(1.2, "exported")) == "on the exporting machine"
