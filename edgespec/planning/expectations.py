"""What method auto expects of every method: from this device's calibration, else from what the export measured."""

from __future__ import annotations

from dataclasses import replace

from edgespec.drafters.registry import AR
from edgespec.errors import EdgespecError
from edgespec.formulas.cost import expected_tokens
from edgespec.planning.profile.record import Profile
from edgespec.planning.speed.prediction import Speed, speed_of
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions

_TYPICAL = 1024  # tokens of a request, prompt and answer: a bundle's context may be many times what is ever held


def predictions(manifest: Manifest, run: RunOptions, profile: Profile | None = None) -> dict[str, Speed]:
    """Predicted speed by method; plain decoding and methods of which nothing is known are not in it.

    Args:
        manifest: of the bundle.
        run: how it is run.
        profile: of this bundle on this device; None = it was not calibrated: what the export predicted.
    """
    if profile is None:
        return exported(manifest)
    run = replace(run, context=min(run.context, _TYPICAL))
    found = {}
    for name in manifest.methods:
        if name == AR:
            continue
        try:
            found[name] = speed_of(manifest, replace(run, method=name), profile)
        except EdgespecError:  # of this method nothing is known
            continue
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


def where(speed: Speed) -> str:
    """On what machine that holds, in words."""
    return "on the exporting machine" if speed.basis == "exported" else f"on this device ({speed.basis})"
