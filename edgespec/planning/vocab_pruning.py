"""Choose the number of tokens that a draft's LM head scores: the fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgespec.drafters.registry import METHODS
from edgespec.formulas.cost import WORTH, CostModel, speedup
from edgespec.planning.traffic import pass_weights
from edgespec.runtimes.files.manifest import DrafterKind, ModelFacts

# Rows of a cut head -> share of a text's tokens among this many first ids of a byte-level BPE tokenizer: GPT-2's on the
# answers of a 7B chat model.  Assumed without a text.
TYPICAL = {1024: 0.61, 2048: 0.69, 4096: 0.78, 8192: 0.87, 16384: 0.94, 32768: 0.98}
ACCEPTED = 0.7  # of guesses with the whole vocabulary, an assumption
LONGEST = 8  # guesses per round


def fastest_size(
    target: ModelFacts,
    draft: ModelFacts,
    coverage: Callable[[int], float] = TYPICAL.__getitem__,  # size -> share of the target's tokens among them
    kind: DrafterKind | None = None,  # of a drafter conditioned on the target; None = a draft model
) -> int | None:
    """Rows of the draft's LM head; None = the whole vocabulary.

    The models are in the same format, with all their parameters counted.
    """
    whole = pass_weights(target) + target.vocab * target.hidden
    layers = pass_weights(draft, own=None if kind is None else draft.vocab * draft.hidden)
    v = CostModel().v

    def gain(size: int, share: float) -> float:
        c = (layers + size * draft.hidden) / whole
        lengths = range(1, LONGEST + 1)
        if kind and METHODS[kind].at_once:  # one pass over a row for each guess, and one more
            return max(speedup(ACCEPTED * share, gamma, c * v(gamma + 1) / gamma, v) for gamma in lengths)
        return max(speedup(ACCEPTED * share, gamma, c, v) for gamma in lengths)

    gains = {size: gain(size, coverage(size)) for size in TYPICAL if 2 * size <= draft.vocab}
    best = max(gains, key=gains.__getitem__, default=None)
    return best if best is not None and gains[best] > WORTH * gain(draft.vocab, 1.0) else None


def first_ids(tokens: Sequence[int]) -> Callable[[int], float]:
    """Coverage of a text, int [n], by the first ids of a tokenizer, which learns frequent pieces first.

    A lower bound for another text of its kind: the text's own frequent tokens come on top.
    """
    ids = np.asarray(tokens, np.int64)
    return lambda size: float((ids < size).mean())
