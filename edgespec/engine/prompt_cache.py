"""Prompt cache on disk: the KV state of a prompt is kept, and the next process finds it.

A request restores the longest prefix of its prompt that a file has (``runtimes.files.prompts``), with the bits that
passes would compute.  A separate thread writes the rest of the text, if reading it again would take long.  It copies
one block at a time, between rounds, while the slot still holds the text.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgespec.decoding.target import common_prefix
from edgespec.drafters.hidden_state import HiddenStateDrafter
from edgespec.drafters.other_tokenizer import OtherTokenizer
from edgespec.engine.prompt_writer import NO_STATE, PromptWriter, WriteJob
from edgespec.engine.sharing import FairLock, PrefillBudget
from edgespec.errors import EdgespecError
from edgespec.planning.budget import prompt_limit
from edgespec.planning.profiles import this_machine
from edgespec.runtimes.files.bundle import Bundle, sha256
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.files.prompts import Bytes, Damaged, Prefix, PromptFolder, root_of, touch
from edgespec.runtimes.files.session_file import fill, slot_bytes
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.ort.session import default_threads
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.version import __version__

WORTH = 1.0  # seconds: text that is read faster than this is not written
LEAST = 64  # tokens that a file must have more than the slot
EVERY = 2048  # tokens of a long prompt between two writes
_TRIES = 8  # beginnings of one text that are tried, where files are damaged or gone
_READERS = 4  # most threads that read files and compare seals


def origin_of(manifest: Manifest, model: Model) -> dict[str, str]:
    """Describe the origin of the bytes of a slot.

    Native operators give the same bits everywhere; those of ONNX Runtime round by version and processor.
    """
    files, part, graph = manifest.files, model.part, model.graph
    found = {
        "weights": files[part.weights].sha256,
        "operators": graph.operators,
        "graph": files[graph.file].sha256,
    }
    if part.high_alone:
        found["planes"] = "high"
    if graph.operators == "native" and not part.foreign:
        tables = part.attention.tables if part.attention else ""
        kv = ", ".join(f"{name} {value}" for name, value in asdict(model.kv).items() if value)
        return found | {"attention": kv, "key tables": files[tables].sha256 if tables else ""}
    machine = this_machine()
    return found | {"processor": machine.processor, "ONNX Runtime": machine.onnxruntime}


def adapter_of(slot: Slot) -> dict[str, str]:
    """Describe the adapter of a slot's rows, by what it computes; nothing without one."""
    store = getattr(slot.model, "adapters", None)
    return {"adapter": store.digests[slot.adapter]} if store is not None and slot.adapter else {}


class PromptCache:
    """The prompts of a loaded bundle; ``paces``: how fast the target and drafts read.

    ``on``: whether prompts are found and kept at all.
    """

    def __init__(
        self,
        bundle: Bundle,
        wanted: bool,
        lock: FairLock,
        paces: tuple[PrefillBudget, PrefillBudget],
        left: Callable[[], int | None],
    ) -> None:
        self._bundle, self._paces, self._path = bundle, paces, str(bundle.path.resolve())
        limit = prompt_limit() if wanted else 0
        self.on = limit > 0
        self._writer = PromptWriter(lock, limit, left)
        self._folders: dict[tuple[str, str | None, int], PromptFolder | None] = {}  # by weights, owner, adapter
        self._warned = False

    def finish(self) -> None:
        """Wait until everything is written."""
        self._writer.finish()

    def take_up(
        self, slot: Slot, tokens: Sequence[int], owner: str | None, room: int, draft: bool = False
    ) -> KeptText | None:
        """Load into a slot the longest prefix of a text that it or a file has, except the text's last token.

        The caller holds the lock.  Only the part of ``owner`` (``SessionPool.take``) before a space counts.  The slot
        must have ``room`` for that many tokens.  Returns the text's part on the disk, or None if this slot is not
        cached.
        """
        if draft and slot.stateful:  # after a crop it reads these tokens again in any case
            return None
        folder = self._folder(slot, owner)
        if folder is None:
            return None
        held = slot.cropped(common_prefix(slot.tokens, tokens[:-1]))
        found = self._find(folder, SlotText(slot, slot), tokens, held, room)
        return KeptText(self._writer, folder, SlotText(slot, slot), tokens, found, self._paces[draft], self._path)

    def take_up_rows(
        self, drafter: HiddenStateDrafter, tokens: Sequence[int], names: Sequence[int], owner: str | None, room: int
    ) -> KeptText | None:
        """Do the same with a drafter's own rows, of which the text has ``names``; the target holds not less of it."""
        slot, target = drafter.slot, drafter.target
        assert isinstance(target, Slot)
        folder = self._folder(slot, owner, target)
        if folder is None:
            return None
        held, behind = len(slot.tokens), drafter.deferred_rows
        # no state to continue from: rows are computed again from a checkpoint
        if drafter.stateful and drafter.known == held:
            held = max(target.cropped(held) - behind, 0)
        found = self._find(folder, SlotText(slot, drafter), names, held, room)
        if (
            drafter.stateful and target.cropped(drafter.known) < drafter.known - LEAST
        ):  # it holds a longer text's states
            self.take_up(target, tokens[: drafter.known + 1], owner, room)
        source, pace = SlotText(slot, drafter), self._paces[False]
        return KeptRows(drafter, self._writer, folder, source, names, found, pace, self._path)

    def _find(self, folder: PromptFolder, source: SlotText, tokens: Sequence[int], held: int, room: int) -> Prefix:
        """Restore the longest prefix of a text in a folder, if it has more than ``held`` tokens."""
        slot, stateful, text = source.slot, source.states.stateful, tokens[:-1]
        found = folder.find(text, stateful)
        for _ in range(_TRIES):
            if found.length < held + LEAST:
                break
            try:
                _restore(folder, source, tokens, found, held, min(slot.context, room))
                touch(path for path, *_ in found.pieces())
                break
            except Damaged as error:
                self._warn(error)
            except OSError:  # another process has just removed it, or the disk does not give it
                pass
            held = 0 if stateful else held
            found = folder.find(text, stateful)
        return found

    def _folder(self, slot: Slot, owner: str | None, target: Slot | None = None) -> PromptFolder | None:
        """Find the folder of an owner; None = no key to encrypt with.

        ``target``: slot whose hidden states a drafter's rows are computed from.
        """
        model = slot.model
        owner = None if owner is None else owner.partition(" ")[0]
        key = model.part.weights, owner, (target or slot).adapter
        if key not in self._folders:
            facts = origin_of(self._bundle.manifest, model) | adapter_of(slot) | {"edgespec": __version__}
            if target is not None:
                made_of = origin_of(self._bundle.manifest, target.model) | adapter_of(target)
                facts |= {f"target's {name}": value for name, value in made_of.items()}
            library = native_library()
            if model.graph.operators != "native":
                facts["threads"] = str(min(model.threads, 2))  # one, or several
            elif library.path is not None:
                facts["library"] = sha256(library.path)
            root = root_of(facts, owner)
            self._folders[key] = None if root is None else PromptFolder(root)
        return self._folders[key]

    def _warn(self, error: Damaged) -> None:
        """Remove a damaged file, and warn once."""
        with suppress(OSError):
            error.path.unlink()
        if not self._warned:
            self._warned = True
            warnings.warn(f"{error}; it was removed, and the prompt is read again", stacklevel=2)


