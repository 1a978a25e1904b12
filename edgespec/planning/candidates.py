"""Ways to run a bundle, or one that an export would make, with what they are predicted to take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from edgespec.drafters.registry import native_alone, needing, searching
from edgespec.planning.memory.parts import Memory, memory_of
from edgespec.planning.profile.record import Profile
from edgespec.planning.speed.curves import STEP
from edgespec.planning.speed.prediction import Speed, speed_of
from edgespec.runtimes.files.manifest import Manifest, Operators
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.options import LoadOptions, RunOptions
from edgespec.runtimes.ort.session import default_threads

Goal = Literal["chat", "batch", "memory", "quality", "auto"]
GOALS: tuple[Goal, ...] = ("auto", "chat", "batch", "memory", "quality")
CONTEXT = 4096  # tokens that are planned for where none are asked for
LEAST_CONTEXT = 512


@dataclass(frozen=True)
class Option:
    """A bundle that is there, or one that an export would make.

    Attributes:
        manifest: its manifest, or the planned one.
        name: the bundle's folder, or the model's name.
        export: options of ``edgespec export`` that make it; None = it is there.
        needs: by method: what has to be made or given first, in words.
        profile: what was measured with this very bundle; None = the request's.
    """

    manifest: Manifest
    name: str
    export: tuple[str, ...] | None = None
    needs: dict[str, str] = field(default_factory=dict)
    profile: Profile | None = None


@dataclass(frozen=True)
class PlanRequest:
    """What is asked of a plan.

    Attributes:
        budget: bytes.
        goal: what matters most.
        batch: sequences together.
        load: how bundles are loaded, its budget apart.  A context of None = ``CONTEXT``, or what fits; an attention of
            None = the bundle's default, and int8 where only that fits.
        profile: another device; None = this one.
    """

    budget: int
    goal: Goal = "auto"
    batch: int = 1
    load: LoadOptions = field(default_factory=LoadOptions)
    profile: Profile | None = None

    def operators(self, manifest: Manifest) -> Operators:
        """Those that a bundle is run on there."""
        if self.load.device != "cpu":
            return "stock"
        if self.profile is not None and self.load.operators == "auto":
            return self.profile.operators
        return choose_operators(self.load.operators, manifest.target).kind


@dataclass(frozen=True)
class PlannedRun:
    """One way to run one bundle, with what it is predicted to take.

    ``approximates``: keys are kept coarser than anybody asked for, which changes the text.
    """

    option: Option
    use: RunOptions
    memory: Memory
    speed: Speed
    fits: bool
    approximates: bool = False

    @property
    def format(self) -> str:
        """Of the weights."""
        return self.option.manifest.target.format

    @property
    def rate(self) -> float:
        """Tokens a second, or a figure in proportion to it where nothing is known of the device."""
        return self.speed.tokens_per_second or self.speed.speedup / _relative_step(self.option.manifest)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return {
            "bundle": self.option.name,
            "method": self.use.method,
            "format": self.format,
            "operators": self.use.operators,
            "attention": self.use.attention,
            "context": self.use.context,
            "batch": self.use.batch,
            "lossless": True,  # every method with the exact rule of acceptance is
            "fits": self.fits,
            "needs": self.option.needs.get(self.use.method),
            "export": None if self.option.export is None else list(self.option.export),
            "memory": self.memory.as_dict(),
            "speed": self.speed.as_dict(),
        }


def contexts(request: PlanRequest, most: int) -> Iterable[int]:
    """Contexts to try, the wanted one first; halves of it only where nobody asked for one."""
    context = request.load.context or min(CONTEXT, most)
    yield context
    while request.load.context is None and context > LEAST_CONTEXT:
        context = max(LEAST_CONTEXT, context // 2)
        yield context


def uses(option: Option, request: PlanRequest, context: int) -> Iterable[RunOptions]:
    """Ways to run one bundle."""
    manifest = option.manifest
    operators, threads = request.operators(manifest), request.load.threads or default_threads()
    for method, part in manifest.methods.items():
        if request.load.device != "cpu" and method in (*searching(), *needing("drafter")):
            continue
        if operators == "stock" and method in native_alone(manifest):
            continue
        use = RunOptions(
            method,
            operators,
            min(context, manifest.target.facts.context),
            request.load.attention,
            batch=request.batch,
            threads=threads,
            device=request.load.device,
            draft_attention=request.load.draft_attention if operators == "native" else None,
        )
        longer = method in (*needing("draft", "drafter"), "medusa")
        yield replace(use, gamma=max(part.gamma, use.gamma)) if longer else use
        if request.load.attention is None and operators == "native" and _coarser(manifest):
            yield replace(use, attention="int8")


def _coarser(manifest: Manifest) -> bool:
    """Whether int8 keys and values would take less than what the bundle was made for."""
    part = manifest.target.attention
    return manifest.target.origin == "edgespec" and (part is None or part.default in ("f32", "f16"))


def planned_run(option: Option, use: RunOptions, request: PlanRequest) -> PlannedRun:
    """What a way to run a bundle is predicted to take."""
    profile = option.profile or request.profile
    memory = memory_of(option.manifest, use, profile.process_bytes if profile else None)
    speed = speed_of(option.manifest, use, profile)
    coarser = use.attention is not None and request.load.attention is None
    return PlannedRun(option, use, memory, speed, memory.peak <= request.budget, coarser)


def peak(option: Option, use: RunOptions, request: PlanRequest) -> int:
    """Its peak alone, bytes."""
    profile = option.profile or request.profile
    return memory_of(option.manifest, use, profile.process_bytes if profile else None).peak


def largest_context(option: Option, use: RunOptions, request: PlanRequest) -> int:
    """Most tokens that fit the budget when run in this way; 0 = not even ``LEAST_CONTEXT``."""
    low, high = 0, option.manifest.target.facts.context
    if peak(option, replace(use, context=high), request) <= request.budget:
        return high
    while high - low > 64:
        middle = (low + high) // 2
        fits = peak(option, replace(use, context=middle), request) <= request.budget
        low, high = (middle, high) if fits else (low, middle)
    return low if low >= LEAST_CONTEXT else 0


def _relative_step(manifest: Manifest) -> float:
    """What a plain step takes, in bytes of int4, for comparing formats on a device of which nothing is known."""
    return float(manifest.files[manifest.target.weights].size) * STEP[manifest.target.format]
