"""Memory budget of an engine, and admission of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from edgespec.drafters.registry import AR, NGRAM
from edgespec.errors import BudgetError
from edgespec.planning.budget import available_memory, check_budget, most_tokens, parse_bytes, show_bytes
from edgespec.planning.buffers import checkpoint_bytes_of
from edgespec.planning.footprint import LEAST, LEAST_CHUNK, SPOKEN, Memory, memory_of, resident_now
from edgespec.planning.streaming import cache_for, can_stream
from edgespec.runtimes.files.formats import CHECKPOINTS
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions

OFF = "off"
MOST_KNOWN = 1024  # figures that are kept
STACK = 8 << 20  # bytes that a thread reserves
CHUNKS = (128, 64, 32, LEAST_CHUNK)  # rows of a prefill's pass: fewer need less scratch and more time
PLAN = "`edgespec plan` says which format and method would fit"
UNASKED = 0.8  # of the free memory may be used for experts without a budget
FALLBACKS = (NGRAM, AR)  # methods that need no memory, the better one first


@dataclass(frozen=True)
class AdmissionDecision:
    """How a request may run."""

    method: str  # the one asked for, or a cheaper one
    chunk: int  # rows of a prefill's pass
    predicted: int  # peak bytes; 0 = nothing was predicted
    reason: str = ""  # the change, as text; empty = nothing
    crowded: bool = False  # whether idle KV of earlier requests must go first
    spare: int | None = None  # bytes of idle KV that may stay; None = any number
    checkpoints: int = CHECKPOINTS  # most checkpoints of states


class MemoryBusyError(BudgetError):
    """Something fits the memory once other loaded models are freed."""


class MemoryBudget:
    """Memory that an engine may take.

    Args:
        manifest: of the bundle.
        use: how it is run: operators, attention, threads, strict, device.
        budget: bytes or text such as 1.5GiB: the most resident memory of this process, mapped files included; None =
            what is free now, of which only private memory is counted: mapped files can be read again; ``off`` = nothing
            is counted.

    Raises:
        InvalidRequest: a budget that is none, or larger than the machine.
    """

    def __init__(self, manifest: Manifest, use: RunOptions, budget: str | int | None = None) -> None:
        self._manifest = manifest
        self._use = replace(use, checkpoints=0)  # they take the rest
        self._checkpoint = checkpoint_bytes_of(manifest.target, use) if use.operators == "native" else 0
        self.asked = budget is not None and budget != OFF  # rather than found
        self.limit: int | None = None  # bytes; None = no limit
        self.others: Callable[[], int] = lambda: 0  # bytes of other bundles in this process, which reduce the limit
        self._mapped = False  # whether mapped files count
        self._known = lru_cache(MOST_KNOWN)(self._predicted)
        self._asked_bytes: int | None = None
        self._reserved, self._aside = False, 0
        if budget == OFF:
            return
        found = available_memory()
        # such limits count memory that is reserved, touched or not, and mapped files may count as well
        self._reserved = found.limit_name.startswith("RLIMIT")
        self._mapped = self.asked or self._reserved
        if budget is not None:
            self.limit = self._asked_bytes = parse_bytes(budget)
            check_budget(self.limit, found)
        else:
            self.limit = found.available + resident_now()[0]
        self._renew()

    def left(self) -> int | None:
        """Unused bytes of the requested budget; None = no budget."""
        return self.limit - sum(resident_now()) if self.asked and self.limit is not None else None

    def reserve(self, size: int) -> None:
        """Reserve this many bytes for other work of this process, such as serving."""
        self._aside += size
        if self.limit is not None:
            self.limit -= size

    def _renew(self) -> int | None:
        """Return the part of the limit that others leave.

        A limit by reserved memory is computed again, because libraries reserve memory while a bundle loads.
        """
        if self._reserved:
            reach = available_memory().reachable - (self._use.threads + 1) * STACK - self._aside
            self.limit = reach if self._asked_bytes is None else min(self._asked_bytes - self._aside, reach)
        return None if self.limit is None else self.limit - self.others()

    def choose_expert_cache(self, context: int | None) -> None:
        """Read weights when passes need them, with a cache as large as the limit allows, where not all of them fit.

        These are the experts of a mixture, or the layers of another model.  Without a budget a mixture leaves a fifth
        of the free memory to others; another model, which is slow then, uses all of it.

        Args:
            context: that was asked for; None = none was.
        """
        limit = self._renew()
        if limit is None or not can_stream(self._manifest.target, self._use):
            return
        share = 1.0 if self._mapped or self._manifest.target.facts.experts is None else UNASKED
        use = replace(self._least(min(context or SPOKEN, self._use.context)), checkpoints=CHECKPOINTS)
        least, others = self._least(min(LEAST, use.context)), self.others()
        cache = cache_for(self._manifest, use, int(share * (limit + others)), smallest=least)
        if cache is not None and others:  # else it fits once they are freed, see admit_bundle
            cache = cache_for(self._manifest, use, int(share * limit), smallest=least)
        self._use = replace(self._use, expert_cache=cache)
        self._known.cache_clear()

    @property
    def expert_cache(self) -> int | None:
        """Bytes for weights that are read when a pass needs them; None = they are mapped."""
        return self._use.expert_cache

    @property
    def use(self) -> RunOptions:
        """How the bundle is run."""
        return self._use

    def admit_bundle(self, context: int | None) -> None:
        """Refuse a bundle that cannot fit, before anything of it is loaded.

        A context that was not asked for, the bundle's own, need not be held at once.

        Raises:
            BudgetError: with a hint about what fits.
            MemoryBusyError: it would without the others.
        """
        use = self._least(context or min(LEAST, self._use.context))
        limit = self._renew()
        if limit is None or self._bytes(use)[0] <= limit:
            return
        self._raise_if_others_hold_memory(use, 0)
        least = self._bytes(self._least(LEAST))[0]
        if least > limit:
            raise BudgetError(
                f"this bundle needs at least {show_bytes(least)} to decode plainly, {self._of(limit)}", PLAN
            )
        raise self._refusal(f"a context of {context} tokens needs", use, limit)

    def loaded_bytes(self) -> int:
        """Bytes of the bundle in a process with others, without texts."""
        memory = memory_of(self._manifest, self._least(LEAST))
        once = [memory.part(name) for name in ("process", "libraries", "runtime")]
        if self._mapped:
            return memory.peak - sum(part.all for part in once)
        return memory.private - sum(part.private for part in once)

    def admit(
        self,
        method: str,  # the one chosen
        tokens: int,  # of prompt and answer
        *,
        gamma: int,  # maximum guesses per round
        greedy: bool,  # whether only likeliest tokens are needed
        methods: Sequence[str],  # of the bundle
        busy: int = 0,  # bytes of KV of other requests
        idle: int = 0,  # bytes of KV that earlier requests have left
    ) -> AdmissionDecision:
        """How a request may run.

        Raises:
            BudgetError: not even plain decoding fits.
            MemoryBusyError: it does without the others.
        """
        limit = self._renew()
        if limit is None:
            return AdmissionDecision(method, CHUNKS[0], 0)
        base = replace(self._use, context=tokens, gamma=gamma, greedy=greedy)
        names = (method, *(name for name in FALLBACKS if name in methods and name != method))
        for name, chunk in product(names, CHUNKS):
            takes, peak = self._bytes(replace(base, method=name, chunk=chunk))
            spare = limit - takes - busy
            if spare < 0:
                continue
            dropped = ""
            if name != method:
                needed = show_bytes(self._bytes(replace(base, method=method, chunk=CHUNKS[-1]))[0])
                dropped = f"{method} needs {needed}, {self._of(limit)}: {name} instead"
            kept = min(CHECKPOINTS, spare // self._checkpoint) if self._checkpoint else 0
            predicted = peak + busy + kept * self._checkpoint
            return AdmissionDecision(name, chunk, predicted, dropped, idle > spare, spare, kept)
        least = replace(base, method=AR, chunk=CHUNKS[-1])
        self._raise_if_others_hold_memory(least, busy)
        raise self._refusal(f"{tokens} tokens of prompt and answer need", least, limit, busy)

    def extended(
        self, admission: AdmissionDecision, tokens: int, *, gamma: int, greedy: bool, busy: int, idle: int
    ) -> AdmissionDecision | None:
        """Admit a running request with more tokens than before, as ``admit`` does; None = they do not fit."""
        limit = self._renew()
        if limit is None:
            return admission
        use = replace(self._use, context=tokens, gamma=gamma, greedy=greedy)
        takes, peak = self._bytes(replace(use, method=admission.method, chunk=admission.chunk))
        busy += admission.checkpoints * self._checkpoint
        spare = limit - takes - busy
        return None if spare < 0 else replace(admission, predicted=peak + busy, crowded=idle > spare, spare=spare)

    def width(self, batch: int, tokens: int, method: str, greedy: bool) -> int:
        """Sequences that fit together: ``batch`` or fewer, at least one."""
        limit, base = self._renew(), replace(self._use, method=method, context=tokens, greedy=greedy)
        while batch > 1 and limit is not None and self._bytes(replace(base, batch=batch))[0] > limit:
            batch -= 1
        return batch

    def together(self, methods: Sequence[str], tokens: int) -> list[str]:
        """Those of the methods, the first ones first, whose memory fits at the same time with this many tokens."""
        limit = self._renew()
        if limit is None:
            return list(methods)
        kept: list[str] = []
        left = limit - self._bytes(self._least(tokens))[0]
        for name in methods:
            extra = self.extra([name], tokens)
            if extra <= left:
                kept.append(name)
                left -= extra
        return kept

    def beside(self, method: str, tokens: int) -> int:
        """Bytes of one more request with this many tokens: its keys and values, its text, its rows of logits."""
        if self.limit is None:
            return 0
        use = self._least(tokens, method)
        return self._bytes(replace(use, batch=3))[0] - self._bytes(replace(use, batch=2))[0]

    def extra(self, methods: Sequence[str], tokens: int) -> int:
        """Return the additional bytes of methods over plain decoding, all of them together."""
        if self.limit is None:
            return 0
        plain = self._bytes(self._least(tokens))[0]
        return sum(max(0, self._bytes(self._least(tokens, name))[0] - plain) for name in methods)

    def memory(self, method: str) -> Memory:
        """Predict a method's memory, part by part, with the whole context full."""
        return memory_of(self._manifest, replace(self._use, method=method, checkpoints=CHECKPOINTS))

    def _least(self, tokens: int, method: str = AR) -> RunOptions:
        """Run in the way that takes the least memory for this many tokens."""
        return replace(self._use, method=method, context=tokens, chunk=CHUNKS[-1])

    def _bytes(self, use: RunOptions) -> tuple[int, int]:
        """(bytes that count: all, or private ones; peak)."""
        # requests differ by a token: whole blocks of KV are what is allocated anyway
        return self._known(replace(use, context=min(-(-use.context // 64) * 64, self._manifest.target.facts.context)))

    def _predicted(self, use: RunOptions) -> tuple[int, int]:
        memory = memory_of(self._manifest, use)
        return memory.peak if self._mapped else memory.private, memory.peak

    def _of(self, limit: int) -> str:
        return f"and the budget is {show_bytes(limit)}" if self.asked else f"and {show_bytes(limit)} are free"

    def _raise_if_others_hold_memory(self, use: RunOptions, busy: int) -> None:
        """Reject a request if the others leave no room for it."""
        taken = self.others()
        if taken and self.limit is not None and self._bytes(use)[0] + busy <= self.limit:
            what = f"{show_bytes(self._bytes(use)[0] + busy)} are needed, {self._of(self.limit)}"
            raise MemoryBusyError(f"{what}, of which other models have {show_bytes(taken)}", "ask again in a moment")

    def _refusal(self, what: str, use: RunOptions, limit: int, busy: int = 0) -> BudgetError:
        """Make the error of a request that does not fit; its hint is the number of tokens that do."""
        takes = show_bytes(self._bytes(use)[0] + busy)
        low = most_tokens(lambda tokens: self._bytes(replace(use, context=tokens))[0] + busy <= limit, use.context)
        fits = f"{low // 64 * 64} tokens fit: shorten the prompt, ask for fewer new tokens, or keep keys as int8"
        return BudgetError(f"{what} {takes} with plain decoding, {self._of(limit)}", PLAN if low < LEAST else fits)
