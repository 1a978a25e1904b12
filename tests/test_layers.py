"""The house keeps its shape: arrows point down, no circles, no long files, and the core imports nothing but itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import house

FOUND = house.modules()
GRAPH = house.imports(FOUND)
CORE = {"edgespec.decoding", "edgespec.formulas", "edgespec.errors"}
"""What ports to other languages mirror: it imports numpy and itself."""


def test_all_parts_are_looked_at() -> None:
    for module in ("edgespec.decoding.loop", "edgespec.cli.run", "edgespec.export.architectures.llama"):
        assert module in FOUND
    assert "edgespec.runtimes.slots.slot" in GRAPH["edgespec.runtimes.opening"]
    assert {house.part(module) for module in FOUND} == {*house.FLOORS, ""}


def test_circles_are_seen() -> None:
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert house.circles({"a": {"b"}, "b": set()}) == []
    assert house.upward({"edgespec.runtimes.x": {"edgespec.engine.y"}}) == [
        ("edgespec.runtimes.x", "edgespec.engine.y")
    ]


def test_modules_make_no_circles() -> None:
    assert house.circles(GRAPH) == []


def test_rooms_make_no_circles() -> None:
    assert house.circles(house.between_rooms(GRAPH, FOUND)) == []


def test_arrows_point_down() -> None:
    assert house.upward(GRAPH) == []


def test_the_core_imports_itself_alone() -> None:
    for module, used in GRAPH.items():
        if any(module == room or module.startswith(f"{room}.") for room in CORE):
            assert not [other for other in used if not other.startswith(tuple(CORE))], module


def test_an_export_knows_nothing_of_loops_and_drafters() -> None:
    for module, used in GRAPH.items():
        if house.part(module) == "export":
            # what methods need, and what is timed of a drafter that is imported: no drafter
            used = used - {"edgespec.drafters.registry", "edgespec.drafters.draft_cache"}
            assert not [other for other in used if house.part(other) in ("drafters", "control", "engine")], module
            assert "edgespec.decoding.loop" not in used


def test_auto_knows_nothing_of_the_planners_speeds() -> None:
    """It starts from what the bundle holds, and measures."""
    for module in FOUND:
        if house.part(module) in ("engine", "control"):
            reached, todo = {module}, [module]
            while todo:
                reached |= (more := GRAPH[todo.pop()] - reached)
                todo += more
            assert not reached & {f"edgespec.planning.{name}" for name in ("costs", "prediction", "traffic")}, module


def python_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=house.ROOT, capture_output=True, text=True, check=True)
    return [house.ROOT / name for name in listed.stdout.split("\n") if name and not (house.ROOT / name).is_symlink()]


@pytest.mark.parametrize("most", [500])
def test_no_file_is_long(most: int) -> None:
    assert {path.name: house.lines(path) for path in python_files() if path.exists() and house.lines(path) > most} == {}
