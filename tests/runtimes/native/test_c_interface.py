"""The C interface gives what slots on ONNX Runtime give, to the bit; its example writes golden tokens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.engine.engine import Engine
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import Attention
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from tests.conftest import PROMPTS, TARGET, Written
from tests.support.c_interface import F16, F32, INT8, LAST_ROWS, NODE, OUTPUTS, Native, NativeNode, found
from tests.support.native_graph import program_text, with_program
from tests.support.passes import run_heads, states
from tests.support.planned import PLANS, with_heads
from tests.support.required import need
from tests.support.selftest import NATIVE, OPERATOR, PLAIN, READERS, compiled, host_compiler, host_isas, linked
from tests.support.selftest import THREADS as SANITIZED_THREADS

pytestmark = pytest.mark.usefixtures("native")
EXAMPLE = NATIVE.parents[1] / "examples" / "c" / "greedy.c"
MODELS = [(TARGET, "int4"), ("qwen2_tied_gqa7", "fp32"), ("lfm2_conv", "int8"), ("qwen3_5_delta", "int8")]
TEXT = np.random.default_rng(1).integers(0, 160, 330).tolist()
TREE, PARENTS, KEPT = TEXT[200:209], [-1, 0, 0, 2, 1, 2, 5, -1, 6], [0, 2, 5, 6]


def graph(made: Written) -> Path:
    return made.folder / made.part.graphs["native"].file


@pytest.mark.parametrize("name, form", MODELS)
def test_passes_are_those_of_a_slot(writer: Callable[..., Written], name: str, form: str) -> None:
    made = writer("native", name, form)
    slot = made.slot("native")
    slot.prefill(TEXT[:150])
    with Native(graph(made), threads=2) as native:
        native.prefill(TEXT[:150])
        for _ in range(3):
            theirs = states(slot, np.array(TREE), np.array(PARENTS))
            ours = native.forward(TREE, PARENTS, hidden=1)
            np.testing.assert_array_equal(ours.logits, theirs.logits)
            np.testing.assert_array_equal(ours.hidden, theirs.hidden)
            slot.keep(KEPT)
            native.keep(KEPT)
        assert native.length() == len(slot.tokens) == 162
        theirs = slot.forward(np.array(TREE)).logits.copy()
        best = native.forward(TREE, top=3, logits=LAST_ROWS)
        assert best.logits is None
        assert best.ids is not None
        assert best.values is not None
        np.testing.assert_array_equal(best.ids, np.argsort(-theirs[-1:], kind="stable")[:, :3])
        np.testing.assert_array_equal(best.values[0], theirs[-1][best.ids[0]])


@pytest.mark.parametrize("name, form", MODELS)
def test_texts_go_back_and_share_passes(writer: Callable[..., Written], name: str, form: str) -> None:
    made = writer("native", name, form)
    slot = made.slot("native")

    def fresh(text: list[int], rows: list[int]) -> np.ndarray:
        slot.follow([])
        slot.prefill(text)
        return slot.forward(np.array(rows)).logits.copy()

    with Native(graph(made), slots=3) as native:
        native.prefill(TEXT[:40], 1)
        native.checkpoint(1)
        native.prefill(TEXT[40:230], 1)
        native.prefill(TEXT[:7], 2)
        ours = native.forward([*TREE[:3], *TREE[:2]], slots=[1, 1, 1, 2, 2]).logits
        assert ours is not None
        np.testing.assert_array_equal(ours[:3], fresh(TEXT[:230], TREE[:3]))
        np.testing.assert_array_equal(ours[3:], fresh(TEXT[:7], TREE[:2]))
        native.keep([3], 2)
        native.keep([0, 1], 1)
        left = native.crop(60, 1)
        assert left == (40 if native.facts.stateful else 60)
        assert (native.length(), native.length(1), native.length(2), native.length(3)) == (0, left, 8, -1)
        native.prefill(TEXT[left:70], 1)
        np.testing.assert_array_equal(native.forward(TREE, slots=[1] * 9).logits, fresh(TEXT[:70], TREE))
        assert native.crop(9, 1) == (0 if native.facts.stateful else 9)


@pytest.mark.parametrize("name, number", [("f32", F32), ("f16", F16), ("int8", INT8)])
def test_formats_of_keys(writer: Callable[..., Written], name: Attention, number: int) -> None:
    made = writer("native", TARGET, "int4")
    slot = open_slot(Model(made.folder, made.part, "native", 1, ATTENTION[name]))
    with Native(graph(made), attention=number) as native:
        slot.prefill(TEXT[:100])
        native.prefill(TEXT[:100])
        np.testing.assert_array_equal(native.forward(TREE).logits, slot.forward(np.array(TREE)).logits)


def test_heads_and_parts(tmp_path: Path) -> None:
    planned = with_heads(tmp_path, resolve(TARGET), PLANS["shared"], "int8")
    made, slot = planned.written, planned.slot()
    layers = made.part.facts.layers
    with Native(graph(made)) as native:
        assert (native.facts.layers, native.facts.groups) == (layers, len(made.part.heads))
        assert (native.facts.vocab, native.facts.hidden) == (made.part.facts.vocab, made.part.facts.hidden)
        slot.prefill(TEXT[:20])
        native.prefill(TEXT[:20])
        hidden = native.forward(TREE, hidden=1).hidden
        assert hidden is not None
        for number, group in enumerate(made.part.heads):
            theirs = run_heads(slot, group.name, hidden).logits
            assert theirs is not None
            np.testing.assert_array_equal(native.heads(number, hidden).logits, theirs.reshape(-1, theirs.shape[-1]))
        native.keep([0, 1])  # heads leave the rows of the pass as they were
        slot.forward(np.array(TREE))
        slot.keep([0, 1])
        # only the first layer, then the others from its hidden states
        gates = np.zeros(native.facts.gates, np.uint8)
        gates[[0, 1, 2 * layers, 2 * layers + 2]] = 1
        gates[2 * layers + 4 + len(made.part.heads) :] = 1
        front = native.forward(TREE, gates=gates.tolist()).hidden
        gates[: 2 * layers + 3] = 1
        gates[[0, 1, 2 * layers, 2 * layers + 2]] = 0
        gates[2 * layers + 3] = 1
        back = native.forward(TREE, inputs=front, gates=gates.tolist()).logits
        np.testing.assert_array_equal(back, slot.forward(np.array(TREE)).logits)


def decode(native: Native, prompt: list[int], count: int) -> list[int]:
    """Decode greedily, and read every result again where a later pass of another cache could have changed it."""
    native.crop(0)
    native.prefill(prompt[:-1])
    text = [prompt[-1]]
    for _ in range(count):
        best = native.forward(text[-1:], top=1, logits=LAST_ROWS).ids
        assert best is not None
        native.keep([0])
        text.append(int(best[0, 0]))
    return text[1:]


@pytest.mark.parametrize("name, form", MODELS)
def test_eight_sessions_share_a_model(writer: Callable[..., Written], name: str, form: str) -> None:
    made = writer("native", name, form)
    prompts = [TEXT[at : at + 9] for at in range(0, 80, 10)]
    with Native(graph(made), threads=2) as native:
        alone = [decode(native, prompt, 12) for prompt in prompts]

        def session(prompt: list[int]) -> list[list[int]]:
            with native.beside() as cache:
                return [decode(cache, prompt, 12) for _ in range(3)]

        with ThreadPoolExecutor(len(prompts)) as pool:
            for text, found in zip(alone, pool.map(session, prompts), strict=True):
                assert found == [text] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("name, form", [MODELS[0], MODELS[3]])
def test_sessions_under_the_thread_sanitizer(
    writer: Callable[..., Written], name: str, form: str, tmp_path: Path
) -> None:
    made, compiler = writer("native", name, form), host_compiler()
    assert compiler, "no C++ compiler"
    flags = (*PLAIN, *SANITIZED_THREADS)
    objects = compiled(tmp_path / "objects", compiler, (*OPERATOR, *READERS, "sessions"),
                       host_isas(), flags)  # fmt: skip
    program = linked(tmp_path / "sessions", compiler, objects, flags)
    assert program.run(str(graph(made)), "8", "40") == "0 of 8 texts differ\n"


def test_results_stay_while_another_cache_runs(writer: Callable[..., Written]) -> None:
    made = writer("native", TARGET, "int4")
    with Native(graph(made)) as native, native.beside() as other:
        mine, result = native.forward(TREE).logits, native.result(TREE)
        other.forward(TEXT[:100])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            native.forward([99999] * 200)  # more rows than the last pass had
        np.testing.assert_array_equal(found(result, len(TREE)).logits, mine)


def test_a_model_outlives_its_handle(writer: Callable[..., Written]) -> None:
    made = writer("native", TARGET, "int4")
    with Native(graph(made)) as native:
        before = native.forward(TREE).logits
        native.close_model()
        np.testing.assert_array_equal(native.forward(TREE).logits, before)


@pytest.mark.parametrize("name, form", MODELS)
def test_a_refused_prefill_changes_nothing(writer: Callable[..., Written], name: str, form: str) -> None:
    made = writer("native", name, form)
    text = (TEXT * 3)[:300]
    with Native(graph(made)) as native:
        native.prefill(text[:50])
        before = native.forward(TREE).logits
        native.crop(50)
        for bad, words in (
            ([*text[:200], 1 << 30, *text[:99]], "outside the vocabulary"),
            ([*text[:299], -1], "outside the vocabulary"),
            ([1] * 1000, "in a slot"),
        ):
            with pytest.raises(ValueError, match=words):
                native.prefill(bad)
            assert native.length() == 50
            np.testing.assert_array_equal(native.forward(TREE).logits, before)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tokens": [99999]}, "outside the vocabulary"),
    ({"tokens": []}, "a pass of 0 rows"),
    ({"tokens": [1, 2], "parents": [-1, 1]}, "continues row 1"),
    ({"tokens": [1], "slots": [4]}, "slot 4 does not exist"),
    ({"tokens": [1, 2], "slots": [1, 0]}, "in order of their slots"),
    ({"tokens": [1] * 600}, "goes to place 512"),
    ({"tokens": [1], "top": 5000}, "top 5000"),
    ({"tokens": [1], "logits": 7}, "logits 7"),
)


def test_what_does_not_fit_is_refused(writer: Callable[..., Written], tmp_path: Path) -> None:
    made = writer("native", TARGET, "int4")
    with Native(graph(made), slots=2) as native:
        native.prefill(TEXT[:5])
        before = native.forward(TREE).logits
        for request, words in REFUSED:
            with pytest.raises(ValueError, match=words):
                native.forward(**request)
        with pytest.raises(ValueError, match="row 2 does not continue"):
            native.keep([0, 2])
        with pytest.raises(ValueError, match="the model has 0"):
            native.heads(0, np.zeros((1, native.facts.hidden), np.float32))
        np.testing.assert_array_equal(native.forward(TREE).logits, before)
    broken = with_program(made, tmp_path / "broken", program_text(made).replace("linear", "nonsense", 1))
    stock = writer("stock", TARGET, "int4")
    for path, words in (
        (tmp_path / "none", "cannot be opened"),
        (tmp_path, "no file"),
        (broken, "unknown step"),
        (stock.folder / stock.part.graphs["plain"].file, "expected one node of native operators"),
        (made.folder / made.part.weights, "not a graph of ONNX|cut off"),
    ):
        with pytest.raises(ValueError, match=words):
            Native(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads a library of Linux")
def test_the_library_has_a_name_and_exports_its_interface() -> None:
    """Beside it, only weak instances of the C++ library's templates."""
    need("readelf", "to read the library's symbols")

    def read(what: str) -> str:
        command = ["readelf", what, "--wide", str(native_library().path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "Library soname: [libedgespec.so]" in read("-d")
    lines = [line.split() for line in read("--dyn-syms").splitlines()]
    lines = [line for line in lines if line[4:6] == ["GLOBAL", "DEFAULT"] and line[6] != "UND"]
    names = {line[7].partition("@")[0] for line in lines}
    assert "edgespec_generate" in names
    assert not [name for name in names if not name.startswith(("edgespec_", "RegisterCustomOps", "Java_dev_edgespec_"))]


FLIPS = """
import sys
from pathlib import Path
import numpy as np
from tests.support.c_interface import Native

graph = Path(sys.argv[1])
whole, random, opened = graph.read_bytes(), np.random.default_rng(1), 0
for turn in range(400):
    data = bytearray(whole[: int(random.integers(len(whole))) if turn % 4 == 0 else len(whole)])
    for at in random.integers(0, max(1, len(data)), 4):
        if turn % 4 and len(data):
            data[at] = random.integers(256)
    (graph.parent / "changed.onnx").write_bytes(data)
    try:
        with Native(graph.parent / "changed.onnx", tokens=64) as native:
            native.forward([1, 2, 3])
        opened += 1
    except ValueError as error:
        assert str(error).startswith("edgespec"), error
print(opened)
"""


def test_no_file_ends_the_process(writer: Callable[..., Written], tmp_path: Path) -> None:
    made = writer("native", TARGET, "int4")
    copy = shutil.copytree(made.folder, tmp_path / "model")
    command = [sys.executable, "-c", FLIPS, str(copy / made.part.graphs["native"].file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) < 399


def test_the_example_writes_the_tokens_of_python(engines: Callable[..., Engine], tmp_path: Path) -> None:
    need("cc", "to build the example")
    engine, library = engines("native"), native_library().path
    assert library is not None
    command = ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{NATIVE}", str(EXAMPLE)]
    linked = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(tmp_path / "greedy")]
    subprocess.run([*command, *linked], check=True, timeout=300)

    def example(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(tmp_path / "greedy"), *words], capture_output=True, text=True, timeout=300)

    ends = ",".join(map(str, engine.bundle.manifest.tokenizer.eos)) or "-"
    for prompt in map(engine.codec.encode, PROMPTS[::3]):
        done = example(str(engine.bundle.path / "model.native.onnx"), "48", ends, *map(str, prompt))
        assert done.returncode == 0, done.stderr
        written = engine.generate(prompt, method="ar", max_new_tokens=48).tokens
        assert [int(token) for token in done.stdout.split()] == written
    done = example(str(tmp_path), "4", "-", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no file" in done.stderr


def given(slot: NativeSlot) -> dict[str, np.ndarray]:
    """Copy the inputs of a slot's last pass, without its outputs."""
    return {name: bound.array.copy() for name, bound in slot._bound.items() if name in NODE}


@pytest.mark.parametrize("name, form", [*MODELS, ("gemma3_old", "int8")])
def test_passes_of_the_node_are_those_of_onnx_runtime(writer: Callable[..., Written], name: str, form: str) -> None:
    made = writer("native", name, form)
    slot = made.slot("native")
    assert isinstance(slot, NativeSlot)
    slot.prefill(TEXT[:140])
    kv = slot._bound["kv"].array.copy()
    theirs = states(slot, np.array(TREE), np.array(PARENTS))
    inputs = given(slot) | {"kv": kv}
    outputs = {name: np.full_like(slot._bound[name].array, 7) for name in OUTPUTS}
    node = NativeNode(graph(made), threads=2)
    assert node.run(inputs, outputs) == [one.shape for one in outputs.values()]
    np.testing.assert_array_equal(outputs["logits"], theirs.logits)
    np.testing.assert_array_equal(outputs["hidden"], theirs.hidden)
    np.testing.assert_array_equal(kv, slot._bound["kv"].array)
    for wrong, why in (
        ({"plan": inputs["plan"][:5]}, "expected a plan"),
        ({"control": inputs["control"][:7]}, "expected 8 controls"),
        ({"kv": kv[:, :64]}, "cache"),
    ):
        with pytest.raises(ValueError, match=why):
            node.run(inputs | wrong, outputs)
    with pytest.raises(ValueError, match="no room for logits"):
        node.run(inputs, outputs | {"logits": outputs["logits"][:1]})
    node.close()
