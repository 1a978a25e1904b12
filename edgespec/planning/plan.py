"""Which method, format and context for a budget: candidates, the pick with its reason, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from edgespec.drafters.registry import AR, native_alone, needing, searching
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import WORTH
from edgespec.planning.budget import most_tokens, show_bytes
from edgespec.planning.footprint import LEAST, LEAST_CHUNK, Memory, memory_of
from edgespec.planning.profiles import Profile
from edgespec.planning.speed import Speed, speed_of
from edgespec.planning.streaming import SeenReads, Streaming, cache_for, streaming_of
from edgespec.planning.traffic import read_bytes
from edgespec.runtimes.files.formats import FOUR_BITS, SPECS
from edgespec.runtimes.files.manifest import Manifest, Operators
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.options import LoadOptions, RunOptions, WeightPrecision
from edgespec.runtimes.ort.session import default_threads

Goal = Literal["chat", "batch", "memory", "quality", "auto"]
CONTEXT = 4096  # tokens of a plan without a requested context
LEAST_CONTEXT = 512
DISK = 10  # times as long as a byte of memory a byte of the disk takes, where neither is known
NEAR = 0.02  # speeds closer than that are taken for equal: the finer format wins, then the smaller one; so with memory
PRECISION = [str(name) for name in sorted(SPECS, key=lambda name: SPECS[name].native_bits)]  # from coarse to fine
# For goal quality, nothing finer than int8 is tried, which loses 1 to 3 % of what int4 does
# (docs/dev/measurements.md, weight quality): fp32 takes four times its bytes, and time.
FINE = PRECISION.index("int8")


@dataclass(frozen=True)
class Option:
    """An existing bundle, or one that an export would make."""

    manifest: Manifest  # its manifest, or the planned one
    name: str  # the bundle's folder, or the model's name
    export: tuple[str, ...] | None = None  # options of ``edgespec export`` that make it; None = it exists
    # by method: a description of parts that must be made or given first
    needs: dict[str, str] = field(default_factory=dict)
    profile: Profile | None = None  # measurements with this very bundle; None = the request's
    hits: SeenReads | None = None  # of its streamed experts, in earlier runs; None = none are known


@dataclass(frozen=True)
class PlanRequest:
    """Conditions and goal of a plan."""

    budget: int  # bytes
    goal: Goal = "auto"  # what matters most
    batch: int = 1  # sequences together
    # how bundles are loaded, without its budget.  A context of None = ``CONTEXT``, or the longest that fits; an
    # attention of None = the bundle's default, and int8 where only that fits
    load: LoadOptions = field(default_factory=LoadOptions)
    profile: Profile | None = None  # another device; None = this one
    bandwidth: float | None = None  # bytes that the device reads per second, without a profile; None = not known
    disk: float | None = None  # bytes per second that its disk gives of experts; None = not known

    def operators(self, manifest: Manifest) -> Operators:
        """Those that a bundle is run on there."""
        if self.load.device != "cpu":
            return choose_operators("stock", manifest.target).kind
        if self.profile is not None and self.load.operators == "auto":
            return self.profile.operators
        return choose_operators(self.load.operators, manifest.target).kind

    def profile_of(self, option: Option) -> Profile | None:
        """Choose what was measured: with the bundle itself, else on the device."""
        return option.profile or self.profile

    def memory(self, option: Option, use: RunOptions) -> Memory:
        """Predict the memory of a way to run a bundle."""
        return memory_of(option.manifest, use, self._process(option))

    def _process(self, option: Option) -> int | None:
        profile = self.profile_of(option)
        return profile.process_bytes if profile else None

    def fitted(self, option: Option, use: RunOptions, layers: bool = False) -> RunOptions:
        """Stream the experts of a mixture that does not fit as a whole.

        ``layers``: and the layers of another model, where not even a short text fits.
        """
        if option.manifest.target.facts.experts is None and not layers:
            return use
        least = replace(use, method=AR, context=min(LEAST, use.context), chunk=LEAST_CHUNK)
        cache = cache_for(option.manifest, use, self.budget, self._process(option), least)
        return use if cache is None else replace(use, expert_cache=cache)


@dataclass(frozen=True)
class PlannedRun:
    """One way to run one bundle, with what it is predicted to take.

    ``approximates``: how far the text is from the bundle's own, unasked: 1 by coarser keys, 2 by weights of which only
    the high planes are read; 3 by both.
    """

    option: Option
    use: RunOptions
    memory: Memory
    speed: Speed
    fits: bool
    approximates: int = 0
    disk: float | None = None  # bytes per second that it gives of experts; None = not known

    @property
    def format(self) -> str:
        """Weight format."""
        return self.option.manifest.target.format

    @property
    def precision(self) -> WeightPrecision:
        """Which planes of int8 weights are read."""
        return "high" if self.option.manifest.target.high_alone else "full"

    @property
    def kl(self) -> float | None:
        """Divergence from the source that the export measured, nats per token; None = not measured."""
        found: float | None = self.option.manifest.parity.get("kl")
        return found

    @property
    def precision_rank(self) -> int:
        """Place of the format among all, from coarse to fine."""
        return PRECISION.index(self.format)

    @property
    def rate(self) -> float:
        """Tokens per second, or a proportional figure for an unknown device."""
        read = read_bytes(self.option.manifest.target, self.use.operators)
        if self.streaming:
            read += DISK * self.streaming.bytes_per_token
        return self.speed.tokens_per_second or self.speed.gain / read

    @property
    def streaming(self) -> Streaming | None:
        """Return what is read from the disk; None = all weights fit."""
        return streaming_of(self.option.manifest, self.use, self.disk, self.option.hits)

    @property
    def waits(self) -> bool:
        """Whether a part must be made or given first."""
        return self.use.method in self.option.needs

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return {
            "bundle": self.option.name,
            "method": self.use.method,
            "format": self.format,
            "precision": self.precision,
            "kl": self.kl,
            "operators": self.use.operators,
            "attention": self.use.attention,
            "context": self.use.context,
            "batch": self.use.batch,
            "lossless": True,  # every method with the exact rule of acceptance is
            "fits": self.fits,
            "needs": self.option.needs.get(self.use.method),
            "export": None if self.option.export is None else list(self.option.export),
            "memory": self.memory.as_dict(),
            "speed": asdict(self.speed),
            "streaming": asdict(self.streaming) if self.streaming else None,
        }


def ways(option: Option, request: PlanRequest, context: int) -> Iterable[RunOptions]:
    """Ways to run one bundle."""
    manifest, device = option.manifest, request.load.device
    operators = request.operators(manifest)
    impossible = native_alone(manifest) if operators == "stock" else ()
    if device != "cpu":
        impossible = (*impossible, *searching(), *needing("drafter"))
    for method, part in manifest.methods.items():
        if method in impossible:
            continue
        use = RunOptions(
            method,
            operators,
            min(context, manifest.target.facts.context),
            request.load.attention,
            batch=request.batch,
            threads=request.load.threads or default_threads(),
            device=device,
            draft_attention=request.load.draft_attention if operators == "native" else None,
        )
        if method in (*needing("draft", "drafter"), "medusa"):
            use = replace(use, gamma=max(part.gamma, use.gamma))
        yield use
        if request.load.attention is None and operators == "native" and _coarser(manifest):
            yield replace(use, attention="int8")


def _coarser(manifest: Manifest) -> bool:
    """Whether int8 keys and values would need less memory than the bundle's default."""
    part = manifest.target.attention
    return manifest.target.origin == "edgespec" and (part is None or part.default in ("f32", "f16"))


