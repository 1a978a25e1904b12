"""Every architecture matches transformers: in numpy, and as graphs, for any division of the text into passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.target import SkipSet
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.architectures.ops import Kind
from edgespec.export.architectures.rules import Norm
from edgespec.export.bundle.model_part import open_model
from edgespec.export.quantization.layers import Array
from edgespec.export.quantization.reference import NumpyOps, reference_logits
from edgespec.runtimes.files.formats import LONGEST_PASS
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, Reference, Written, use_operators
from tests.support import hf, seq2seq
from tests.support.passes import run_draft
from tests.support.zoo import WITHOUT_REFERENCE

NAMES = sorted(hf.CONFIGS)
GRAPHS = ("plain", "strict", "gated", "native")
PROMPT = 8  # tokens before the reference's greedy continuation
TOLERANCE = 1e-4


def run_by(names: Iterable[str], kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Each configuration with each kind of graph, or of operators, that can run it.

    The graph without gates has the bits of the one with them (tests/runtimes/slots/test_slot.py): some have it too.
    """
    return [
        (name, kind)
        for name in sorted(names)
        for kind in kinds
        if kind == "native" or (name not in hf.NATIVE_ONLY and (kind != "strict" or name in hf.CORE))
    ]


GRAPH = pytest.mark.parametrize("name, graph", run_by(NAMES, GRAPHS))
BOTH = pytest.mark.parametrize("name, operators", run_by(NAMES, OPERATORS), indirect=["operators"])

Write = Callable[..., Written]
Open = Callable[..., Slot]


@pytest.fixture
def operators(request: pytest.FixtureRequest) -> Operators:
    """Choose the operators of the graph that a test is parametrized with; some test both, for any graph."""
    if "graph" in request.fixturenames:
        request.param = "native" if request.getfixturevalue("graph") == "native" else "stock"
    return use_operators(request)


@pytest.fixture(scope="module")
def opened() -> Open:
    """Return a function that opens a slot over a graph of ``made``; each is loaded once, slots share its outputs."""
    models: dict[tuple[Path, str], Model] = {}

    def get(made: Written, graph: str | None = None) -> Slot:
        key = made.folder, graph or made.main
        if key not in models:
            models[key] = made.model(graph)
        return open_slot(models[key], reserve=1)

    return get


def run(slot: Slot, tokens: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float32]:
    """Logits [n, vocab] of a text fed in passes of these sizes; the last size repeats."""
    slot.follow([])
    found, at = [], 0
    if slot.model.facts.convolutions:  # their states are kept for this many rows
        sizes = [min(size, LONGEST_PASS) for size in sizes]
    for size in [*sizes, *[sizes[-1]] * len(tokens)]:
        piece = np.asarray(tokens[at : at + size], np.int64)
        if not len(piece):
            break
        found.append(slot.forward(piece).logits.copy())
        slot.keep(range(len(piece)))
        at += len(piece)
    return np.concatenate(found)


def assert_close(got: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_every_architecture_has_a_reference() -> None:
    known = *hf.CONFIGS.values(), *seq2seq.CASES.values()
    assert {config["model_type"] for config in known} == set(ARCHITECTURES) - WITHOUT_REFERENCE


@pytest.mark.parametrize("name", NAMES)
def test_numpy_equals_transformers(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], name: str
) -> None:
    arch, known = open_model(checkpoint(name), hf.CONTEXTS.get(name)), reference(name)
    assert_close(reference_logits(arch, known.tokens.tolist(), known.rows.tolist()), known.logits)
    tokens = [*known.tokens[:PROMPT].tolist(), *known.greedy.tolist()]
    rows = range(PROMPT - 1, len(tokens) - 1)  # a token of each is what greedy decoding would have written next
    assert reference_logits(arch, tokens, list(rows)).argmax(-1).tolist() == known.greedy.tolist()


@GRAPH
def test_graph_equals_transformers(
    written: Write, opened: Open, reference: Callable[[str], Reference], name: str, graph: str
) -> None:
    """At once, with a past, mixed; and the beginning row by row."""
    known, slot = reference(name), opened(written(name), graph)
    for sizes, most in (([1000], None), ([7, 5], None), ([200, 1, 3], None), ([1], 48)):
        logits = run(slot, known.tokens[:most].tolist(), sizes)
        at = known.rows < len(logits)
        assert at.any()
        assert_close(logits[known.rows[at]], known.logits[at])


@pytest.mark.parametrize("name, operators", run_by(hf.LONG, OPERATORS), indirect=["operators"])
def test_long_positions(written: Write, opened: Open, reference: Callable[[str], Reference], name: str) -> None:
    known = reference(name)
    late = known.rows > 256  # past one prefill chunk, and far beyond the length the rope was trained for
    assert late.sum() >= 8
    made = written(name)
    slot = opened(made, "native" if made.part.layout == "native" else "plain")
    for row in known.rows[late].tolist():
        same = slot.follow(known.tokens[:row].tolist())
        slot.prefill(known.tokens[same:row].tolist())
        got = slot.forward(known.tokens[row : row + 1]).logits
        assert_close(got, known.logits[known.rows == row])


