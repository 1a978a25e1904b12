"""Sessions: the KV slots of one sequence at a time, with the drafters that live on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from edgespec.control.adaptive import Adaptive, Control
from edgespec.control.auto import Auto, Candidate
from edgespec.control.learned import Learned
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposer import Proposer
from edgespec.decoding.settings import DraftOptions, Settings
from edgespec.decoding.target import SkipSet, Target, common_prefix
from edgespec.drafters.ngram_stores import NGramStore
from edgespec.drafters.proposer import UserDrafter
from edgespec.drafters.registry import AR, METHODS, Parts
from edgespec.engine.input import Input
from edgespec.engine.inputs import Inputs
from edgespec.engine.known import Experience, known_rates
from edgespec.engine.methods import MethodChoice, own_choice
from edgespec.engine.prompt_cache import KeptPrompt
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import ENOUGH, CostModel, medians, time_turns
from edgespec.planning.profiles import export_busy
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

VERIFY_SIZES = (1, 2, 3, 5)
PRICING = 0.1  # seconds; after that a measurement of prices starts no further turn
MOST_DRAFTERS = 32  # drafters, and policies over them, by method and options, that a session keeps


T = TypeVar("T")


class Session:
    """A target slot, the draft's slot if one is needed, and drafters by method with the policies over them.

    They stay from request to request; what is learned of them belongs to the engine (``experience``).

    Attributes:
        keeps_prompts: whether the disk may keep what is read of prompts.
    """

    keeps_prompts = True

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        target: Slot,
        draft: Callable[[str], Model],
        inputs: Inputs,
        experience: Experience,
        store: NGramStore | None = None,
    ) -> None:
        self._inputs, self._given = inputs, Input()
        self._manifest, self._draft, self._experience = manifest, draft, experience
        # why keys and values of its text cannot be vouched for, as a sentence; "" = they were computed here
        self.foreign = ""
        self.restored = 0  # tokens of the text that were restored with those
        self.target = target
        self.owner: str | None = None  # owner of its text; None = no particular owner
        self.asked = 0  # tokens of the last prompt, up to the end of its last turn
        self.shared = 0  # tokens of it that are also a prefix of another session's text, and likely of further ones
        self.used = 0.0  # when it was given back last, by ``time.monotonic``
        self._most_rows = self.target.chunk
        self._drafts: dict[str, tuple[Slot, int]] = {}  # open ones, and the maximum rows of a prefill pass
        self._kept: KeptPrompt | None = None  # of the request that it has
        self._restores: dict[str, Callable[[Slot], None]] = {}  # fill a draft's slot once it is open
        self._parts = Parts(bundle, manifest, self.target, self._open_draft, lambda: self._verify_costs(None), store)
        # by what it is and its options; the last asked for is last
        self._drafters: dict[tuple[object, ...], Drafter] = {}
        self._policies: dict[tuple[object, ...], Policy] = {}
        self._own: tuple[Proposer, int | None, bool, bool, Policy] | None = None
        self.attend(self._given)

    @property
    def sourced(self) -> bool:
        """Whether passes read the output of an encoder too: texts with the same tokens need not be the same."""
        return self._inputs.sourced

    def attend(self, given: Input) -> float:
        """Let all slots attend over the content of an input from now on -> the milliseconds that reading it took."""
        self._given = given
        return self._inputs.attend(self.slots(), given)

    def leave(self) -> None:
        """Let all slots attend over no memory, so that it may make room; their texts stay, for the same source."""
        self._given = Input()
        for slot in self.slots().values():
            slot.leave()

    def restore_draft(self, restore: Callable[[Slot], None]) -> None:
        """Let ``restore`` fill the draft's slot once a method asks for it."""
        self._restores["draft"] = restore

    def listen(self, kept: KeptPrompt) -> None:
        """Restore the slots of a request, those of drafts when a method asks for them."""
        self._kept = kept
        for name, slot in self.slots().items():
            kept.opened(name, slot)

    def begin(self, tokens: Sequence[int]) -> list[str]:
        """Begin a text -> why what is held of it cannot be vouched for, a sentence each."""
        # all texts of a model may begin with one token, which every later one looks at: it must not be a foreign one's
        if self.foreign and 2 * common_prefix(self.target.tokens, tokens) < self.restored:
            self.target.follow([])
            self.foreign = ""
        return [self.foreign] if self.foreign else []

    def decoding_target(self, given: Input, settings: Settings) -> Target:
        """Return the target of a request; an ``InvalidRequest``: it is guided, and this session has one slot."""
        if settings.guided:
            raise InvalidRequest("a guided request needs separate sessions and cannot join the passes of a batch")
        return self.target

    def policy_of(self, choice: MethodChoice, settings: Settings) -> Policy:
        """Return the policy of a request: over its own proposer, or of the method that was chosen."""
        how = settings.gamma, settings.adaptive, settings.fallback
        if settings.proposer is not None:
            return self.own(settings.proposer, *how)
        return self.policy(choice, *how, settings.drafts)

    def policy(
        self, choice: MethodChoice, gamma: int | None, adaptive: bool, fallback: bool, options: DraftOptions
    ) -> Policy:
        """Return the policy of a method: with ``adaptive`` it drafts as much as is fastest, else a fixed length."""
        members = tuple((one.name, one.promise) for one in choice.proposers or choice.candidates)
        key = choice.name, members, options, gamma or choice.gamma, adaptive, fallback
        return _kept(self._policies, key, lambda: self._policy(choice, gamma, adaptive, fallback, options))

    def _policy(
        self, choice: MethodChoice, gamma: int | None, adaptive: bool, fallback: bool, options: DraftOptions
    ) -> Policy:
        def control(one: MethodChoice) -> Control:
            drafter, learned = self.drafter(one, options), self._experience.of(one.name, options)
            return self._control(one, drafter, learned, gamma, fallback)

        members = choice.proposers or (choice,)
        if not adaptive or choice.name == AR:
            return Policy([self.drafter(one, options) for one in members], choice.name)
        if not choice.candidates:
            return Adaptive([control(one) for one in members], choice.name)
        self._verify_costs(None)  # the passes that this times must come before the prompt is read
        candidates = []
        for one in choice.candidates:
            needs, standing = METHODS[one.name].needs, self._experience.of(one.name, options).standing
            make = partial(control, one)
            candidates.append(Candidate(one.name, one.promise, make, needs == "text", needs == "drafter", standing))
        return Auto(candidates, fallback)

    def own(self, proposer: Proposer, gamma: int | None, adaptive: bool, fallback: bool) -> Policy:
        """Return the policy over a caller's proposer; the last one is kept with what was learned of it."""
        if self._own is None or self._own[0] is not proposer or self._own[1:4] != (gamma, adaptive, fallback):
            drafter = UserDrafter(proposer, self.target.vocab_size)
            policy = Policy([drafter])
            if adaptive:
                choice = own_choice(drafter.name)
                policy = Adaptive([Control(drafter, self._costs(choice, drafter), gamma or choice.gamma, fallback)])
            self._own = proposer, gamma, adaptive, fallback, policy
        return self._own[4]

    def drafter(self, choice: MethodChoice, options: DraftOptions) -> Drafter:
        """Return the drafter of a method."""
        key = choice.name, replace(options, proposers=())
        return _kept(self._drafters, key, lambda: METHODS[choice.name].build(self._parts, choice.part, options))

    def _control(
        self, choice: MethodChoice, drafter: Drafter, learned: Learned, gamma: int | None, fallback: bool
    ) -> Control:
        """Return the control of a drafter, which begins with what the engine has learned of its method."""
        if learned.cost is None:
            learned.cost = self._costs(choice, drafter)
        return Control(drafter, learned, gamma or choice.gamma, fallback, known_rates(choice.name, choice.part))

    @property
    def chunk(self) -> int:
        """Maximum rows of a prefill pass."""
        return self.target.chunk

    @chunk.setter
    def chunk(self, rows: int) -> None:
        self.target.chunk = min(rows, self._most_rows)
        for slot, most in self._drafts.values():
            slot.chunk = min(rows, most)

    def slots(self) -> dict[str, Slot]:
        """List the slots: the target's, and those of a draft and a drafter once a method has asked for them."""
        return {"target": self.target} | {name: slot for name, (slot, _) in self._drafts.items()}

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV allocated."""
        return sum(slot.kv_bytes for slot in self.all_slots())

    def all_slots(self) -> list[Slot]:
        """List the slots that hold a text."""
        return list(self.slots().values())

    @property
    def adapter(self) -> int:
        """Number of the LoRA adapter that its text is read with; 0 = none."""
        return self.target.adapter

    def use_adapter(self, number: int) -> None:
        """Read texts with another adapter from now on; a text that was read otherwise is forgotten."""
        if number != self.adapter:
            self.forget()
            for slot in self.all_slots():
                if slot.model is self.target.model:
                    slot.use_adapter(number)

    def forget(self) -> None:
        """Forget the text, so that its content cannot speed up the next request."""
        for slot in self.all_slots():
            slot.follow([])
        self.foreign = ""

    def close(self) -> None:
        """Free the slots and all that the drafters hold, even if this session is still referenced."""
        self.close_target()
        for slot, _ in self._drafts.values():
            slot.close()
        # these name this session, or its engine: their memory is free now, not once cycles are collected
        self._drafts.clear()
        self._drafters.clear()
        self._policies.clear()
        self._own = self._kept = None
        del self._parts, self._draft

    def close_target(self) -> None:
        """Free the slots of the target."""
        self.target.close()

    def _open_draft(self, name: str) -> Slot:
        if name not in self._drafts:
            slot = open_slot(self._draft(name))
            self._inputs.attend({name: slot}, self._given)
            if (restore := self._restores.pop(name, None)) is not None:
                restore(slot)
            if self._kept is not None:
                self._kept.opened(name, slot)
            self._drafts[name] = slot, slot.chunk
            slot.chunk = min(slot.chunk, self.target.chunk)
        return self._drafts[name][0]

    def _costs(self, choice: MethodChoice, inner: Drafter) -> CostModel:
        """Return the initial costs for control: the export's measurements, corrected by a few passes here and now.

        The exporting machine may have been another one, or busy.  Control that starts too pessimistic would not draft,
        and so never measure the cost of drafting.  Seeded sampling uses only the export's numbers, so that it is
        reproducible.
        """
        part = choice.part
        if self.target.streams and isinstance(skip := getattr(inner, "skip", None), SkipSet):
            # a step reads the target's layers from the disk as well, and takes too long to time some first
            read = 1 - len(skip.mlp) / self.target.model.facts.layers
            return self._verify_costs(max(part.draft_cost or 0.0, read), part.first_cost, read)
        cost = self._verify_costs(*((0.0, None) if inner.cheap else (part.draft_cost, part.first_cost)))
        if inner.benchmark_step():
            (ms,) = self._measured(choice.name, lambda _: inner.benchmark_step(), (1,)).values()
            first = ms
            if inner.benchmark_step(first=True):
                (first,) = self._measured(f"{choice.name}, first", lambda _: inner.benchmark_step(True), (1,)).values()
                cost.observe_draft(2, first + ms, ENOUGH)
            cost.observe_draft(1, first, ENOUGH)
        return cost

    def _verify_costs(
        self, draft_cost: float | None, first_cost: float | None = None, draft_reads: float = 0.0
    ) -> CostModel:
        mixed, streams = self.target.model.facts.experts, self.target.streams
        if mixed is not None and streams:
            # by the bytes that rows read if they choose experts independently, until passes show otherwise: a pass over
            # equal rows, as below, would read those of one
            curve = {rows: mixed.distinct(rows) for rows in (1, *VERIFY_SIZES, 2 * max(VERIFY_SIZES))}
            return CostModel(curve, draft_cost, first_cost, curve, draft_reads)
        saved = None if export_busy(self._manifest.cost) else self._manifest.cost.get("verify_ms")
        verify = {int(rows): ms for rows, ms in saved.items()} if saved else None
        if streams:  # all rows of a pass read the same layers, and a pass takes too long to time some first
            return CostModel(verify, draft_cost, first_cost, {1: 1.0}, draft_reads)
        cost = CostModel(verify, draft_cost, first_cost)
        forward = self.target.forward
        for rows, ms in self._measured("verify", lambda n: forward(np.zeros(n, np.int64)), VERIFY_SIZES).items():
            cost.observe_verify(rows, ms, ENOUGH)
        return cost

    def _measured(self, name: str, run: Callable[[int], object], sizes: tuple[int, ...]) -> dict[int, float]:
        """Return times by size: of a calibration or an earlier process, or measured once for all sessions."""
        times = self._experience.times
        if name not in times:
            turns = time_turns({size: partial(run, size) for size in sizes}, PRICING, least=1, most=3)
            self._experience.add_times(name, medians(turns))
        return times[name]


def _kept(made: dict[tuple[object, ...], T], key: tuple[object, ...], make: Callable[[], T]) -> T:
    """Return what was made for these options, or make it; least recently used ones are forgotten."""
    found = made.pop(key) if key in made else make()
    made[key] = found
    while len(made) > MOST_DRAFTERS:
        del made[next(iter(made))]
    return found
