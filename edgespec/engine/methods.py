"""Choice of the method of a request, with the reason, and the sampling that the model recommends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from edgespec.control.auto import TRIED
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions
from edgespec.drafters.registry import AR, AUTO, CHAIN, METHODS, NGRAM, needing, searching
from edgespec.engine.known import expected_speeds
from edgespec.errors import InvalidRequest
from edgespec.planning.profiles import Profile
from edgespec.runtimes.files.manifest import Manifest, MethodPart, SamplingPart

LEAST_GAMMA = 6  # for a method under adaptive control without its own default
CANDIDATES = 3  # most methods that auto chooses from


@dataclass(frozen=True)
class MethodChoice:
    """A method picked for a request."""

    name: str
    part: MethodPart  # its parameters in the manifest
    gamma: int  # the maximum number of guesses per round
    reason: str  # why this one
    proposers: tuple[MethodChoice, ...] = ()  # of a chain: its methods
    promise: float = 1.0  # predicted speed over plain decoding; 1 = nothing was predicted
    candidates: tuple[MethodChoice, ...] = ()  # of auto: the methods to choose from, this one first

    @property
    def methods(self) -> list[str]:
        """The method, or those of a chain."""
        return [proposer.name for proposer in self.proposers] or [self.name]

    def among(self, allowed: Collection[str], why: str) -> MethodChoice:
        """Auto limited to the allowed candidates; other choices, and auto without any, stay unchanged.

        ``why``: the reason for leaving out the others.
        """
        kept = [one for one in self.candidates if one.name in allowed]
        if not kept or len(kept) == len(self.candidates):
            return self
        dropped = ", ".join(one.name for one in self.candidates if one.name not in allowed)
        gamma = max(one.gamma for one in kept)
        return replace(kept[0], gamma=gamma, reason=f"{dropped}: {why}; {kept[0].reason}", candidates=tuple(kept))


def choose_method(
    manifest: Manifest,
    wanted: str | None,
    drafts: DraftOptions | None = None,
    without: Collection[str] = (),
    profile: Profile | None = None,
) -> MethodChoice:
    """Choose the wanted method; None or "auto" = the method expected to be fastest, then the alternatives.

    A chain where only proposers are named.  ``without``: methods that auto must leave out.
    ``profile``: a calibration of this machine.

    Raises:
        InvalidRequest: the bundle was not exported with that method, or with one of the proposers.
    """
    methods = manifest.methods
    proposers = drafts.proposers if drafts else ()
    if wanted == CHAIN or (wanted is None and proposers):
        return _chain(manifest, proposers)
    if wanted == AUTO and proposers:
        raise InvalidRequest(
            f"method auto and proposers {', '.join(proposers)}: expected one of them",
            "proposers belong to method chain",
        )
    if wanted not in (None, AUTO):
        if wanted not in methods:
            raise InvalidRequest(
                f"method {wanted!r} is not in this bundle; it has: {', '.join(methods)}", _how_to_have(manifest, wanted)
            )
        return _choice(manifest, wanted, "asked for")
    return _auto(manifest, without, profile)


def _auto(manifest: Manifest, without: Collection[str], profile: Profile | None) -> MethodChoice:
    """Order the candidates by the speed that is expected of them; n-grams last, unless they are expected to gain.

    A transcript seldom repeats itself: Whisper uses n-grams only if a gain is expected.
    """
    hears = manifest.speech is not None
    usable = [name for name in manifest.methods if name != AR and name not in without]
    promises = {name: speed for name, speed in expected_speeds(manifest, profile).items() if name in usable}
    calibrated = profile.trials if profile else {}
    reasons = {
        name: f"calibrated: {promise:.2f}x" if name in calibrated
        else f"predicted {promise:.2f}x on the exporting machine" if manifest.methods[name].predicted_speedup
        else f"estimated at {promise:.2f}x: the exporting machine was too busy to predict"
        for name, promise in promises.items()
    }  # fmt: skip
    names = sorted((name for name in promises if promises[name] >= TRIED), key=lambda name: -promises[name])
    names = names[:CANDIDATES]
    if hears and not names:
        return _choice(manifest, AR, "no method of this bundle is expected to gain on transcripts")
    if NGRAM not in names and not hears:
        names = [*names[: CANDIDATES - 1], NGRAM]
        if promises.get(NGRAM, 0.0) < TRIED:
            promises[NGRAM], reasons[NGRAM] = TRIED, "default: costs little where text does not repeat"
    chosen = tuple(replace(_choice(manifest, name, reasons[name]), promise=promises[name]) for name in names)
    return replace(chosen[0], gamma=max(one.gamma for one in chosen), candidates=chosen)


def _chain(manifest: Manifest, proposers: tuple[str, ...]) -> MethodChoice:
    """Choose the proposers, or n-gram and the other method of the best predicted speed."""
    usable = [name for name in manifest.methods if name != AR]
    if not proposers:
        others = [name for name in usable if name != NGRAM]
        others.sort(key=lambda name: -(manifest.methods[name].predicted_speedup or 0))
        proposers = (NGRAM, *others[:1])
    if unknown := [name for name in proposers if name not in usable]:
        raise InvalidRequest(
            f"proposer {unknown[0]!r} is not in this bundle; it has: {', '.join(usable)}",
            _how_to_have(manifest, unknown[0]),
        )
    if len(set(proposers)) < len(proposers):
        raise InvalidRequest(f"proposers {', '.join(proposers)}: expected each one once")
    chosen = tuple(_choice(manifest, name, "") for name in proposers)
    gamma = max(choice.gamma for choice in chosen)
    return MethodChoice(CHAIN, MethodPart(), gamma, ", then ".join(proposers), chosen)


def check_branch(manifest: Manifest, branch: tuple[int, ...]) -> None:
    """Refuse, by an ``InvalidRequest``, trees of guesses that a graph of this bundle cannot run.

    The target or the draft may support only chains, and the tree has siblings below siblings.
    """
    target = manifest.target.foreign
    draft = manifest.draft is not None and manifest.draft.foreign and len(branch) > 1
    if branch != (1,) and (draft or target):
        raise InvalidRequest(
            f"branch {','.join(map(str, branch))}: the {'target' if target else 'draft'}'s graph was exported by "
            f"{_origin(manifest, target)}, and trees need one of edgespec's own",
            "leave the branch out; architectures that edgespec emits itself: docs/architectures.md",
        )


def _origin(manifest: Manifest, target: bool) -> str:
    part = manifest.target if target or manifest.draft is None else manifest.draft
    return part.origin


def check_device(device: str, choice: MethodChoice) -> None:
    """Refuse, by an ``InvalidRequest``, a method that cannot run on a device other than the CPU."""
    for name in choice.methods:
        if name in needing("drafter"):
            raise InvalidRequest(
                f"method {name} reads hidden states of the model, which stay on device {device}",
                "use another method, or device cpu",
            )
        if name in searching():
            raise InvalidRequest(
                f"method {name} chooses the layers it leaves out while it writes, but on device {device} a graph "
                "leaves out what it was exported for",
                "use self-spec, or device cpu",
            )


def own_choice(name: str) -> MethodChoice:
    """Describe a caller's own proposer as a method."""
    return MethodChoice(name, MethodPart(), 8, "the caller's own proposer")


