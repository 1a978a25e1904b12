"""Which method a request gets: auto's candidates are what the export predicted."""

from __future__ import annotations

import pytest

from edgespec.control.auto import TRIED
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.registry import AUTO
from edgespec.engine.methods import CANDIDATES, choose_method
from edgespec.errors import InvalidRequest
from edgespec.planning import profiles as quiet
from tests.support.planning import manifest, predicting

ALL = ("ar", "ngram", "speculative", "self-spec", "swift", "medusa")


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


@pytest.mark.parametrize(
    ("gains", "without", "names"),
    [
        ({"speculative": 1.2, "self-spec": 1.1, "swift": TRIED, "medusa": 1.5}, (), ["medusa", "speculative", "ngram"]),
        ({"speculative": 1.2, "medusa": 1.5, "ngram": 1.3}, (), ["medusa", "ngram", "speculative"]),
        (dict.fromkeys(ALL, TRIED - 0.01), (), ["ngram"]),
        ({"swift": 1.5, "medusa": 1.5}, ("swift",), ["medusa", "ngram"]),
        ({}, (), ["ngram"]),
    ],
)
def test_no_more_than_a_few_and_none_without_promise(
    gains: dict[str, float], without: tuple[str, ...], names: list[str]
) -> None:
    choice = choose_method(predicting(manifest(methods=ALL), gains), AUTO, without=without)
    assert [one.name for one in choice.candidates] == names
    assert len(names) <= CANDIDATES
    if names == ["ngram"]:
        assert choice.reason == "default: costs little where text does not repeat"


def test_an_export_that_was_too_busy_to_predict_has_its_methods_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "BUSY", 1.5)
    made = predicting(manifest(methods=ALL), {})
    choice = choose_method(made.model_copy(update={"cost": {"spread": 3.0}}), None)
    assert {one.name for one in choice.candidates} == {"speculative", "self-spec", "ngram"}
    assert choice.reason.endswith("the exporting machine was too busy to predict")
    assert choice.promise >= TRIED


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
