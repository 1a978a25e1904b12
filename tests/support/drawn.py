"""Check texts that an encoder-decoder samples against the model's own distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np

from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.engine.encoding import Source
from edgespec.engine.engine import Engine
from edgespec.formulas.statistics import pearson

COUNT = 400


def check_drawn(engine: Engine, text: str, method: str, length: int = 2, least: int = COUNT // 20) -> None:
    """Sample tokens after a source many times, and compare the last two by chi-square.

    Args:
        engine: of the model.
        text: the source.
        method: which guesses.
        length: tokens; a method that guesses from hidden states has none before the first.
        least: guesses that must have been accepted in all.
    """
    how, source = SamplingParams(temperature=3.0, top_k=4), engine.encode(text)
    assert isinstance(source, Source)
    slot, begin = engine.open_slot(given=source), list(source.begin)
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for before, chance in texts.items():
            tokens = [*begin, *before]
            p = distribution(slot.forward(np.array(tokens)).logits[-1].copy(), how, tokens)
            longer |= {(*before, int(token)): chance * float(p[token]) for token in np.flatnonzero(p)}
        texts = longer
    chances = Counter[tuple[int, ...]]()
    for drawn, chance in texts.items():
        chances[drawn[-2:]] += chance  # type: ignore[assignment]
    found = engine.generate_batch(
        [text] * COUNT, method=method, sampling=how, max_new_tokens=length, seeds=range(COUNT), batch=32,
        fallback=False, adaptive=False, gamma=2, ignore_eos=True,
    )  # fmt: skip
    accepted = sum(result.stats.accepted for result in found)
    assert accepted >= least, f"{method}: {accepted} guesses accepted"
    seen = Counter(tuple(result.tokens[-2:]) for result in found)
    fit = pearson(seen, chances)
    assert fit.degrees >= 5
    assert fit.p() > 1e-5
