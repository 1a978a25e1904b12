"""Which entries a drafter makes: of chains, of blocks, or none, where it borrows the target's."""

from __future__ import annotations

from edgespec.decoding.target import TappedTarget
from edgespec.drafters.blocks import Blocks
from edgespec.drafters.borrowed import Borrowed
from edgespec.drafters.entries import Entries
from edgespec.runtimes.slots.slot import Slot


def entries_of(target: TappedTarget, slot: Slot, branch: tuple[int, ...] = (1,)) -> Entries:
    """Those of the slot's kind."""
    decoder = slot.model.part.decoder
    if decoder and decoder.reads:
        return Borrowed(target, slot)
    return Blocks(target, slot) if decoder and decoder.block else Entries(target, slot, branch)