class KeptPrompt:
    """The stored parts of a request's prompt, slot by slot.

    Args:
        prompts: the cache; None = nothing is kept.
        tokens: the prompt, and the answer so far.
        ends: lengths of its turns.
        owner: whose it is.
        room: tokens that a slot is to have room for.
    """

    def __init__(
        self, prompts: PromptCache | None, tokens: Sequence[int], ends: Sequence[int], owner: str | None, room: int
    ) -> None:
        self._prompts, self._tokens, self._ends, self._owner, self._room = prompts, tokens, ends, owner, room
        self._kept: dict[str, KeptText] = {}
        self._slots: list[Slot] = []

    def opened(self, name: str, slot: Slot) -> None:
        """Restore a slot of the request; a drafter's own rows once it begins the prompt."""
        if self._prompts is None:
            return
        self._slots.append(slot)
        if name == "drafter":
            slot.on_begin = self._begin_rows
        elif slot.model.translation is not None:
            slot.on_begin = self._begin_translated
        else:
            draft = name == "draft"
            self._watch(name, self._prompts.take_up(slot, self._tokens, self._owner, self._room, draft=draft))

    def _begin_rows(self, drafter: HiddenStateDrafter, names: list[int]) -> None:
        if self._prompts is not None and not drafter.cache.borrowed:
            found = self._prompts.take_up_rows(drafter, self._tokens, names, self._owner, self._room)
            self._watch("drafter", found, drafter.deferred_rows)

    def _begin_translated(self, drafter: OtherTokenizer, tokens: list[int]) -> None:
        """Restore the slot of a draft with another tokenizer, whose ``tokens`` are the text's."""
        slot = drafter.model
        assert isinstance(slot, Slot)
        if self._prompts is not None:
            found = self._prompts.take_up(slot, tokens, self._owner, self._room, draft=True)
            if found is not None:
                self._kept["draft"], found.own = found, drafter.own
                found.watch(len(tokens), ())

    def _watch(self, name: str, found: KeptText | None, behind: int = 0) -> None:
        if found is not None:
            self._kept[name] = found
            found.watch(len(self._tokens), self._ends, behind)

    def rows(self, most: int) -> int:
        """Limit the next piece, so that it ends at a point to keep."""
        return min([most, *(kept.rows(most) for name, kept in self._kept.items() if name != "draft")])

    def end(self, tokens: Sequence[int]) -> None:
        """Write what the request left in its slots; ``tokens``: prompt and answer."""
        with suppress(EdgespecError):  # the text exists; another process reads it again
            for kept in self._kept.values():
                kept.end(tokens)

    def stop(self) -> None:
        """Write nothing of this request from now on."""
        self._prompts = None
        self._kept.clear()
        for slot in self._slots:
            slot.on_read = slot.on_begin = None
        self._slots.clear()


