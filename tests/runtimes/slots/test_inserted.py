"""Rows of images in a text: equal to transformers', in whatever pieces they are read, and found again by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import Pass
from edgespec.engine.engine import Engine
from edgespec.engine.input import MultimodalTokens
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.images.image import Image
from edgespec.runtimes.slots.inserted import EmbeddingSpan
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from tests.support import sight
from tests.support.c_interface import NODE, OUTPUTS, Native, NativeNode
from tests.support.passes import run_hypotheses, states

pytestmark = pytest.mark.usefixtures("native")
# plain; seen both ways, in all layers or in those with a window; added after layers; with states
KINDS = ["idefics3", "gemma3", "gemma4_large", "qwen3_vl", "qwen3_5"]
TAIL = 10  # tokens after the last image


@dataclass
class Case:
    """An engine, the tokens of a text with two images, and transformers' logits after the last."""

    engine: Engine
    tokens: list[int]
    images: tuple[EmbeddingSpan, ...]
    logits: NDArray[np.float32]  # [vocab]

    def slot(self, tokens: int = 0, chunk: int = 128) -> NativeSlot:
        """Open a slot that has read ``tokens`` tokens by chunks."""
        slot = NativeSlot(self.engine.model, reserve=1)
        slot.chunk = chunk
        slot.prefill(self.tokens[:tokens])
        return slot

    def tail(self, slot: NativeSlot) -> NDArray[np.float32]:
        """Run the last tokens as a pass -> logits, a copy."""
        return slot.forward(np.array(self.tokens[-TAIL:])).logits.copy()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Case]]:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            source, shown = sight.write_case(folder / "source", name), sight.pictures()
            (source / "calibration.txt").write_text("a picture of the sea and what it is " * 99, "utf-8")
            export_model(ExportOptions(str(source), folder / "bundle", [], "fp32", threads=1, quick=True), golden=False)
            engine = load(folder / "bundle", threads=2)
            first, second = (Image.of(shown[number]) for number in sight.SHOWN)
            parts: list[str | Image] = ["a picture ", first, " and another ", second, " what is it"]
            tokens = engine.encode(parts)
            assert isinstance(tokens, MultimodalTokens)
            engine.model.inserted.hold(tokens.spans)
            made[name] = Case(engine, list(tokens), tuple(tokens.spans), sight.reference(name)["logits"][-1])
        return made[name]

    yield get
    for case in made.values():
        case.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_in_whatever_pieces_they_are_read(cases: Callable[[str], Case], kind: str) -> None:
    case = cases(kind)
    n = len(case.tokens) - TAIL
    kept = case.tail(case.slot(n))
    np.testing.assert_allclose(kept[-1], case.logits, atol=2e-4, rtol=0)
    inside = case.tokens.index(case.images[0].first) + 3
    for chunk in (7, 16):
        slot = case.slot(n, chunk)
        for length in (n, 4, inside, n - 2):  # a text that goes back, into an image too, and is read on
            slot.prefill(case.tokens[slot.crop(length) : n])
            np.testing.assert_array_equal(case.tail(slot), kept)
    second = case.tokens.index(case.images[1].first)
    lengths = np.array([3, second, n])  # beginnings, each of which a token continues
    rows = run_hypotheses(slot, np.arange(3), lengths, np.full(3, -1)).logits.copy()
    for token, length in enumerate(lengths):
        np.testing.assert_array_equal(rows[token], case.slot(length).forward(np.array([token])).logits[0])
    guesses = np.array([case.tokens[n], 1, case.tokens[n + 1], case.tokens[n + 2]])
    tree = slot.forward(guesses, np.array([-1, 0, 0, 2])).logits
    np.testing.assert_array_equal(tree[[0, 2, 3]], kept[:3])
    width = case.engine.model.facts.hidden
    np.testing.assert_array_equal(slot.embed(np.array(case.images[0].tokens[:3])), case.images[0].rows[:3, :width])
    batch = NativeBatch(case.engine.model, 2)
    for one in batch.slots:
        one.prefill(case.tokens[:n])
    for output in batch.run([(one, Pass(np.array(case.tokens[-TAIL:]))) for one in batch.slots]):
        np.testing.assert_array_equal(output.logits, kept)
    batch.close()


def test_an_image_that_nobody_holds_and_two_of_one_number(cases: Callable[[str], Case]) -> None:
    case = cases("idefics3")
    slot, store = case.slot(), case.engine.model.inserted
    other = replace(case.images[0], digest=bytes(32), users=0)
    with pytest.raises(InvalidRequest, match="not there"):
        slot.prefill(other.tokens)
    store.hold([other])
    with pytest.raises(InvalidRequest, match="same number"):
        store.hold([replace(other, digest=bytes(31) + b"1")])
    store.let_go([other])


def test_the_c_interface_runs_passes_with_rows_of_images(cases: Callable[[str], Case]) -> None:
    case = cases("qwen3_vl")
    graph, slot = case.engine.model.folder / case.engine.model.graph.file, case.slot(len(case.tokens) - TAIL)
    slot.crop(at := case.tokens.index(case.images[1].first))
    theirs = states(slot, np.array(case.tokens[at : at + 5])).logits
    own = {name: slot._bound[name].array.copy() for name in (*NODE, *OUTPUTS) if name in slot._bound}
    node = NativeNode(graph)
    node.run(own, own)
    np.testing.assert_array_equal(own["logits"], theirs)
    node.close()
    with pytest.raises(ValueError, match="reads more than tokens"):
        Native(graph)
