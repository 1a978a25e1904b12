"""The target drafts for itself, and searches which sub-layers to leave out while it decodes: SWIFT.

Xia et al., arXiv 2410.06916.  No search at export, no training: sets are scored on the tokens just written, over the
full model's keys and values, in rows after the slot's own (the technique: ``edgespec/export/measuring/acceptance.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgespec.decoding.drafter import DraftRequest
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.settings import DraftOptions
from edgespec.decoding.stats import RoundTime
from edgespec.decoding.target import HYPOTHESES, Output, Pass, SkipSet, Target
from edgespec.drafters.registry import Parts
from edgespec.drafters.sampling_drafts import SiblingPolicy, Weak, draw_siblings
from edgespec.drafters.self_spec import SelfSpec, skip_set
from edgespec.errors import EdgespecError
from edgespec.formulas.cost import CostModel
from edgespec.plugins.swift.search import OnlineSearch, SkipStore
from edgespec.runtimes.files.manifest import Manifest, MethodPart, SkipSetPart

ROWS, DEPTH = 16, 4  # of one scoring pass: its rows, in chains of this length
_FRESH = 8  # tokens to be written before the next pass
_SAVE_EVERY = 16  # scored windows
HIGH_SAVES = 4 / 8.5  # of the bytes of int8 weights, with their scales


@dataclass
class StepCost:
    """Cost of a draft step over a plain one, by its skip set."""

    attention: float  # what leaving out one attention saves
    mlp: float  # what leaving out one MLP saves
    extra: float = 0.0  # what steps took beyond that on this machine; learned
    high_attention: float = 0.0  # time saved by reading only the high plane of one attention
    high_mlp: float = 0.0  # of one MLP
    high_head: float = 0.0  # of the LM head

    def __call__(self, skip: SkipSet) -> float:
        """Predict the cost of a step with ``skip`` left out."""
        saved = len(skip.attention) * self.attention + len(skip.mlp) * self.mlp
        saved += len(skip.high_attention) * self.high_attention + len(skip.high_mlp) * self.high_mlp
        return max(1 - saved - skip.high_head * self.high_head + self.extra, 0.02)

    def observe(self, skip: SkipSet, cost: float) -> None:
        """Learn that a step with ``skip`` took ``cost``; limit the weight of interrupted steps."""
        self.extra += 0.1 * min(max(cost - self(skip), -0.2), 0.2)


class Swift(SelfSpec):
    """Drafts with the target itself and the best known skip set, and searches for better sets as it decodes.

    A seeded text of rejection sampling must not depend on the clock or on earlier requests.  It is drafted with the
    initial set of the search, and nothing is searched.

    Args:
        target: the model; without ``HYPOTHESES`` nothing is searched.
        search: which sets to try; it predicts speeds with ``step_cost``, which learns from the clock.
        costs: the verify curve.
        share: maximum time of the search, as a share of the time of decoding.
        branch: maximum draft tokens per node by depth; siblings are offered where they help.  None = chains.
    """

    name = "swift"

    def __init__(
        self,
        target: Target,
        search: OnlineSearch,
        step_cost: StepCost,
        costs: CostModel,
        share: float = 0.02,
        branch: Sequence[int] | None = None,
        store: SkipStore | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.search, self.step_cost, self.costs = search, step_cost, costs
        self.share, self.branch, self.store, self.clock = share, branch, store, clock
        self.scoring = target if HYPOTHESES in target.can else None
        if self.scoring is None:
            search.stopped = "this target cannot score sets"
        self.decoded_ms = self.search_ms = 0.0
        self.passes = 0
        self._changes = 0  # number of the set in use, without texts that start from the same set every time
        self._reproducible = False
        self._siblings = SiblingPolicy((1,))
        self._unit_ms = 0.0  # time of a one-row pass
        self._recent: deque[float] = deque(maxlen=4)  # times of the last scoring passes
        self._prompt = self._scored_at = self._unsaved = 0
        self._first_cost = replace(step_cost, extra=0.0)
        if store is not None:
            store.load(search)
        self._counted = search.best
        super().__init__(target, search.best)

    # -- drafting ----------------------------------------------------------------------------------------------------

    def begin(self, request: DraftRequest) -> None:
        """Load the results of other requests; a seeded text starts from the same set every time."""
        super().begin(request)
        self._reproducible = request.params.seeded_rejection
        self._use(self.search.initial if self._reproducible else self.search.best)
        if self.branch is not None:
            self._siblings = self._priced(self.branch)
        self._prompt, self._scored_at = len(request.tokens), 0
        if self.store is not None and not self._reproducible:
            if self._unsaved:
                self._save()
            elif self.store.load(self.search):
                self._use(self.search.best)

    def _priced(self, branch: Sequence[int]) -> SiblingPolicy:
        """Offer siblings where they are expected to gain more than their rows cost."""
        costs = self.costs.given() if self._reproducible else self.costs
        step = self._first_cost if self._reproducible else self.step_cost

        def price(depth: int, expected: float, rows: int) -> float:
            """Price one more row in tokens, at this round's speed or plain decoding's if that is higher."""
            rate = expected / (depth * step(self.skip) + costs.v(depth + 1))
            return max(rate, 1.0) * (costs.v(rows + 1) - costs.v(rows))

        least = min(costs.v(rows + 1) - costs.v(rows) for rows in range(2, 2 + self.gamma_max))
        return SiblingPolicy(branch, price, least)

    def _draw(self, tokens: list[int], budget: int, weak: Weak | None) -> Proposal:
        """Draft a chain up to the last token that is worth its time, and siblings where they help."""
        steps, how, length = self._steps(tokens), self.how(tokens), min(budget, self.gamma_max)
        return draw_siblings(steps, how, length, weak, self._siblings, self._bucket)

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        """Count the accepted tokens of the chain."""
        if proposal.parents is not None:
            chain = proposal.deepest  # its nodes come first
            accepted = sum(node < chain for node in verdict.path)
            proposal, verdict = Proposal(proposal.tokens[:chain]), Verdict(range(accepted), verdict.next_token)
        super().observe(proposal, verdict, output)

    def forecast(self, budget: int) -> tuple[int | None, list[int] | None]:
        return self._bucket, None

    @property
    def _bucket(self) -> int:
        """Number the set in use: each has a separate acceptance."""
        return 0 if self._reproducible else self._changes

    def _use(self, skip: SkipSet) -> None:
        self.skip = skip
        if not self._reproducible and skip != self._counted:
            self._counted = skip
            self._changes += 1

    # -- searching ---------------------------------------------------------------------------------------------------

    def timed(self, proposal: Proposal, time: RoundTime) -> None:
        """Learn the time of a round, once its output is read, and score a set if there is time for it."""
        if self._reproducible or time.shared:
            return
        if len(proposal) and self._unit_ms > 0:
            self.step_cost.observe(self.skip, time.draft_ms / proposal.deepest / self._unit_ms)
        unit = time.verify_ms / self.costs.v(time.rows)
        self._unit_ms += (unit - self._unit_ms) * (0.1 if self._unit_ms else 1.0)
        self.decoded_ms += time.draft_ms + time.verify_ms
        if not self.search.stopped and self._may_score():
            start = self.clock()
            self._score()
            taken = 1000 * (self.clock() - start)
            self.search_ms += taken
            self._recent.append(taken)

    def _may_score(self) -> bool:
        """Return whether there are tokens to score, room for the rows, and time for it within the budget."""
        if self.scoring is None:
            return False
        held = len(self.scoring.tokens)
        if held - ROWS < self._prompt or held - self._scored_at < _FRESH:
            return False
        if held + ROWS + 1 > getattr(self.scoring, "capacity", held + ROWS + 1):
            return False
        expected = 1.5 * max(self._recent, default=2 * self._unit_ms * self.costs.v(ROWS))
        return self.search_ms + expected <= self.share * self.decoded_ms

    def _score(self) -> None:
        search = self.search
        assert self.scoring is not None
        skip = search.ask()
        self._scored_at = len(self.scoring.tokens)
        try:
            matched = matches(self.scoring, skip)
        except EdgespecError as error:  # coded keys of which too few are exact, or no room
            search.stopped = f"sets cannot be scored here: {error}"
            return
        self.passes += 1
        self._unsaved += 1
        if search.record_result(skip, matched, ROWS):
            self._use(search.best)
            self._save()
        elif self._unsaved >= _SAVE_EVERY or search.stopped:
            self._save()

    def _save(self) -> None:
        self._unsaved = 0
        if self.store is not None:
            self.store.save(self.search)

    @property
    def reason(self) -> str:
        """Describe the results of the search."""
        skip, search = self.skip, self.search
        words = f"leaves out {len(skip.attention)} attentions and {len(skip.mlp)} MLPs"
        if search.planes:
            words += f", reads high planes of {len(skip.high_attention)} attentions and {len(skip.high_mlp)} MLPs"
        if self._reproducible:
            words += ": the set to start from, because the text is seeded"
        elif skip in search.records:
            words += f", predicted {search.speed(skip):.2f}x at matchness {search.acceptance(skip):.2f}"
        words += f"; {search.candidates} sets tried in {self.search_ms:.0f} ms ({self.search_share:.1%} of decoding)"
        notes = [search.stopped, self.store.note if self.store else ""]
        return "; ".join([words, *(note for note in notes if note)])

    @property
    def search_share(self) -> float:
        """Divide the time of the search by that of the rounds; 0 before the first."""
        return self.search_ms / self.decoded_ms if self.decoded_ms else 0.0


def matches(target: Target, skip: SkipSet) -> int:
    """Count the slot's last ROWS tokens that a draft without ``skip`` would have predicted.

    The text before is cut into chains of DEPTH rows.  Each sees the full model's keys and values of the tokens before
    its first one, and its own: what a draft of that length sees.
    """
    ids = np.array(target.tokens[-ROWS - 1 :], np.int64)  # [ROWS + 1]
    first = len(target.tokens) - ROWS - 1
    rows = np.arange(ROWS)
    depth = rows % DEPTH
    above = np.where(depth > 0, rows - 1, -1)
    output = target.run(Pass(ids[:-1], above, visible=first + rows - depth, skip=skip))
    return int((output.logits.argmax(-1) == ids[1:]).sum())


def build(parts: Parts, part: MethodPart, options: DraftOptions) -> Swift:
    """Start from the set that export wrote, or from a better one found later."""
    target, manifest = parts.target, parts.manifest
    found, last = skip_set(part.skip or SkipSetPart()), target.layers - 1
    if not target.planes and not len(found):
        found = SkipSet.every_other(target.layers)
    attention, mlp = (tuple(layer for layer in layers if 0 < layer < last) for layers in (found.attention, found.mlp))
    first = replace(found, attention=attention, mlp=mlp) if target.planes else SkipSet(attention, mlp)
    step_cost, costs = _step_cost(manifest), parts.costs()
    search = OnlineSearch(target.layers, first, step_cost, costs.v)
    store = SkipStore(manifest, target.model.graph.operators, options.kind)
    return Swift(target, search, step_cost, costs, options.search, options.branch, store)


def _step_cost(manifest: Manifest) -> StepCost:
    """Read export's measurement of the time that sub-layers save, or estimate it by their weights."""
    saved, facts = manifest.cost, manifest.target.facts
    names = ("plain", "attention", "mlp", "high_attention", "high_mlp", "high_head")
    plain, attention, mlp, *high = (float(saved.get(f"{name}_ms", 0)) for name in names)
    if not (plain > 0 and attention + mlp > 0):
        attention = facts.hidden * facts.head_dim * 2 * (facts.heads + facts.kv_heads)
        mlp = 3 * facts.hidden * facts.intermediate
        head = facts.hidden * facts.vocab
        plain = facts.layers * (attention + mlp) + head
        half = HIGH_SAVES if manifest.target.planes else 0.0
        high = [half * attention, half * mlp, half * head]
    return StepCost(attention / plain, mlp / plain, 0.0, *(each / plain for each in high))
