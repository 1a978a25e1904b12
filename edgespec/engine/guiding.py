"""Requests with classifier-free guidance: sessions of two slots, whose passes are one on native operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from edgespec.decoding.settings import Settings
from edgespec.decoding.target import Output, Pass, Target
from edgespec.decoding.text import INSERTED
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.pool import SessionPool
from edgespec.engine.sessions import Session
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.guided import Guided
from edgespec.runtimes.slots.native_batch import BatchSlot, NativeBatch


def sessions_for(engine: LoadedBundle, settings: Settings) -> SessionPool:
    """Return the sessions that a request decodes on: guided ones have a second slot, and encoder-decoders none."""
    if not settings.guided:
        return engine.sessions
    if engine.encoding is not None:
        raise InvalidRequest("guidance_scale is for decoders alone, and this model reads a source", "leave it out")
    if engine.guided_sessions is None:
        engine.guided_sessions = SessionPool(lambda: _session(engine), most_idle=1)
        engine.places.pools.append(engine.guided_sessions)
    return engine.guided_sessions


def _session(engine: LoadedBundle) -> Session:
    if engine.operators.kind != "native" or engine.device != "cpu":
        session = engine.new_session()
        session.other = open_slot(engine.model, context=engine.context)
        return session
    batch = NativeBatch(engine.model, 2, context=engine.context)
    session = engine.new_session(batch.slots[0])
    session.other, session.batch = batch.slots[1], batch
    return session


def guided(engine: LoadedBundle, session: Session, prompt: Sequence[int], settings: Settings) -> Target:
    """Make the target of a guided request over the slots of its session (``sessions_for``)."""
    target, other, batch = session.target, session.other, session.batch
    if other is None:
        raise InvalidRequest("a guided request needs separate sessions and cannot join the passes of a batch")
    negative, codes = settings.negative_prompt, engine.bundle.manifest.codes
    instead = list(engine.codec.encode(negative) if isinstance(negative, str) else negative or ())
    if not instead and codes is not None and codes.image is not None:
        instead = codes.image.null
    instead = instead or list(prompt[-1:])
    known = [token for token in instead if token < INSERTED] or [0]
    if len(instead) >= engine.context or not 0 <= min(known) <= max(known) < target.vocab_size:
        raise InvalidRequest(
            f"a negative prompt of {len(instead)} tokens: expected fewer than {engine.context}, of the vocabulary"
        )

    def both(asked: Pass, instead: Pass) -> tuple[Output, Output]:
        assert batch is not None
        assert asked.tokens is not None
        passes = [(cast(BatchSlot, target), asked), (cast(BatchSlot, other), instead)]
        if 2 * len(asked.tokens) <= LONGEST_PASS:
            first, second = batch.run(passes)
            return first, second
        ((first,), (second,)) = (batch.run([one]) for one in passes)
        return first, second

    found = Guided(target, other, len(prompt), instead, float(settings.guidance_scale or 0), both if batch else None)
    return cast(Target, found)
