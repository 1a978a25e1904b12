"""Trees over whole models: a row's logits, hidden state and taps, and what is kept, are a chain's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import Output, Pass
from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.read import read_drafter
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import FORMATS, Attention, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from tests.conftest import TARGET, Written
from tests.lossless.test_architectures import CASES
from tests.support import hf
from tests.support.any_drafter import Pair
from tests.support.coded import Prepared, prepare
from tests.support.eagle import write_random
from tests.support.passes import absorb, run_inputs
from tests.support.slots import MODELS, depth_first, path_to, random_tree

Write = Callable[..., Written]
pytestmark = pytest.mark.usefixtures("native")
DEPTHS = (0, 1, 29, 63, 121, 126, 128, 200)


def numbers(output: Output, row: int) -> list[NDArray[np.float32]]:
    """Everything that a pass says of a row."""
    return [array[row].copy() for array in (output.logits, output.hidden, output.aux_hidden) if array is not None]


class Compared:
    """A text whose next rows come as trees over one slot and, over another, one by one."""

    def __init__(self, trees: NativeSlot, chains: NativeSlot, seed: int = 0) -> None:
        self.trees, self.chains, self.random = trees, chains, np.random.default_rng(seed)
        self.tapped = bool(trees.model.part.aux_hidden_layers)

    def run(self, slot: NativeSlot, tokens: NDArray[np.int64], parents: NDArray[np.int64] | None = None) -> Output:
        return slot.run(Pass(tokens, parents, hidden=True, aux_hidden=self.tapped))

    def words(self, count: int) -> NDArray[np.int64]:
        return self.random.integers(2, self.trees.vocab_size, count)

    def path(self, text: list[int], tokens: NDArray[np.int64]) -> list[NDArray[np.float32]]:
        """Run ``tokens`` one by one after ``text``; return what the last one gives."""
        assert self.chains.follow(text) == len(text)
        for token in tokens:
            found = numbers(self.run(self.chains, token[None]), 0)
            self.chains.keep([0])
        return found

    def fill(self, to: int) -> None:
        """Extend the text to ``to`` tokens in both slots."""
        more = self.words(max(0, to - len(self.trees.tokens))).tolist()
        for slot in (self.trees, self.chains):
            slot.prefill(more)

    def tree(self, parents: Sequence[int]) -> None:
        """Run the tree of ``parents``, compare each row with its path as a chain, and keep a random path."""
        text, tokens = list(self.trees.tokens), self.words(len(parents))
        output = self.run(self.trees, tokens, np.array(parents))
        found = [numbers(output, row) for row in range(len(parents))]
        self.chains.revocable = True  # states wait where they can be gone back to
        for row in range(len(parents)):
            for got, expected in zip(found[row], self.path(text, tokens[path_to(parents, row)]), strict=True):
                np.testing.assert_array_equal(got, expected, f"row {row} of {list(parents)} after {len(text)}")
        kept = path_to(parents, int(self.random.integers(len(parents))))
        self.trees.keep(kept)
        self.path(text, tokens[kept])
        self.chains.revocable = False
        self.same()

    def same(self) -> None:
        """Check that both slots keep the same tokens and states."""
        assert self.trees.tokens == self.chains.tokens
        held = self.chains.snapshot()
        for key, values in self.trees.snapshot().items():
            np.testing.assert_array_equal(values, held[key], key)

    def go(self, rows: Sequence[int] = (16, 32), depths: Sequence[int] = DEPTHS) -> None:
        """Trees at several depths, then a pass of a chain over what they left."""
        for depth in depths:
            self.fill(min(depth, self.trees.context - 2 * max(rows)))
            for count in rows:
                self.tree(random_tree(self.random, count))
        self.fill(len(self.trees.tokens) + 1)
        last = self.words(9)
        np.testing.assert_array_equal(self.trees.forward(last).logits, self.chains.forward(last).logits)


def opened(made: Written | Prepared, threads: int, attention: Attention = "f16") -> NativeSlot:
    if isinstance(made, Prepared):
        return made.slot(ATTENTION[attention], threads)
    slot = made.slot("native", threads)
    assert isinstance(slot, NativeSlot)
    return slot


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_formats(writer: Write, name: str, form: Format) -> None:
    made = writer("native", name, form)
    Compared(opened(made, 2), opened(made, 1)).go()


@pytest.mark.parametrize("kind", sorted(CASES))
def test_architectures(writer: Write, kind: str) -> None:
    """Windows, capped scores, shared keys, experts, convolutions, delta rules, state spaces."""
    made = writer("native", CASES[kind], "int4")
    depths = DEPTHS if CASES[kind] not in hf.CONTEXTS else (0, 1, 29)
    Compared(opened(made, 2), opened(made, 1)).go((13,), depths)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("coded"), "padded")


@pytest.mark.parametrize("attention", ATTENTION)
def test_attentions(coded: Prepared, attention: Attention) -> None:
    Compared(opened(coded, 2, attention), opened(coded, 1, attention)).go(depths=(*DEPTHS, 380, 508, 600))


def test_taps_and_a_drafters_own_cache(tmp_path: Path) -> None:
    arch = open_model(resolve(TARGET), 320)
    source = write_random(tmp_path / "checkpoint", arch, {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]})
    pair = Pair(tmp_path, arch, read_drafter(source, arch), "native")
    trees, chains = NativeSlot(pair.model), NativeSlot(pair.model)
    Compared(trees, chains).go((16,))
    random, drafter = np.random.default_rng(2), pair.drafter
    assert drafter.part.decoder is not None
    own, single = NativeSlot(drafter), NativeSlot(drafter)
    for depth in (3, 60, 125):
        rows = random.standard_normal((depth, drafter.part.decoder.columns)).astype(np.float32)
        parents = random_tree(random, 16)
        given = random.standard_normal((16, rows.shape[1])).astype(np.float32)
        for slot in (own, single):
            slot.follow([])
            absorb(slot, rows)
        output = run_inputs(own, given, True, parents=np.array(parents))
        found = [numbers(output, row) for row in range(16)]
        for row in range(16):
            single.follow([0] * depth)
            for one in path_to(parents, row):
                expected = numbers(run_inputs(single, given[one : one + 1], True), 0)
                single.keep([0])
            for got, wanted in zip(found[row], expected, strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_trees_beside_each_other(writer: Write) -> None:
    """Trees of several sequences in one pass, of different lengths."""
    made = writer("native", MODELS[0], "int4")
    batch, random = NativeBatch(made.model("native", 2), 3), np.random.default_rng(4)
    alone = [opened(made, 1) for _ in batch.slots]
    for slot, single, length in zip(batch.slots, alone, (3, 90, 127), strict=True):
        for one in (slot, single):
            one.prefill(random.integers(2, one.vocab_size, length).tolist() if one is slot else list(slot.tokens))
    for _ in range(12):
        trees = [random_tree(random, int(random.integers(1, 14))) for _ in alone]
        words = [random.integers(2, alone[0].vocab_size, len(tree)) for tree in trees]
        passes = [
            (slot, Pass(tokens, np.array(tree))) for slot, tokens, tree in zip(batch.slots, words, trees, strict=True)
        ]
        outputs = [output.logits.copy() for output in batch.run(passes)]
        for slot, single, found, tokens, parents in zip(batch.slots, alone, outputs, words, trees, strict=True):
            text = list(single.tokens)
            for row in depth_first(parents):
                path = tokens[path_to(parents, row)].tolist()
                single.follow([*text, *path[:-1]])
                np.testing.assert_array_equal(found[row], single.forward(np.array(path[-1:])).logits[0])
                single.keep([0])
            kept = path_to(parents, int(random.integers(len(parents))))
            slot.keep(kept)
            single.follow(text)
            single.prefill(tokens[kept].tolist())


@pytest.mark.parametrize("row", range(5))
def test_the_probe_notices_a_tree_that_is_no_chain(writer: Write, monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """Where a row that is read differs in a bit; what a sibling gives does not matter."""
    slot = opened(writer("native", MODELS[0], "int4"), 1)
    original, seen = slot.run, []
    assert rows_exact(slot)

    def disturbed(wanted: Pass) -> Output:
        output = original(wanted)
        if wanted.parents is not None:
            seen.append(len(wanted.parents))
            output.logits[row, 0] = np.nextafter(output.logits[row, 0], np.float32(np.inf))
        return output

    monkeypatch.setattr(slot, "run", disturbed)
    assert rows_exact(slot) == (row % 2 == 1)
    assert seen == [5]
