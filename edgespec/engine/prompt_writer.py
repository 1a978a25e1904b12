"""Writing prompts in the background, a block at a time, while their slots still hold them."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from edgespec.decoding.target import common_prefix
from edgespec.engine.sharing import FairLock
from edgespec.errors import EdgespecError
from edgespec.runtimes.files.cache import BLOCK
from edgespec.runtimes.files.prompts import Bytes, PromptFolder, room_for, touch, trim
from edgespec.runtimes.files.session_file import Arrays, slot_bytes
from edgespec.runtimes.slots.slot import Slot

NO_STATE: Bytes = np.zeros(0, np.uint8)
_MOST_STATES = 64 << 20  # bytes of states that may wait to be written
_MOST = 256  # texts that may wait


@dataclass(frozen=True)
class WriteJob:
    """A pending write."""

    folder: PromptFolder  # where
    slot: Slot  # slot that holds or held it; if it now holds another text, nothing is written
    text: list[int]  # its tokens
    state: Bytes  # state after them; empty if there is none
    make: Callable[[], None]  # makes the folder


class PromptWriter:
    """Writes requested data in a thread that ends when nothing is left.

    It copies a block at a time under ``lock``.  ``limit``: bytes that all prompts may take on the disk; ``left``: bytes
    of memory that states which wait may take, None = any number.
    """

    def __init__(self, lock: FairLock, limit: int, left: Callable[[], int | None]) -> None:
        self._lock, self._limit, self._left = lock, limit, left
        self._waiting: deque[WriteJob] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        _ALL.add(self)

    def add(self, wanted: WriteJob) -> bool:
        """Line up a text; False = too much waits already, or its states do not fit the memory."""
        if wanted.state.size and (left := self._left()) is not None and left < 0:  # the states already use memory
            return False
        with self._changed:
            states = sum(one.state.nbytes for one in self._waiting)
            if len(self._waiting) >= _MOST or states + wanted.state.nbytes > max(_MOST_STATES, wanted.state.nbytes):
                return False
            self._waiting.append(wanted)
            if self._thread is None or not self._thread.is_alive():  # a forked process has none
                self._thread = threading.Thread(target=self._run, name="edgespec-prompts", daemon=True)
                self._thread.start()
        return True

    def finish(self) -> None:
        """Wait until all is written; the caller does not hold the lock."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or not self._thread.is_alive())

    def _run(self) -> None:
        try:
            while (wanted := self._next()) is not None:
                with suppress(OSError, EdgespecError):  # no room, no rights, no memory in reach: it is read again then
                    self._write(wanted)
        finally:
            self._ended()

    def _next(self) -> WriteJob | None:
        """Take the next text; None = the queue is empty, and the thread ends."""
        with self._changed:
            if self._waiting:
                return self._waiting.popleft()
            self._ended()
            return None

    def _ended(self) -> None:
        """Mark this thread as ended; another one may already run."""
        with self._changed:
            if self._thread is threading.current_thread():
                self._thread = None
                self._changed.notify_all()

    def _write(self, wanted: WriteJob) -> None:
        folder, text = wanted.folder, wanted.text
        chain, whole = folder.chain(text), len(text) // BLOCK
        pieces = [(at * BLOCK, (at + 1) * BLOCK, True) for at in range(whole)]
        if len(text) % BLOCK or wanted.state.size:
            pieces.append((whole * BLOCK, len(text), False))
        names = {piece: folder.name_of(chain, text, piece[1], piece[2]) for piece in pieces}
        missing = [piece for piece in pieces if not (folder.path / names[piece]).exists()]
        if not missing or (block := self._copy(wanted, 0, min(BLOCK, len(text)))) is None:
            return
        most, size = room_for(self._limit), slot_bytes(block) * len(missing) + wanted.state.nbytes
        if size > most // 2:
            return
        trim(most, size)
        wanted.make()
        for start, stop, of_block in missing:
            arrays = self._copy(wanted, start, stop)
            if arrays is None:
                break
            folder.write(names[start, stop, of_block], arrays, NO_STATE if of_block else wanted.state)
        touch(folder.path / name for name in names.values())

    def _copy(self, wanted: WriteJob, start: int, stop: int) -> Arrays | None:
        """Copy what the slot has of some tokens; None = it has moved on to another text."""
        with self._lock:
            slot = wanted.slot
            held = getattr(slot, "tokens", ())  # a closed slot has nothing
            if common_prefix(held, wanted.text[:stop]) < stop:
                return None
            return [array.copy() for array in slot.part(start, stop)]


_ALL: weakref.WeakSet[PromptWriter] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """Let the end of the process wait for the current write, but not after another Ctrl-C."""
    with suppress(KeyboardInterrupt):
        for writer in list(_ALL):
            writer.finish()
