"""Experts that are read from the disk when a pass needs them: the size of their cache, and what a token costs.

Where a mixture is larger than the memory, its other weights stay resident and the rest of the memory is a cache of
experts.  A token of plain decoding waits for its other experts::

    bytes = (1 - hits) * experts of a row * bytes of an expert        seconds = bytes / disk + resident bytes / memory
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path

from edgespec.planning.footprint import MARGIN, memory_of
from edgespec.planning.profiles import manifest_hash
from edgespec.planning.weights import all_expert_bytes, expert_bytes
from edgespec.runtimes.files.checked import records
from edgespec.runtimes.files.manifest import Manifest, ModelPart
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.options import RunOptions

PAGE = 4096  # bytes, in which files are read
PARTS = 3  # matrices of an expert


def can_stream(part: ModelPart, use: RunOptions) -> bool:
    """Whether a model has experts that can be read one by one, when run in this way."""
    native = sys.platform != "win32" and use.operators == "native" and use.device == "cpu" and NATIVE in part.graphs
    return native and part.facts.experts is not None


def slot_bytes(part: ModelPart) -> int:
    """Bytes of an expert in the cache: whole pages of the file."""
    return expert_bytes(part) + 2 * PARTS * PAGE


def least_cache(part: ModelPart) -> int:
    """Bytes of the smallest cache that is planned: the experts of a row in one layer, twice."""
    mixed = part.facts.experts
    return 0 if mixed is None else 2 * mixed.chosen * slot_bytes(part)


def cache_for(manifest: Manifest, use: RunOptions, limit: int, process: int | None = None) -> int | None:
    """Choose the bytes of the cache of experts within ``limit`` bytes of memory; None = all of them fit.

    It is never smaller than ``least_cache``, so the limit may be exceeded.

    ``process``: resident bytes of a process before loading; None = as measured elsewhere.
    """
    part = manifest.target
    if not can_stream(part, use) or memory_of(manifest, replace(use, expert_cache=None), process).peak <= limit:
        return None
    rest = memory_of(manifest, replace(use, expert_cache=0), process).peak
    most = (all_expert_bytes(part) // expert_bytes(part)) * slot_bytes(part)
    room = int((limit - rest) / (1 + MARGIN))  # memory_of adds a share of all private bytes
    return min(max(room, least_cache(part)), most)


@dataclass(frozen=True)
class SeenHits:
    """Hits of one-row passes in earlier runs of a bundle."""

    share: float  # of the experts that the cache held
    hits: float  # share of those needed that were in it

    def at(self, share: float) -> float:
        """Estimate the hits of another cache, by a power of its share."""
        if not 0 < self.share < 1 or not 0 < self.hits < 1 or not 0 < share < 1:
            return share if not 0 < share < 1 else self.hits
        return float(share ** (log(self.hits) / log(self.share)))


def _record(manifest: Manifest) -> tuple[Path, str]:
    name = manifest_hash(manifest)
    return records() / f"{name[:24]}-experts.json", f"hits of experts {name}"


def remember_hits(manifest: Manifest, seen: SeenHits) -> None:
    """Record the hits of a run for later plans; without a cache folder nothing is recorded."""
    path, purpose = _record(manifest)
    with suppress(OSError):
        write_sealed(path, purpose, asdict(seen))


def seen_hits(manifest: Manifest) -> SeenHits | None:
    """Read the recorded hits of a bundle; None = there are none."""
    path, purpose = _record(manifest)
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = read_sealed(path, purpose)
        return SeenHits(float(found["share"]), float(found["hits"]))
    return None


@dataclass(frozen=True)
class Streaming:
    """Predicted reads of experts from the disk; a plan's JSON has these keys."""

    experts: int  # bytes of all experts
    cache: int  # bytes of those in memory
    hits: float  # expected share of a token's experts that are in it
    bytes_per_token: int  # of the disk, of plain decoding
    disk: float | None  # bytes per second that it gives; None = not measured
    seen: bool  # whether earlier runs of this bundle showed the hits; else texts are taken to choose experts evenly

    @property
    def seconds(self) -> float | None:
        """Time of a token that the disk takes; None = not known."""
        return self.bytes_per_token / self.disk if self.disk else None


def streaming_of(
    manifest: Manifest, use: RunOptions, disk: float | None = None, seen: SeenHits | None = None
) -> Streaming | None:
    """Predict what a streamed mixture reads; None = nothing is streamed.

    Without hits that were seen, tokens are taken to choose experts uniformly: real texts prefer some, and read less.

    Args:
        manifest: of the bundle.
        use: how it is run.
        disk: bytes per second.
        seen: hits of earlier runs.
    """
    part, mixed = manifest.target, manifest.target.facts.experts
    if use.expert_cache is None or mixed is None:
        return None
    slots = use.expert_cache // slot_bytes(part)
    share = min(1.0, slots / (mixed.count * len(mixed.layers)))
    hits = seen.at(share) if seen else share
    read = (1 - hits) * mixed.chosen * len(mixed.layers) * slot_bytes(part)
    return Streaming(all_expert_bytes(part), use.expert_cache, hits, round(read), disk, seen is not None)
