"""Profiles: what was measured of this or another device with a bundle, and whether a profile holds here."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from edgespec.errors import EdgespecError, ProfileError
from edgespec.planning.budget import available_memory, system_file
from edgespec.runtimes.devices.webgpu import DeviceName, driver
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.formats import Attention, Format
from edgespec.runtimes.files.json_file import read_json, validated
from edgespec.runtimes.files.manifest import Manifest, ModelFacts, Operators
from edgespec.runtimes.files.migration import RENAMING, with_old_names
from edgespec.runtimes.files.staged import write_staged
from edgespec.runtimes.options import LoadOptions, RunOptions
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.ort.session import default_threads, processors
from edgespec.version import __version__

BUSY = 1.5  # from this spread of equal passes on, something else ran on the machine
OTHERS = 0.2  # share of the processors above which other programs distort the times
STAT = Path("/proc/stat")
UNITS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # ticks a second in ``STAT``
IDLE, WAITING = 3, 4  # for a disk, in ``STAT``


class Watch:
    """Measures the share of this process's processors that other processes and virtual machines use from now on."""

    def __init__(self) -> None:
        self._begun, self._busy, self._own = perf_counter(), _busy(), sum(os.times()[:4])  # including ended children

    def others(self) -> float | None:
        """Return the share of the processors that others took since the start, 0 to 1; None = not known here."""
        elapsed = (perf_counter() - self._begun) * len(processors())
        if self._busy is None or (busy := _busy()) is None or elapsed <= 0:
            return None
        return min(1.0, max(0.0, (busy - self._busy) - (sum(os.times()[:4]) - self._own)) / elapsed)


def busy_words(spread: float, others: float | None = None) -> str:
    """Say why times may be wild; empty = the machine was quiet.

    Args:
        spread: of times of equal passes, the upper quartile over the lower.
        others: share of the processors that others took; None = not known.
    """
    found = []
    if spread >= BUSY:
        found.append(f"timings varied {spread:.1f}x (interquartile)")
    if others is not None and others >= OTHERS:
        found.append(f"other programs took {others:.0%} of the processors")
    return f"the machine was busy: {', and '.join(found)}" if found else ""


def export_busy(cost: Mapping[str, Any]) -> str:
    """Say why the times of a bundle's export (``Manifest.cost``) may be wild; empty = they should hold."""
    return busy_words(float(cost.get("spread", 1.0)), float(cost.get("others", 0.0)))


def _busy() -> float | None:
    """Seconds that the processors of this process have worked since the machine started; None = not known."""
    wanted = {f"cpu{number}" for number in processors()}
    lines = (line.split() for line in system_file(STAT).splitlines())
    rows = [[int(one) for one in line[1:9]] for line in lines if line and line[0] in wanted]
    return sum(sum(row) - row[IDLE] - row[WAITING] for row in rows) / UNITS if rows else None


OLDEST_SCHEMA, PROFILE_SCHEMA = 1, 2
AGAIN = "make one with `edgespec calibrate BUNDLE -o FILE`"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(_Part):
    """Machine, runtime and driver that the figures belong to, as ``this_machine`` finds them."""

    processor: str
    cores: int = Field(gt=0, description="processors that this process may use")
    memory: int = Field(ge=0, description="bytes of main memory, or of the container")
    onnxruntime: str
    edgespec: str
    isa: str = Field(description="kernels of native operators; empty = none")
    library: str = ""  # hash of the file of native operators; empty = none
    driver: str = ""  # of a device other than the CPU


class Trial(_Part):
    """A method as it runs by default (adaptive control, greedy) compared with plain decoding, on the bundle's prompts.

    Times are means of a round.
    """

    rounds: int = Field(gt=0)
    tokens: int = Field(gt=0)
    drafted: int = Field(ge=0)
    accepted: int = Field(ge=0)
    rows: dict[int, int]  # rounds by rows of their pass
    draft_ms: float = Field(ge=0)
    verify_ms: float = Field(ge=0)
    other_ms: float = Field(ge=0)
    speedup: float = Field(gt=0, description="over plain decoding of the same prompts, right beside it")
    depth: float = Field(default=0.0, ge=0, description="mean tokens before a pass")
    drafted_at: list[int] = Field(default_factory=list)  # rounds that tested a guess, by position (``Stats``)
    accepted_at: list[int] = Field(default_factory=list)  # those accepted

    @property
    def tokens_per_round(self) -> float:
        """Tokens of a round, plain ones included."""
        return self.tokens / self.rounds

    @property
    def round_ms(self) -> float:
        """Time of a round."""
        return self.draft_ms + self.verify_ms + self.other_ms

    @property
    def acceptance(self) -> list[float]:
        """P(accepted | put to the test) by position, up to the first that never was."""
        tried = takewhile(lambda pair: pair[0], zip(self.drafted_at, self.accepted_at, strict=False))
        return [accepted / drafted for drafted, accepted in tried]

    @property
    def gamma(self) -> int:
        """Guesses of most of its drafted rounds; 0 = it mostly decoded plainly."""
        drafted = {rows: count for rows, count in self.rows.items() if rows > 1}
        if not drafted or 2 * sum(drafted.values()) < self.rounds:
            return 0
        return max(drafted, key=lambda rows: drafted[rows]) - 1


