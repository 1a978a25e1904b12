"""How often the target accepts a drafter's guesses, on text that the target writes itself, as written into the bundle.

Nothing raises an error where a drafter is read in another way than it was trained: it only guesses worse.  So it is
measured, and one near chance is refused, with what would help among the settings that checkpoints get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.kinds import entries_of
from edgespec.drafters.registry import EAGLE, MTP
from edgespec.errors import ExportError
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.probe import HELPS, best_setting, streams
from edgespec.export.drafters.readings import other_readings
from edgespec.export.drafters.write import write_drafter
from edgespec.export.measuring.acceptance import Acceptance
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.export.quantization.weights import WeightChoice
from edgespec.formulas.cost import measure
from edgespec.runtimes.files.manifest import DecoderPart, Format, Measured, MethodPart, ModelPart
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

GAMMA, TEXTS, PROMPT, WRITTEN = 5, 4, 24, 64  # guesses of a chain; texts, given tokens and written ones of each
Text = tuple[list[int], NDArray[np.float32]]  # tokens, and what was tapped [tokens - 1, k * hidden]
FORMATS: tuple[Format, ...] = "fp32", "int8", "int4"  # that guesses are compared in
LEAST = 0.2  # first guesses of a drafter that fits are right far more often


@dataclass(frozen=True)
class MeasuredDrafter:
    """What was found.

    Attributes:
        acceptance: of chains.
        step_ms: of a draft step.
        first_ms: of a round's first, which reads what was accepted before, too.
        covered: share of the target's own tokens that the drafter can guess.
        at_once: all guesses are made in one step.
        notes: for people.
    """

    acceptance: Acceptance
    step_ms: float
    first_ms: float
    covered: float
    at_once: bool = False
    notes: list[str] = field(default_factory=list)

    def method(self, costs: StepCosts, text: str, sha256: str) -> MethodPart:
        """The manifest's entry."""
        longest = len(self.acceptance.rates)
        more = {g: 0 if self.at_once else g - 1 for g in range(1, longest + 1)}  # steps after the first
        means = {g: (self.first_ms + more[g] * self.step_ms) / g for g in more}  # of a guess
        gains = {g: costs.speedups(self.acceptance, means[g])[g] for g in means}
        gamma = max(gains, key=lambda g: gains[g])
        measured = Measured(acceptance=self.acceptance.rates, positions=self.acceptance.offered[0], text=text,
                            text_sha256=sha256)  # fmt: skip
        return MethodPart(gamma=gamma, draft_cost=self.step_ms / costs.plain, first_cost=self.first_ms / costs.plain,
                          predicted_speedup=gains[gamma], measured=[measured],
                          notes="; ".join(self.notes) or None)  # fmt: skip


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
    slot = _opened(folder, part, target, threads)
    starts = np.linspace(0, max(0, len(tokens) - PROMPT), TEXTS).astype(int)
    texts = [_written(target, tokens[at : at + PROMPT]) for at in starts]
    written = [text for text, _ in texts]
    found = _accepted(target, slot, part, texts)
    step_ms, first_ms = _times(slot, target)
    own = np.array([token for text in written for token in text[PROMPT:]])
    covered = 1.0 if drafter.tokens is None else float(np.isin(own, drafter.tokens).mean())
    notes = []
    if drafter.tokens is not None:
        notes.append(f"the drafter can guess {len(drafter.tokens)} tokens, {covered:.0%} of those that the model wrote")
    better = best_setting(drafter, target, written, PROMPT) if drafter.method == EAGLE else ""
    if found.rates[0] < LEAST:
        better = better or _better_reading(drafter, folder, part, slot, target, texts, found.rates[0], threads)
        raise ExportError(
            f"the model accepts {found.rates[0]:.0%} of the drafter's first guesses: expected at least {LEAST:.0%}, "
            "more than a drafter of another model reaches",
            better or _remedy(drafter),
        )
    if better:
        notes.append(f"the model accepts {found.rates[0]:.0%} of the drafter's first guesses; {better}")
    forms = {form: _share(drafter, form, folder, target, texts, threads) for form in FORMATS if form != part.format}
    shares = ", ".join(f"{form} {share:.0%}" for form, share in ({part.format: found.rates[0]} | forms).items())
    notes.append(f"first guesses of the drafter that the model accepts, by format, as written first: {shares}")
    return MeasuredDrafter(found, step_ms, first_ms, covered, _decoder(part).block is not None, notes)


def _times(slot: Slot, target: Slot) -> tuple[float, float]:
    """Milliseconds of a draft step, and of a round's first."""
    entries = entries_of(target, slot)
    tries: tuple[Callable[[], object], ...] = entries.try_once, entries.try_first
    found = measure(lambda which: _discard(tries[which]()), (0, 1), 5)
    return found[0], found[1] if entries.try_first() else found[0]


def _opened(folder: Path, part: ModelPart, target: Slot, threads: int | None) -> Slot:
    graph = choose_operators(target.model.graph.operators, part).graph(part, strict=False)
    return open_slot(Model(folder, part, graph, threads))


