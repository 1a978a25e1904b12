"""A slot over a graph of optimum's: its ports, and the right numbers, whatever was run, refused or cropped before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.decoding.target import Pass, Rows, SkipSet
from edgespec.errors import InvalidRequest
from edgespec.export.foreign.graph import ForeignGraph
from edgespec.export.foreign.model import ForeignModel
from edgespec.export.foreign.write import HEADROOM, write_foreign
from edgespec.export.quantization.weights import WeightChoice
from edgespec.runtimes.files.facts import ModelFacts
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Graph, ModelPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.concat import FLOAT, INTEGER, Cached, ConcatPorts, ConcatSlot, Port
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Reference
from tests.support import hf
from tests.support.foreign import write_export
from tests.support.passes import run_draft, run_hypotheses
from tests.support.slots import disturb, one_by_one

NAME = "llama_tied_gqa"
CONFIG = hf.CONFIGS[NAME]
GRAPHS = ("strict", "padded", "plain")
PROMPT = 8  # tokens before the reference's greedy continuation
FORMS: tuple[Format, ...] = ("fp32", "int4", "int8")
Opened = Callable[..., Slot]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """(format, graph, position_ids, threads) -> a new slot over a small model."""
    models: dict[tuple[Format, str, bool, int], Model] = {}

    def get(form: Format = "fp32", graph: str = "strict", positions: bool = True, threads: int = 1) -> Slot:
        key = form, graph, positions, threads
        if key not in models:
            folder = tmp_path_factory.mktemp("part")
            source = write_export(tmp_path_factory.mktemp("export"), CONFIG, hf.SEEDS[NAME], positions=positions)
            model = ForeignModel.open(source, None)
            part = write_foreign(folder, model.open_graph(), model.facts, WeightChoice.of(form, None, None)).part
            padded = {"padded": Graph(file=part.graphs["plain"].file, padded=True)}
            part = part.model_copy(update={"graphs": part.graphs | padded})
            models[key] = Model(folder, part, graph, threads)
        return open_slot(models[key], reserve=1)

    return get


def text(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, CONFIG["vocab_size"], count).tolist()
    return tokens


def ids(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(tokens, np.int64)


def close(found: NDArray[np.float32], expected: NDArray[np.float32], form: Format = "fp32") -> None:
    """Check equality up to rounding: with quantized activations, a last bit may turn into another level."""
    np.testing.assert_allclose(found, expected, atol=2e-4 if form == "fp32" else 0.15)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("positions", [True, False])
def test_logits_are_those_of_transformers(
    opened: Opened, reference: Callable[[str], Reference], graph: str, positions: bool
) -> None:
    known, slot = reference(NAME), opened("fp32", graph, positions)
    whole = slot.forward(known.tokens).logits
    np.testing.assert_allclose(whole[known.rows], known.logits, atol=2e-4)
    slot.keep(range(len(known.tokens)))
    slot.follow(known.tokens[: PROMPT - 1].tolist())
    token, written = int(known.tokens[PROMPT - 1]), []
    for _ in known.greedy:
        token = int(slot.forward(ids([token])).logits[0].argmax())
        slot.keep([0])
        written.append(token)
    assert written == known.greedy.tolist()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_any_pass_are_those_of_plain_decoding(opened: Opened, form: Format, threads: int, graph: str) -> None:
    """They are equal bit for bit if the probe, which tries far fewer passes, finds them exact."""
    slot = opened(form, graph, True, threads)
    exact, tokens = rows_exact(slot), text(220)
    assert slot.tokens == []
    for depth in (0, 1, 51, 180):
        past, following = tokens[:depth], tokens[depth : depth + 36]
        plain = one_by_one(slot, past, following)
        for size in (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 36):
            slot.follow(past)
            rows = slot.forward(ids(following[:size])).logits
            if exact:
                np.testing.assert_array_equal(rows, plain[:size], f"{size} rows after {depth}")
            close(rows, plain[:size], form)


def test_the_probe_sees_that_a_row_alone_is_another(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = opened()
    disturb(monkeypatch, slot, rows=9, row=8)
    assert not rows_exact(slot)


def test_a_crop_changes_no_bit(opened: Opened) -> None:
    slot, tokens = opened(), text(90)
    slot.prefill(tokens[:40])
    before, rows = slot.snapshot(), slot.forward(ids(tokens[40:43])).logits.copy()
    slot.keep(range(3))
    slot.prefill(tokens[43:90])
    assert slot.follow(tokens[:40]) == 40
    np.testing.assert_array_equal(slot.forward(ids(tokens[40:43])).logits, rows)
    for name, values in slot.snapshot().items():
        np.testing.assert_array_equal(values, before[name])
    assert slot.follow([]) == 0
    slot.prefill(tokens[:3])
    assert slot.tokens == tokens[:3]


OPERATIONS = st.lists(st.tuples(st.sampled_from(["prefill", "forward", "draft", "crop", "masked"]), st.integers(1, 19)))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, seed=st.integers(0, 1000))
@pytest.mark.parametrize("graph", GRAPHS)
def test_any_history_equals_a_fresh_slot(
    opened: Opened, graph: str, operations: list[tuple[str, int]], seed: int
) -> None:
    random, slot = np.random.default_rng(seed), opened("fp32", graph)
    for kind, count in operations[:12]:
        tokens = ids(text(count, int(random.integers(1 << 30))))
        if kind == "prefill":
            slot.prefill(tokens.tolist())
        elif kind == "forward":
            slot.forward(tokens)
            slot.keep(range(int(random.integers(count + 1))))
        elif kind == "draft":
            run_draft(slot, tokens)
        elif kind == "masked":
            run_hypotheses(slot, tokens, np.full(count, len(slot.tokens) // 2), np.full(count, -1))
        else:
            slot.follow(slot.tokens[: int(random.integers(len(slot.tokens) + 1))])
    fresh = opened("fp32", graph)
    fresh.prefill(slot.tokens)
    for name, values in slot.snapshot().items():
        close(values, fresh.snapshot()[name])
    following = ids(text(6, seed))
    close(slot.forward(following).logits, fresh.forward(following).logits)


def test_hypotheses_are_passes_after_beginnings_of_the_text(opened: Opened) -> None:
    slot, tokens = opened(), text(50)
    slot.prefill(tokens)
    before = slot.snapshot()
    chains, starts = ids(text(9, 3)).reshape(3, 3), ids([8, 50, 20])
    parents = np.tile([-1, 0, 1], 3) + np.where(np.tile([0, 1, 1], 3), np.repeat([0, 3, 6], 3), 0)
    found = run_hypotheses(slot, chains.ravel(), np.repeat(starts, 3), parents).logits
    assert slot.tokens == tokens
    for name, values in slot.snapshot().items():
        np.testing.assert_array_equal(values, before[name])
    for at, start in enumerate(starts.tolist()):
        slot.follow(tokens[:start])
        slot.prefill(tokens[len(slot.tokens) : start])
        close(slot.forward(chains[at]).logits, found[3 * at : 3 * at + 3])


def test_growth_keeps_what_is_there_and_ends_at_the_context(opened: Opened) -> None:
    slot, roomy, tokens = opened(), opened(), text(300)
    roomy.reserve(400)
    capacities = set()
    for slots in (slot, roomy):
        for start in range(0, 300, 7):
            slots.forward(ids(tokens[start : start + 7]))
            slots.keep(range(len(tokens[start : start + 7])))
            capacities.add(slots.capacity)
    for name, values in slot.snapshot().items():
        np.testing.assert_array_equal(values, roomy.snapshot()[name])
    assert len(capacities) > 2
    facts = slot.model.facts
    assert facts.context == CONFIG["max_position_embeddings"] - HEADROOM
    assert slot.kv_bytes == 2 * slot.capacity * facts.kv_bytes_per_token
    slot.reserve(10**6)
    assert slot.capacity == facts.context + HEADROOM
    slot.prefill(text(facts.context - 300))
    with pytest.raises(InvalidRequest, match="does not fit the cache"):
        slot.forward(ids(text(HEADROOM + 1)))
    assert len(slot.tokens) == facts.context


@pytest.mark.parametrize(
    "wrong",
    [
        lambda slot: slot.forward(ids([5, 6, 7]), ids([-1, 0, 0])),
        lambda slot: slot.keep([1]),
        lambda slot: slot.keep([0, 1, 2]),
        lambda slot: run_draft(slot, ids([5]), 1),
        lambda slot: run_draft(slot, ids([5]), 0, SkipSet((0,), ())),
        lambda slot: run_hypotheses(slot, ids([5, 6, 7]), ids([2, 2, 2]), ids([-1, 0, 0])),
        lambda slot: run_hypotheses(slot, ids([5]), ids([2]), ids([-1]), SkipSet((0,), ())),
    ],
)
def test_what_the_graph_cannot_do_is_refused(opened: Opened, wrong: Callable[[Slot], object]) -> None:
    slot, tokens = opened(), text(10)
    slot.prefill(tokens)
    slot.forward(ids([5, 6]))
    with pytest.raises(InvalidRequest, match="exported by optimum: it cannot"):
        wrong(slot)
    assert slot.tokens == tokens
    rows = slot.forward(ids([5, 6, 7]), ids([-1, 0, 1])).logits.copy()  # a chain, said as a tree
    np.testing.assert_array_equal(rows, slot.forward(ids([5, 6, 7])).logits)


def test_the_proto_and_the_session_say_the_same(opened: Opened, tmp_path: Path) -> None:
    source = write_export(tmp_path, CONFIG, hf.SEEDS[NAME])
    assert ForeignGraph(source / "model.onnx").ports == ConcatPorts.of_session(opened().model.session)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("length", [0, 1, 20, 40])
def test_a_slot_begins_like_another(opened: Opened, graph: str, length: int) -> None:
    lender, other, fresh = (opened("fp32", graph) for _ in range(3))
    tokens, guesses = text(30), np.array([3, 4, 5])
    other.prefill(text(12, 1))
    lender.prefill(tokens)
    lender.forward(guesses)
    lender.keep([])
    assert other.copy_prefix_from(lender, length) == min(length, 30)
    fresh.prefill(tokens[:length])
    for slot in (other, fresh):
        slot.forward(guesses)
        slot.keep([0, 1])
    assert other.tokens == fresh.tokens
    assert lender.tokens == tokens
    for name, kept in fresh.snapshot().items():
        np.testing.assert_array_equal(other.snapshot()[name], kept)


PAIRS = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]


def ports(**changes: Port | None) -> tuple[list[Port], list[Port]]:
    """Return the inputs and outputs of two layers; ``changes`` replace ports by name, None removes one."""
    given = {
        "input_ids": Port("input_ids", INTEGER, ("b", "s")),
        "attention_mask": Port("attention_mask", INTEGER, ("b", "t")),
    }
    given |= {f"past_key_values.{pair}": Port(f"past_key_values.{pair}", FLOAT, ("b", 2, "p", 16)) for pair in PAIRS}
    made = {"logits": Port("logits", FLOAT, ("b", "s", 160))}
    made |= {f"present.{pair}": Port(f"present.{pair}", FLOAT, ("b", 2, "t", 16)) for pair in PAIRS}
    for name, port in changes.items():
        where = made if name in made else given
        if port is None:
            del where[name]
        else:
            where[name] = port
    return list(given.values()), list(made.values())


def test_ports_are_found_whatever_their_order() -> None:
    given, made = ports()
    found = ConcatPorts.match(given[::-1], made[::-1])
    assert found == ConcatPorts.match(given, made)
    assert (len(found.cache), found.heads, found.vocab, found.states, found.single) == (4, (2, 16), 160, False, False)
    assert found.fed == ("input_ids", "attention_mask")
    assert found.cache[1] == Cached("past_key_values.0.value", "present.0.value", (1, 2, None, 16))
    renamed = [replace(port, name=port.name.replace("present.", "present_key_values.")) for port in made]
    assert ConcatPorts.match(given, renamed).cache[0].present == "present_key_values.0.key"


KEY = "past_key_values.1.key"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_cache_branch": Port("use_cache_branch", "tensor(bool)", (1,))}, "has an input 'use_cache_branch'"),
        ({"input_ids": None}, "no input input_ids"),
        ({"input_ids": Port("input_ids", "tensor(int32)", ("b", "s"))}, "expected tensor\\(int64\\)"),
        ({f"past_key_values.{pair}": None for pair in PAIRS}, "without a cache"),
        ({"present.1.key": None}, "4 past keys and values, but 3 present"),
        ({KEY: Port(KEY, "tensor(float16)", ("b", 2, "p", 16))}, "export it in float32"),
        ({KEY: Port(KEY, FLOAT, ("b", "p", 2, 16))}, "expected the same sizes"),
        ({KEY: Port(KEY, FLOAT, ("b", "p", 32))}, "expected the same sizes"),
        ({KEY: Port(KEY, FLOAT, ("b", 4, "p", 16))}, "expected the same sizes"),
        ({KEY: Port(KEY, FLOAT, ("b", 2, "p", "d"))}, "one for the tokens at most"),
        ({"logits": Port("logits", "tensor(float16)", ("b", "s", 160))}, "output logits"),
        ({"logits": None}, "got nothing"),
    ],
)  # fmt: skip
def test_other_graphs_are_refused(changes: dict[str, Port | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConcatPorts.match(*ports(**changes))


# -- states ------------------------------------------------------------------------------------------------------------

WIDTH, SIZE = 4, 11


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> tuple[ConcatSlot, Rows, Rows]:
    """Give a slot over a graph of single rows, with a state, a cache and a count, and its two matrices."""
    random, folder = np.random.default_rng(2), tmp_path_factory.mktemp("recurrent")
    embedding, head = (random.standard_normal(shape, np.float32) for shape in ((SIZE, WIDTH), (WIDTH, SIZE)))

    def value(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def constant(name: str, array: NDArray[Any]) -> onnx.TensorProto:
        return numpy_helper.from_array(array, name)

    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["row"]),  # [1, 1, width]
        helper.make_node("Reshape", ["row", "flat"], ["x"]),
        helper.make_node("Mul", ["past.0", "half"], ["faded"]),
        helper.make_node("Add", ["faded", "x"], ["present.0"]),
        helper.make_node("Unsqueeze", ["row", "first"], ["wide"]),
        helper.make_node("Concat", ["past.1", "wide"], ["present.1"], axis=2),
        helper.make_node("ReduceSum", ["present.1", "tokens"], ["total"], keepdims=0),  # [1, 1, width]
        helper.make_node("Add", ["total", "present.0"], ["seen"]),
        helper.make_node("MatMul", ["seen", "head"], ["scores"]),
        helper.make_node("Add", ["past.2", "one"], ["present.2"]),
        helper.make_node("Cast", ["present.2"], ["count"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["scores", "count"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "recurrent",
        [
            value("input_ids", TensorProto.INT64, 1, 1),
            value("past.0", TensorProto.FLOAT, 1, WIDTH),
            value("past.1", TensorProto.FLOAT, 1, 1, "p", WIDTH),
            value("past.2", TensorProto.INT64),  # how many tokens there were
        ],
        [
            value("logits", TensorProto.FLOAT, 1, 1, SIZE),
            value("present.0", TensorProto.FLOAT, 1, WIDTH),
            value("present.1", TensorProto.FLOAT, 1, 1, "t", WIDTH),
            value("present.2", TensorProto.INT64),
        ],
        [
            constant("one", np.array(1)),
            constant("embedding", embedding),
            constant("head", head),
            constant("flat", np.array([1, WIDTH])),
            constant("half", np.array(0.5, np.float32)),
            constant("first", np.array([0])),
            constant("tokens", np.array([2])),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, str(folder / "model.onnx"))
    facts = ModelFacts(architecture="tide", layers=1, hidden=WIDTH, intermediate=WIDTH, heads=1, kv_heads=1,
                       head_dim=WIDTH, vocab=SIZE, context=48)  # fmt: skip
    graphs = {"strict": Graph(file="model.onnx"), "plain": Graph(file="model.onnx")}
    part = ModelPart(facts=facts, format="fp32", graphs=graphs, weights="model.data", layout="stock", extra_rows=16,
                     min_rows=1, origin="transformers")  # fmt: skip
    return ConcatSlot(Model(folder, part, "strict", 1), reserve=1), embedding, head


def expected_logits(text: Sequence[int], embedding: Rows, head: Rows) -> Rows:
    """Compute the logits after every token of a text."""
    state, total, found = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32), []
    for count, token in enumerate(text, 1):
        state, total = state / 2 + embedding[token], total + embedding[token]
        found.append((state + total) @ head + count)
    return np.array(found)


def test_states_follow_whatever_is_kept_and_cropped(recurrent: tuple[ConcatSlot, Rows, Rows]) -> None:
    """Rejected rows leave nothing in a state, and a shorter text is read again."""
    slot, *matrices = recurrent
    random, text = np.random.default_rng(4), list[int]()
    slot.follow([])
    for _ in range(40):
        if len(text) > 30:
            slot.follow(text[:7])
            text = list(slot.tokens)
            assert text == []  # states do not go back to a part
        rows = random.integers(0, SIZE, int(random.integers(1, 6)))
        expected = expected_logits([*text, *rows.tolist()], *matrices)[len(text) :]
        if random.random() < 0.3:  # guesses of a draft, which are thrown away
            found = slot.run(Pass(rows, draft=True)).logits
        else:
            found = slot.forward(rows).logits
            kept = int(random.integers(-1, len(rows) + 1))
            if kept >= 0:  # else the pass was only a look
                slot.keep(range(kept))
                text += rows[:kept].tolist()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert slot.tokens == text


def test_hypotheses_about_a_text_with_states(recurrent: tuple[ConcatSlot, Rows, Rows]) -> None:
    slot, *matrices = recurrent
    slot.follow([])
    text = [3, 1, 4, 1, 5, 9]
    slot.prefill(text)
    rows, parents, visible = np.array([7, 2, 8, 6]), np.array([-1, 0, -1, -1]), np.array([4, 4, 2, 6])
    found = slot.run(Pass(rows, parents=parents, visible=visible)).logits
    for at, before in enumerate(([*text[:4], 7], [*text[:4], 7, 2], [*text[:2], 8], [*text, 6])):
        np.testing.assert_allclose(found[at], expected_logits(before, *matrices)[-1], rtol=1e-4, atol=1e-4)
    after = slot.forward(np.array([2])).logits[0]
    np.testing.assert_allclose(after, expected_logits([*text, 2], *matrices)[-1], rtol=1e-4, atol=1e-4)


def test_states_are_saved_and_restored(recurrent: tuple[ConcatSlot, Rows, Rows]) -> None:
    slot, *matrices = recurrent
    slot.follow([])
    text = [3, 1, 4, 1, 5]
    slot.prefill(text)
    held, state = [array.copy() for array in slot.held()], slot.state()
    slot.follow([])
    slot.prefill([7, 7])
    for array, saved in zip(slot.take_up(text, len(text)), held, strict=True):
        array[...] = saved
    assert slot.put_state(state)
    assert not slot.put_state(state[:-4])
    after = slot.forward(np.array([2])).logits[0]
    np.testing.assert_allclose(after, expected_logits([*text, 2], *matrices)[-1], rtol=1e-4, atol=1e-4)