class Profile(_Part):
    """A device, as one bundle saw it.  Times are milliseconds, medians; depth is tokens before a pass."""

    schema_version: int = PROFILE_SCHEMA
    machine: Machine
    bundle: str = Field(description="hash of the bundle's manifest")
    name: str = Field(description="the bundle's folder, readable")
    facts: ModelFacts
    format: Format
    head_format: Format | None = None
    weight_bytes: int = Field(gt=0, description="bytes of weights that a one-row pass reads")
    kv_bytes: int = Field(default=0, ge=0, description="bytes of keys and values of one token")
    operators: Operators
    device: DeviceName = "cpu"
    threads: int = Field(gt=0)
    attention: Attention | None = None
    strict: bool = True
    context: int = Field(default=0, ge=0, description="maximum tokens that it was measured for")
    # by depth, by rows, over the graph that runs every method
    passes: dict[int, dict[int, float]] = Field(min_length=1)
    plain: dict[int, float] = Field(default_factory=dict)  # one row of the fastest plain decoding, by depth
    # by method, by depth: one draft step, of methods with heads one look at them
    drafts: dict[str, dict[int, float]] = Field(default_factory=dict)
    # a round's first step, where it takes another time; older profiles have none
    first_drafts: dict[str, dict[int, float]] = Field(default_factory=dict)
    trials: dict[str, Trial] = Field(default_factory=dict)  # by method
    prompts: str = Field(default="", description="hash of the trials' prompts; empty = the bundle's own")
    prefill: dict[int, float] = Field(default_factory=dict, description="tokens per second, by depth")
    bandwidth: float = Field(gt=0, description="bytes of weights per second that a one-row pass reads")
    spread: float = Field(default=1.0, ge=1, description="of times of equal passes: upper quartile over the lower")
    others: float = Field(default=0.0, ge=0, le=1, description="share of the processors that other programs took")
    rows_exact: bool
    process_bytes: int = Field(ge=0, description="resident bytes of the process before a bundle is loaded")
    seconds: float = Field(ge=0, description="duration of the calibration")
    notes: list[str] = Field(default_factory=list, description="missing measurements, with reasons")
    created: str = Field(description="UTC, ISO 8601")

    @property
    def busy(self) -> str:
        """Reasons why figures may be unreliable; empty = the machine was steady."""
        return busy_words(self.spread, self.others)


