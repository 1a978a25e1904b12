"""Measure every method on the written graphs: acceptance, costs and skip sets for the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from edgespec.decoding.target import SkipSet
from edgespec.drafters.registry import METHODS, SELF_SPEC, SPECULATIVE, draft_drafter, has_exits
from edgespec.export.bundle.progress import Progress
from edgespec.export.drafters.head_choice import HeadChoice
from edgespec.export.measuring.acceptance import Acceptance, ChainScorer
from edgespec.export.measuring.heads import measure_heads
from edgespec.export.measuring.reading import Reading
from edgespec.export.measuring.skip_search import Candidate, SkipSearch, StepCosts, measure_steps
from edgespec.export.quantization.calibration_text import MIN_TOKENS, CalibrationText, digest
from edgespec.formulas.confidence import counted
from edgespec.formulas.cost import WORTH, expected_tokens
from edgespec.runtimes.files.manifest import Matching, Measured, MethodPart, ModelPart, SkipSetPart
from edgespec.runtimes.files.operators import WantedOperators, choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.translation import Translation

GAMMA = 5  # length of the measured chains: acceptance is known up to here
POSITIONS, HEAD_POSITIONS = 40, 160
TREE_ROWS = (9, 17)  # rows of the passes that verify trees
_USUAL = 1.02  # how much faster another format of a draft must be predicted to be than the usual one


@dataclass(frozen=True)
class BestDraft:
    """The draft that is predicted to be the fastest: which one it is, and how it guesses with another tokenizer."""

    at: int = 0
    matching: Matching = "strings"


WrittenDraft = tuple[Path, ModelPart]  # the folder of its bundle, and its part


@dataclass(frozen=True)
class MethodMeasurer:
    """Measures the methods of one export.

    Attributes:
        methods: all of the bundle.
        operators, threads: that graphs are opened with.
        trials, seed: of the search for a skip set.
        planes: whether a draft may read only high planes; graphs for devices have none.
        keep_search: folder for the state of an interrupted search; None = it is not kept.
        given_skip: instead of a search.
        text: for all measurements.
        model: distinguishes this search from others, because its state may be kept in a file.
        progress: called at every stage.
    """

    methods: list[str]
    operators: WantedOperators
    threads: int | None
    trials: int
    planes: bool
    seed: int
    keep_search: Path | None
    heads: HeadChoice
    given_skip: SkipSet | None
    text: CalibrationText
    model: str
    progress: Progress

    def measure(
        self,
        folder: Path,
        slot: Slot,
        tokens: list[int],
        drafts: Sequence[WrittenDraft] = (),
        read: Reading | None = None,
        translation: Translation | None = None,
    ) -> tuple[dict[str, MethodPart], StepCosts, BestDraft]:
        """Return acceptance and costs with the skip set, all on the written graphs, and which draft is the fastest.

        ``drafts``: the draft model in each format to choose from, the usual one first.  ``read``: the source that the
        target's slot attends over; a draft is given the same.  ``translation``: of a draft with another tokenizer.
        """
        methods = {name: MethodPart() for name in self.methods}
        slot.follow([])
        slot.prefill(tokens)
        costs = measure_steps(slot, GAMMA, TREE_ROWS if self.heads.trained else ())
        if found := [name for name in self.methods if METHODS[name].searches]:
            start = (SkipSet.all_high if self.planes and slot.planes else SkipSet.every_other)(slot.layers)
            part = MethodPart(skip=SkipSetPart.of(start), draft_cost=costs.draft_ms(start) / costs.plain)
            methods |= dict.fromkeys(found, part)
        planes = self.planes and slot.planes and slot.model.part.layers_have_planes
        if not drafts and SELF_SPEC not in self.methods and not self.heads.trained and not planes:
            return methods, costs, BestDraft()
        self.progress("acceptance", 0, 1, "the target's own continuations")
        scorer = _chains(slot, tokens)
        self.progress("acceptance", 1, 1, "the target's own continuations")
        each = [self._speculative(draft, slot, tokens, scorer, costs, read, translation) for draft in drafts]
        best = max(
            range(len(each)), key=lambda at: (each[at][0].predicted_speedup or 0.0) * _USUAL ** (not at), default=0
        )
        chosen = BestDraft()
        if each:
            methods[SPECULATIVE], chosen = each[best][0], BestDraft(best, each[best][1])
        if SELF_SPEC in self.methods or planes:
            methods[SELF_SPEC] = self._self_spec(slot, scorer, costs)
        for name, heads in self.heads.trained.items():
            self.progress("heads", 0, 1, f"{name} against the target")
            chains = scorer if has_exits(name) else _chains(slot, tokens, HEAD_POSITIONS)
            methods[name] = measure_heads(name, heads, slot, chains, costs, self._measured)
            self.progress("heads", 1, 1, f"{name} against the target")
        return {name: methods[name] for name in METHODS if name in methods}, costs, chosen

    def _speculative(
        self,
        written: WrittenDraft,
        slot: Slot,
        tokens: list[int],
        scorer: ChainScorer,
        costs: StepCosts,
        read: Reading | None,
        translation: Translation | None,
    ) -> tuple[MethodPart, Matching]:
        folder, part = written
        wanted = "auto" if part.foreign else self.operators
        graph = choose_operators(wanted, part).graph(part, strict=False)
        draft = open_slot(Model(folder, part, graph, self.threads))
        if read is not None:
            read.attend(folder, part, draft, self.threads)
        within = max(MIN_TOKENS, part.facts.context // 2)  # a draft may have less context than its target
        chains = scorer if within >= len(tokens) else _chains(slot, tokens[:within])
        matching: Matching = "strings"
        if translation is None:
            acceptance, line = chains.score(draft), _scored(draft, chains)
        else:
            acceptance, matching, line = _translated(draft, chains, translation)
        draft_ms = measure_steps(draft, 1).plain
        gains = costs.speedups(acceptance, draft_ms)
        gamma = max(gains, key=lambda g: gains[g])
        made = MethodPart(
            gamma=gamma,
            draft_cost=draft_ms / costs.plain,
            predicted_speedup=gains[gamma],
            measured=[self._measured(acceptance.rates, acceptance.offered[0])],
            notes=line,
        )
        return made, matching

    def _self_spec(self, slot: Slot, scorer: ChainScorer, costs: StepCosts) -> MethodPart:
        search = SkipSearch(slot, scorer, costs, self.seed, self._store(), self.planes and slot.planes)
        if SELF_SPEC not in self.methods:  # int8 drafts by its high planes without being asked to
            found = search.with_cut_head(search.score(search.start))
        elif self.given_skip is not None:
            found = search.score(self.given_skip)
        else:
            found = search.run(self.trials, lambda done, of, what: self.progress("skip set", done, of, what))
            found = search.with_cut_head(found)
        if search.store is not None:
            search.store.unlink(missing_ok=True)
        confidence = counted(*scorer.confidence(slot, found.skip))
        return MethodPart(
            gamma=found.gamma,
            skip=SkipSetPart.of(found.skip),
            draft_cost=found.draft_cost,
            predicted_speedup=found.speedup,
            measured=[self._measured(found.acceptance.rates, found.acceptance.offered[0], confidence)],
            notes=_advice(found, "" if search.stopped is None else given_up(search.stopped, self.trials)),
        )

    def _measured(self, rates: list[float], positions: int, confidence: Sequence[float] = ()) -> Measured:
        return Measured(acceptance=rates, positions=positions, confidence=list(confidence), **self.text.facts)

    def _store(self) -> Path | None:
        folder = self.keep_search
        return folder and folder / f"skip-{digest(self.model + digest(self.text.text))[:16]}.journal"


def _chains(target: Slot, tokens: list[int], positions: int = POSITIONS) -> ChainScorer:
    return ChainScorer(target, tokens, positions=min(positions, len(tokens) // 4), gamma=GAMMA)


def _translated(draft: Slot, chains: ChainScorer, translation: Translation) -> tuple[Acceptance, Matching, str]:
    """Measure both ways to guess by a draft with another tokenizer -> the better one's acceptance, it, and a line."""
    found: dict[Matching, Acceptance] = {}
    for matching in get_args(Matching):
        drafter = draft_drafter(draft, chains.vocab, replace(translation, matching=matching))
        found[matching] = chains.score_drafter(drafter)
    best = max(found, key=lambda one: expected_tokens(found[one].rates, chains.gamma))
    rates = {one: f"{each.rates[0]:.0%}" for one, each in found.items()}
    shared = int((translation.targets >= 0).sum())
    how = {
        "strings": f"what it writes is tokenized for the target ({rates['strings']} of first guesses right; "
        f"shared tokens: {rates['tokens']})",
        "tokens": f"it guesses shared tokens ({rates['tokens']} of first guesses right; as strings: "
        f"{rates['strings']})",
    }
    return found[best], best, f"the draft has another tokenizer, with {shared} shared tokens: {how[best]}"


def _scored(draft: Slot, chains: ChainScorer) -> str | None:
    """Describe how much of the target's text a draft's cut LM head covers; None = the head is whole."""
    if not draft.model.part.cut or draft.head_tokens is None:
        return None
    share = np.isin(chains.chains[:, 1:], draft.head_tokens).mean()
    return (
        f"the draft guesses {len(draft.head_tokens)} of {draft.model.facts.vocab} tokens, {share:.0%} of those that "
        "the target wrote here; --draft-vocab 0 lets it guess all"
    )


def given_up(tried: int, trials: int) -> str:
    """Say that a search for a skip set stopped before its end."""
    return f"; the search for a skip set found nothing that pays and stopped after {tried} of {trials} trials"


def _advice(found: Candidate, stopped: str = "") -> str:
    if found.speedup >= WORTH:
        return f"predicted {found.speedup:.2f}x on the exporting machine"
    return (
        f"predicted {found.speedup:.2f}x on the exporting machine: a draft step still costs {found.draft_cost:.2f} of "
        f"a full one, so self-speculation hardly pays here{stopped}"
    )
