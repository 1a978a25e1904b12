"""What was measured of a device with a bundle: `edgespec calibrate` writes it, planning and method auto read it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from edgespec.runtimes.devices import DeviceName
from edgespec.runtimes.manifest import Format, ModelFacts, Operators

PROFILE_SCHEMA = 1


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_Part):
    """What the figures belong to: another machine, runtime or driver has others."""

    processor: str
    cores: int
    memory: int = Field(description="bytes of main memory, or of the container")
    onnxruntime: str
    edgespec: str
    isa: str = Field(description="kernels of native operators; empty = none")


class Trial(_Part):
    """A method run as it comes (adaptive control, greedy) beside plain decoding, on the bundle's own prompts.

    ``rows``: rounds by rows of their pass; times are means of a round.
    """

    rounds: int
    tokens: int
    drafted: int
    accepted: int
    rows: dict[int, int]
    draft_ms: float
    verify_ms: float
    other_ms: float
    speedup: float = Field(description="over plain decoding of the same prompts, right beside it")


class Profile(_Part):
    """A device, as one bundle saw it.  Times are milliseconds, medians.

    ``passes``: by depth (tokens before the pass), by rows.  ``drafts``: one draft step of each method; ``trials`` by
    method.  ``bandwidth``: bytes a second that a one-row pass reads of weights.
    """

    schema_version: int = PROFILE_SCHEMA
    machine: Machine
    bundle: str = Field(description="hash of the bundle's manifest")
    name: str = Field(description="the bundle's folder, for people")
    facts: ModelFacts
    format: Format
    weight_bytes: int
    operators: Operators
    device: DeviceName = "cpu"
    threads: int
    attention: str | None = None
    strict: bool = True
    passes: dict[int, dict[int, float]]
    drafts: dict[str, float] = Field(default_factory=dict)
    trials: dict[str, Trial] = Field(default_factory=dict)
    prefill: dict[int, float] = Field(default_factory=dict, description="tokens a second, by depth")
    bandwidth: float
    rows_exact: bool
    process_bytes: int = Field(description="resident bytes of the process before a bundle is loaded")
    seconds: float
    created: str = Field(description="UTC, ISO 8601")
