"""Generate texts with a target, and measure how often it accepts a drafter's tokens along them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.target import Pass
from edgespec.drafters.draft_cache import BlockCache, ParallelCache, borrowed_step, draft_cache_of
from edgespec.export.measuring.acceptance import Acceptance
from edgespec.runtimes.files.manifest import DecoderPart, ModelPart
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

Array = NDArray[np.float32]
GAMMA, TEXTS, PROMPT, WRITTEN = 5, 4, 24, 64  # guesses of a chain; texts, given tokens and written ones of each
LEAST = 0.2  # first guesses of a drafter that fits are right far more often
Text = tuple[list[int], NDArray[np.float32]]  # tokens, and what was tapped [tokens - 1, k * hidden]


def opened(folder: Path, part: ModelPart, target: Slot) -> Slot:
    """Open a drafter that was written into a folder, on the operators and threads of the target."""
    graph = choose_operators(target.model.graph.operators, part).graph(part, strict=False)
    return open_slot(Model(folder, part, graph, target.model.threads))


def written(target: Slot, tokens: Sequence[int]) -> list[Text]:
    """Texts that the target writes greedily after pieces of a text."""
    starts = np.linspace(0, max(0, len(tokens) - PROMPT), TEXTS).astype(int)
    return [_continued(target, tokens[at : at + PROMPT]) for at in starts]


def tapped(target: Slot, texts: Sequence[Text], at: Sequence[int]) -> list[Text]:
    """Return the same texts with taps at different boundaries."""
    found = []
    for text, _ in texts:
        rows = streams(target, text[:-1], at)
        found.append((text, np.concatenate([rows[each] for each in at], -1)))
    return found


def accepted(
    target: Slot, slot: Slot, part: ModelPart, texts: Sequence[Text], most: int = GAMMA, scale: float = 1.0
) -> Acceptance:
    """Measure the acceptance of chains of ``most`` draft tokens, or of blocks, along texts that the target generated.

    Args:
        target: its slot is overwritten.
        scale: factor of token embeddings.
    """
    block, reads = decoder_of(part).block, bool(decoder_of(part).reads)
    gamma = min(GAMMA, block - 1) if block else most  # what a block guesses first depends on its size
    run = _Run(target, slot, decoder_of(part), gamma, scale)
    right, offered = np.zeros(gamma, np.int64), np.zeros(gamma, np.int64)
    for text, taps in texts:
        slot.crop(0)
        if reads:  # the target's keys, of this text
            target.follow([])
            target.prefill(text[:-1])
        else:
            run.absorb(run.given(text[1 : PROMPT - 1], taps[: PROMPT - 2]))
        for end in range(PROMPT, len(text) - GAMMA):  # tokens that are known, the pending one last
            last = text[end - 1], taps[end - 2]
            guesses = run.at_once(*last) if run.cache.at_once else run.chain(*last, end - 1)
            same = int(np.cumprod(np.equal(guesses, text[end : end + gamma])).sum())
            offered[: same + 1] += 1
            right[:same] += 1
    return Acceptance(tuple(offered.tolist()), tuple(right.tolist()))


def decoder_of(part: ModelPart) -> DecoderPart:
    """Return what kind of drafter it is."""
    assert part.decoder is not None
    return part.decoder


class _Run:
    """A drafter that guesses after tokens; see ``accepted``."""

    def __init__(self, target: Slot, slot: Slot, decoder: DecoderPart, gamma: int, scale: float) -> None:
        self.target, self.slot, self.decoder, self.gamma, self.scale = target, slot, decoder, gamma, scale
        self.cache = draft_cache_of(target, slot)

    def chain(self, pending: int, taps: NDArray[np.float32], rows: int) -> list[int]:
        """Draft after a pending token, from the taps [k * hidden] of the token before it, whose entry stays in the
        cache.

        An assistant reads the target's keys of the first ``rows`` tokens instead.
        """
        given, guesses, kept = self.given([pending], taps[None]), list[int](), len(self.slot.tokens) + 1
        reads = self.decoder.reads
        for step in range(self.gamma):
            if reads:
                output = borrowed_step(self.slot, self.target, rows, given, step > 0, True)
            else:
                output = self.slot.run(Pass(None, None, 1, True, scored=1, inputs=given, fused=step == 0))
            assert output.best is not None
            assert output.hidden is not None
            guesses.append(int(output.best[0][-1]))
            state = output.hidden[-1:].copy()
            if not reads:
                self.slot.keep([0])
            given = self.given(guesses[-1:], state)
        self.slot.crop(kept)
        return guesses

    def at_once(self, pending: int, taps: NDArray[np.float32]) -> list[int]:
        """As ``chain``, of a drafter whose guesses are made in one pass; taps [k * hidden]."""
        if isinstance(self.cache, ParallelCache):
            return self.cache.greedy(self.given([pending], taps[None]), self.gamma)
        assert isinstance(self.cache, BlockCache)
        assert self.decoder.mask is not None
        self.absorb(self.given([pending], taps[None]))
        rows = [pending] + [self.decoder.mask] * (self.cache.rows(self.gamma) - 1)
        return self.cache.greedy(self.given(rows, np.zeros((1, 0), np.float32)), pending, self.gamma)

    def absorb(self, given: NDArray[np.float32]) -> None:
        """Append rows [n, columns] without drafting after them."""
        self.slot.run(Pass(scored=0, read=True, inputs=given, fused=True))

    def given(self, tokens: Sequence[int], state: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n, columns]: what the drafter is given of tokens [n], and taps or its own hidden states [n, any]."""
        embedded = self.cache.embedding.embed(np.array(tokens, np.int64)) * np.float32(self.scale)
        found = np.zeros((len(tokens), self.decoder.columns), np.float32)
        found[:, : embedded.shape[1]] = embedded
        found[:, embedded.shape[1] : embedded.shape[1] + state.shape[1]] = state
        return found


def _continued(target: Slot, prompt: Sequence[int]) -> Text:
    """Return a greedy continuation by the target, and its taps [tokens - 1, k * hidden]."""
    text, taps = list(prompt), []
    target.follow([])
    rows = text
    while len(text) < min(len(prompt) + WRITTEN, target.context - 1):
        output = target.run(Pass(np.array(rows, np.int64), aux_hidden=True))
        assert output.aux_hidden is not None
        taps.append(output.aux_hidden.copy())
        rows = [int(output.logits[-1].argmax())]
        target.keep(range(len(taps[-1])))
        text += rows
    return text, np.concatenate(taps)


def streams(target: Slot, text: Sequence[int], boundaries: Collection[int]) -> dict[int, Array]:
    """Return the residual stream [T, hidden] at each boundary, a number of layers; the slot is overwritten."""
    tokens = np.asarray(text, np.int64)
    target.follow([])
    target.reserve(len(text))
    found = {}
    for at in sorted(set(boundaries)):
        hidden = target.run(Pass(tokens, hidden=True, scored=0, layers=(0, at))).hidden
        assert hidden is not None
        found[at] = hidden.copy()
    return found
