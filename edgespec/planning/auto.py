"""What method auto expects of every method: from this device's calibration, else from what the export measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cost import expected_tokens
from edgespec.planning import profile as profiles
from edgespec.planning.speed import Speed, speed_of
from edgespec.planning.use import Use
from edgespec.runtimes.devices import DeviceName
from edgespec.runtimes.manifest import Attention, Manifest, Operators

if TYPE_CHECKING:
    from edgespec.runtimes.bundle import Bundle


def predictions(
    bundle: Bundle,
    operators: Operators,
    threads: int,
    context: int,
    *,
    device: DeviceName = "cpu",
    attention: Attention | None = None,
    strict: bool = True,
) -> dict[str, Speed]:
    """Predicted speed by method; plain decoding and methods of which nothing is known are not in it.

    A calibration profile of this bundle on this device counts if there is one; nothing here ever fails for want of it.
    """
    manifest = bundle.manifest
    profile = _profile(bundle, operators, threads, device, attention, strict)
    if profile is None:
        return exported(manifest)
    found = {}
    for name in manifest.methods:
        if name == "ar":
            continue
        use = Use(
            name, operators, context, attention=attention, threads=threads, strict=strict, device=device
        )
        found[name] = speed_of(manifest, use, profile)
    return found


def exported(manifest: Manifest) -> dict[str, Speed]:
    """What the exporting machine predicted."""
    found = {}
    for name, part in manifest.methods.items():
        if not part.predicted_speedup:
            continue
        acceptance = part.measured[0].acceptance if part.measured else []
        found[name] = Speed(
            speedup=part.predicted_speedup,
            tokens_per_second=None,
            plain_tokens_per_second=None,
            prefill_tokens_per_second=None,
            gamma=part.gamma,
            tokens_per_round=expected_tokens(acceptance, part.gamma),
            acceptance=acceptance[0] if acceptance else None,
            basis="exported",
        )
    return found
