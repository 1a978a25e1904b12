"""Embeddings of texts, and scores of documents for a query.

A decoder's embedding pools the hidden states of a text's tokens after the final norm, an encoder's its rows.
Each text is computed separately, and sums are computed row by row in float64.  So an embedding has the same bits,
regardless of other texts and of how the text is cut into chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.settings import Settings
from edgespec.decoding.target import Pass
from edgespec.drafters.registry import AR
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.reservation import reserve
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.runtimes.files.bundle import read_final_norm
from edgespec.runtimes.files.embedding import EmbeddingPart, Pooling, StepWeights, read_steps
from edgespec.runtimes.files.manifest import FinalNorm, Manifest
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.text_encoder import TextEncoder
from edgespec.runtimes.text.pooling import POOLINGS as POOLINGS
from edgespec.runtimes.text.pooling import Doubles, Pool, check_pooling, finish, shortened
from edgespec.runtimes.text.prompted import Pair, check_text


@dataclass(frozen=True)
class Ranked:
    """A document of ``rerank``: its number in the list, and its score."""

    index: int
    score: float


def why_no_embeddings(manifest: Manifest, operators: str) -> tuple[str, str] | None:
    """Return why a bundle has no embeddings, and a hint; None = it has them."""
    if manifest.embedding is not None and manifest.embedding.scores:
        return "this bundle's model scores pairs of texts, and makes no embeddings", "use rerank"
    if manifest.target.final_norm is None and not manifest.is_encoder:
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
    normalize: bool | None = None,
    skips: Sequence[int] = (),
    cancel: threading.Event | None = None,
) -> NDArray[np.float32]:
    """Embed texts -> [n, dimensions]; see ``Engine.embed``.

    ``skips``: tokens of the prompt of each text, which pooling does not count.
    """
    engine = engine.usable
    manifest = engine.bundle.manifest
    if problem := why_no_embeddings(manifest, engine.operators.kind):
        raise InvalidRequest(*problem)
    if pooling is not None:
        check_pooling(pooling)
    part, width = manifest.embedding or EmbeddingPart(), engine.vector_width
    if dimensions is not None and not 1 <= dimensions <= width:
        raise InvalidRequest(f"dimensions {dimensions}: expected 1 to {width}, the model's width")
    for text in texts:
        check_text(text, manifest.embedding, manifest.target.facts.vocab, engine.context)
    found = np.zeros((len(texts), dimensions or width), np.float32)
    own = part.normalize if normalize is None else normalize
    if not len(texts):
        return found
    encoder = engine.inputs.encoder
    made = (
        _of_decoder(engine, texts, pooling or manifest.pooling or "mean", part, cancel)
        if encoder is None
        else _of_encoder(engine, encoder, texts, pooling, skips, cancel=cancel)
    )
    for number, vector in made:
        found[number] = shortened(vector, dimensions, own)
    return found


def score(
    engine: LoadedBundle, pairs: Sequence[Pair], cancel: threading.Event | None = None
) -> NDArray[np.float32]:  # [n]
    """Score pairs of texts; see ``Engine.rerank``."""
    encoder = engine.usable.inputs.encoder
    if encoder is None or not encoder.part.scores:
        raise InvalidRequest("this bundle's model does not score pairs of texts", "use embed")
    found = np.zeros(len(pairs), np.float32)
    tokens, second = [pair.tokens for pair in pairs], [pair.second for pair in pairs]
    for text in tokens:
        check_text(text, encoder.part, engine.bundle.manifest.target.facts.vocab, engine.context)
    for number, vector in _of_encoder(engine, encoder, tokens, None, (), second, cancel):
        found[number] = vector[0]
    return found


def _of_encoder(
    engine: LoadedBundle,
    encoder: TextEncoder,
    texts: Sequence[Sequence[int]],
    pooling: Pooling | None,
    skips: Sequence[int] = (),
    second: Sequence[int] = (),
    cancel: threading.Event | None = None,
) -> Iterator[tuple[int, Doubles]]:
    """Compute vectors of an encoder; between passes, other requests take their turn."""
    passes = encoder.vectors(texts, pooling, skips, second, cancel)
    while True:
        with engine.lock:
            engine.require_open()
            found = next(passes, None)
        if found is None:
            return
        yield found


def _of_decoder(
    engine: LoadedBundle,
    texts: Sequence[Sequence[int]],
    pooling: Pooling,
    part: EmbeddingPart,
    cancel: threading.Event | None,
) -> Iterator[tuple[int, Doubles]]:
    """Compute vectors of a decoder, text by text."""
    target = engine.bundle.manifest.target
    stored, norm = read_final_norm(engine.bundle.path, target), target.final_norm
    assert stored is not None
    assert norm is not None
    weights, steps = stored.astype(np.float64), read_steps(engine.bundle.path, part, target.facts.hidden)
    settings = Settings(method=AR, max_new_tokens=1)
    reserved = reserve(engine, engine.choose(AR), max(texts, key=len), settings)
    session = None
    try:
        with engine.lock:
            session = engine.new_session()
        session.chunk = reserved.admission.chunk
        slot = session.target
        assert isinstance(slot, NativeSlot)
        for number, text in enumerate(texts):
            yield number, _pooled(engine, slot, text, pooling, weights, norm, steps, cancel)
    finally:
        reserved.release()
        if session is not None and not engine.closed:
            session.close()


def _pooled(
    engine: LoadedBundle,
    slot: NativeSlot,
    text: Sequence[int],
    pooling: Pooling,
    weights: Doubles,  # [1 or 2, hidden]
    norm: FinalNorm,
    steps: Sequence[StepWeights],
    cancel: threading.Event | None,
) -> Doubles:  # [hidden]
    """Read a text, and pool the states of its tokens."""
    slot.crop(0)
    pool, at, pace = Pool(pooling, weights.shape[1]), 0, engine.paces[0]
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
        if pooling != "last":
            pool.add(_normed(states, weights, norm))
        elif at == len(text):
            pool.add(_normed(states[-1:], weights, norm))
    return finish(pool.vector, steps)


def _normed(states: Doubles, weights: Doubles, norm: FinalNorm) -> Doubles:  # [n, hidden]
    """Apply the final norm to each row."""
    states = states - states.mean(-1, keepdims=True) if norm.centered else states
    scaled = states / np.sqrt(np.square(states).mean(-1, keepdims=True) + norm.eps) * weights[0]
    return scaled + weights[1] if norm.biased else scaled