def _how_to_have(manifest: Manifest, name: str) -> str:
    if name not in METHODS:
        return f"check the spelling; {METHODS.refused('method', name).hint}"
    if manifest.target.foreign and METHODS[name].needs not in ("text", "draft"):
        return (
            f"its graph was exported by {manifest.target.origin}, and {name} needs one of edgespec's own; "
            "architectures that edgespec emits itself: docs/architectures.md"
        )
    if METHODS[name].needs == "adapter":
        return "load the bundle with a draft adapter: `edgespec train selfdraft MODEL -o DIR`, then --draft-adapter DIR"
    return f"export it with `--method {name}`"


def _choice(manifest: Manifest, name: str, reason: str) -> MethodChoice:
    part = manifest.methods[name]
    # adaptive control may go beyond the gamma that was best on average: a sure draft deserves a longer round
    gamma = METHODS[name].gamma or max(part.gamma, LEAST_GAMMA)
    return MethodChoice(name, part, gamma, reason)


NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def own_sampling(part: SamplingPart | None, temperature: float = 0.0) -> SamplingParams:
    """Return the sampling of a request that says nothing; ``temperature``: where the model does not, either."""
    part = part or SamplingPart()
    given = {name: getattr(part, name) for name in NAMES}
    return SamplingParams(**given | {"temperature": temperature if part.temperature is None else part.temperature})


def kept_of_model(part: SamplingPart | None, used: SamplingParams) -> dict[str, float]:
    """Collect by name the model's own settings that decide in a request: those that are not plain decoding's."""
    off, names = SamplingParams(), ("repetition_penalty",) if used.greedy else NAMES
    own = {name: getattr(part, name, None) for name in names}
    return {name: value for name, value in own.items() if value == getattr(used, name) != getattr(off, name)}
