"""The books of a text against plain rules over a plain memory: what is read after any calls is of the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.formats import CHECKPOINTS, LONGEST_PASS, STATE_ROWS
from edgespec.runtimes.files.kv import state_bytes, state_width
from edgespec.runtimes.files.manifest import ModelFacts
from edgespec.runtimes.slots.books import DRAFT, HYPOTHESES, MUTUAL, READ, TREE, Books
from edgespec.runtimes.slots.kv_reader import tokens_held
from tests.conftest import Written

pytestmark = pytest.mark.usefixtures("native")
POSITION, SLOT, VISIBLE, PARENT, PLACE = range(1, 6)
CONTEXT = 600


@dataclass
class Plain:
    """The rules, in plain Python: a text is a list of names of rows, and so is each kind of its memory."""

    facts: ModelFacts
    ring: int
    text: list[int] = field(default_factory=list)
    high_water_mark: int = 0
    since: int = 0
    certain: int = 0
    moves: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: dict[int, list[int]] = field(default_factory=dict)  # the whole text at each
    most: int = CHECKPOINTS
    held: int = 0

    def lost(self, same: int) -> bool:
        stateful = bool(self.ring or self.facts.convolutions)
        gone = stateful and (self.high_water_mark - same > LONGEST_PASS or same < self.since)
        return gone or bool(self.facts.delta and self.held > same)

    def cropped(self, length: int) -> int:
        same = min(length, len(self.text))
        return max((at for at in self.checkpoints if at <= same), default=0) if self.lost(same) else same

    def crop(self, length: int) -> int:
        same, left = min(length, len(self.text)), self.cropped(length)
        if self.lost(same):
            self.high_water_mark = self.since = left
            self.held = left if self.facts.delta else 0
            self.moves = []
        self.moves = [(at, to) for at, to in self.moves if to < left]
        self.checkpoints = {at: text for at, text in self.checkpoints.items() if at <= left}
        del self.text[left:]
        self.certain = left
        return left

    def bound(self) -> None:
        while len(self.checkpoints) > self.most:
            del self.checkpoints[list(self.checkpoints)[1 if self.most > 1 else 0]]


class Slot:
    """A text with both kinds of books, and a memory that holds the name of a row where a pass would write its state."""

    def __init__(self, facts: ModelFacts, ring: int) -> None:
        self.facts, self.plain, self.books = facts, Plain(facts, ring), Books(facts, ring)
        self.head = np.zeros(max(state_bytes(facts), 64), np.uint8)
        self.books.attach(self.head)
        self.keys = np.zeros(CONTEXT + 200, np.int64)  # of attention, by place
        self.waiting: tuple[list[int], list[int]] | None = None  # names and parents of rows that may be kept
        self.revocable = False

    @property
    def states(self) -> np.ndarray:  # [layers, rows, width], of states by place
        layers = self.head[: state_bytes(self.facts)].view(np.float32).reshape(len(self.facts.convolutions) or 1, -1)
        width = state_width(self.facts)
        return layers[:, : STATE_ROWS * width].reshape(len(layers), -1, width)

    @property
    def matrices(self) -> np.ndarray:  # [layers]: a number for what was applied
        return self.head[: state_bytes(self.facts)].view(np.float32).reshape(len(self.facts.convolutions), -1)[:, -17]

    def run(self, names: list[int], parents: list[int] | None, offset: int, how: int) -> None:
        """Plan rows, check their plan, and do to the memory what their pass does."""
        n, past, plain = len(names), len(self.plain.text) + offset, self.plain
        plan = np.full((6, n + 3), -7, np.int64)
        if parents is not None:
            plan[PARENT, 2 : 2 + n] = [parent if parent < 0 else parent + 2 for parent in parents]
        tree = list(range(-1, n - 1)) if parents is None else parents
        depths: list[int] = []
        for parent in tree:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.books.plan(plan.ctypes.data, n + 3, 2, n, offset, how | TREE * (parents is not None), 5)
        mutual = bool(how & MUTUAL)
        expected = {
            POSITION: [past + row if mutual else past + depths[row] for row in range(n)],
            SLOT: [5] * n,
            VISIBLE: [past + n if mutual else past] * n,
            PARENT: [-1 if mutual or parent < 0 else parent + 2 for parent in tree],
            PLACE: list(range(past, past + n)),
        }
        for line, values in expected.items():
            assert plan[line, 2 : 2 + n].tolist() == values
        assert (plan[:, [0, 1, n + 2]] == -7).all()
        assert (plan[0] == -7).all()  # the tokens are the caller's
        plain.high_water_mark = max(plain.high_water_mark, past + n)
        if how & READ:
            plain.certain = len(plain.text) + n
        if not how & DRAFT:
            self.waiting = names, tree
        self.launch(names, past, n if how & READ else 0)

    def launch(self, names: list[int], past: int, read: int) -> None:
        count, end, plain = self.books.waiting, past + len(names), self.plain
        moves = np.zeros((count, 3), np.int64)
        self.books.moves(moves.ctypes.data, 5, read, self.revocable)
        assert moves[:, 0].tolist() == [5] * count
        made = [(at, to) for _, at, to in moves.tolist()]
        committed = len(plain.text) + read
        if self.facts.delta:
            if self.revocable:
                committed = min(committed, max(plain.certain, plain.held, end + self.facts.taps - STATE_ROWS))
            assert made.pop() == (-1, committed)
        assert made == plain.moves
        for at, to in made:
            self.keys[to] = self.keys[at]
            if self.facts.convolutions:
                self.states[:, to % STATE_ROWS] = self.states[:, at % STATE_ROWS]
        for row, name in enumerate(names):
            self.keys[past + row] = name
            if self.facts.convolutions:
                self.states[:, (past + row) % STATE_ROWS] = name
        if self.facts.delta:
            self.matrices[:] = mixed([*plain.text, *names[:read]][:committed])
            tokens_held(self.head, self.facts)[:] = plain.held = committed
        self.books.moved()
        plain.moves = []

    def keep(self, rows: list[int]) -> None:
        assert self.waiting is not None
        past, (names, _) = len(self.plain.text), self.waiting
        self.books.keep(rows)
        self.plain.moves += [(past + row, past + at) for at, row in enumerate(rows) if row != at]
        self.plain.text += [names[row] for row in rows]
        self.waiting = None

    def check(self) -> None:
        """Check that what the next token reads is the text's, once what waits is done."""
        plain, books = self.plain, self.books
        assert books.high_water_mark == max(plain.high_water_mark, len(plain.text))
        assert books.checkpoints == list(plain.checkpoints)
        assert books.needed == max([len(plain.text), *(at + 1 for at, _ in plain.moves)])
        assert books.waiting == len(plain.moves) + bool(self.facts.delta)
        for length in (0, len(plain.text) // 2, len(plain.text) - 130, len(plain.text) - 3, len(plain.text) + 9):
            if length >= 0:
                assert books.cropped(length) == plain.cropped(length)
        keys, states = self.keys.copy(), self.states.copy() if self.facts.convolutions else None
        for at, to in plain.moves:
            keys[to] = keys[at]
            if states is not None:
                states[:, to % STATE_ROWS] = states[:, at % STATE_ROWS]
        assert keys[: len(plain.text)].tolist() == plain.text
        if states is not None and not plain.lost(len(plain.text)):
            for at in range(max(0, len(plain.text) - self.facts.taps + 1), len(plain.text)):
                assert (states[:, at % STATE_ROWS] == plain.text[at]).all()
        if self.facts.delta:
            assert (self.matrices == mixed(plain.text[: plain.held])).all() or not plain.held
            held = plain.held - len(plain.text)
            assert books.behind == (held < 0) - (held > 0)


def mixed(names: list[int]) -> np.float32:
    """Mix rows in order, as a delta rule does."""
    found = 0
    for name in names:
        found = (found * 31 + name) % 8191
    return np.float32(found)


class Calls(RuleBasedStateMachine):
    """Random calls over two texts of a model."""

    facts: ModelFacts
    ring: int

    @initialize()
    def begin(self) -> None:
        self.slots = [Slot(self.facts, self.ring), Slot(self.facts, self.ring)]
        self.at, self.named = 0, 0

    @property
    def slot(self) -> Slot:
        return self.slots[self.at]

    def names(self, count: int) -> list[int]:
        self.named += count
        return [1 + (self.named - row) % 4001 for row in range(count)]

    def room(self, rows: int) -> bool:
        return len(self.slot.plain.text) + rows <= CONTEXT

    @rule()
    def other_slot(self) -> None:
        self.at = 1 - self.at

    @rule(count=strategies.integers(1, LONGEST_PASS), mutual=strategies.booleans())
    def read(self, count: int, mutual: bool) -> None:
        if self.room(count):
            self.slot.run(self.names(count), None, 0, READ | MUTUAL * mutual)
            self.slot.keep(list(range(count)))

    @rule(parents=strategies.lists(strategies.integers(-1, 30), min_size=1, max_size=30), data=strategies.data())
    def guess(self, parents: list[int], data: strategies.DataObject) -> None:
        tree = [-1 if parent < 0 else parent % (row + 1) - 1 for row, parent in enumerate(parents)]
        if not self.room(len(tree)):
            return
        self.slot.run(self.names(len(tree)), tree, 0, 0)
        path = [data.draw(strategies.integers(0, len(tree) - 1))]
        while tree[path[0]] >= 0:
            path.insert(0, tree[path[0]])
        self.slot.keep(path[: data.draw(strategies.integers(0, len(path)))])

    @rule(count=strategies.integers(1, 20), offset=strategies.integers(0, 9))
    def draft(self, count: int, offset: int) -> None:
        if self.room(count + offset):
            self.slot.run(self.names(count), None, offset, DRAFT)

    @rule(back=strategies.integers(0, 300))
    def crop(self, back: int) -> None:
        plain = self.slot.plain
        length = max(0, len(plain.text) - back)
        kept = plain.checkpoints.get(plain.cropped(length), [])
        expected = plain.crop(length)
        assert self.slot.books.crop(length) == expected
        assert not kept or plain.text == kept[:expected] or not plain.since

    @rule()
    def settle(self) -> None:
        if self.slot.books.behind > 0:
            self.slot.run(self.names(1), None, 0, DRAFT)
        elif self.slot.plain.moves:
            self.slot.launch([], len(self.slot.plain.text), 0)

    @precondition(lambda self: self.slot.books.has_checkpoints and not self.slot.books.behind)
    @rule()
    def checkpoint(self) -> None:
        slot, plain = self.slot, self.slot.plain
        if plain.moves:
            slot.launch([], len(plain.text), 0)
        if plain.lost(len(plain.text)):
            return
        slot.books.checkpoint()
        plain.checkpoints.pop(len(plain.text), None)
        if len(plain.text) >= 16 and plain.most:
            plain.checkpoints[len(plain.text)] = list(plain.text)
        plain.bound()

    @rule(most=strategies.integers(0, 5))
    def limit(self, most: int) -> None:
        self.slot.books.limit(most)
        self.slot.plain.most = most
        self.slot.plain.bound()

    @rule(revocable=strategies.booleans())
    def revoke(self, revocable: bool) -> None:
        self.slot.revocable = revocable

    @rule(length=strategies.integers(0, CONTEXT))
    def copy_prefix_from(self, length: int) -> None:
        other, mine = self.slots[1 - self.at], self.slot
        most = min([length, *(to for _, to in other.plain.moves)])
        same = other.plain.cropped(most)
        assert other.books.lends(length) == same
        if not same:
            return
        back = other.plain.lost(same)
        mine.head[:], mine.keys[:same] = other.head, other.keys[:same]
        assert mine.books.copy_prefix_from(other.books, same) == same
        kept = {at: text for at, text in other.plain.checkpoints.items() if at <= same}
        mine.plain = Plain(
            self.facts, self.ring, other.plain.text[:same],
            same if back else max(other.plain.high_water_mark, len(other.plain.text)),
            same if back else other.plain.since, same, [], kept, mine.plain.most,
            (same if back else other.plain.held) if self.facts.delta else 0,
        )  # fmt: skip
        mine.plain.bound()

    @rule()
    def save(self) -> None:
        """Put the states of a text where another text of the same tokens begins."""
        slot, plain = self.slot, self.slot.plain
        if slot.books.behind or plain.moves or plain.lost(len(plain.text)):
            return
        states = slot.books.states()
        if self.facts.convolutions:
            slot.head[:] = 255
        slot.books.hold(len(plain.text), len(plain.text))
        assert not slot.books.put_states(np.append(states, np.float32(0)))
        assert slot.books.put_states(states)
        plain.high_water_mark = plain.since = plain.certain = len(plain.text)
        plain.checkpoints, slot.waiting = {}, None

    @invariant()
    def sound(self) -> None:
        for slot in getattr(self, "slots", ()):
            slot.check()


@pytest.mark.parametrize("name, ring", [("llama_tied_gqa", 0), ("llama_tied_gqa", 192), ("lfm2_conv", 0),
                                        ("lfm2_conv", 192), ("qwen3_5_delta", 0)])  # fmt: skip
def test_any_calls(writer: Callable[..., Written], name: str, ring: int) -> None:
    facts = writer("native", name).part.facts
    calls = type("Calls", (Calls,), {"facts": facts, "ring": ring})
    run_state_machine_as_test(calls, settings=settings(max_examples=12, stateful_step_count=30))


@pytest.fixture
def books(writer: Callable[..., Written]) -> Books:
    return Books(writer("native", "llama_tied_gqa").part.facts, 0)


def planned(books: Books, parents: list[int], how: int = TREE) -> np.ndarray:
    plan = np.zeros((6, len(parents)), np.int64)
    plan[PARENT] = parents
    books.plan(plan.ctypes.data, len(parents), 0, len(parents), 0, how, 0)
    return plan


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 0, 3], [-2], [-1, -5]])
def test_a_row_continues_an_earlier_one(books: Books, parents: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="expected -1, or an earlier one of its slot"):
        planned(books, parents)
    assert books.high_water_mark == 0


@pytest.mark.parametrize("rows", [[1], [0, 1, 2], [2], [0, 2, 4], [0, 0], [-1], [0, 1, 3], [9]])
def test_only_a_path_is_kept(books: Books, rows: list[int]) -> None:
    planned(books, [-1, 0, 0, 2, 1])
    with pytest.raises(InvalidRequest, match="does not continue those before it"):
        books.keep(rows)
    books.keep([0, 2, 3])  # a refusal has changed nothing
    assert (books.high_water_mark, books.waiting, books.needed) == (5, 2, 4)
    with pytest.raises(InvalidRequest, match="not of the last pass"):
        books.keep([0])


def test_rows_of_hypotheses_see_what_they_say(books: Books) -> None:
    books.hold(100, 100)
    plan = np.zeros((6, 4), np.int64)
    plan[VISIBLE], plan[PARENT] = [40, 40, 70, 70], [-1, 0, -1, 2]
    books.plan(plan.ctypes.data, 4, 0, 4, 0, TREE | HYPOTHESES | DRAFT, 0)
    assert plan[VISIBLE].tolist() == [40, 40, 70, 70]
    assert plan[POSITION].tolist() == [40, 41, 70, 71]
    assert plan[PLACE].tolist() == [100, 101, 102, 103]
