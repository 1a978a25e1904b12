"""Profiles of this machine, kept from one calibration to the next; and why a profile is not this machine's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.planning.profile.machine import this_machine
from edgespec.planning.profile.record import Profile, manifest_hash, read_profile, write_profile
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.manifest import Manifest, read_manifest
from edgespec.runtimes.options import LoadOptions, RunOptions
from edgespec.runtimes.ort.session import default_threads

HOW = ("operators", "threads", "device", "attention", "strict")
"""What of the way that a bundle is run decides its speed: of ``RunOptions``, and of a profile."""


def profile_folder() -> Path:
    """Where the profiles of this machine are."""
    return cache_folder() / "profiles"


def profile_path(bundle: str, run: RunOptions | Profile) -> Path:
    """The file of a bundle (``manifest_hash``) run in this way on this machine, as it is now."""
    machine = this_machine(run.device).model_dump(exclude={"memory"})
    text = json.dumps([bundle, _how(run), machine], sort_keys=True)
    return profile_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def find_profile(bundle: Path | Manifest, options: LoadOptions) -> Profile | None:
    """What this machine was found to be with a bundle, loaded in this way; None = it was not calibrated so.

    Whatever else lies in the cache is no profile: nothing is raised.
    """
    try:
        manifest = bundle if isinstance(bundle, Manifest) else read_manifest(bundle)
        name, run = manifest_hash(manifest), options.resolve(manifest)
        path = profile_path(name, run)
        profile = read_profile(path) if path.is_file() else None
    except (EdgespecError, OSError, ValueError):
        return None
    return profile if profile is not None and not staleness(profile, name, run) else None


def latest_profile(threads: int | None = None, device: DeviceName = "cpu") -> Profile | None:
    """The latest profile of this machine, whatever the bundle."""
    found = [
        profile
        for profile in kept_profiles()
        if (profile.threads, profile.device) == (threads or default_threads(), device) and not foreign(profile)
    ]
    return max(found, key=lambda profile: profile.created, default=None)


def kept_profiles() -> Iterator[Profile]:
    """Every profile in the cache, also those of other machines that share it; other files are passed over."""
    for file in sorted(profile_folder().glob("*.json")):
        with suppress(EdgespecError):
            yield read_profile(file)


def save_profile(profile: Profile) -> Path:
    """Keep a profile of this machine; returns its file.

    Raises:
        ProfileError: the cache cannot be written.
    """
    path = profile_path(profile.bundle, profile)
    with suppress(OSError):  # writing says why
        path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, path)
    return path


def staleness(profile: Profile, bundle: str, run: RunOptions | Profile) -> list[str]:
    """Why a profile does not say what this machine takes for a bundle run in this way, in words; empty = it does."""
    here = this_machine(run.device)
    reasons = [
        f"{what} {there}, here {mine}"
        for what, there, mine in (
            ("measured on", profile.machine.processor, here.processor),
            ("processors:", profile.machine.cores, here.cores),
            ("onnxruntime", profile.machine.onnxruntime, here.onnxruntime),
            ("edgespec", profile.machine.edgespec, here.edgespec),
            ("kernels", profile.machine.isa or "none", here.isa or "none"),
            ("driver", profile.machine.driver, here.driver),
        )
        if there != mine
    ]
    if profile.machine.library != here.library and profile.machine.isa == here.isa:
        reasons.append("other native operators are installed now")
    if profile.bundle != bundle:
        reasons.append(f"another bundle ({profile.name})")
    if profile.busy:
        reasons.append(profile.busy)
    theirs = _how(profile)
    return reasons + [f"{name} {theirs[name]}, here {mine}" for name, mine in _how(run).items() if theirs[name] != mine]


def foreign(profile: Profile) -> list[str]:
    """Why a profile is not of this machine, in words; empty = it is.  Planning with one is planning for its device."""
    return staleness(profile, profile.bundle, profile)


def why_none(bundle: str, run: RunOptions, name: str) -> list[str]:
    """Why nothing that was kept will do, where something of a bundle of this name was kept.

    What is closest speaks: the one with the fewest reasons against it.  Files that are no profiles say so.
    """
    path, found = profile_path(bundle, run), []
    if path.is_file():
        try:
            return staleness(read_profile(path), bundle, run)
        except EdgespecError as error:
            return [f"the profile that was kept is unusable: {error.message}"]
    for profile in kept_profiles():
        if profile.bundle == bundle:
            found.append(staleness(profile, bundle, run))
        elif profile.name == name:
            found.append(["the bundle has changed", *staleness(profile, profile.bundle, run)])
    return min(found, key=len, default=[])


def _how(run: RunOptions | Profile) -> dict[str, Any]:
    return {name: getattr(run, name) for name in HOW}
