"""Layers import only lower ones, without import cycles, and the core imports nothing but itself."""

from __future__ import annotations

import pytest

from tools import structure

FOUND = structure.modules()
CORE = {"edgespec.decoding", "edgespec.formulas", "edgespec.errors", "edgespec.extensions", "edgespec.declared"}
"""The core, which ports to other languages mirror: it imports numpy and itself."""


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Read the imports of every module."""
    return structure.imports(FOUND)


def test_all_parts_are_looked_at(graph: dict[str, set[str]]) -> None:
    for module in ("edgespec.decoding.loop", "edgespec.cli.run", "edgespec.export.architectures.llama"):
        assert module in FOUND
    assert "edgespec.runtimes.slots.slot" in graph["edgespec.runtimes.opening"]
    assert {structure.layer(module) for module in FOUND} == {*structure.LAYERS, "edgespec"}


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
