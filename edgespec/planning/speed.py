"""Speed of a bundle before it runs: bytes over bandwidth, and gains that were measured.

Plain decoding reads all weights, and the keys and values of every token before, for each token that it writes::

    tokens/s = bandwidth / (weights + depth · keys and values of a token)

Weights that are streamed add the time that the disk takes for those not in memory (``streaming``).

The gain of a method depends on the text, the draft, the kernels and the processor, so it is never computed here.  It is
what ``edgespec calibrate`` measured with this bundle, else what its export measured, else unknown: ``edgespec bench``
measures it.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from edgespec.drafters.registry import AR
from edgespec.errors import InvalidRequest
from edgespec.planning.budget import show_bytes
from edgespec.planning.footprint import LEAST, LEAST_CHUNK, SPOKEN, memory_of
from edgespec.planning.profiles import Profile, export_busy, manifest_hash
from edgespec.planning.streaming import SeenReads, Streaming, cache_for, streaming_of
from edgespec.planning.traffic import kv_token_bytes, layer_weights, read_bytes
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.ort import native_library

Basis = Literal["calibrated", "exported"]  # who measured a gain: `calibrate` with this bundle, or its export
_BLOCK = 1 << 26  # bytes that a thread reads without the native library, more than caches hold


@dataclass(frozen=True)
class Speed:
    """A prediction; a plan's JSON has these keys."""

    speedup: float | None  # relative to plain decoding of the same bundle; None = not measured
    tokens_per_second: float | None  # of one sequence after the prefill; None = the device's bandwidth is not known
    plain_tokens_per_second: float | None  # the same of plain decoding
    prefill_tokens_per_second: float | None  # None = not measured
    basis: Basis | None  # of ``speedup``; None = plain decoding, or not measured

    @property
    def gain(self) -> float:
        """Return the speed over plain decoding, 1 where it was not measured."""
        return self.speedup or 1.0


def speed_of(
    manifest: Manifest,
    use: RunOptions,
    profile: Profile | None = None,
    bandwidth: float | None = None,
    depth: float | None = None,
    disk: float | None = None,
    hits: SeenReads | None = None,
) -> Speed:
    """Predict how fast a bundle decodes.

    Args:
        manifest: of the bundle, or of one that an export would make.
        use: how it is run; sequences together (``batch``) share a pass of native operators, and take turns elsewhere.
        profile: measurements on the device, with this bundle or another one; one of a busy machine is not used.
        bandwidth: bytes of weights that the device reads per second, if there is not a profile; None = not known.
        depth: tokens before a pass, on average; None = half of the context.
        disk: bytes per second that it reads of experts, where they are streamed; None = not known.
        hits: of streamed experts, in earlier runs; None = not known.

    Raises:
        InvalidRequest: the bundle does not have the method.
    """
    if use.method not in manifest.methods:
        raise InvalidRequest(
            f"method {use.method!r} is not in this bundle; it has: {', '.join(manifest.methods)}",
            "export it with that method",
        )
    known = profile if profile is not None and not profile.busy else None
    if known is not None:
        bandwidth = known.bandwidth
    shared = use.batch if use.operators == "native" and use.device == "cpu" else 1
    before = shared * (use.context / 2 if depth is None else depth)
    target = manifest.target
    read = read_bytes(target, use.operators) + before * kv_token_bytes(target, use.operators, use.attention)
    plain = bandwidth / read * shared / use.batch if bandwidth else None
    if streaming := streaming_of(manifest, use, disk, hits):
        plain = streaming.rate(plain) if plain else None
    speedup, basis = measured_gain(manifest, use, known)
    fast = plain * (speedup or 1.0) if plain else None
    return Speed(speedup, fast, plain, _prefill(manifest, known), basis)


@dataclass(frozen=True)
class Within:
    """How a bundle runs within a budget; ``edgespec info`` has these keys."""

    budget: int  # bytes
    peak: int  # predicted bytes
    fits: bool
    streaming: Streaming | None  # None = all weights stay in memory
    tokens_per_second: float | None  # of plain decoding; None = not known

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return asdict(self)

    def words(self) -> str:
        """Say it in a line."""
        if not self.fits:
            return f"{show_bytes(self.budget)} are not enough: it needs {show_bytes(self.peak)}"
        rate = "" if self.tokens_per_second is None else f", about {self.tokens_per_second:.1f} tokens/s"
        held = "all weights in memory" if self.streaming is None else self.streaming.words()
        return f"{show_bytes(self.budget)}: {held}{rate}"


def within(
    manifest: Manifest, use: RunOptions, budget: int, disk: float | None, hits: SeenReads | None = None
) -> Within:
    """Predict how plain decoding runs within a budget, as loading with it does.

    Args:
        manifest: of the bundle.
        use: how it is run without a budget.
        budget: bytes.
        disk: bytes per second that it reads of weights; None = not known.
        hits: of streamed experts, in earlier runs; None = not known.
    """
    least = replace(use, method=AR, context=min(LEAST, use.context), chunk=LEAST_CHUNK)
    spoken = replace(least, context=min(SPOKEN, use.context))
    used = replace(least, expert_cache=cache_for(manifest, spoken, budget, smallest=least))
    peak = memory_of(manifest, used).peak
    speed = speed_of(manifest, used, bandwidth=read_bandwidth(use.threads), depth=LEAST, disk=disk, hits=hits)
    streaming = streaming_of(manifest, used, disk, hits)
    return Within(budget, peak, peak <= budget, streaming, speed.plain_tokens_per_second)


def measured_gain(manifest: Manifest, use: RunOptions, profile: Profile | None) -> tuple[float | None, Basis | None]:
    """Look up the speed of a method over plain decoding -> (gain, who measured it); of a batch nothing is known."""
    if use.method == AR:
        return 1.0, None
    if use.batch > 1 or use.expert_cache is not None:  # gains were measured with all weights in memory
        return None, None
    if profile is not None and (trial := profile.trials.get(use.method)):
        there = (profile.operators, profile.device)  # compared first: a hash writes the whole manifest
        if there == (use.operators, use.device) and profile.bundle == manifest_hash(manifest):
            return trial.speedup, "calibrated"
    part, cost = manifest.methods[use.method], manifest.cost
    here = (use.operators, use.device) == (manifest.target.layout, "cpu")
    if part.predicted_speedup and part.measured and here and not export_busy(cost):
        return part.predicted_speedup, "exported"
    return None, None


def _prefill(manifest: Manifest, profile: Profile | None) -> float | None:
    """Scale the tokens per second that a profile read at its least depth by the weights of the layers."""
    if profile is None or not profile.prefill:
        return None
    rate = profile.prefill[min(profile.prefill)]
    return rate * layer_weights(profile.facts) / layer_weights(manifest.target.facts)


@cache
def read_bandwidth(threads: int) -> float:
    """Measure the bytes per second that this many threads read of main memory, in about a tenth of a second."""
    if found := native_library.read_bandwidth(threads, megabytes=256, repeats=2):
        return 1e9 * found
    block = np.ones(_BLOCK // 4, np.float32)

    def read() -> float:
        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: block.max(), range(threads)))
        return threads * _BLOCK / (time.perf_counter() - begun)

    return max(read() for _ in range(3))
