"""How often heads are right, and what exits cost, against a way that goes one token at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.engine.engine import Engine
from edgespec.export.measuring.acceptance import ChainScorer
from edgespec.export.measuring.heads import DOUBT, TOP, ExitRecord, _along, choose_exits, head_ranks
from edgespec.runtimes.opening import open_slot
from tests.conftest import PROMPTS
from tests.lossless.test_matrix import plain_greedy


@pytest.mark.parametrize("name", ["medusa", "blockwise"])
def test_right_guesses_by_rank_and_chains_of_them(engine: Callable[..., Engine], name: str) -> None:
    made = engine("fp32")
    slot = open_slot(made.model, reserve=1)
    tokens = made.codec.encode(PROMPTS[18])
    gamma = 5
    scorer = ChainScorer(slot, tokens, 24, gamma)
    (group,) = (group for group in made.bundle.manifest.target.heads if group.name == name)
    ranks, acceptance = head_ranks(slot, scorer, group)

    count = min(group.count, gamma - 1)
    hits, offered, accepted, rows = np.zeros((count, TOP)), [0] * count, [0] * count, 0
    for position in scorer.positions.tolist():
        text = tokens[: position + 1]
        text = text + plain_greedy(slot, text, gamma)
        for at in range(position, position + gamma - count):
            slot.follow([])
            slot.prefill(text[:at])
            slot.keep_hidden = True
            hidden = slot.forward(np.array(text[at : at + 1])).hidden
            assert hidden is not None
            best = slot.forward_heads(name, hidden.copy(), TOP).best
            slot.keep_hidden = False
            assert best is not None
            rows += 1
            good = True
            for head in range(count):
                right = best[0][head, 0] == text[at + head + 2]  # [TOP]
                hits[head] += right
                offered[head] += good
                good = good and bool(right[0])
                accepted[head] += good
    np.testing.assert_allclose(ranks, hits / (rows + DOUBT), rtol=1e-12)
    assert acceptance.offered == tuple(offered)
    assert acceptance.accepted == tuple(accepted)
    assert 0 < accepted[0] < rows


RECORD = ExitRecord(
    layers=(1, 2),
    confidence=np.array([[0.9, 0.1, 0.9, 0.1, 0.9], [0.9, 0.9, 0.1, 0.1, 0.1]]),
    right=np.array([[True, True, False, True, False], [True] * 5]),
    ms=(1.0, 2.0, 3.0),
    head_ms=0.5,
)


def test_the_cost_of_rounds_with_exits() -> None:
    """Worked out by hand; v(n) = 1 + (n - 1) / 2, at most two guesses a round.

    Round 1, tokens 0 to 2.  The first exit takes 0: 1 + 0.5, and 2 (v(2) - 1) = 1 for the layers between, later.  The
    second takes 1: 1 + 2 and two questions, 4.  A third guess is not allowed, its start is: 1.5.  The rest: 3 v(3) = 6.
    Round 2, token 3.  No exit: 4, and 3.
    Round 3, token 4.  The first exit is wrong: 1.5 + 1, what follows it: 1.5, and 3 v(2) = 4.5.
    """
    found = _along(RECORD, (0, 1), 0.5, 6.0, lambda n: 1 + (n - 1) / 2, 2)
    assert found.layers == (1, 2)
    guessing = 1.5 + 1 + 4 + 1.5 + 4 + 1.5 + 1 + 1.5
    assert found.speedup == pytest.approx(5 * 6 / (guessing + 6 + 3 + 4.5))
    assert found.acceptance == pytest.approx(2 / 3)
    assert found.taken == pytest.approx(3 / 5)
    assert found.draft_cost == pytest.approx(guessing / 6 / 6)  # three guesses and three starts that ended a round


def test_the_exit_that_pays_is_chosen() -> None:
    always = np.array([[0.7] * 20, [0.7] * 20])
    flat = lambda n: 1.0  # noqa: E731
    for good in (0, 1):
        right = np.array([[good == 0] * 20, [good == 1] * 20])
        found = choose_exits(ExitRecord((1, 2), always, right, (1.0, 0.1, 9.0), 0.1), 10.0, flat)
        assert found.layers == (2,) if good else found.layers[0] == 1  # the wrong one is not asked before it
        assert found.threshold < 0.7
        assert found.speedup > 2
