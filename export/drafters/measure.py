"""How often the target accepts a drafter's guesses, on text that the target writes itself, as written into the bundle.

Nothing raises an error where a drafter is read in another way than it was trained: it only guesses worse.  So it is
measured, and one near chance is refused, with what would help among the settings that checkpoints get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.noise import Noise
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafters.entries import entries_of
from edgespec.drafters.registry import EAGLE, MTP
from edgespec.errors import ExportError
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.probe import best_setting
from edgespec.export.measuring.acceptance import Acceptance
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.formulas.cost import measure
from edgespec.runtimes.files.manifest import DecoderPart, Measured, MethodPart, ModelPart
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

GAMMA, TEXTS, PROMPT, WRITTEN = 5, 4, 24, 64  # guesses of a chain; texts, given tokens and written ones of each
LEAST = 0.2  # first guesses of a drafter that fits are right far more often


@dataclass(frozen=True)
class MeasuredDrafter:
    """What was found.

    Attributes:
        acceptance: of chains.
        step_ms: of a draft step.
        covered: share of the target's own tokens that the drafter can guess.
        at_once: all guesses are made in one step.
        notes: for people.
    """

    acceptance: Acceptance
    step_ms: float
    covered: float
    at_once: bool = False
    notes: list[str] = field(default_factory=list)

    def method(self, costs: StepCosts, text: str, sha256: str) -> MethodPart:
        """The manifest's entry."""
        longest = len(self.acceptance.rates)
        shares = {g: 1 / g if self.at_once else 1.0 for g in range(1, longest + 1)}  # of the cost of a step
        gains = {g: costs.speedups(self.acceptance, self.step_ms * shares[g])[g] for g in shares}
        gamma = max(gains, key=lambda g: gains[g])
        measured = Measured(acceptance=self.acceptance.rates, positions=self.acceptance.offered[0], text=text,
                            text_sha256=sha256)  # fmt: skip
        return MethodPart(gamma=gamma, draft_cost=self.step_ms / costs.plain, predicted_speedup=gains[gamma],
                          measured=[measured], notes="; ".join(self.notes) or None)  # fmt: skip


def measure_drafter(
    drafter: Drafter, folder: Path, part: ModelPart, target: Slot, tokens: Sequence[int], threads: int | None
) -> MeasuredDrafter:
    """Let the target write with the drafter.

    Args:
        drafter: what was read.
        folder: of the bundle.
        part: the drafter's entry in the manifest.
        target: the written target; its slot is overwritten.
        tokens: a text; beginnings of it are gone on with.
        threads: of passes.

    Raises:
        ExportError: the target accepts next to nothing.
    """
    graph = choose_operators(target.model.graph.operators, part).graph(part, strict=False)
    entries = entries_of(target, open_slot(Model(folder, part, graph, threads)))
    block, greedy, noise = _decoder(part).block, SamplingParams(), Noise()
    gamma = min(GAMMA, block - 1) if block else GAMMA
    offered, accepted = np.zeros(gamma, np.int64), np.zeros(gamma, np.int64)
    written: list[list[int]] = []
    for at in np.linspace(0, max(0, len(tokens) - PROMPT), TEXTS).astype(int):
        text, taps = _written(target, tokens[at : at + PROMPT])
        written.append(text)
        entries.crop(0)
        entries.absorb(text[1 : PROMPT - 1], taps[: PROMPT - 2])
        for end in range(PROMPT, len(text) - GAMMA):  # tokens that are known, the pending one last
            guesses = entries.draw(text[:end], taps[end - 2 : end - 1], gamma, greedy, noise).tokens
            entries.crop(end - 1)
            right = int(np.cumprod(np.equal(guesses, text[end : end + gamma])).sum())
            offered[: right + 1] += 1
            accepted[:right] += 1
    (step_ms,) = measure(lambda _: entries.try_once(), (1,), 5).values()
    own = np.array([token for text in written for token in text[PROMPT:]])
    covered = 1.0 if drafter.tokens is None else float(np.isin(own, drafter.tokens).mean())
    notes = []
    if drafter.tokens is not None:
        notes.append(f"the drafter can guess {len(drafter.tokens)} tokens, {covered:.0%} of those that the model wrote")
    found = Acceptance(tuple(offered.tolist()), tuple(accepted.tolist()))
    better = best_setting(drafter, target, written, PROMPT) if drafter.method == EAGLE else ""
    if found.rates[0] < LEAST:
        raise ExportError(
            f"the model accepts {found.rates[0]:.0%} of the drafter's first guesses: expected at least {LEAST:.0%}, "
            "more than a drafter of another model reaches",
            better or _remedy(drafter),
        )
    if better:
        notes.append(f"the model accepts {found.rates[0]:.0%} of the drafter's first guesses; {better}")
    return MeasuredDrafter(found, step_ms, covered, block is not None, notes)


def _remedy(drafter: Drafter) -> str:
    if drafter.method == MTP:
        return "the checkpoint's layer may not be for these weights: fine-tuning leaves it as it was"
    return "it may be for another model, or another variant of this one"


def _written(target: Slot, prompt: Sequence[int]) -> tuple[list[int], NDArray[np.float32]]:
    """A text that the target goes on with greedily, and what is tapped of it, [tokens - 1, k * hidden]."""
    text, taps = list(prompt), []
    target.follow([])
    target.keep_taps = True
    try:
        rows = text
        while len(text) < min(len(prompt) + WRITTEN, target.context - 1):
            output = target.forward(np.array(rows, np.int64))
            assert output.taps is not None
            taps.append(output.taps.copy())
            rows = [int(output.logits[-1].argmax())]
            target.keep(range(len(taps[-1])))
            text += rows
    finally:
        target.keep_taps = False
    return text, np.concatenate(taps)


def _decoder(part: ModelPart) -> DecoderPart:
    assert part.decoder is not None
    return part.decoder
