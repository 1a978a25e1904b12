"""Layers import lower ones only, no import cycles, no long files, and the core imports nothing but itself."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from edgespec.drafters.registry import METHODS
from tools import structure

FOUND = structure.modules()
CORE = {"edgespec.decoding", "edgespec.formulas", "edgespec.errors"}
"""What ports to other languages mirror: it imports numpy and itself."""
LONGEST = 500  # lines of a file


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Read the imports of every module."""
    return structure.imports(FOUND)


def test_all_parts_are_looked_at(graph: dict[str, set[str]]) -> None:
    for module in ("edgespec.decoding.loop", "edgespec.cli.run", "edgespec.export.architectures.llama"):
        assert module in FOUND
    assert "edgespec.runtimes.slots.slot" in graph["edgespec.runtimes.opening"]
    assert {structure.layer(module) for module in FOUND} == {*structure.LAYERS, ""}


def test_cycles_are_seen() -> None:
    assert structure.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert structure.cycles({"a": {"b"}, "b": set()}) == []
    assert structure.upward({"edgespec.runtimes.x": {"edgespec.engine.y"}}) == [
        ("edgespec.runtimes.x", "edgespec.engine.y")
    ]


def test_modules_make_no_import_cycle(graph: dict[str, set[str]]) -> None:
    assert structure.cycles(graph) == []


def test_packages_make_no_import_cycle(graph: dict[str, set[str]]) -> None:
    assert structure.cycles(structure.between_packages(graph, FOUND)) == []


def test_layers_import_lower_ones_only(graph: dict[str, set[str]]) -> None:
    assert structure.upward(graph) == []


def test_the_core_imports_itself_alone(graph: dict[str, set[str]]) -> None:
    for module, used in graph.items():
        if any(module == part or module.startswith(f"{part}.") for part in CORE):
            assert not [other for other in used if not other.startswith(tuple(CORE))], module


def test_an_export_knows_nothing_of_loops_and_drafters(graph: dict[str, set[str]]) -> None:
    for module, used in graph.items():
        if structure.layer(module) == "export":
            # what methods need, and what is timed of a drafter that is imported: no drafter
            used = used - {"edgespec.drafters.registry", "edgespec.drafters.draft_cache"}
            assert not [other for other in used if structure.layer(other) in ("drafters", "control", "engine")], module
            assert "edgespec.decoding.loop" not in used


def test_auto_knows_nothing_of_the_planners_speeds(graph: dict[str, set[str]]) -> None:
    """It starts from what the bundle holds, and measures."""
    for module in FOUND:
        if structure.layer(module) in ("engine", "control"):
            reached, todo = {module}, [module]
            while todo:
                reached |= (more := graph[todo.pop()] - reached)
                todo += more
            assert not reached & {f"edgespec.planning.{name}" for name in ("costs", "prediction", "traffic")}, module


def test_no_file_is_long() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=structure.ROOT, capture_output=True, text=True, check=True)
    paths = {name: structure.ROOT / name for name in listed.stdout.splitlines()}
    sizes = {name: structure.lines(path) for name, path in paths.items() if path.exists() and not path.is_symlink()}
    assert {name: size for name, size in sizes.items() if size > LONGEST} == {}


def test_files_of_the_core_stay_few() -> None:
    """Those that a reader of the algorithm, or of an export, has to find the way among."""
    root = structure.ROOT
    assert len(list((root / "edgespec/decoding").glob("*.py"))) <= 12
    methods = {method.builder.split(":")[0].rpartition(".")[2] for method in METHODS.values()}
    shared = {path.stem for path in (root / "edgespec/drafters").glob("*.py")} - methods
    assert len(shared) <= 8, shared  # a method is one file; these serve several
    assert len([folder for folder in (root / "export").iterdir() if (folder / "__init__.py").is_file()]) <= 11


FENCED = re.compile(r"(?i)(?<![a-z])(swift|skip_search|resume[ds]?|paradecode|combs?|lossy)(?![a-z])")
"""Methods that stay behind a drafter's hooks: the path of every request does not know them."""


@pytest.mark.parametrize("package", ["decoding", "control", "engine"])
def test_methods_stay_behind_their_hooks(package: str) -> None:
    for path in (structure.ROOT / "edgespec" / package).glob("*.py"):
        assert not FENCED.findall(path.read_text("utf-8")), path.name


def test_a_round_is_one_function_of_one_screen() -> None:
    """It proposes, runs the pass, verifies and commits itself, and is watched by three calls at most."""
    tree = ast.parse((structure.ROOT / "edgespec/decoding/loop.py").read_text("utf-8"))
    (decode,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "decode")
    assert (decode.end_lineno or 0) - decode.body[1].lineno < 45  # body[0] is its docstring
    called = [ast.unparse(node.func) for node in ast.walk(decode) if isinstance(node, ast.Call)]
    assert {"guard.propose", "run", "verify", "target.keep"} <= set(called)
    assert sum(name.startswith("stats.") for name in called) <= 3
