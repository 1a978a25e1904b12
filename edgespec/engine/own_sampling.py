"""A model's own sampling settings: what a request gets that says nothing else."""

from __future__ import annotations

from edgespec.decoding.sampling import SamplingParams
from edgespec.runtimes.files.manifest import SamplingPart

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def own_sampling(part: SamplingPart | None, temperature: float = 0.0) -> SamplingParams:
    """The sampling of a request that says nothing.

    Args:
        part: what the bundle says of the model; None = nothing.
        temperature: where the model does not say whether to sample.
    """
    part = part or SamplingPart()
    given = {name: getattr(part, name) for name in NAMES}
    return SamplingParams(**given | {"temperature": temperature if part.temperature is None else part.temperature})


def kept_of_model(part: SamplingPart | None, used: SamplingParams) -> dict[str, float]:
    """The model's own settings that decide in a request, by name: those that differ from plain decoding's defaults.

    Args:
        part: what the bundle says of the model; None = nothing.
        used: the request's sampling.
    """
    if part is None:
        return {}
    off, greedy = SamplingParams(), ("repetition_penalty",)
    names = greedy if used.greedy else NAMES
    own = {name: getattr(part, name) for name in names}
    return {name: value for name, value in own.items() if value == getattr(used, name) != getattr(off, name)}