def manifest_hash(manifest: Manifest) -> str:
    """Identify a bundle by its manifest, which has the hashes of its files.

    For a manifest from this version it is the file's SHA-256 without its line breaks, as other runtimes compute it.  A
    bundle with the old names of keys keeps the hash that its profiles have.
    """
    data = manifest.model_dump(mode="json", exclude_none=True)
    if manifest.stored_schema < RENAMING:
        data = with_old_names(data)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """Names a set of prompts; empty for none."""
    text = json.dumps([list(prompt) for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16] if prompts else ""


def read_profile(path: Path) -> Profile:
    """Read a file that ``edgespec calibrate`` wrote, of this or of another machine.

    Raises:
        ProfileError: it cannot be read, is not a profile, lacks something, or is of another version's schema.
    """
    data = read_json(path, ProfileError, AGAIN, "not a device profile: ")
    version = data.get("schema_version") if isinstance(data, dict) and "machine" in data else None
    if not isinstance(version, int):
        got = ", ".join(list(data)[:4]) or "nothing" if isinstance(data, dict) else type(data).__name__
        expected = "expected an object with schema_version and machine"
        raise ProfileError(f"{path}: not a device profile: {expected}, got {got}", AGAIN)
    if not OLDEST_SCHEMA <= version <= PROFILE_SCHEMA:
        age = "older" if version < OLDEST_SCHEMA else "newer"
        raise ProfileError(
            f"{path}: profile of schema {version}, which is {age} than this edgespec's ({PROFILE_SCHEMA})",
            "calibrate again with this version" + (", or upgrade edgespec" if age == "newer" else ""),
        )
    return validated(Profile, _migrated(data) if version < PROFILE_SCHEMA else data, path, ProfileError, AGAIN)


def _migrated(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a profile of schema 1, whose trials have ``offered`` for ``drafted_at``."""
    trials = data.get("trials")
    if isinstance(trials, dict):
        renamed = {name: _with_drafted_at(trial) for name, trial in trials.items()}
        data = data | {"trials": renamed}
    return data | {"schema_version": PROFILE_SCHEMA}


def _with_drafted_at(trial: Any) -> Any:
    if not isinstance(trial, dict) or "drafted_at" in trial:
        return trial
    return {"drafted_at" if key == "offered" else key: value for key, value in trial.items()}


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile, whole or not at all.

    Raises:
        ProfileError: it cannot be written there.
    """
    try:
        write_staged(path, profile.model_dump_json(indent=1))
    except OSError as error:
        hint = "choose a folder that exists and may be written"
        raise ProfileError(f"{path}: cannot be written: {error.strerror or error}", hint) from error


_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "asimddp", "i8mm", "sve")  # flags that select kernels


@cache
def this_machine(device: DeviceName = "cpu") -> Machine:
    """Describe this machine; with ``device`` other than the CPU its driver, which is asked for."""
    import onnxruntime  # not needed by plans, which import this module

    library = native_library()
    return Machine(
        processor=_processor(),
        cores=default_threads(),
        memory=available_memory().total,
        onnxruntime=onnxruntime.__version__,
        edgespec=__version__,
        isa=library.isa,
        library=hashlib.sha256(library.path.read_bytes()).hexdigest()[:16] if library.path else "",
        driver="" if device == "cpu" else driver(),
    )


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Architecture, name and the instruction sets that matter; of several kinds of cores those of the first."""
    lines = re.findall(r"^(model name|flags|Features)\s*:(.*)$", system_file(cpuinfo), re.MULTILINE)
    found = {key: value.strip() for key, value in reversed(lines)}
    flags = found.get("flags", found.get("Features", "")).split()
    name = found.get("model name", platform.processor())
    return " ".join(filter(None, (platform.machine(), name, *(flag for flag in _FLAGS if flag in flags))))


def _how(run: RunOptions | Profile) -> dict[str, Any]:
    """Return the run options that decide the speed."""
    return {name: getattr(run, name) for name in ("operators", "threads", "device", "attention", "strict")}


def profile_folder() -> Path:
    """Where the profiles of this machine are."""
    return cache_folder() / "profiles"


def profile_path(bundle: str, run: RunOptions | Profile) -> Path:
    """Name the profile's file of a bundle (``manifest_hash``) run in this way on this machine, as it is now."""
    return profile_folder() / f"{run_id(bundle, run)}.json"


def run_id(bundle: str, run: RunOptions | Profile) -> str:
    """Identify a bundle (``manifest_hash``) run in this way on this machine, as it is now: 32 hex digits."""
    machine = this_machine(run.device).model_dump(exclude={"memory"})
    text = json.dumps([bundle, _how(run), machine], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_profile(manifest: Manifest, options: LoadOptions) -> Profile | None:
    """Find the profile of this machine with a bundle, loaded in this way; None = it was not calibrated so.

    Other files in the cache do not count as profiles and raise no errors.
    """
    try:
        name, run = manifest_hash(manifest), options.resolve(manifest)
        path = profile_path(name, run)
        profile = read_profile(path) if path.is_file() else None
    except (EdgespecError, OSError, ValueError):
        return None
    return profile if profile is not None and not staleness(profile, name, run) else None


def latest_profile(threads: int | None = None, device: DeviceName = "cpu") -> Profile | None:
    """Find the latest profile of this machine, of any bundle."""
    wanted = threads or default_threads(), device
    kept = (one for one in kept_profiles() if (one.threads, one.device) == wanted)
    found = [one for one in kept if not staleness(one, one.bundle, one)]
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


_TOLD = {
    "processor": "measured on",
    "cores": "processors:",
    "onnxruntime": "onnxruntime",
    "edgespec": "edgespec",
    "isa": "kernels",
    "driver": "driver",
}


def staleness(profile: Profile, bundle: str, run: RunOptions | Profile) -> list[str]:
    """Explain why a profile does not apply to this machine, bundle and run; empty = it does."""
    there, here = profile.machine, this_machine(run.device)
    reasons = [
        f"{what} {getattr(there, name) or 'none'}, here {getattr(here, name) or 'none'}"
        for name, what in _TOLD.items()
        if getattr(there, name) != getattr(here, name)
    ]
    if there.library != here.library and there.isa == here.isa:
        reasons.append("other native operators are installed now")
    if profile.bundle != bundle:
        reasons.append(f"another bundle ({profile.name})")
    if profile.busy:
        reasons.append(profile.busy)
    theirs = _how(profile)
    return reasons + [f"{name} {theirs[name]}, here {mine}" for name, mine in _how(run).items() if theirs[name] != mine]


def why_none(bundle: str, run: RunOptions, name: str) -> list[str]:
    """Explain why no saved profile applies, using the closest one.

    The closest profile is the one with the fewest reasons against it.  A file that is not a profile has that as its
    reason.
    """
    path = profile_path(bundle, run)
    if path.is_file():
        try:
            return staleness(read_profile(path), bundle, run)
        except EdgespecError as error:
            return [f"the profile that was kept is unusable: {error.message}"]
    kept = [one for one in kept_profiles() if bundle == one.bundle or name == one.name]
    changed = "the bundle has changed"
    found = [[changed] * (one.bundle != bundle) + staleness(one, one.bundle, run) for one in kept]
    return min(found, key=len, default=[])
