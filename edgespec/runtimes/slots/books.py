"""The books of the text in a native slot, which the native library keeps (native/books.h): a handle.

They say how many tokens the slot's memory holds, what of their states is lost, which rows the next pass moves, and what
checkpoints there are.  The tokens themselves are the slot's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.kv import state_width
from edgespec.runtimes.files.manifest import ModelFacts
from edgespec.runtimes.slots.handles import ADDRESS, HANDLE, NUMBER, Functions

# how rows continue a text: enum How of native/books.h
TREE, MUTUAL, HYPOTHESES, DRAFT, READ = 1, 2, 4, 8, 16

_SIGNATURES: dict[str, tuple[Any, ...]] = {  # the result, and the arguments after the handle
    "attach": (None, ADDRESS),
    "hold": (None, NUMBER, NUMBER),
    "high_water_mark": (NUMBER,),
    "plan": (NUMBER, ADDRESS, *[NUMBER] * 6),
    "keep": (NUMBER, ADDRESS, NUMBER),
    "waiting": (NUMBER,),
    "moves": (None, ADDRESS, NUMBER, NUMBER, NUMBER),
    "moved": (None,),
    "needed": (NUMBER,),
    "cropped": (NUMBER, NUMBER),
    "crop": (NUMBER, NUMBER),
    "restart": (NUMBER,),
    "reaches": (NUMBER, NUMBER, NUMBER),
    "lends": (NUMBER, NUMBER),
    "copy_prefix_from": (NUMBER, HANDLE, NUMBER),
    "behind": (NUMBER,),
    "set_held": (None, NUMBER),
    "state_size": (NUMBER,),
    "copy_states": (None, ADDRESS),
    "put_states": (NUMBER, ADDRESS, NUMBER),
    "checkpoint": (NUMBER,),
    "limit": (None, NUMBER),
    "checkpoints": (NUMBER, ADDRESS, NUMBER),
    "checkpoint_bytes": (NUMBER,),
    "close": (None,),
}
_MOST_LENGTHS = 64  # of checkpoints


@cache
def _functions() -> Functions:
    return Functions("text", _SIGNATURES, 5)


class Books:
    """The books of one text; one thread uses them at a time.

    Args:
        facts: of the model.
        ring: rows of exact recent keys in the slot's head, 0 = none.
    """

    def __init__(self, facts: ModelFacts, ring: int) -> None:
        heads, layers = facts.delta, len(facts.convolutions)
        matrix = heads.values * heads.key_dim * heads.value_dim if heads else 0
        functions = _functions()
        self._call = functions.of
        self._handle = functions.open(layers, state_width(facts) if layers else 0, matrix, facts.taps, ring)
        self.has_checkpoints = bool(layers and not ring)  # recent keys would have to be copied as well
        self.stateful = bool(layers or ring)
        # what every round calls, without a method around it: below 0 = refused
        self.try_plan = partial(self._call["plan"], self._handle)
        self.try_keep = partial(self._call["keep"], self._handle)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._call["close"](self._handle)

    def attach(self, head: NDArray[np.uint8]) -> None:  # [bytes]
        """Say where the states and exact recent keys of the slot are."""
        self._call["attach"](self._handle, head.ctypes.data)

    def hold(self, length: int, high_water_mark: int) -> None:
        """Say that the memory holds a text, without checkpoints.

        Args:
            length: of the text, in tokens.
            high_water_mark: see ``high_water_mark``.
        """
        self._call["hold"](self._handle, length, high_water_mark)

    @property
    def high_water_mark(self) -> int:
        """Tokens ever written that may be read again."""
        return int(self._call["high_water_mark"](self._handle))

    # -- passes --------------------------------------------------------------------------------------------------------

    def plan(self, plan: int, width: int, first: int, count: int, offset: int, how: int, slot: int) -> None:
        """Plan rows that are run next: write their lines but the tokens.

        Args:
            plan: address of int64 [6, width].
            first, count: the rows.
            offset: rows of earlier passes, after the text and not kept, that they continue.
            how: ``TREE``: the line of parents is there, as rows of the pass; ``MUTUAL``: every row sees all others;
                ``HYPOTHESES``: the line of visible tokens is there; ``DRAFT``: none of them waits to be kept;
                ``READ``: they are part of the text for certain.
            slot: its number.

        Raises:
            InvalidRequest: too many rows for a model with states, or a parent that is not an earlier row.
        """
        if self.try_plan(plan, width, first, count, offset, how, slot) < 0:
            raise self.refusal()

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last pass, a path from the text on; the others are forgotten.

        Raises:
            InvalidRequest: they are not such a path.
        """
        count, given = len(rows), None
        if count and rows[-1] != count - 1:  # else they ascend from 0 without gaps
            given = array("q", rows)
        if self.try_keep(given.buffer_info()[0] if given else None, count) < 0:
            raise self.refusal()

    def refusal(self) -> InvalidRequest:
        """Make the error of a call that was refused."""
        return _functions().refusal()

    @property
    def waiting(self) -> int:
        """Moves that come before the next pass, and word of what its states may hold."""
        return int(self._call["waiting"](self._handle))

    def moves(self, out: int, slot: int, read: int, revocable: bool) -> None:
        """Write what waits.

        Args:
            out: address of int64 [waiting, 3].
            slot: its number.
            read: rows of the planned pass that are part of the text at once.
            revocable: whether tokens that are kept may be taken back.
        """
        self._call["moves"](self._handle, out, slot, read, revocable)

    def moved(self) -> None:
        """Say that the moves are made."""
        self._call["moved"](self._handle)

    @property
    def needed(self) -> int:
        """Tokens that the text and its moves read."""
        return int(self._call["needed"](self._handle))

    # -- going back ----------------------------------------------------------------------------------------------------

    def cropped(self, length: int) -> int:
        """Count the tokens that ``crop`` would leave: ``length``, fewer where states go back to a checkpoint."""
        return int(self._call["cropped"](self._handle, length))

    def crop(self, length: int) -> int:
        """Forget the tokens after the first ``length``, or more; returns how many remain."""
        return int(self._call["crop"](self._handle, length))

    def restart(self) -> None:
        """Forget the text."""
        self._call["restart"](self._handle)

    def reaches(self, visible: int, count: int) -> bool:
        """Tell whether the states are there that a row after ``visible`` tokens reads, in a pass of ``count`` rows."""
        return bool(self._call["reaches"](self._handle, visible, count))

    def lends(self, length: int) -> int:
        """Count the first tokens, at most ``length``, that another text may copy."""
        return int(self._call["lends"](self._handle, length))

    def copy_prefix_from(self, other: Books, length: int) -> int:
        """Say that the memory holds a copy of what another text ``lends`` -> how many tokens are left of it."""
        return int(self._call["copy_prefix_from"](self._handle, other._handle, length))

    # -- states --------------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> int:
        """1: some states of delta rules hold fewer tokens than the text has; -1: only some that hold more; else 0."""
        return int(self._call["behind"](self._handle))

    def set_held(self, tokens: int) -> None:
        """Say that the states of delta rules hold this many tokens."""
        self._call["set_held"](self._handle, tokens)

    def states(self) -> NDArray[np.float32]:  # [n]
        """Copy what the next token reads of the states, which hold exactly the text."""
        found = np.empty(self._call["state_size"](self._handle), np.float32)
        self._call["copy_states"](self._handle, found.ctypes.data)
        return found

    def put_states(self, states: NDArray[np.float32]) -> bool:  # [n]
        """Restore ``states`` of the same text, of which the memory has no others -> whether the size is right."""
        states = np.ascontiguousarray(states)
        return bool(self._call["put_states"](self._handle, states.ctypes.data, states.size))

    def checkpoint(self) -> None:
        """Keep the states of the text as it is, for ``crop``: a copy of what the next token reads."""
        if self._call["checkpoint"](self._handle) < 0:
            raise MemoryError(str(self.refusal()))

    def limit(self, most: int) -> None:
        """Keep at most this many checkpoints from now on: the first one and the newest ones."""
        self._call["limit"](self._handle, most)

    @property
    def checkpoints(self) -> list[int]:
        """Tokens of the text at each checkpoint."""
        found = np.zeros(_MOST_LENGTHS, np.int64)
        return found[: self._call["checkpoints"](self._handle, found.ctypes.data, len(found))].tolist()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all checkpoints."""
        return int(self._call["checkpoint_bytes"](self._handle))
