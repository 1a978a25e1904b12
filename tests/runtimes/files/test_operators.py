"""Which operators run, and why: with and without the library, on every kind of bundle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from edgespec.engine.loading import load
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files import operators as operators_module
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import ModelPart, Operators
from edgespec.runtimes.files.operators import WantedOperators, choose_operators
from edgespec.runtimes.ort import native_library as library_module
from edgespec.runtimes.ort.native_library import NativeLibrary, native_library
from edgespec.runtimes.ort.session import make_session
from tests.cli.conftest import Command, process
from tests.cli.conftest import command as command  # a fixture
from tests.conftest import COMPILERS, PROMPTS, Written

FAST = NativeLibrary(Path("libedgespec.so"), "avx512", "native operators, avx512 kernels")
NONE = NativeLibrary(None, "", "no native operators: this installation was built without a C++ compiler")
SCALAR = NativeLibrary(Path("libedgespec.so"), "scalar", "native operators, scalar kernels")

Bundles = Callable[..., Path]


@pytest.fixture
def part(bundles: Bundles) -> ModelPart:
    """Return the target of a bundle in the native layout."""
    return Bundle.open(bundles("native"), check=False).manifest.target


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[NativeLibrary], None]:
    """Pretend that this library was found."""
    monkeypatch.delenv("EDGESPEC_ISA", raising=False)
    return lambda found: monkeypatch.setattr(operators_module, "native_library", lambda: found)


# -- the choice ------------------------------------------------------------------------------------------------------


def ungated(part: ModelPart) -> ModelPart:
    graphs = {"strict": part.graphs["gated"].model_copy(update={"gated": False}), "plain": part.graphs["plain"]}
    return part.model_copy(update={"graphs": graphs})


def older(part: ModelPart) -> ModelPart:
    graphs = {name: graph for name, graph in part.graphs.items() if name != "native"}
    return part.model_copy(update={"graphs": graphs, "index": None, "layout": "stock"})


def stock_layout(part: ModelPart) -> ModelPart:
    return part.model_copy(update={"layout": "stock"})


def as_it_is(part: ModelPart) -> ModelPart:
    return part


NO_GRAPH, ASKED = "the bundle has no graph for native operators", "asked for"
NO_KERNELS = "there are no kernels for this processor: the portable ones are slower than stock"


@pytest.mark.parametrize(
    "found, change, wanted, kind, reason, graphs",
    [
        (FAST, as_it_is, "auto", "native", FAST.reason, ("native", "native")),
        (FAST, as_it_is, "native", "native", FAST.reason, ("native", "native")),
        (FAST, as_it_is, "stock", "stock", ASKED, ("gated", "gated")),
        (FAST, ungated, "stock", "stock", ASKED, ("strict", "plain")),
        (FAST, stock_layout, "auto", "stock", "the bundle was exported for stock operators", ("gated", "gated")),
        (FAST, stock_layout, "native", "native", FAST.reason, ("native", "native")),  # after a conversion
        (FAST, older, "auto", "stock", NO_GRAPH, ("gated", "gated")),
        (FAST, older, "native", None, "export it again", ()),
        (NONE, as_it_is, "auto", "stock", NONE.reason, ("gated", "gated")),
        (NONE, as_it_is, "native", None, r"without a C\+\+ compiler(.|\n)*or use stock operators", ()),
        (SCALAR, as_it_is, "auto", "stock", NO_KERNELS, ("gated", "gated")),
        (SCALAR, as_it_is, "native", "native", SCALAR.reason, ("native", "native")),
    ],
)
def test_what_is_chosen(
    part: ModelPart,
    library: Callable[[NativeLibrary], None],
    found: NativeLibrary,
    change: Callable[[ModelPart], ModelPart],
    wanted: WantedOperators,
    kind: Operators | None,
    reason: str,
    graphs: tuple[str, ...],  # in strict mode and without
) -> None:
    library(found)
    part = change(part)
    if kind is None:
        with pytest.raises(BundleError, match=reason):
            choose_operators(wanted, part)
        return
    choice = choose_operators(wanted, part)
    assert (choice.kind, choice.reason) == (kind, reason)
    assert (choice.graph(part, True), choice.graph(part, False)) == graphs


def test_portable_kernels_that_are_asked_for(
    part: ModelPart, library: Callable[[NativeLibrary], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library(SCALAR)
    monkeypatch.setenv("EDGESPEC_ISA", "scalar")
    assert choose_operators("auto", part).kind == "native"


# -- the library -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
def test_the_library_says_what_it_is() -> None:
    found = native_library()
    assert found.path is not None
    assert found.isa in ("avx512", "avxvnni", "avx2", "i8mm", "neon", "scalar")
    assert found.reason.startswith(f"native operators, {found.isa} kernels")


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh = native_library.__wrapped__
    monkeypatch.setenv("EDGESPEC_NATIVE", "0")
    assert fresh() == NativeLibrary(None, "", "EDGESPEC_NATIVE=0 turns native operators off")
    monkeypatch.setenv("EDGESPEC_NATIVE", str(tmp_path / "none.so"))
    assert "none.so does not exist" in fresh().reason
    (tmp_path / "bad.so").write_bytes(b"not a library")
    monkeypatch.setenv("EDGESPEC_NATIVE", str(tmp_path / "bad.so"))
    assert fresh().path is None
    assert "bad.so does not load" in fresh().reason
    monkeypatch.delenv("EDGESPEC_NATIVE")
    monkeypatch.setattr(library_module, "_installed", lambda: None)
    assert fresh() == NONE


@pytest.mark.usefixtures("native")
def test_a_library_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = native_library().path
    assert path is not None
    copy = Path(shutil.copyfile(path, tmp_path / path.name))
    monkeypatch.setenv("EDGESPEC_NATIVE", str(copy))
    assert native_library.__wrapped__().path == copy


@pytest.mark.usefixtures("native")
def test_another_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library, but not ours."""
    import _ctypes

    monkeypatch.setenv("EDGESPEC_NATIVE", str(getattr(_ctypes, "__file__", "") or sys.executable))
    found = native_library.__wrapped__()
    assert (found.path, "does not load" in found.reason) == (None, True)