class Skipping(NumpyOps):
    """The numpy reference with sub-layers left out."""

    skip = SkipSet()

    def sublayer(
        self, kind: Kind, layer: int, x: Array, body: Callable[[Array], Array], scale: str | None, norm: Norm | None
    ) -> Array:
        attention, mlp = layer in self.skip.attention, layer in self.skip.mlp
        left_out = {"attention": attention, "memory": attention, "mlp": mlp, "embedding": attention and mlp}[kind]
        return x if left_out else super().sublayer(kind, layer, x, body, scale, norm)


@pytest.mark.parametrize("name", NAMES)
def test_skipped_sublayers_are_left_out(
    writer: Callable[..., Written], opened: Open, reference: Callable[[str], Reference], native: None, name: str
) -> None:
    tokens = reference(name).tokens[:20]
    models = [writer(kind, name) for _, kind in run_by([name], OPERATORS)]
    slots = [opened(made) for made in models]
    arch = models[0].arch
    whole = reference_logits(arch, tokens.tolist())
    for skip in (SkipSet((0,), (1,)), SkipSet((0, 1), (0,)), SkipSet((1,), (0, 1))):
        ops = Skipping(arch, tokens.tolist())
        ops.skip = skip
        expected: Array = ops.run(arch.trace())[0]
        assert np.abs(expected - whole).max() > 0.05  # leaving it out did matter
        for slot in slots:
            at_once = run_draft(slot, tokens, 0, skip).logits
            assert_close(at_once, expected[-1:])
            for at in range(len(tokens)):  # and as a draft runs: one row after the other, over its own KV
                assert_close(run_draft(slot, tokens[at : at + 1], at, skip).logits, expected[at : at + 1])


#        0
#      / | \
#     1  2  3
#    /|  |   \
#   4 5  6    7
#     |
#     8
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 3, 5]
LEAVES = [4, 6, 7, 8]


def path_to(node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


@GRAPH
def test_tree_rows_equal_chains(
    written: Write, opened: Open, reference: Callable[[str], Reference], name: str, graph: str
) -> None:
    made, known = written(name), reference(name).tokens
    past, tree = known[:15].tolist(), known[15 : 15 + len(PARENTS)]
    slot, other = opened(made, graph), opened(made, graph)
    slot.prefill(past)
    other.prefill(past)
    rows = slot.forward(tree, np.array(PARENTS)).logits.copy()
    for leaf in LEAVES:
        path = path_to(leaf)
        assert_close(rows[path], other.forward(tree[path]).logits)


@BOTH
def test_kept_tree_path_equals_a_fresh_prefill(
    written: Write, opened: Open, reference: Callable[[str], Reference], name: str
) -> None:
    made, known = written(name), reference(name).tokens
    past, tree = known[:15].tolist(), known[15 : 15 + len(PARENTS)]
    slot, fresh = opened(made), opened(made)
    for leaf in LEAVES:
        path = path_to(leaf)
        slot.follow(past)
        slot.prefill(past[len(slot.tokens) :])
        slot.forward(tree, np.array(PARENTS))
        slot.keep(path)
        assert slot.tokens == [*past, *tree[path].tolist()]
        fresh.follow([])
        fresh.prefill(slot.tokens)
        held = fresh.snapshot()
        for key, values in slot.snapshot().items():
            assert_close(values, held[key])
        following = known[30:33]
        assert_close(slot.forward(following).logits.copy(), fresh.forward(following).logits)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_embedded_models_match_numpy(written: Write, opened: Open, graph: str) -> None:
    for name in ("builtin:shakespeare", "builtin:shakespeare-draft"):
        made = written(name)
        tokens = np.random.default_rng(1).integers(2, made.part.facts.vocab, 60).tolist()
        expected = reference_logits(made.arch, tokens)
        assert_close(run(opened(made, graph), tokens, [33, 1, 4]), expected)


def test_head_dim_and_heads_come_from_the_configuration(checkpoint: Callable[[str], Path]) -> None:
    for name, config in hf.CORE.items():
        facts = open_model(checkpoint(name), None).facts
        assert facts.heads == config["num_attention_heads"]
        assert facts.kv_heads == config.get("num_key_value_heads", facts.heads)
        assert facts.head_dim == config.get("head_dim", config["hidden_size"] // facts.heads)
        assert facts.tied == config["tie_word_embeddings"]
        assert facts.kv_bytes_per_token == 2 * 4 * facts.layers * facts.kv_heads * facts.head_dim


def test_an_untied_configuration_without_a_head_is_tied(tmp_path: Path) -> None:
    """As transformers does, which then finds no lm_head either."""
    config = hf.CONFIGS["llama_tied_gqa"]
    folder = hf.write_checkpoint(tmp_path / "model", config, 3)
    described = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": False}), "utf-8")
    assert open_model(folder, None).facts.tied