def planned_run(option: Option, use: RunOptions, request: PlanRequest, layers: bool = False) -> PlannedRun:
    """Predict the memory and the speed of a way to run a bundle; ``layers``: they may be streamed."""
    use = request.fitted(option, use, layers)
    memory = request.memory(option, use)
    speed = speed_of(
        option.manifest, use, request.profile_of(option), request.bandwidth, disk=request.disk, hits=option.hits
    )
    coarser = use.attention is not None and request.load.attention is None
    high = option.manifest.target.high_alone and request.load.precision == "full"
    return PlannedRun(option, use, memory, speed, memory.peak <= request.budget, coarser + 2 * high, request.disk)


def largest_context(option: Option, use: RunOptions, request: PlanRequest) -> int:
    """Maximum tokens that fit the budget when run in this way; 0 = not even ``LEAST_CONTEXT``."""
    high = option.manifest.target.facts.context

    def fits(context: int) -> bool:
        one = request.fitted(option, replace(use, context=context, expert_cache=None))
        return request.memory(option, one).peak <= request.budget

    low = high if fits(high) else most_tokens(fits, high)
    return low if low >= min(LEAST_CONTEXT, high) else 0


@dataclass(frozen=True)
class Plan:
    """The answer."""

    request: PlanRequest  # what was asked for
    candidates: tuple[PlannedRun, ...]  # all that were considered, those that fit first, the best first
    pick: PlannedRun | None  # the best that fits; None = none fits
    reason: str  # explanation of the pick
    hints: tuple[str, ...] = ()  # changes that would make it fit, or other possible gains

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        used = filter(None, (self.request.profile_of(one.option) for one in self.candidates))
        profiles = {id(profile): profile for profile in used}.values()
        return {
            "budget": self.request.budget,
            "goal": self.request.goal,
            "pick": None if self.pick is None else self.pick.as_dict(),
            "reason": self.reason,
            "hints": list(self.hints),
            "candidates": [candidate.as_dict() for candidate in self.candidates],
            "profiles": [
                {"machine": profile.machine.model_dump(), "bundle": profile.name, "created": profile.created}
                for profile in profiles
            ],
        }


