"""Saving and restoring what passes left of a text (``runtimes.files.session_file``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.settings import Settings
from edgespec.decoding.target import common_prefix
from edgespec.decoding.text import INSERTED
from edgespec.drafters.registry import AR
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.prompt_cache import adapter_of, origin_of
from edgespec.engine.reservation import reserve
from edgespec.errors import InvalidRequest, SessionError
from edgespec.runtimes.audio.audio import Audio
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.files.session_file import (
    SavedSlot,
    SessionHeader,
    fill,
    read_session,
    slot_bytes,
    write_session,
)
from edgespec.runtimes.images.image import Image
from edgespec.runtimes.images.prompt import apart, seeing
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.chat import Message

_AGAIN = "delete it; a new one is written"
_HASH = 64  # characters that no person reads


def save_session(
    engine: LoadedBundle, file: Path, tokens: Sequence[int], messages: Sequence[Message], adapter: int = 0
) -> None:
    """See ``Engine.save_session``."""
    messages, held = apart(messages, engine.inputs.kinds)
    if not held and max(tokens, default=0) >= INSERTED:
        what = "images or recordings"
        raise InvalidRequest(f"a text with {what} is saved as a conversation", "give the messages that have them")
    with engine.inputs.ids(tokens):
        shown = sorted((engine.inputs.reader.of(*one) for one in held), key=lambda one: one.kind != "image")
        _save(engine, file, list(tokens)[: engine.context], messages, shown, adapter)


def _save(
    engine: LoadedBundle,
    file: Path,
    tokens: list[int],
    messages: Sequence[Message],
    shown: Sequence[Image | Audio],
    adapter: int,
) -> None:
    vocab = engine.bundle.manifest.target.facts.vocab
    if any(not 0 <= token < vocab for token in tokens if token < INSERTED):
        raise InvalidRequest(f"a token id outside the vocabulary: expected 0 to {vocab - 1}")
    session = engine.sessions.take(tokens, adapter=adapter)
    try:
        if session.target.capacity < len(tokens):
            _admit(engine, tokens)
        target, left = session.target, len(tokens)
        while left:  # by pieces, between which others run
            with engine.lock:
                engine.require_open()
                session.begin(tokens)
                held = target.follow(tokens)
                rows = engine.paces[0].rows(target.chunk, engine.sessions.busy < 2)
                target.prefill(tokens[held : held + rows])
                left = len(tokens) - len(target.tokens)
        with engine.lock:
            engine.require_open()
            # a drafter's entries are computed from taps, which are not saved: it reads the text again
            slots = {name: slot for name, slot in session.slots().items() if name != "drafter"}
            if "draft" in slots:  # it never ran ahead of what is committed, but may have followed another text
                slots["draft"].follow(tokens[: common_prefix(slots["draft"].tokens, tokens)])
            arrays = {name: slot.held() for name, slot in slots.items()}
            saved = {
                name: SavedSlot(
                    origin=origin_of(engine.bundle.manifest, slot.model) | adapter_of(slot),
                    tokens=slot.tokens,
                    high_water_mark=slot.high_water_mark,
                    nbytes=slot_bytes(arrays[name]),
                )
                for name, slot in slots.items()
            }
            header = SessionHeader(
                **saved,
                messages=[dict(message) for message in messages],
                pictures=[one.pixels.shape[:2] for one in shown if isinstance(one, Image)],
                recordings=[len(one.samples) for one in shown if isinstance(one, Audio)],
            )
            own = [one.pixels if isinstance(one, Image) else one.samples for one in shown]
            vouched = not session.foreign and not engine.unverified()
            write_session(file, header, [array for some in (*arrays.values(), own) for array in some], vouched)
    finally:
        engine.sessions.give_back(session)


def restore_session(engine: LoadedBundle, file: Path) -> list[Message]:
    """See ``Engine.restore_session``."""
    saved = read_session(file)
    target, draft, manifest = saved.header.target, saved.header.draft, engine.bundle.manifest
    adapter = _adapter(file, target, engine)
    _require(file, target, engine.model, manifest, engine.context)
    count = len(saved.header.pictures)
    shown = {"image": saved.held[:count], "audio": saved.held[count:]}
    held = {kind: [engine.inputs.reader.of(kind, one) for one in some] for kind, some in shown.items()}
    for one in (*held["image"], *held["audio"]):
        engine.inputs.reader.rows_of(one)
    _admit(engine, target.tokens)
    with engine.lock, engine.inputs.ids(target.tokens):
        session = engine.new_session()
        session.use_adapter(adapter)
        _take_up(file, target, saved.target, session.target)
        if not saved.sealed:
            session.foreign = f"the session file {file.name} does not have this user's seal"
            session.restored = len(target.tokens)
        if draft is not None and manifest.draft is not None:

            def take_up(slot: Slot) -> None:
                assert draft is not None
                # the draft is loaded with the first method that needs it, and reads its text again if it is another one
                if draft.origin == origin_of(manifest, slot.model) and len(draft.tokens) <= slot.context:
                    _take_up(file, draft, saved.draft, slot)

            session.restore_draft(take_up)
    engine.sessions.add(session)
    return seeing(saved.header.messages, held)


def _admit(engine: LoadedBundle, tokens: Sequence[int]) -> None:
    """Refuse, by a ``BudgetError``, a text that does not fit the memory."""
    settings = Settings(method=AR, max_new_tokens=1)
    reserve(engine, engine.choose(AR), tokens, settings).release()


def _take_up(file: Path, saved: SavedSlot, body: NDArray[np.uint8], slot: Slot) -> None:  # [nbytes]
    arrays = slot.take_up(saved.tokens, saved.high_water_mark)
    if slot_bytes(arrays) != saved.nbytes:
        slot.follow([])
        raise SessionError(f"{file}: {len(saved.tokens)} tokens of {saved.nbytes} bytes: "
                           f"expected {slot_bytes(arrays)}", _AGAIN)  # fmt: skip
    fill(arrays, body)
    if not slot.taken_up():
        raise SessionError(f"{file}: states that are not those of its {len(saved.tokens)} tokens", _AGAIN)


def _adapter(file: Path, saved: SavedSlot, engine: LoadedBundle) -> int:
    """Find the adapter that a text was read with; 0 = none."""
    digest, store = saved.origin.get("adapter"), getattr(engine.model, "adapters", None)
    if digest is None:
        return 0
    for number, known in (store.digests if store else {}).items():
        if known == digest:
            return number
    raise SessionError(f"{file}: its text was read with an adapter that is not loaded", "load the bundle with it")


def _require(file: Path, saved: SavedSlot, model: Model, manifest: Manifest, context: int) -> None:
    """Refuse what was saved elsewhere or otherwise."""
    here = origin_of(manifest, model)
    for name in dict.fromkeys([*here, *saved.origin]):
        if name == "adapter":
            continue  # see ``_adapter``
        was, now = (found.get(name, "none") for found in (saved.origin, here))
        if was != now:
            what = f": {was}, and this has {now}" if max(len(was), len(now)) < _HASH else ""
            raise SessionError(
                f"{file}: saved with other {name[:20]}{what}",
                "load that bundle, and as it was loaded then; or delete the file",
            )
    vocab, extra = manifest.target.facts.vocab, manifest.target.extra_rows
    if len(saved.tokens) > context or saved.high_water_mark > context + extra:
        raise SessionError(
            f"{file}: a text of {len(saved.tokens)} tokens: expected at most {context}, the context",
            "load the bundle with a longer context",
        )
    if any(vocab <= token < INSERTED for token in saved.tokens):
        raise SessionError(f"{file}: a token id outside the vocabulary of {vocab}")
