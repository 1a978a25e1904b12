"""Seconds: how fast a bundle decodes, from what was measured on the device and the acceptance in the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from edgespec.planning.profile import Profile
from edgespec.planning.use import Use
from edgespec.runtimes.manifest import Manifest

# from best to worst: measured with this bundle on this device; its figures for another bundle, scaled; what the
# exporting machine measured; formulas with assumptions alone
Basis = Literal["calibrated", "scaled", "exported", "assumed"]


@dataclass(frozen=True)
class Speed:
    """A prediction.

    Attributes:
        speedup: over the fastest plain decoding of the same bundle on the same device.
        tokens_per_second: of one sequence after the prefill; None = nothing is known of the device.
        plain_tokens_per_second: the same of plain decoding.
        prefill_tokens_per_second: None = not known.
        gamma: guesses a round that it was predicted for.
        tokens_per_round: expected.
        acceptance: of the first guess; None = the method was timed as a whole, or drafts nothing.
        basis: what it rests on.
        assumed: what of it is assumed rather than measured, in words; empty = nothing.
    """

    speedup: float
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    prefill_tokens_per_second: float | None
    gamma: int
    tokens_per_round: float
    acceptance: float | None
    basis: Basis
    assumed: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return asdict(self) | {"assumed": list(self.assumed)}


def speed_of(manifest: Manifest, use: Use, profile: Profile | None = None) -> Speed:
    """How fast a bundle decodes in this way on the device of ``profile``; None = nothing is known of the device."""
    raise NotImplementedError
