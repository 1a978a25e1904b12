"""States of short convolutions and delta rules: after any rounds of draft tokens, the bits that single tokens leave.

`python -m tests.runtimes.slots.test_states 10000` runs that many rounds of each kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from edgespec.decoding.target import Pass, SkipSet
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files.formats import LONGEST_PASS, STATE_ROWS, Format
from edgespec.runtimes.files.kv import state_bytes
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.slots.kv_reader import tokens_held
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from tests.conftest import Written
from tests.support.passes import run_draft, run_hypotheses

Write = Callable[..., Written]
pytestmark = pytest.mark.usefixtures("native")
NAMES = [
    "lfm2_conv",
    "lfm2_biases",
    "qwen3_5_delta",
    "qwen3_5_biases",
    "olmo_hybrid_nope",
    "granite_hybrid_dense",
    "granite_hybrid_experts",
]
SKIP = SkipSet(attention=(1,), mlp=(2,))
ROUNDS = int(os.environ.get("EDGESPEC_ROUNDS", "300")) // 2


def opened(writer: Write, name: str, form: Format = "fp32") -> NativeSlot:
    slot = writer("native", name, form).slot("native")
    assert isinstance(slot, NativeSlot)
    return slot


def path_of(parents: np.ndarray, leaf: int) -> list[int]:
    path = [leaf]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def checkpoints(slot: NativeSlot) -> list[int]:
    return slot._books.checkpoints


def leave_a_guess(slot: NativeSlot, guess: int, kept: int) -> None:
    """Make the mistake that this file is about: the state of a rejected ``guess`` in the place of that of ``kept``."""
    assert slot._cache is not None
    facts, tokens = slot.model.facts, len(slot.tokens)
    slot._settle()
    if facts.delta:
        slot._books.hold(tokens + guess - kept, slot.high_water_mark)
        slot._settle()
        slot._books.hold(tokens, slot.high_water_mark)
        slot._books.set_held(tokens)
        return
    rows = slot._cache.array[0, : state_bytes(facts)].view("<f4").reshape(-1, STATE_ROWS, facts.hidden)
    rows[:, kept % STATE_ROWS] = rows[:, guess % STATE_ROWS]


def rounds(
    guessing: NativeSlot, single: NativeSlot, count: int, seed: int, trees: bool = False, spoilt: bool = False
) -> None:
    """Draft random tokens and keep a random path; ``single`` reads the kept tokens one by one."""
    random = np.random.default_rng(seed)
    vocab, marks = guessing.vocab_size, random.integers(20, 300, 3).tolist()
    for number in range(count):
        text = guessing.tokens
        if len(text) > 300 or random.random() < 0.03:  # another turn: back to a prefix, near or far
            prefix = text[: int(random.integers(0, len(text) + 1))]
            reached = [length for length in checkpoints(guessing) if length <= len(prefix)]
            same = guessing.follow(prefix)
            assert same in (max(reached, default=0), len(prefix))
            guessing.mark([length for length in marks if length <= len(prefix)], 3)
            guessing.prefill(prefix[same:])
            single.mark((), 0)
            same = single.follow(prefix)
            assert same in (0, len(prefix))
            single.prefill(prefix[same:])
        past, n = len(guessing.tokens), int(random.integers(1, 9))
        tokens = random.integers(0, vocab, n)
        if random.random() < 0.3:  # a self-draft, which is forgotten
            for at in range(int(random.integers(1, 4))):
                run_draft(guessing, random.integers(0, vocab, 1), at, SKIP)
        chain = not trees or random.random() < 0.3
        parents = np.arange(-1, n - 1) if chain else np.array([int(random.integers(-1, row)) for row in range(n)])
        logits = guessing.forward(tokens, None if chain else parents).logits.copy()
        path = path_of(parents, int(random.integers(0, n)))
        guessing.keep(path)
        if spoilt and path[-1] + 1 < n:
            leave_a_guess(guessing, past + n - 1, past + len(path) - 1)
        for row in path:
            expected = single.forward(tokens[row : row + 1]).logits
            assert (logits[row] == expected[0]).all(), f"round {number}: the logits of row {row} differ"
            single.keep([0])
        assert guessing.tokens == single.tokens
        if number % 20 == 19:
            compare(guessing, single)


def compare(guessing: NativeSlot, single: NativeSlot) -> None:
    """Everything that is kept of the text."""
    facts, held = single.model.facts, single.snapshot()
    assert any(key.startswith("delta" if facts.delta else "convolution") for key in held)
    for key, rows in guessing.snapshot().items():
        np.testing.assert_array_equal(rows, held[key], key)


@pytest.mark.parametrize("form, trees", [("fp32", False), ("int4", False), ("fp32", True), ("int4", True)])
@pytest.mark.parametrize("name", NAMES)
def test_rejected_guesses_leave_nothing(writer: Write, name: str, form: Format, trees: bool) -> None:
    for seed in range(2):
        rounds(opened(writer, name, form), opened(writer, name, form), ROUNDS, seed, trees)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_guess_left_in_a_state_is_found(writer: Write, name: str, trees: bool) -> None:
    with pytest.raises(AssertionError, match="the logits of row"):
        rounds(opened(writer, name), opened(writer, name), 150, 0, trees, spoilt=True)


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_a_fresh_prefill(writer: Write, name: str) -> None:
    slot, fresh = opened(writer, name), opened(writer, name)
    tokens = np.random.default_rng(4).integers(0, slot.vocab_size, 320)
    slot.prefill(tokens[:40].tolist())
    for at in range(40, 320, 8):
        slot.forward(tokens[at : at + 8])
        slot.keep(range(8))
    fresh.prefill(tokens.tolist())
    for key, rows in slot.snapshot().items():
        np.testing.assert_array_equal(rows, fresh.snapshot()[key], key)


@pytest.mark.parametrize("skip", [None, SKIP])
def test_hypotheses_near_and_far(writer: Write, skip: SkipSet | None) -> None:
    """Near ones are rows of one pass; for those too far back for kept states, the text is run again."""
    slot, other = opened(writer, NAMES[0]), opened(writer, NAMES[0])
    text = np.random.default_rng(6).integers(0, slot.vocab_size, 300)
    for starts in ([290, 250, 280], [290, 40, 5, 41]):
        slot.prefill(text[slot.follow(text.tolist()) :].tolist())
        seen = np.repeat(starts, 3)
        tokens = (seen * 7 + np.arange(len(seen))) % slot.vocab_size
        parents = np.where(np.arange(len(seen)) % 3 > 0, np.arange(len(seen)) - 1, -1)
        found = run_hypotheses(slot, tokens, seen, parents, skip).logits.copy()
        assert slot.tokens == text.tolist()
        for at, start in enumerate(starts):
            other.follow([])
            other.prefill(text[:start].tolist())
            for row in range(3 * at, 3 * at + 3):
                expected = run_draft(other, tokens[row : row + 1], row - 3 * at, skip).logits
                np.testing.assert_allclose(found[row], expected[0], rtol=0, atol=1e-4)


def test_far_behind_it_begins_again(writer: Write) -> None:
    slot = opened(writer, NAMES[0])
    text = list(range(2, 150)) + list(range(2, 150))
    slot.prefill(text)
    assert slot.follow(text[: len(text) - LONGEST_PASS]) == len(text) - LONGEST_PASS
    slot.prefill(text[len(slot.tokens) :])
    assert slot.follow(text[: len(text) - LONGEST_PASS - 1]) == 0
    slot.prefill(text[: len(text) - LONGEST_PASS])
    assert slot.follow(text) == len(text) - LONGEST_PASS
    slot.prefill(text[len(slot.tokens) :])
    assert slot.follow(text[: len(text) - LONGEST_PASS - 1]) == len(text) - LONGEST_PASS - 1  # gone back to before
    with pytest.raises(InvalidRequest, match="a pass of 129 rows"):
        slot.forward(np.zeros(LONGEST_PASS + 1, np.int64))


@pytest.mark.parametrize("revocable", [False, True])
def test_a_delta_rule_never_goes_on_from_more_than_the_text(writer: Write, revocable: bool) -> None:
    """A state cannot be cropped: the text is read again, unless its tokens were not yet added to the state."""
    slot, fresh = opened(writer, "qwen3_5_delta"), opened(writer, "qwen3_5_delta")
    text = np.random.default_rng(8).integers(0, slot.vocab_size, 220)
    slot.revocable = revocable
    slot.prefill(text[:200].tolist())
    for at in range(200, 212):
        slot.forward(text[at : at + 1])
        slot.keep([0])
    assert set(tokens_held(slot._head, slot.model.facts)) == {200 if revocable else 211}
    lengths = (204 if revocable else 211, 203, 150)
    for length in lengths:  # where the state has not gone yet, and where it has been
        slot.mark((), 0)
        reused = slot.follow(text[:length].tolist())
        assert reused == (length if length == lengths[0] else 0)
        slot.prefill(text[reused:length].tolist())
        fresh.prefill(text[fresh.follow(text[:length].tolist()) : length].tolist())
        expected = fresh.forward(text[length : length + 3]).logits
        np.testing.assert_array_equal(slot.forward(text[length : length + 3]).logits, expected)


def test_slots_of_a_batch_have_states_of_their_own(writer: Write) -> None:
    model = writer("native", NAMES[0]).model("native")
    batch, alone = NativeBatch(model, 3), [opened(writer, NAMES[0]) for _ in range(3)]
    random = np.random.default_rng(5)
    for _ in range(40):
        pieces = [random.integers(0, model.facts.vocab, int(random.integers(1, 6))) for _ in alone]
        parents = [np.array([int(random.integers(-1, row)) for row in range(len(piece))]) for piece in pieces]
        passes = [(slot, Pass(tokens, above)) for slot, tokens, above in zip(batch.slots, pieces, parents, strict=True)]
        for found, slot, own, piece, tree in zip(batch.run(passes), batch.slots, alone, pieces, parents, strict=True):
            np.testing.assert_array_equal(found.logits, own.forward(piece, tree).logits)
            path = path_of(tree, int(random.integers(0, len(piece))))
            slot.keep(path)
            own.keep(path)


def test_stock_operators_are_refused(writer: Write) -> None:
    part = writer("native", NAMES[0]).part
    assert list(part.graphs) == ["native"]
    assert choose_operators("auto", part).kind == "native"
    with pytest.raises(BundleError, match=r"needs native operators(.|\n)*leave --device and --operators out"):
        choose_operators("stock", part)


def main() -> None:
    """Many rounds of each kind, with bundles in a temporary folder."""
    import subprocess
    import sys

    rounds_each = sys.argv[1] if len(sys.argv) > 1 else "10000"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "--timeout=0", __file__, "-k", "leave_nothing"],
        check=True,
        env={**os.environ, "EDGESPEC_ROUNDS": rounds_each},
    )


if __name__ == "__main__":
    main()