class States(Protocol):
    """Holder of the states of a text: a slot, or a drafter of the target; see ``Slot``."""

    @property
    def stateful(self) -> bool: ...
    def state(self) -> Bytes: ...
    def put_state(self, state: Bytes) -> bool: ...


@dataclass(frozen=True)
class SlotText:
    """The storage of a text."""

    slot: Slot  # its keys and values
    states: States  # its states


class KeptText:
    """The text of a slot, the part ``found`` on disk, and the part to write there."""

    def __init__(
        self,
        writer: PromptWriter,
        folder: PromptFolder,
        source: SlotText,
        tokens: Sequence[int],
        found: Prefix,
        pace: PrefillBudget,
        bundle: str,
    ) -> None:
        self._writer, self._folder, self._pace, self._bundle = writer, folder, pace, bundle
        self._slot, self._states, self._tokens = source.slot, source.states, tokens
        self._length = found.length
        self._stops: list[int] = []
        # of a draft with another tokenizer: a text of the target -> the slot's tokens of it
        self.own: Callable[[list[int]], list[int]] | None = None

    def watch(self, tokens: int, ends: Sequence[int], behind: int = 0) -> None:
        """Save a prompt while it is read: at the ends of turns, at the end, and every ``EVERY`` tokens.

        Args:
            tokens: of the prompt.
            ends: lengths of the prompt at the ends of turns.
            behind: tokens without a row yet, for a drafter.
        """
        last = tokens - 1
        stops = {stop - behind for stop in (*ends, last, *range(EVERY, last, EVERY))}
        self._stops = sorted(stop for stop in stops if self._length < stop <= last - behind)
        self._slot.on_read = self._read

    def rows(self, most: int) -> int:
        """Limit the next piece, so that it ends at a point to keep."""
        held = len(self._slot.tokens)
        return min([most, *(stop - held for stop in self._stops if stop > held)])

    def keep(self, text: Sequence[int]) -> None:
        """Write the prefix that the slot holds, if reading it again would take long; see ``take_up``."""
        length = common_prefix(self._slot.tokens, text)
        if length < LEAST or not self._worth(length):
            return
        stateful = self._states.stateful
        state = self._states.state() if stateful and length == len(self._slot.tokens) else NO_STATE
        if stateful and not state.size:
            return
        weights, facts = self._slot.model.folder / self._slot.model.part.weights, {"bundle": self._bundle}
        make = partial(self._folder.make, weights, facts)
        if self._writer.add(WriteJob(self._folder, self._slot, list(text[:length]), state, make)):
            self._length = length

    def end(self, tokens: Sequence[int]) -> None:
        """Write what the slot holds of a text that has ended."""
        self.keep(tokens if self.own is None else self.own(list(tokens)))

    def _worth(self, length: int) -> bool:
        """Whether reading this much of the text takes long."""
        return (length - self._length) * (self._pace.cost or 0.0) >= WORTH

    def _read(self) -> None:
        """Note that the slot has read some of the prompt."""
        if len(self._slot.tokens) in self._stops:
            self.keep(self._tokens)


class KeptRows(KeptText):
    """Rows of a drafter; their names are its text."""

    def __init__(self, drafter: HiddenStateDrafter, *how: Any) -> None:
        super().__init__(*how)
        self._drafter = drafter

    def end(self, tokens: Sequence[int]) -> None:
        if self._worth(len(tokens)):
            self.keep(self._drafter.flush_pending(tokens))


def _restore(
    folder: PromptFolder, source: SlotText, tokens: Sequence[int], found: Prefix, held: int, room: int
) -> None:
    """Fill a slot that holds ``held`` tokens of a text with the part found.

    Raises:
        Damaged, OSError: of a file; the slot holds as much as before then, or nothing where it has states.
    """
    slot, states = source.slot, source.states
    slot.reserve(room)
    slot.held()  # what the last request left to the next pass
    slot.take_up(tokens[: found.length], found.length)
    pieces = [piece for piece in found.pieces() if piece[2] > held or piece[0] == found.end]

    def read(mine: Sequence[tuple[Path, int, int]]) -> Bytes:  # the state after the last one
        buffer, state = np.zeros(0, np.uint8), NO_STATE
        for path, start, stop in mine:
            arrays = slot.part(start, stop)
            size = slot_bytes(arrays)
            if len(buffer) < size:
                buffer = np.empty(size, np.uint8)
            state = folder.read(path, buffer, size)
            fill(arrays, buffer)
        return state

    try:
        threads = min(_READERS, default_threads(), len(pieces))
        with ThreadPoolExecutor(threads) as pool:  # reading, hashing and copying hold no lock of Python's
            read_ones = list(pool.map(read, [pieces[at::threads] for at in range(threads)]))
        state = read_ones[(len(pieces) - 1) % threads] if found.end else NO_STATE
        if not (states.put_state(state) and slot.taken_up()):
            raise Damaged(found.pieces()[-1][0], "states of another text")
    except BaseException:
        slot.crop(0 if states.stateful else held)
        raise
