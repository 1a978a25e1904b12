"""Acceptance measured on chains equals what the loop accepts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.target import SkipSet
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.speculative import Speculative
from edgespec.export.measuring.acceptance import Acceptance, ChainScorer
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import DRAFT, TARGET, Written


def measured_by_the_loop(
    target: Slot, drafter: Drafter, tokens: list[int], positions: list[int], gamma: int
) -> Acceptance:
    """One real round after each position, counted by hand."""
    offered, accepted = Counter[int](), Counter[int]()
    for position in positions:
        options = DecodeOptions(gamma + 1, gamma, sampling=SamplingParams())
        item = next(decode(target, drafter, tokens[: position + 1], options))
        assert len(item.drafted) == gamma
        for at in range(gamma):
            if at <= item.accepted:
                offered[at] += 1
                accepted[at] += at < item.accepted
    return Acceptance(tuple(offered[at] for at in range(gamma)), tuple(accepted[at] for at in range(gamma)))


@pytest.mark.parametrize("skip", [SkipSet((1,)), SkipSet((), (2,)), SkipSet((0, 2), (3,))], ids=str)
def test_self_draft_acceptance_is_that_of_the_loop(
    written: Callable[..., Written], scorer: tuple[Slot, ChainScorer], skip: SkipSet
) -> None:
    slot, chains = scorer
    made = written(TARGET, "fp32")
    target = made.slot("gated", 2)
    drafter = SelfSpec(target, skip, stop=0.0)
    found = chains.score(slot, skip)
    assert found == measured_by_the_loop(target, drafter, chains.tokens, chains.positions.tolist(), chains.gamma)
    assert 0 < sum(found.accepted) < sum(found.offered)


def test_draft_model_acceptance_is_that_of_the_loop(
    written: Callable[..., Written], scorer: tuple[Slot, ChainScorer]
) -> None:
    _, chains = scorer
    model = written(DRAFT, "fp32")
    drafter = Speculative(model.slot("plain", 2), model.part.facts.vocab)
    target = written(TARGET, "fp32").slot("gated", 2)
    found = chains.score(model.slot("plain", 2))
    assert found == measured_by_the_loop(target, drafter, chains.tokens, chains.positions.tolist(), chains.gamma)
    assert 0 < sum(found.accepted) < sum(found.offered)


def test_the_target_accepts_itself(scorer: tuple[Slot, ChainScorer]) -> None:
    slot, chains = scorer
    found = chains.score(slot)
    assert found.accepted == found.offered == (len(chains.positions),) * chains.gamma
    assert found.rates == [1.0] * chains.gamma
    assert Acceptance((4, 0), (0, 0)).rates == [0.0, 0.0]
