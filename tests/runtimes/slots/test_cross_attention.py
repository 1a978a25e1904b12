"""Encoders, and decoders that attend over what they give: equal to transformers, and the same bits in every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.target import Ids, Pass, Rows, SkipSet
from edgespec.errors import InvalidRequest
from edgespec.export.architectures.seq2seq import EncoderDecoder
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.runtimes.audio.features import encoder_rows
from edgespec.runtimes.files.formats import Attention, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.slots.encoder import EncodedSources, Encoder
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.native_batch import NativeBatch
from edgespec.runtimes.slots.shared import Model
from tests.support import seq2seq
from tests.support.c_interface import NODE, OUTPUTS, NativeNode
from tests.support.passes import run_draft, run_hypotheses

pytestmark = pytest.mark.usefixtures("native")


@dataclass
class Made:
    """A case, its decoder and its encoder."""

    case: dict[str, Any]
    decoder: Model
    encoder: Encoder
    source: Ids | Rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    def make(name: str, form: Format = "fp32", attention: Attention = "f32", threads: int = 2) -> Made:
        folder = tmp_path_factory.mktemp(name)
        arch, case = open_model(seq2seq.write_case(folder / "source", name), None), seq2seq.reference(name)
        assert isinstance(arch, EncoderDecoder)
        assert arch.encoder is not None
        models = []
        for side, own in ((folder / "decoder", arch), (folder / "encoder", arch.encoder)):
            side.mkdir()
            part = write_model(side, own, ModelSpec(form)).part
            part = part if own is not arch else part.model_copy(update={"source": arch.source_part})
            models.append(Model(side, part, "native", threads, ATTENTION[attention]))
        source = case["source"] if arch.sound is None else encoder_rows(case["source"], arch.sound)
        return Made(case, models[0], Encoder(models[1]), source)

    return make


@pytest.mark.parametrize("name", seq2seq.CASES)
def test_float32_equals_transformers(made: Callable[..., Made], name: str) -> None:
    one = made(name)
    rows, case = one.encoder.encode(one.source), one.case
    np.testing.assert_allclose(rows, case["encoded"], atol=1e-4, rtol=0)
    slot, tokens = NativeSlot(one.decoder), case["tokens"]
    slot.attend(EncodedSources(one.decoder).fill(rows, b"source"))
    found = np.concatenate([slot_rows(slot, tokens[at : at + 90]) for at in range(0, len(tokens), 90)])
    np.testing.assert_allclose(found[case["rows"]], case["logits"], atol=1e-4, rtol=0)
    slot.crop(0)
    text = [int(tokens[0])]
    for expected in case["greedy"]:
        row = slot_rows(slot, text[-1:])[0]
        assert row[expected] >= row.max() - 1e-4  # as close as logits are compared
        text.append(int(expected))


def slot_rows(slot: NativeSlot, tokens: Sequence[int] | Ids) -> Rows:
    """Run a chunk and keep it -> logits [n, vocab], a copy."""
    logits = slot.forward(np.asarray(tokens, np.int64)).logits.copy()
    slot.keep(range(len(tokens)))
    return logits


@pytest.mark.parametrize("form, attention", [("int4", "int8"), ("int8", "f16"), ("fp32", "f32")])
def test_a_row_has_the_same_bits_in_every_pass(made: Callable[..., Made], form: Format, attention: Attention) -> None:
    one, alone = made("t5_gated_untied", form, attention), made("t5_gated_untied", form, attention, threads=1)
    sources: list[Any] = [one.source, one.source[:7], np.resize(one.source, 300)]
    rows = [one.encoder.encode(source) for source in sources]
    for source, own in zip(sources, rows, strict=True):
        np.testing.assert_array_equal(own, alone.encoder.encode(source))
    few, memories = EncodedSources(alone.decoder), EncodedSources(one.decoder)
    text = one.case["tokens"][:40]
    expected, slot = [], NativeSlot(alone.decoder)
    for number, own in enumerate(rows):
        slot.attend(few.fill(own, b"%d" % number))
        assert slot.tokens == []  # tokens that were read with another source are forgotten
        expected.append(np.concatenate([slot_rows(slot, [token]) for token in text]))
    # each in one pass, after a prefill, with a tree, and as hypotheses
    slot = NativeSlot(one.decoder)
    slot.attend(memories.fill(rows[2], b"2"))
    np.testing.assert_array_equal(slot_rows(slot, text), expected[2])
    slot.crop(20)
    tree, path = np.array([text[20], 3, text[21], text[22], 5]), [0, 2, 3]
    found = slot.forward(tree, np.array([-1, 0, 0, 2, 1])).logits
    np.testing.assert_array_equal(found[path], expected[2][20:23])
    slot.keep(path)
    np.testing.assert_array_equal(slot_rows(slot, text[23:]), expected[2][23:])
    guesses = run_hypotheses(slot, np.array([text[30], text[10]]), np.array([30, 10]), np.array([-1, -1])).logits
    np.testing.assert_array_equal(guesses, expected[2][[30, 10]])
    slot.crop(30)
    np.testing.assert_array_equal(run_draft(slot, text[30:31]).logits, expected[2][30:31])
    assert not np.array_equal(run_draft(slot, text[30:31], skip=SkipSet((1,), ())).logits, expected[2][30:31])
    # rows of several memories in one pass
    batch = NativeBatch(one.decoder, 3)
    for number, (each, own) in enumerate(zip(batch.slots, rows, strict=True)):
        each.attend(memories.fill(own, b"%d" % number))
        each.prefill(text[: 5 * number].tolist())
    wanted = [(each, Pass(text[5 * number : 20 + number])) for number, each in enumerate(batch.slots)]
    for number, output in enumerate(batch.run(wanted)):
        np.testing.assert_array_equal(output.logits, expected[number][5 * number : 20 + number])


def test_memories_are_kept_until_their_place_is_wanted(made: Callable[..., Made]) -> None:
    one = made("marian")
    memories, slot = EncodedSources(one.decoder, 2), NativeSlot(one.decoder)
    with pytest.raises(InvalidRequest, match="attends over a source"):
        slot.forward(np.array([1]))
    rows = one.encoder.encode(one.source)
    first = memories.fill(rows, b"a")
    slot.attend(first)
    slot.prefill([1, 2, 3])
    assert memories.fill(rows[:3], b"b").rows == 3
    assert memories.fill(rows, b"a") == first == memories.find(b"a")
    slot.attend(first)
    assert slot.tokens == [1, 2, 3]
    memories.fill(rows, b"c")
    assert memories.find(b"b") is None  # not in use
    other = NativeSlot(one.decoder)
    assert other.copy_prefix_from(slot, 3) == 0  # it attends over nothing
    other.attend(memories.fill(rows, b"c"))
    with pytest.raises(InvalidRequest, match="all 2 memories are in use"):
        memories.fill(rows, b"d")
    other.close()
    memories.fill(rows, b"d")
    for source, message in ((rows[:0], "0 rows"), (np.zeros((401, 64), np.float32), "401 rows: expected 1 to 400")):
        with pytest.raises(InvalidRequest, match=message):
            memories.fill(source, b"e")
    with pytest.raises(InvalidRequest, match="a source of 401 rows"):
        one.encoder.encode(np.zeros(401, np.int64))


def test_the_c_interface_runs_its_passes(made: Callable[..., Made]) -> None:
    one = made("t5_gated_untied", "int8", "f16")
    slot, pool = NativeSlot(one.decoder), EncodedSources(one.decoder)
    slot.attend(pool.fill(one.encoder.encode(one.source), b"source"))
    text = one.case["tokens"][:9]
    theirs = slot.forward(text).logits
    own = {name: slot._bound[name].array.copy() for name in (*NODE[:10], *OUTPUTS)}
    node = NativeNode(one.decoder.folder / one.decoder.graph.file)
    node.run(own, own)
    np.testing.assert_array_equal(own["logits"], theirs)
    node.close()
    graph = one.encoder._slot.model
    (bound, rows) = (one.encoder._slot._bound, one.encoder.encode(one.source))
    own = {name: bound[name].array.copy() for name in (*NODE[:8], *OUTPUTS)}
    node = NativeNode(graph.folder / graph.graph.file)
    node.run(own, own)
    np.testing.assert_array_equal(own["hidden"], rows)
    node.close()