@pytest.mark.usefixtures("native")
def test_a_library_that_onnx_runtime_does_not_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As of another version of its interface: it loads, and cannot be registered."""
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(
        'const char* edgespec_isa(void) { return "scalar"; } const char* edgespec_isa_error(void) { return 0; }'
        " void edgespec_sources_open(void) {}"
    )
    compiler = next(path for name in COMPILERS if (path := shutil.which(name)))
    if compiler.endswith("cl"):
        pytest.skip("a library is not made this way by cl")
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv("EDGESPEC_NATIVE", str(library))
    found = native_library.__wrapped__()
    assert found.path is None
    assert "does not take libother.so" in found.reason


@pytest.mark.usefixtures("native")
def test_an_instruction_set_by_name() -> None:
    def says(isa: str) -> str:
        """Print which set a process with this variable takes, and why."""
        code = "from edgespec.runtimes.ort.native_library import native_library as n; print(n().isa, n().reason)"
        env, root = os.environ | {"EDGESPEC_ISA": isa}, Path(__file__).parents[3]
        return subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True
        ).stdout

    assert says("scalar").startswith("scalar")
    own = says("").split()[0]  # the processor's; this process may be under a variable of that name
    assert says("magic").startswith(own)
    assert "EDGESPEC_ISA names an instruction set" in says("magic")


@pytest.mark.usefixtures("native")
def test_the_operators_run_on_the_installed_onnxruntime(writer: Callable[..., Written]) -> None:
    """Its C interface is declared by hand (native/abi.h): this is what pins slots and layouts."""
    assert tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 23)
    made = writer("native", "llama_biases_mqa", "int4")
    session = make_session(made.folder / made.part.graphs["native"].file, 1, True)
    assert [item.name for item in session.get_inputs()] == [
        "plan", "rows", "gates", "moves", "kv", "control", "tables", "hidden_in",
    ]  # fmt: skip
    assert [item.name for item in session.get_outputs()] == ["logits", "ids", "values", "hidden"]
    assert made.slot(threads=2).forward(np.arange(2, 9)).logits.shape == (7, made.part.facts.vocab)


def test_a_native_graph_without_the_library_is_refused(
    writer: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.runtimes.ort.session.native_library", lambda: NONE)
    made = writer("native", "llama_biases_mqa", "int4")
    with pytest.raises(BundleError, match=r"needs native operators: .*without a C\+\+ compiler"):
        made.slot()


# -- engines and commands --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("layout", ["stock", "native"])
def test_either_kind_runs_either_layout(bundles: Bundles, layout: Operators) -> None:
    texts = {}
    for kind in ("stock", "native"):
        engine = load(bundles(layout, "fp32"), threads=1, operators=kind, check=False)
        assert engine.operators.kind == kind
        result = engine.generate(PROMPTS[0], method="ar", max_new_tokens=24)
        assert (result.operators, result.as_dict()["operators"]) == (kind, kind)
        texts[kind] = result.tokens
    assert texts["stock"] == texts["native"]


def test_attention_needs_native_operators(bundles: Bundles) -> None:
    with pytest.raises(InvalidRequest, match="attention int8 needs native operators"):
        load(bundles("stock"), threads=1, operators="stock", attention="int8", check=False)
    with pytest.raises(InvalidRequest, match="unknown attention 'int9'"):
        load(bundles("stock"), threads=1, operators="stock", attention="int9", check=False)
    assert load(bundles("stock"), threads=1, operators="stock", attention="f32", check=False).operators.kind == "stock"


@pytest.mark.usefixtures("native")
def test_info_says_what_runs_and_why(bundles: Bundles, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("EDGESPEC_ISA", native_library().isa)  # covers a machine with only portable kernels
    found = command("info", bundles("native"), "--json").json["operators"]
    assert found == {
        "active": "native",
        "reason": native_library().reason,
        "exact_rows": True,
        "layout": "native",
        "repacked_bytes": found["repacked_bytes"],
        "graphs": {"gated": "stock", "plain": "stock", "native": "native"},
    }
    assert f"native ({native_library().reason})" in command("info", bundles("native")).out
    stock = command("info", bundles("stock"), "--json").json["operators"]
    assert (stock["active"], stock["reason"]) == ("stock", "the bundle was exported for stock operators")


def test_a_command_without_native_operators(bundles: Bundles, tmp_path: Path) -> None:
    off = {"EDGESPEC_NATIVE": "0"}
    made = process("info", bundles("native"), "--json", cwd=tmp_path, **off).json["operators"]
    assert (made["active"], made["reason"]) == ("stock", "EDGESPEC_NATIVE=0 turns native operators off")
    short = "--prompt", "ROMEO:", "--max-new-tokens", 8
    ran = process("run", bundles("native"), *short, "--json", cwd=tmp_path, **off).json
    assert ran["operators"] == "stock"
    refused = process("run", bundles("native"), *short, "--operators", "native", cwd=tmp_path, **off)
    refused.refused(1, "EDGESPEC_NATIVE=0 turns native operators off", "hint: ")
