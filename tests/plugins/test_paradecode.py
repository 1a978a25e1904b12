"""ParaDecode's passes: layers that drafting ran are not run again, and a failure costs only the drafter."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Output, Pass
from edgespec.plugins.paradecode.drafter import ParaDecode
from tests.drafters.test_heads import VOCAB, model, target
from tests.support.reference import LayeredFunctionTarget
from tests.support.toy import plain


def always_sure(seed: int) -> tuple[LayeredFunctionTarget, ParaDecode]:
    made = target(seed, 4)
    return made, ParaDecode(made, (2,), 0.0, most=4)


@pytest.mark.parametrize("new", [1, 2, 7, 40])
def test_a_pass_goes_on_however_the_chain_was_cut(new: int) -> None:
    """By the end of the text, or at a token that ends it: the layers that ran are those of the first rows."""
    for seed in range(10):
        for eos in (None, 3):
            made, drafter = always_sure(seed)
            ends = frozenset([] if eos is None else [eos])
            stats = Stats()
            rounds = decode(made, drafter, [1, 2], DecodeOptions(new, 4, eos=ends), stats)
            assert [token for one in rounds for token in one.tokens] == plain(model(seed), VOCAB, [1, 2], new, ends)
            assert stats.dropped_reason is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_hidden_states_that_are_not_finite_cost_the_drafter(bad: float) -> None:
    made, drafter = always_sure(1)
    run = made.run

    def broken(wanted: Pass) -> Output:
        if wanted.group:
            return target(1, 4).run(wanted)
        output = run(wanted)
        if wanted.scored == 0:
            output.hidden = np.full_like(output.hidden, bad)
        return output

    made.run = broken  # type: ignore[method-assign]
    stats = Stats()
    rounds = decode(made, drafter, [1, 2], DecodeOptions(9, 4), stats)
    assert [token for one in rounds for token in one.tokens] == plain(model(1), VOCAB, [1, 2], 9)
    assert stats.dropped_reason is not None
