"""Measure how often the target accepts a drafter's tokens, on text that the target generates.

A drafter that is read differently from its training raises no error: it only drafts worse.  So its acceptance is
measured.  A drafter near chance is refused, and the message names settings that checkpoints often get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.drafters.draft_cache import draft_cache_of
from edgespec.drafters.registry import EAGLE, MTP
from edgespec.errors import ExportError
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.measuring.acceptance import Acceptance
from edgespec.export.measuring.diagnose import Trials
from edgespec.export.measuring.guesses import LEAST, PROMPT, accepted, opened, written
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.export.quantization.weights import WeightChoice
from edgespec.formulas.cost import measure
from edgespec.runtimes.files.manifest import Measured, MethodPart, ModelPart
from edgespec.runtimes.slots.slot import Slot


@dataclass(frozen=True)
class MeasuredDrafter:
    """Measured acceptance and times of a drafter."""

    acceptance: Acceptance  # of chains
    step_ms: float  # of a draft step
    first_ms: float  # of a round's first step, which also reads the tokens accepted before
    at_once: bool = False  # all guesses are made in one step
    notes: list[str] = field(default_factory=list)  # messages for the user

    def method(self, costs: StepCosts, text: dict[str, Any]) -> MethodPart:
        """Return the manifest's entry."""
        longest = len(self.acceptance.rates)
        more = {g: 0 if self.at_once else g - 1 for g in range(1, longest + 1)}  # steps after the first
        means = {g: (self.first_ms + more[g] * self.step_ms) / g for g in more}  # of a guess
        gains = {g: costs.speedups(self.acceptance, means[g])[g] for g in means}
        gamma = max(gains, key=lambda g: gains[g])
        measured = Measured(acceptance=self.acceptance.rates, positions=self.acceptance.offered[0], **text)
        return MethodPart(gamma=gamma, draft_cost=self.step_ms / costs.plain, first_cost=self.first_ms / costs.plain,
                          predicted_speedup=gains[gamma], measured=[measured],
                          notes="; ".join(self.notes) or None)  # fmt: skip


def measure_drafter(
    drafter: Drafter, folder: Path, part: ModelPart, target: Slot, tokens: Sequence[int], choice: WeightChoice
) -> MeasuredDrafter:
    """Let the target write with the drafter.

    Args:
        target: the written target; its slot is overwritten.

    Raises:
        ExportError: the target accepts next to nothing.
    """
    slot = opened(folder, part, target)
    texts = written(target, tokens)
    found = accepted(target, slot, part, texts)
    step_ms, first_ms = _times(slot, target)
    notes = []
    if drafter.tokens is not None:
        covered = np.isin([token for text, _ in texts for token in text[PROMPT:]], drafter.tokens).mean()
        notes.append(f"the drafter can guess {len(drafter.tokens)} tokens, {covered:.0%} of those that the model wrote")
    trials = Trials(drafter, choice, folder, target, texts)
    if found.rates[0] < LEAST:
        raise ExportError(
            f"the model accepts {found.rates[0]:.0%} of the drafter's first guesses: expected at least {LEAST:.0%}, "
            "more than a drafter of another model reaches",
            trials.hint(found.rates[0]) or _remedy(drafter),
        )
    if drafter.method == EAGLE and (better := trials.reading()[0]):
        notes.append(f"the model accepts {found.rates[0]:.0%} of the drafter's first guesses; {better}")
    shares = {part.format: found.rates[0]} | trials.formats()
    said = ", ".join(f"{form} {share:.0%}" for form, share in shares.items())
    notes.append(f"first guesses of the drafter that the model accepts, by format, as written first: {said}")
    return MeasuredDrafter(found, step_ms, first_ms, draft_cache_of(target, slot).at_once, notes)


def _times(slot: Slot, target: Slot) -> tuple[float, float]:
    """Milliseconds of a draft step, and of a round's first."""
    entries = draft_cache_of(target, slot)
    tries: tuple[Callable[[], object], ...] = entries.try_once, entries.try_first
    found = measure(lambda which: tries[which](), (0, 1), 5)
    return found[0], found[1] if entries.try_first() else found[0]


def _remedy(drafter: Drafter) -> str:
    if drafter.method == MTP:
        return "the checkpoint's layer may not be for these weights: fine-tuning leaves it as it was"
    return "it may be for another model, or another variant of this one"
