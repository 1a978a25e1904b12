"""Lanes: the KV slots of one sequence at a time, with the drafters that live on them, kept for the next request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from edgespec.cost import ENOUGH, CostModel, measure
from edgespec.drafters import Drafter
from edgespec.drafters.adaptive import Adaptive
from edgespec.drafters.ar import Plain
from edgespec.drafters.draft_model import DraftModel
from edgespec.drafters.ngram import NGram
from edgespec.drafters.self_spec import SelfSpec
from edgespec.methods import MethodChoice
from edgespec.runtimes.manifest import Manifest
from edgespec.runtimes.session import Model
from edgespec.runtimes.slot import Slot, open_slot
from edgespec.runtimes.target import SkipSet, common_prefix

Times = dict[str, dict[int, float]]  # what was measured of this machine: milliseconds by rows, by kind of pass
VERIFY_SIZES = (1, 2, 3, 5)
MOST_IDLE = 4  # finished conversations whose KV is kept


class Lane:
    """A target slot, the draft's slot if one is needed, and a drafter per method.

    Drafters and their adaptive control stay from request to request: what a method learned about its acceptance and its
    cost is worth keeping.
    """

    def __init__(
        self, manifest: Manifest, model: Model, draft: Callable[[], Model], context: int, times: Times
    ) -> None:
        self._manifest, self._draft, self._times = manifest, draft, times
        self.target = open_slot(model, context=context)
        self._draft_slot: Slot | None = None
        self._inner: dict[str, Drafter] = {}
        self._adaptive: dict[tuple[str, int, bool], Adaptive] = {}

    def drafter(self, choice: MethodChoice, gamma: int | None, adaptive: bool, fallback: bool) -> Drafter:
        """The drafter of a method; with ``adaptive`` inside the control that drafts as much as pays."""
        inner = self._inner.get(choice.name)
        if inner is None:
            inner = self._inner[choice.name] = self._make(choice)
        if choice.name == "ar" or not adaptive:
            return inner
        key = choice.name, gamma or choice.gamma, fallback
        if key not in self._adaptive:
            control = Adaptive(inner, self._costs(choice), key[1], fallback)
            if choice.part.measured and choice.part.measured[0].acceptance:
                control.prior = choice.part.measured[0].acceptance[0]
            self._adaptive[key] = control
        return self._adaptive[key]

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV allocated."""
        return self.target.kv_bytes + (self._draft_slot.kv_bytes if self._draft_slot else 0)

    def _make(self, choice: MethodChoice) -> Drafter:
        if choice.name == "ngram":
            return NGram()
        if choice.name == "speculative":
            if self._draft_slot is None:
                self._draft_slot = open_slot(self._draft())
            return DraftModel(self._draft_slot, self.target.vocab_size)
        if choice.name == "self-spec":
            return SelfSpec(self.target, _skip_set(choice))
        return Plain()

    def _costs(self, choice: MethodChoice) -> CostModel:
        """Where control starts from: what the export measured, corrected by a few passes on this machine.

        The exporting machine may have been another one, or busy; and control that starts too pessimistic would not
        draft, and so never see what drafting costs.  Seeded sampling is decided by the export's numbers alone.
        """
        saved = self._manifest.cost.get("verify_ms")
        verify = {int(rows): ms for rows, ms in saved.items()} if saved else None
        cost = CostModel(verify, 0.0 if choice.name == "ngram" else choice.part.draft_cost)
        for rows, ms in self._measured("verify", self._verify_once, VERIFY_SIZES).items():
            cost.observe_verify(rows, ms, ENOUGH)
        if choice.name in ("speculative", "self-spec"):
            (ms,) = self._measured(choice.name, lambda _: self._draft_once(choice), (1,)).values()
            cost.observe_draft(1, ms, ENOUGH)
        return cost

    def _measured(self, name: str, run: Callable[[int], None], sizes: tuple[int, ...]) -> dict[int, float]:
        """Times by size, measured once for all lanes of an engine."""
        if name not in self._times:
            self._times[name] = measure(run, sizes, repeats=3)
        return self._times[name]

    def _verify_once(self, rows: int) -> None:
        self.target.forward(np.zeros(rows, np.int64))

    def _draft_once(self, choice: MethodChoice) -> None:
        if choice.name == "speculative" and self._draft_slot is not None:
            self._draft_slot.forward(np.zeros(1, np.int64))
        else:
            self.target.forward_skipped(np.zeros(1, np.int64), 0, _skip_set(choice))


class LanePool:
    """Hands every request the idle lane that already holds most of its prompt."""

    def __init__(self, make: Callable[[], Lane]) -> None:
        self._make = make
        self._idle: list[Lane] = []
        self._busy: list[Lane] = []
        self._lock = threading.Lock()

    def take(self, prompt: Sequence[int]) -> Lane:
        """An idle lane, or a new one."""
        with self._lock:
            best = max(self._idle, key=lambda lane: common_prefix(lane.target.tokens, prompt), default=None)
            if best is not None:
                self._idle.remove(best)
            lane = best or self._make()
            self._busy.append(lane)
            return lane

    def give_back(self, lane: Lane) -> None:
        """The request on this lane has ended."""
        with self._lock:
            if lane in self._busy:
                self._busy.remove(lane)
                self._idle.append(lane)
                del self._idle[:-MOST_IDLE]

    def kv_bytes(self) -> int:
        """Bytes of KV of all lanes."""
        with self._lock:
            return sum(lane.kv_bytes for lane in [*self._idle, *self._busy])

    def longest(self) -> int:
        """Capacity of the longest target slot, in tokens."""
        with self._lock:
            return max((lane.target.capacity for lane in [*self._idle, *self._busy]), default=0)

    def clear(self) -> None:
        """Drop the idle lanes."""
        with self._lock:
            self._idle.clear()


def _skip_set(choice: MethodChoice) -> SkipSet:
    """The skip set of a method, in the runtime's form."""
    skip = choice.part.skip
    return SkipSet(tuple(skip.attention), tuple(skip.mlp)) if skip else SkipSet()