def _accepted(target: Slot, slot: Slot, part: ModelPart, texts: Sequence[Text], most: int = GAMMA) -> Acceptance:
    """Of chains of so many guesses, or blocks, along texts that the target wrote."""
    block, reads = _decoder(part).block, bool(_decoder(part).reads)
    gamma = min(GAMMA, block - 1) if block else most  # what a block guesses first depends on its size
    offered, accepted = np.zeros(gamma, np.int64), np.zeros(gamma, np.int64)
    for text, taps in texts:
        del slot.tokens[:]
        if reads:  # the target's keys, of this text
            target.follow([])
            target.prefill(text[:-1])
        else:
            slot.absorb_given(_given(target, part, text[1 : PROMPT - 1], taps[: PROMPT - 2]))
        for end in range(PROMPT, len(text) - GAMMA):  # tokens that are known, the pending one last
            given = target, slot, part, text[end - 1], taps[end - 2], gamma
            guesses = _block(*given) if block else _chain(*given, end - 1)
            right = int(np.cumprod(np.equal(guesses, text[end : end + gamma])).sum())
            offered[: right + 1] += 1
            accepted[:right] += 1
    return Acceptance(tuple(offered.tolist()), tuple(accepted.tolist()))


def _better_reading(
    drafter: Drafter,
    bundle: Path,
    part: ModelPart,
    slot: Slot,
    target: Slot,
    texts: Sequence[Text],
    known: float,
    threads: int | None,
) -> str:
    """What a checkpoint may have meant whose guesses are next to nothing, in words; "" = none of what is tried."""
    shares: dict[str, float] = {}
    for reading in other_readings(drafter, target.layers):
        read = texts
        if reading.tapped != drafter.tapped:
            read = [(text, _tapped(target, text, reading.tapped)) for text, _ in texts]
        said = reading.said_by(drafter)
        try:
            vars(drafter.arch).update(reading.flags)
            if reading.flags:
                shares[reading.words] = _share(drafter, "fp32", bundle, target, read, threads)
            else:
                shares[reading.words] = _accepted(target, slot, part, read, 1).rates[0]
        finally:
            vars(drafter.arch).update(said)
    best = max(shares, key=lambda words: shares[words], default="")
    return f"{shares[best]:.0%} would be right with {best}" if best and shares[best] >= known + HELPS else ""


def _share(
    drafter: Drafter, form: Format, bundle: Path, target: Slot, texts: Sequence[Text], threads: int | None
) -> float:
    """First guesses that the target accepts of a drafter written in another way."""
    with TemporaryDirectory(dir=bundle) as folder:
        choice, operators = WeightChoice.of(form, None, None), target.model.graph.operators
        part = write_drafter(Path(folder), drafter, choice, operators)
        return _accepted(target, _opened(Path(folder), part, target, threads), part, texts, 1).rates[0]


def _tapped(target: Slot, text: Sequence[int], tapped: Sequence[int]) -> NDArray[np.float32]:
    """What is tapped of a text at other boundaries, [tokens - 1, k * hidden]."""
    found = streams(target, text[:-1], tapped)
    return np.concatenate([found[at] for at in tapped], -1)


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


def _chain(
    target: Slot, slot: Slot, part: ModelPart, pending: int, taps: NDArray[np.float32], gamma: int, rows: int
) -> list[int]:
    """Guesses after a pending token, of what was tapped [k * hidden] at the token before; its entry is kept.

    An assistant reads the target's keys of so many ``rows`` instead.
    """
    given, guesses, kept = _given(target, part, [pending], taps[None]), [], len(slot.tokens) + 1
    reads = _decoder(part).reads
    for step in range(gamma):
        run = partial(slot.forward_over, target, rows) if reads else slot.forward_given
        output = run(given, step > 0, True)
        assert output.best is not None
        assert output.hidden is not None
        guesses.append(int(output.best[0][-1]))
        state = output.hidden[-1:].copy()
        if not reads:
            slot.keep([0])
        given = _given(target, part, guesses[-1:], state)
    del slot.tokens[kept:]
    return guesses


def _block(target: Slot, slot: Slot, part: ModelPart, pending: int, taps: NDArray[np.float32], gamma: int) -> list[int]:
    """As ``_chain``, of a drafter of blocks."""
    decoder = _decoder(part)
    assert decoder.mask is not None
    slot.absorb_given(_given(target, part, [pending], taps[None]))
    rows = [pending] + [decoder.mask] * gamma
    best = slot.forward_block(_given(target, part, rows, np.zeros((1, 0), np.float32)), best=True).best
    assert best is not None
    guesses: list[int] = best[0].tolist()
    return guesses


def _given(target: Slot, part: ModelPart, tokens: Sequence[int], state: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, columns]: what the drafter is given of tokens [n], and taps or its own hidden states [n, any]."""
    embedded = target.embed(np.array(tokens, np.int64))
    found = np.zeros((len(tokens), _decoder(part).columns), np.float32)
    found[:, : embedded.shape[1]] = embedded
    found[:, embedded.shape[1] : embedded.shape[1] + state.shape[1]] = state
    return found


def _decoder(part: ModelPart) -> DecoderPart:
    assert part.decoder is not None
    return part.decoder


def _discard(_: object) -> None:
    """The output of a timed pass."""
