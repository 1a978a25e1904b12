"""Weights that are read from the disk when a pass needs them: the size of their cache, and what a token costs.

Where a mixture is larger than the memory, its other weights stay resident and the rest of the memory is a cache of
experts.  A token of plain decoding waits for its other experts::

    bytes = (1 - hits) * experts of a row * bytes of an expert        seconds = bytes / disk + resident bytes / memory

Where a model without experts is larger, each token needs all layers in order: the first ones stay, and the others are
read while those before them compute::

    bytes = layers that do not stay        seconds = max(bytes / disk, weights / memory)
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path

from edgespec.planning.budget import show_bytes
from edgespec.planning.footprint import MARGIN, memory_of
from edgespec.planning.profiles import manifest_hash
from edgespec.planning.weights import expert_bytes, streamed_bytes
from edgespec.runtimes.files.checked import records
from edgespec.runtimes.files.manifest import Manifest, ModelPart
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.expert_store import disk_rate

PAGE = 4096  # bytes, in which files are read
PARTS = 3  # matrices of an expert
LAYER_PARTS = 4  # of a layer
AHEAD = 2  # layers that are read while one is computed (native/expert_store.h)


def can_stream(part: ModelPart, use: RunOptions) -> bool:
    """Whether a model's weights can be read one by one, when run in this way."""
    native = use.operators == "native" and use.device == "cpu" and NATIVE in part.graphs
    return native and not part.foreign and sys.platform != "win32"


def _piece_bytes(manifest: Manifest) -> int:
    """Bytes of an expert, or of a layer."""
    part = manifest.target
    return expert_bytes(part) or streamed_bytes(part, manifest.files) // part.facts.layers


def slot_bytes(manifest: Manifest) -> int:
    """Bytes of an expert in the cache, or of a layer: whole pages of the file."""
    return _piece_bytes(manifest) + 2 * (LAYER_PARTS if manifest.target.facts.experts is None else PARTS) * PAGE


def read_at_once(manifest: Manifest) -> tuple[int, int]:
    """Return the bytes of a read of a pass, and how many of them it waits for at once: some experts, or layers."""
    mixed = manifest.target.facts.experts
    if mixed is None:
        return slot_bytes(manifest), AHEAD
    return slot_bytes(manifest) // PARTS, max(1, mixed.chosen // 2) * PARTS  # about half are in the cache


def least_cache(manifest: Manifest) -> int:
    """Bytes of the smallest cache that is planned: the experts of a row in one layer, twice, or three layers."""
    mixed = manifest.target.facts.experts
    return (AHEAD + 1 if mixed is None else 2 * mixed.chosen) * slot_bytes(manifest)