def make_plan(options: Sequence[Option], request: PlanRequest) -> Plan:
    """Choose among ways to run ``options`` within a budget.

    Raises:
        InvalidRequest: no option, a context that none of them has, or a batch below 1.
    """
    if not options:
        raise InvalidRequest("nothing to plan for: expected at least one bundle or model")
    if request.batch < 1:
        raise InvalidRequest(f"batch {request.batch}: expected at least one sequence")
    most, asked = max(option.manifest.target.facts.context for option in options), request.load.context
    if asked is not None and not 1 < asked <= most:
        raise InvalidRequest(f"context {asked}: expected 2 to {most}, what the model was made for")
    tried = _tried(options, request, asked or min(CONTEXT, most))
    if tried and not any(one.fits for one in tried):  # slower than anything that fits
        streamed = _tried(options, request, asked or min(CONTEXT, most), layers=True)
        tried = streamed if any(one.fits for one in streamed) else tried
    if not tried:
        names = ", ".join(dict.fromkeys(name for option in options for name in option.manifest.methods))
        where = request.load.device if request.load.device != "cpu" else "these operators"
        raise InvalidRequest(f"{names}: cannot run on {where}", "plan for other methods, or without --device")
    ranked = sorted(tried, key=lambda one: _order(one, request.goal))
    pick = _pick([one for one in ranked if one.fits], request.goal)
    if pick is None:
        return Plan(request, tuple(ranked), None, *_nothing_fits(ranked, request))
    ranked = [pick, *(one for one in ranked if one is not pick)]
    return Plan(request, tuple(ranked), pick, *_why(pick, ranked, request))


