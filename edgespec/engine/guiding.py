"""Requests with classifier-free guidance: sessions of two slots, whose passes are one on native operators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from edgespec.decoding.settings import Settings
from edgespec.decoding.target import Output, Pass, Target
from edgespec.decoding.text import INSERTED
from edgespec.engine.input import Input
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.pool import SessionPool
from edgespec.engine.sessions import Session
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.guided import Guided
from edgespec.runtimes.slots.native_batch import BatchSlot, NativeBatch
from edgespec.runtimes.slots.slot import Slot


class GuidedSession(Session):
    """A session with a second slot, for the prompt that guidance leads away from.

    Its prompts are not kept on the disk: whose keys and values these are would be unknown.
    """

    keeps_prompts = False

    def __init__(self, engine: LoadedBundle, other: Slot, batch: NativeBatch | None, *how: Any) -> None:
        self._engine, self.other, self._batch = engine, other, batch  # None: their passes cannot be one
        super().__init__(*how)

    def all_slots(self) -> list[Slot]:
        return [*super().all_slots(), self.other]

    def close_target(self) -> None:
        if self._batch is not None:
            self._batch.close()
        else:
            self.target.close()
            self.other.close()
        del self._engine

    def decoding_target(self, given: Input, settings: Settings) -> Target:
        instead = _instead(self._engine, given, settings)
        both = None if self._batch is None else self._both
        scale = float(settings.guidance_scale or 0)
        return Guided(self.target, self.other, len(given), instead, scale, both)

    def _both(self, asked: Pass, instead: Pass) -> tuple[Output, Output]:
        """Run a pass of each slot, as one where they fit."""
        batch = self._batch
        assert batch is not None
        assert asked.tokens is not None
        passes = [(cast(BatchSlot, self.target), asked), (cast(BatchSlot, self.other), instead)]
        if 2 * len(asked.tokens) <= LONGEST_PASS:
            first, second = batch.run(passes)
            return first, second
        ((first,), (second,)) = (batch.run([one]) for one in passes)
        return first, second


def sessions_for(engine: LoadedBundle, settings: Settings) -> SessionPool:
    """Return the sessions that a request decodes on: guided ones have a second slot, and encoder-decoders none."""
    if not settings.guided:
        return engine.sessions
    engine.inputs.require_decoder("guidance_scale is for decoders alone, and this model reads a source", "leave it out")
    if engine.guided_sessions is None:
        engine.guided_sessions = SessionPool(lambda: _session(engine), most_idle=1)
        engine.reservations.pools.append(engine.guided_sessions)
    return engine.guided_sessions


def _session(engine: LoadedBundle) -> Session:
    if engine.operators.kind != "native" or engine.device != "cpu":
        other = open_slot(engine.model, context=engine.context)
        return engine.new_session(make=partial(GuidedSession, engine, other, None))
    batch = NativeBatch(engine.model, 2, context=engine.context)
    return engine.new_session(batch.slots[0], partial(GuidedSession, engine, batch.slots[1], batch))


def _instead(engine: LoadedBundle, prompt: Sequence[int], settings: Settings) -> list[int]:
    """Return the prompt that guidance leads away from.

    Raises:
        InvalidRequest: it is too long, or has tokens outside the vocabulary.
    """
    negative, codes = settings.negative_prompt, engine.bundle.manifest.codes
    instead = list(engine.codec.encode(negative) if isinstance(negative, str) else negative or ())
    if not instead and codes is not None and codes.image is not None:
        instead = codes.image.null
    instead = instead or list(prompt[-1:])
    known = [token for token in instead if token < INSERTED] or [0]
    if len(instead) >= engine.context or not 0 <= min(known) <= max(known) < engine.bundle.manifest.target.facts.vocab:
        raise InvalidRequest(
            f"a negative prompt of {len(instead)} tokens: expected fewer than {engine.context}, of the vocabulary"
        )
    return instead