def cache_for(
    manifest: Manifest, use: RunOptions, limit: int, process: int | None = None, smallest: RunOptions | None = None
) -> int | None:
    """Choose the bytes of the cache of streamed weights within ``limit`` bytes of memory; None = all of them fit.

    It is never smaller than ``least_cache``, so the limit may be exceeded.

    Args:
        manifest: of the bundle.
        use: how it is run; the cache leaves room for its texts.
        limit: bytes.
        process: resident bytes of a process before loading; None = as measured elsewhere.
        smallest: layers are streamed where this does not fit; None = ``use``.
    """
    part = manifest.target
    mixed = part.facts.experts is not None
    asked = replace(use if mixed or smallest is None else smallest, expert_cache=None)
    if not can_stream(part, use) or memory_of(manifest, asked, process).peak <= limit:
        return None
    rest = memory_of(manifest, replace(use, expert_cache=0, greedy=False), process).peak  # requests may sample
    most = (streamed_bytes(part, manifest.files) // _piece_bytes(manifest)) * slot_bytes(manifest)
    room = int((limit - rest) / (1 + MARGIN))  # memory_of adds a share of all private bytes
    return min(max(room, least_cache(manifest)), most)


@dataclass(frozen=True)
class SeenReads:
    """Hits and reads of one-row passes in earlier runs of a bundle."""

    share: float  # of the experts that the cache held
    hits: float  # share of those needed that were in it
    rate: float | None = None  # bytes read per second that a pass waited for them; None = it waited for none

    def at(self, share: float) -> float:
        """Estimate the hits of another cache, by a power of its share."""
        if not 0 < self.share < 1 or not 0 < self.hits < 1 or not 0 < share < 1:
            return share if not 0 < share < 1 else self.hits
        return float(share ** (log(self.hits) / log(self.share)))


def disk_of(folder: Path, manifest: Manifest) -> float | None:
    """Measure the bytes per second at which passes would read and check weights, in half a second; None = they cannot.

    Args:
        folder: of the bundle.
        manifest: of it.

    Raises:
        BundleError: the disk fails.
    """
    weights = folder / manifest.target.weights
    if manifest.target.layout != "native" or not weights.is_file() or not native_library().path:
        return None
    return disk_rate(weights, *read_at_once(manifest), checked=True)


def _record(manifest: Manifest) -> tuple[Path, str]:
    name = manifest_hash(manifest)
    return records() / f"{name[:24]}-experts.json", f"hits of experts {name}"


def remember_reads(manifest: Manifest, seen: SeenReads) -> None:
    """Record the hits and reads of a run for later plans; without a cache folder nothing is recorded."""
    path, purpose = _record(manifest)
    with suppress(OSError):
        write_sealed(path, purpose, asdict(seen))


def seen_reads(manifest: Manifest) -> SeenReads | None:
    """Read what is recorded of earlier runs of a bundle; None = nothing is."""
    path, purpose = _record(manifest)
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = read_sealed(path, purpose)
        rate = found["rate"]
        return SeenReads(float(found["share"]), float(found["hits"]), None if rate is None else float(rate))
    return None


@dataclass(frozen=True)
class Streaming:
    """Predicted reads from the disk; a plan's JSON has these keys."""

    experts: int  # bytes of all experts, or of all layers
    cache: int  # bytes of those in memory
    hits: float  # expected share of a token's experts that are in it
    bytes_per_token: int  # of the disk, of plain decoding
    disk: float | None  # bytes per second that it gives, checked as they arrive; None = not measured
    seen: bool  # whether earlier runs of this bundle showed the hits; else texts are taken to choose experts evenly
    kind: str = "experts"  # of a mixture, or "layers"

    @property
    def seconds(self) -> float | None:
        """Time of a token that the disk takes; None = not known."""
        return self.bytes_per_token / self.disk if self.disk else None

    def rate(self, resident: float) -> float | None:
        """Predict tokens per second, from those with all weights in memory; None = the disk was not measured."""
        if self.seconds is None:
            return None
        return 1 / (max(self.seconds, 1 / resident) if self.kind == "layers" else self.seconds + 1 / resident)

    def words(self) -> str:
        """Say what stays in memory and what is read."""
        held, read = show_bytes(self.cache), show_bytes(self.bytes_per_token)
        if self.kind == "layers":
            whole = show_bytes(self.experts)
            return f"{held} of its {whole} of layers in memory, the others are read from the disk: {read} per token"
        how = "as earlier runs did" if self.seen else "if texts choose them evenly"
        return (
            f"{held} of its {show_bytes(self.experts)} of experts in memory, the others are read from the disk: "
            f"{read} per token, {how}"
        )


def streaming_of(
    manifest: Manifest, use: RunOptions, disk: float | None = None, seen: SeenReads | None = None
) -> Streaming | None:
    """Predict what a streamed model reads; None = nothing is streamed.

    Without hits that were seen, tokens are taken to choose experts uniformly: real texts prefer some, and read less.

    Args:
        manifest: of the bundle.
        use: how it is run.
        disk: bytes per second that were measured alone; passes of earlier runs may have got fewer.
        seen: in earlier runs.
    """
    part, mixed = manifest.target, manifest.target.facts.experts
    if use.expert_cache is None:
        return None
    slots, all_bytes = use.expert_cache // slot_bytes(manifest), streamed_bytes(part, manifest.files)
    if mixed is None:
        stay = 1.0 if slots >= part.facts.layers else max(0, slots - AHEAD - 1) / part.facts.layers
        return Streaming(all_bytes, use.expert_cache, stay, round((1 - stay) * all_bytes), disk, True, "layers")
    share = min(1.0, slots / (mixed.count * len(mixed.layers)))
    hits = seen.at(share) if seen else share
    read = (1 - hits) * mixed.chosen * len(mixed.layers) * slot_bytes(manifest)
    if disk and seen and seen.rate:
        disk = min(disk, seen.rate)
    return Streaming(all_bytes, use.expert_cache, hits, round(read), disk, seen is not None)
