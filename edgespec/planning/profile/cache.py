"""Profiles of this machine, kept from one calibration to the next; and why a profile is not this machine's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.planning.profile.machine import this_machine
from edgespec.planning.profile.record import Profile, manifest_hash, read_profile, write_profile
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.attention import choose_attention
from edgespec.runtimes.files.manifest import Attention, Manifest, Operators, read_manifest
from edgespec.runtimes.files.operators import WantedOperators, choose_operators
from edgespec.runtimes.files.repack import cache_folder
from edgespec.runtimes.ort.session import default_threads


@dataclass(frozen=True)
class Setting:
    """How a bundle is loaded, as far as its speed goes: nothing is left open.

    ``strict`` is true of native operators, whose rows have the same bits anyway.
    """

    bundle: str
    operators: Operators
    threads: int
    device: DeviceName
    attention: Attention | None
    strict: bool

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        operators: WantedOperators = "auto",
        threads: int | None = None,
        device: DeviceName = "cpu",
        attention: str | None = None,
        strict: bool = True,
    ) -> Setting:
        """What ``load`` makes of the same arguments.

        Raises:
            EdgespecError: it would refuse them.
        """
        kind = choose_operators("stock" if device != "cpu" else operators, manifest.target).kind
        name = choose_attention(manifest.target, kind, attention).name
        exact = strict or kind == "native"
        return cls(manifest_hash(manifest), kind, threads or default_threads(), device, name, exact)

    @classmethod
    def of_profile(cls, profile: Profile) -> Setting:
        """The setting that a profile was measured in."""
        names = cls.__dataclass_fields__
        return cls(**{name: getattr(profile, name) for name in names})


def profile_folder() -> Path:
    """Where the profiles of this machine are."""
    return cache_folder() / "profiles"


def profile_path(setting: Setting) -> Path:
    """The file of a setting on this machine, as its processor, its runtime and its operators are now."""
    machine = this_machine(setting.device).model_dump(exclude={"memory"})
    text = json.dumps([asdict(setting), machine], sort_keys=True)
    return profile_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def find_profile(
    bundle: Path | Manifest | None,
    operators: WantedOperators = "auto",
    threads: int | None = None,
    device: DeviceName = "cpu",
    attention: str | None = None,
    strict: bool = True,
) -> Profile | None:
    """What this machine was found to be with a bundle, loaded in this way; None = it was not calibrated so.

    Whatever else lies in the cache is no profile: nothing is raised.  A bundle of None stands for any: the latest
    profile of this machine.
    """
    if bundle is None:
        return latest(threads, device)
    try:
        manifest = bundle if isinstance(bundle, Manifest) else read_manifest(bundle)
        setting = Setting.of(manifest, operators, threads, device, attention, strict)
        path = profile_path(setting)
        profile = read_profile(path) if path.is_file() else None
    except (EdgespecError, OSError, ValueError):
        return None
    return profile if profile is not None and not staleness(profile, setting) else None


def latest(threads: int | None = None, device: DeviceName = "cpu") -> Profile | None:
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
    path = profile_path(Setting.of_profile(profile))
    with suppress(OSError):  # writing says why
        path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, path)
    return path


def staleness(profile: Profile, setting: Setting) -> list[str]:
    """Why a profile is not that of this machine in this setting, in words; empty = it is."""
    here = this_machine(setting.device)
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
    if profile.bundle != setting.bundle:
        reasons.append(f"another bundle ({profile.name})")
    theirs = Setting.of_profile(profile)
    for name in ("operators", "threads", "device", "attention", "strict"):
        there, mine = getattr(theirs, name), getattr(setting, name)
        if there != mine:
            reasons.append(f"{name} {there}, here {mine}")
    return reasons


def foreign(profile: Profile) -> list[str]:
    """Why a profile is not of this machine, in words; empty = it is.  Planning with one is planning for its device."""
    return staleness(profile, Setting.of_profile(profile))


def why_none(setting: Setting, name: str) -> list[str]:
    """Why nothing that was kept will do, where something of a bundle of this name was kept.

    What is closest speaks: the one with the fewest reasons against it.  Files that are no profiles say so.
    """
    path, found = profile_path(setting), []
    if path.is_file():
        try:
            return staleness(read_profile(path), setting)
        except EdgespecError as error:
            return [f"the profile that was kept is unusable: {error.message}"]
    for profile in kept_profiles():
        if profile.name != name and profile.bundle != setting.bundle:
            continue
        reasons = staleness(profile, setting)
        if profile.bundle != setting.bundle:  # of the same name
            others = staleness(profile, replace(setting, bundle=profile.bundle))
            reasons = ["the bundle has changed", *others]
        found.append(reasons)
    return min(found, key=len, default=[])