def _tried(options: Sequence[Option], request: PlanRequest, context: int, layers: bool = False) -> list[PlannedRun]:
    """Plan all ways with this context, or where none was asked for with the largest one that fits some."""
    while True:
        tried = [
            planned_run(option, use, request, layers) for option in options for use in ways(option, request, context)
        ]
        if request.load.context is not None or context <= LEAST_CONTEXT or any(one.fits for one in tried):
            return tried
        context = max(LEAST_CONTEXT, context // 2)


_SOURCES = {"calibrated": "as calibrated", "exported": "as its export measured", None: "not measured"}

# -- the pick ----------------------------------------------------------------------------------------------------------


def _order(one: PlannedRun, goal: Goal) -> tuple[float, ...]:
    """Sort the best first: those that fit, keep the bundle's own text, and can run at once; then by the goal."""
    first = (not one.fits, one.approximates)
    if goal == "memory":
        return (*first, one.waits, one.memory.peak, -one.rate)
    if goal == "quality":
        return (*first, -min(one.precision_rank, FINE), one.waits, -one.rate)
    return (*first, one.waits, -one.rate, one.memory.peak)


def _pick(fitting: Sequence[PlannedRun], goal: Goal) -> PlannedRun | None:
    """Pick the best that fits; plain decoding where nothing is clearly faster, the smaller one of equals."""
    if not fitting:
        return None
    best = fitting[0]
    rivals = [one for one in fitting if (one.approximates, one.waits) == (best.approximates, best.waits)]
    if goal == "quality":
        rivals = [one for one in rivals if one.format == best.format]
    if goal == "memory":
        # saving little memory is not worth a clearly slower method
        return max((one for one in rivals if one.memory.peak <= 1.02 * best.memory.peak), key=_rate)
    plain = max((one for one in rivals if one.use.method == AR), key=_rate, default=None)
    if plain is not None and best.rate < WORTH * plain.rate:
        return plain
    near = [one for one in rivals if one.rate >= (1 - NEAR) * best.rate]
    finest = max(one.precision_rank for one in near)
    near = [one for one in near if one.precision_rank == finest]
    least = min(one.memory.peak for one in near)
    return max((one for one in near if one.memory.peak <= (1 + NEAR) * least), key=_rate)


def _rate(one: PlannedRun) -> float:
    return one.rate


def _why(pick: PlannedRun, ranked: Sequence[PlannedRun], request: PlanRequest) -> tuple[str, tuple[str, ...]]:
    """Write the reason, and hints."""
    goals = {
        "auto": "the fastest that fits",
        "chat": "the fastest for one sequence that fits",
        "batch": f"the highest total speed of {request.batch} sequences",
        "memory": "the least memory",
        "quality": "the finest format that fits, up to int8, and the fastest with it",
    }
    words = [goals[request.goal]]
    if request.goal in ("auto", "chat", "batch") and any(one.fits and one.rate > pick.rate for one in ranked):
        words = ["as fast as the fastest that fits, as far as a prediction can tell"]
    words += [f"predicted peak {show_bytes(pick.memory.peak)} of {show_bytes(request.budget)}"]
    if found := pick.streaming:
        words.append(found.words())
    if pick.use.method == AR:
        words.append("no method was measured to be clearly faster than plain decoding")
    else:
        words.append(f"{pick.speed.gain:.2f}x plain decoding, {_SOURCES[pick.speed.basis]}")
    faster = [one for one in ranked if one.rate > WORTH * pick.rate and not one.approximates]
    if best := max((one for one in faster if not one.fits), key=_rate, default=None):
        words.append(f"{best.format} {best.use.method} would be faster but needs {show_bytes(best.memory.peak)}")
    whole = pick.option.manifest.target.facts.context
    most = max(one.option.manifest.target.facts.context for one in ranked)
    if request.load.context is None and pick.use.context < min(CONTEXT, most):
        words.append(f"context cut to {pick.use.context} tokens to fit")
    if pick.approximates & 1:
        words.append("with the bundle's own keys nothing fits: int8 keys and values change its text a little")
    if pick.approximates & 2:
        words.append("with both planes of its weights nothing fits: the high ones alone are a model of 4 bits")
    room = largest_context(pick.option, pick.use, request)
    all_of_it = f"the model's whole context of {whole} tokens fits this budget"
    hints = [all_of_it if room == whole else f"room for {room} tokens of context in this budget"]
    if pick.option.export is not None and pick.format in FOUR_BITS:
        hints.append(f"no plan knows what {pick.format} loses: `edgespec export` without --format measures it first")
    profiles = (request.profile, *(one.option.profile for one in ranked))
    if busy := next((profile.busy for profile in profiles if profile is not None and profile.busy), ""):
        hints.append(f"{busy}: its times are not used; calibrate again when nothing else runs")
    if one := next((one for one in faster if one.fits and one.waits), None):
        need = one.option.needs[one.use.method]
        hints.append(f"{one.format} {one.use.method}: {one.speed.gain:.2f}x, but {need}")
    if unknown := dict.fromkeys(one.use.method for one in ranked if one.speed.speedup is None):
        first = "" if pick.option.export is None else " once it is exported"
        hints.append(f"not measured: {', '.join(unknown)}; `edgespec bench` measures what they gain{first}")
    return "; ".join(words), tuple(hints)


def _nothing_fits(ranked: Sequence[PlannedRun], request: PlanRequest) -> tuple[str, tuple[str, ...]]:
    """Describe the closest candidate, and the changes that would make it fit."""
    closest = min(ranked, key=lambda one: one.memory.peak)
    own = min((one for one in ranked if not one.approximates), key=lambda one: one.memory.peak)
    reason = (
        f"nothing fits {show_bytes(request.budget)}: closest is {own.format} {own.use.method} with a context of "
        f"{own.use.context} tokens, which needs {show_bytes(own.memory.peak)}"
    )
    hints = []
    coarser = replace(own.use, attention="int8")
    if room := largest_context(closest.option, closest.use, request):
        hints.append(
            f"a shorter context: --context {room} fits with {closest.format} {closest.use.method}"
            + (" and --attention int8" if closest.approximates & 1 else "")
            + (" and --precision high" if closest.approximates & 2 else "")
        )
    elif request.load.attention not in (None, "int8") and request.memory(own.option, coarser).peak <= request.budget:
        hints.append("keys and values in 8 bits: --attention int8")
    if request.batch > 1:
        alone = request.memory(own.option, replace(own.use, batch=1))
        hints.append(f"one sequence at a time needs {show_bytes(alone.peak)}")
    if min(one.precision_rank for one in ranked) > PRECISION.index("int4"):
        hints.append("a smaller format: export with --format int4")
    if own.use.method != AR and own.memory.peak < max(one.memory.peak for one in ranked):
        hints.append(f"without extras: method {own.use.method} is the smallest of this model")
    hints.append(f"a budget of {-(-own.memory.peak // 1024**2)} MiB")  # rounded up, so that it is enough
    return reason, tuple(hints)


def label(candidate: PlannedRun) -> str:
    """Name a candidate in a few words."""
    use = candidate.use
    keys = f" {use.attention} keys" if use.attention else ""
    planes = " of int8's high planes" if candidate.precision == "high" else ""
    return f"{candidate.format}{planes} {use.method}{keys}"
