"""Embeddings of texts: the hidden states of their tokens after the final norm, pooled and of length one.

Each text is read separately, and sums are computed row by row in float64.  So an embedding has the same bits,
regardless of other texts and of how the text is cut into chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.loop import check_prompt
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.decoding.target import Pass
from edgespec.drafters.registry import AR
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.reservation import reserve
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.bundle import read_final_norm
from edgespec.runtimes.files.manifest import FinalNorm, Pooling
from edgespec.runtimes.slots.native import NativeSlot

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
Floats = NDArray[np.float64]


def why_no_embeddings(norm: FinalNorm | None, operators: str) -> tuple[str, str] | None:
    """Return why a bundle has no embeddings, and a hint; None = it has them."""
    if norm is None:
        return "this bundle was exported without what embeddings need", "export it again with this version"
    if operators != "native":
        what = f"this model runs on {operators} ones"
        return f"embeddings need native operators, and {what}", "use `--operators native`, on the CPU"
    return None


def embed(
    engine: LoadedBundle,
    texts: Sequence[Sequence[int]],
    pooling: Pooling | None = None,
    dimensions: int | None = None,
    cancel: threading.Event | None = None,
) -> NDArray[np.float32]:
    """Embed texts -> [n, dimensions]; see ``Engine.embed``."""
    engine = engine.usable
    target = engine.bundle.manifest.target
    if problem := why_no_embeddings(target.final_norm, engine.operators.kind):
        raise InvalidRequest(*problem)
    stored = read_final_norm(engine.bundle.path, target)
    assert stored is not None
    weights = stored.astype(np.float64)
    assert target.final_norm is not None
    pooling, hidden = pooling or engine.bundle.manifest.pooling or "mean", target.facts.hidden
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling {pooling!r}: expected {' or '.join(POOLINGS)}")
    if dimensions is not None and not 1 <= dimensions <= hidden:
        raise InvalidRequest(f"dimensions {dimensions}: expected 1 to {hidden}, the model's width")
    for text in texts:
        check_prompt(text, SamplingParams(), target.facts.vocab, engine.context)
    found = np.zeros((len(texts), dimensions or hidden), np.float32)
    if not len(texts):
        return found
    longest = max(texts, key=len)
    settings = Settings(method=AR, max_new_tokens=1)
    reserved = reserve(engine, engine.choose(AR), longest, settings)
    session = None
    try:
        with engine.lock:
            session = engine.new_session()
        session.chunk = reserved.admission.chunk
        slot = session.target
        assert isinstance(slot, NativeSlot)
        for row, text in enumerate(texts):
            pooled = _pooled(engine, slot, text, pooling, weights, target.final_norm, cancel)
            cut = pooled[: found.shape[1]]
            found[row] = cut / (np.sqrt(np.square(cut).sum()) or 1)
        return found
    finally:
        reserved.release()
        if session is not None and not engine.closed:
            session.close()


def _pooled(
    engine: LoadedBundle,
    slot: NativeSlot,
    text: Sequence[int],
    pooling: Pooling,
    weights: Floats,  # [1 or 2, hidden]
    norm: FinalNorm,
    cancel: threading.Event | None,
) -> Floats:  # [hidden]
    """Read a text -> the sum of its tokens' states, or the last one."""
    slot.crop(0)
    total, at, pace = np.zeros(weights.shape[1]), 0, engine.paces[0]
    while at < len(text):
        if cancel is not None and cancel.is_set():
            raise EdgespecError("cancelled before the text was embedded")
        rows = min(pace.rows(slot.chunk, engine.sessions.busy == 0), len(text) - at)
        start = time.perf_counter()
        with engine.lock:  # buffers are shared by all slots
            engine.require_open()
            part = np.asarray(text[at : at + rows], np.int64)
            read = slot.run(Pass(part, hidden=True, scored=0, read=True)).hidden
            assert read is not None
            states = read.astype(np.float64)
        pace.took(rows, time.perf_counter() - start)
        at += rows
        if pooling == "mean":
            for row in _normed(states, weights, norm):
                total += row
        elif at == len(text):
            total = _normed(states[-1:], weights, norm)[0]
    return total


def _normed(states: Floats, weights: Floats, norm: FinalNorm) -> Floats:  # [n, hidden]
    """Apply the final norm to each row."""
    states = states - states.mean(-1, keepdims=True) if norm.centered else states
    scaled = states / np.sqrt(np.square(states).mean(-1, keepdims=True) + norm.eps) * weights[0]
    return scaled + weights[1] if norm.biased else scaled
