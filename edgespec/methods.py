"""Which method a request gets, and why."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.cost import WORTH
from edgespec.errors import InvalidRequest
from edgespec.runtimes.manifest import METHODS, Manifest, MethodPart


@dataclass(frozen=True)
class MethodChoice:
    """A method picked for a request.

    Attributes:
        name: the method.
        part: its parameters in the manifest.
        gamma: most guesses a round.
        reason: why this one.
    """

    name: str
    part: MethodPart
    gamma: int
    reason: str

    @property
    def draws(self) -> bool:
        """Whether guesses are drawn from a distribution when sampling (then rejection sampling decides)."""
        return self.name in ("speculative", "self-spec", "swift", "paradecode")


def choose_method(manifest: Manifest, wanted: str | None) -> MethodChoice:
    """The wanted method, or the one with the best predicted speed.

    Raises:
        InvalidRequest: the bundle was not exported with that method.
    """
    methods = manifest.methods
    if wanted is not None:
        if wanted not in methods:
            raise InvalidRequest(
                f"method {wanted!r} is not in this bundle; it has: {', '.join(methods)}",
                f"export it with `--method {wanted}`" if wanted in METHODS else "check the spelling",
            )
        return _choice(manifest, wanted, "asked for")
    predicted = {name: part.predicted_speedup for name, part in methods.items() if part.predicted_speedup}
    best = max(predicted, key=lambda name: predicted[name] or 0, default=None)
    if best is not None and (predicted[best] or 0) >= WORTH:
        return _choice(manifest, best, f"predicted {predicted[best]:.2f}x on the exporting machine")
    return _choice(manifest, "ngram", "default: costs little where text does not repeat")


def _choice(manifest: Manifest, name: str, reason: str) -> MethodChoice:
    part = manifest.methods[name]
    # adaptive control may go beyond the gamma that was best on average: a sure draft deserves a longer round
    gamma = {"ar": 1, "ngram": 8}.get(name, max(part.gamma, 6))
    return MethodChoice(name, part, gamma, reason)
