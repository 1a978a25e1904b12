"""What was measured of a device with a bundle: `edgespec calibrate` writes it, planning and method auto read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from edgespec.errors import ProfileError
from edgespec.planning.profile.quiet import busy_words
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import Attention, Format
from edgespec.runtimes.files.json_file import read_json, validated
from edgespec.runtimes.files.manifest import Manifest, ModelFacts, Operators
from edgespec.runtimes.files.staged import write_staged

PROFILE_SCHEMA = 1
AGAIN = "make one with `edgespec calibrate BUNDLE -o FILE`"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(_Part):
    """What the figures belong to: another machine, runtime or driver has others.  ``planning.machine`` asks for it.

    ``library``: hash of the file of native operators; empty = none.  ``driver``: of a device other than the CPU.
    """

    processor: str
    cores: int = Field(gt=0, description="processors that this process may use")
    memory: int = Field(ge=0, description="bytes of main memory, or of the container")
    onnxruntime: str
    edgespec: str
    isa: str = Field(description="kernels of native operators; empty = none")
    library: str = ""
    driver: str = ""


class Trial(_Part):
    """A method run as it comes (adaptive control, greedy) beside plain decoding, on the bundle's own prompts.

    ``rows``: rounds by rows of their pass; times are means of a round.  ``offered`` and ``accepted_at``: guesses put to
    the test, and accepted, by position (``Stats``).
    """

    rounds: int = Field(gt=0)
    tokens: int = Field(gt=0)
    drafted: int = Field(ge=0)
    accepted: int = Field(ge=0)
    rows: dict[int, int]
    draft_ms: float = Field(ge=0)
    verify_ms: float = Field(ge=0)
    other_ms: float = Field(ge=0)
    speedup: float = Field(gt=0, description="over plain decoding of the same prompts, right beside it")
    depth: float = Field(default=0.0, ge=0, description="mean tokens before a pass")
    offered: list[int] = Field(default_factory=list)
    accepted_at: list[int] = Field(default_factory=list)

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
        rates: list[float] = []
        for offered, accepted in zip(self.offered, self.accepted_at, strict=False):
            if not offered:
                break
            rates.append(accepted / offered)
        return rates


class Profile(_Part):
    """A device, as one bundle saw it.  Times are milliseconds, medians.

    ``passes``: by depth (tokens before the pass), by rows, over the graph that runs every method.  ``plain``: one row
    of the fastest plain decoding, by depth.  ``drafts``: one draft step of each method, by depth; of methods with heads
    one look at them.  ``first_drafts``: of a round's first step, where it takes another time; older profiles have none.
    ``trials`` by method.  ``bandwidth``: bytes a second that a one-row pass reads of weights.
    """

    schema_version: int = PROFILE_SCHEMA
    machine: Machine
    bundle: str = Field(description="hash of the bundle's manifest")
    name: str = Field(description="the bundle's folder, for people")
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
    context: int = Field(default=0, ge=0, description="most tokens that it was measured for")
    passes: dict[int, dict[int, float]] = Field(min_length=1)
    plain: dict[int, float] = Field(default_factory=dict)
    drafts: dict[str, dict[int, float]] = Field(default_factory=dict)
    first_drafts: dict[str, dict[int, float]] = Field(default_factory=dict)
    trials: dict[str, Trial] = Field(default_factory=dict)
    prompts: str = Field(default="", description="hash of the trials' prompts; empty = the bundle's own")
    prefill: dict[int, float] = Field(default_factory=dict, description="tokens a second, by depth")
    bandwidth: float = Field(gt=0)
    spread: float = Field(default=1.0, ge=1, description="of times of equal passes: upper quartile over the lower")
    others: float = Field(default=0.0, ge=0, le=1, description="share of the processors that other programs took")
    rows_exact: bool
    process_bytes: int = Field(ge=0, description="resident bytes of the process before a bundle is loaded")
    seconds: float = Field(ge=0, description="what calibration took")
    notes: list[str] = Field(default_factory=list, description="what was not measured, and why")
    created: str = Field(description="UTC, ISO 8601")

    @property
    def busy(self) -> str:
        """Why figures may be wild, in words; empty = the machine was steady."""
        return busy_words(self.spread, self.others)


def manifest_hash(manifest: Manifest) -> str:
    """Names a bundle by what its manifest says: the hashes of its files among it."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """Names a set of prompts; empty for none."""
    text = json.dumps([list(prompt) for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16] if prompts else ""


def read_profile(path: Path) -> Profile:
    """Read a file that ``edgespec calibrate`` wrote, of this or of another machine.

    Raises:
        ProfileError: it cannot be read, is no profile, lacks something, or is of another version's schema.
    """
    data = read_json(path, ProfileError, AGAIN, "not a device profile: ")
    if not isinstance(data, dict) or not isinstance(data.get("schema_version"), int) or "machine" not in data:
        raise ProfileError(
            f"{path}: not a device profile: expected an object with schema_version and machine, got "
            f"{', '.join(list(data)[:4]) or 'nothing' if isinstance(data, dict) else type(data).__name__}",
            AGAIN,
        )
    version = data["schema_version"]
    if version != PROFILE_SCHEMA:
        older = version < PROFILE_SCHEMA
        raise ProfileError(
            f"{path}: profile of schema {version}, which is {'older' if older else 'newer'} than this edgespec's "
            f"({PROFILE_SCHEMA})",
            "calibrate again with this version" if older else "upgrade edgespec, or calibrate with this version",
        )
    return validated(Profile, data, path, ProfileError, AGAIN)


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
