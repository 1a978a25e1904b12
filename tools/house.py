"""The shape of the house: rooms, what imports what, circles, floors, longest files.

    python tools/house.py            # a table of folders
    python tools/house.py --arrows   # and every arrow between rooms, with what causes it

A room is a folder of modules.  Every import is counted, those inside functions and those for types alone too.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HIGH = ("cli", "server", "export", "reports", "engine", "planning")
FLOORS = (*HIGH, "control", "drafters", "runtimes", "decoding", "formulas")
"""The parts of the package, the highest first: a part imports lower ones only."""

Graph = Mapping[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package by its import name, through the links `edgespec/export` and the like."""
    found = {}
    for folder in ("edgespec", "export", "runtimes", "configs"):
        prefix = () if folder == "edgespec" else ("edgespec",)
        for path in sorted((root / folder).rglob("*.py")):
            inner = path.relative_to(root)
            if any((root / parent).is_symlink() for parent in inner.parents):
                continue  # counted where it lies
            parts = (*prefix, *inner.with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(found: Mapping[str, Path]) -> dict[str, set[str]]:
    """What each module imports of this package, anywhere in it.

    Raises:
        ValueError: a relative import, or one by the name of a link (`import export` makes a second copy).
    """
    graph: dict[str, set[str]] = {name: set() for name in found}
    for name, path in found.items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                if node.level or node.module is None:
                    raise ValueError(f"{name}: a relative import; write `from edgespec...`")
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            for target in named:
                if target.split(".")[0] in ("export", "runtimes", "configs"):
                    raise ValueError(f"{name} imports {target}: write edgespec.{target}")
                graph[name] |= {known for known in (target, target.rpartition(".")[0]) if known in found} - {name}
        graph[name] -= {
            parent for parent in graph[name] if any(child.startswith(f"{parent}.") for child in graph[name])
        }
        graph[name].discard("edgespec")  # the names of the package itself are imported on first use
    return graph


def room(module: str, found: Mapping[str, Path]) -> str:
    """The folder of a module, by its import name; a module at the top is a room of its own."""
    folder = module if found[module].name == "__init__.py" else module.rpartition(".")[0]
    return module if folder == "edgespec" else folder


def part(module: str) -> str:
    """The part of the package that a module belongs to: the word after `edgespec.`, or "" for what lies at the top."""
    words = module.split(".")
    return words[1] if len(words) > 1 and words[1] in FLOORS else ""


def between_rooms(graph: Graph, found: Mapping[str, Path]) -> dict[str, set[str]]:
    """The same arrows, of rooms instead of modules."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for module, used in graph.items():
        here = room(module, found)
        rooms[here] |= {room(other, found) for other in used} - {here}
    return dict(rooms)


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def floors(graph: Graph) -> dict[str, int]:
    """How many arrows lie below each node, on the longest way down; nodes of one circle share a floor."""
    heights: dict[str, int] = {}

    def height(node: str, above: frozenset[str]) -> int:
        if node not in heights:
            below = [height(other, above | {node}) for other in graph.get(node, ()) if other not in above]
            heights[node] = 1 + max(below, default=-1)
        return heights[node]

    for node in sorted(graph):
        height(node, frozenset())
    return heights


def upward(graph: Graph) -> list[tuple[str, str]]:
    """Arrows from a lower part of the package to a higher one."""
    rank = {name: place for place, name in enumerate(FLOORS)}
    pairs = ((module, other) for module, used in graph.items() for other in sorted(used))
    return [(a, b) for a, b in pairs if part(a) and part(b) and rank[part(b)] < rank[part(a)]]


def lines(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text("utf-8").splitlines())


def table(found: Mapping[str, Path]) -> Iterator[str]:
    """A line a room: files, lines, the longest file."""
    rooms: dict[str, list[Path]] = defaultdict(list)
    for module, path in found.items():
        rooms[
            "edgespec" if room(module, found) == module and path.name != "__init__.py" else room(module, found)
        ].append(path)
    for name in sorted(rooms):
        sizes = {path.name: lines(path) for path in rooms[name]}
        longest = max(sizes, key=lambda file: sizes[file])
        yield f"{name:40} {len(sizes):3} files {sum(sizes.values()):6} lines   longest {longest} ({sizes[longest]})"


def main() -> None:
    """Print the house."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrows", action="store_true", help="print every arrow between rooms")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    found = modules(options.root)
    graph = imports(found)
    rooms = between_rooms(graph, found)
    print(*table(found), sep="\n")
    total = sum(lines(path) for path in found.values())
    stories = max(floors(graph).values()) + 1
    print(f"\n{len(found)} modules, {len(rooms)} rooms, {total} lines, {stories} floors of modules")
    print("circles of modules:", circles(graph) or "none")
    print("circles of rooms:", circles(rooms) or "none")
    print("arrows upward:", upward(graph) or "none")
    if options.arrows:
        for module, used in sorted(graph.items()):
            for other in sorted(used):
                if room(module, found) != room(other, found):
                    print(f"{room(module, found)} -> {room(other, found)}: {module} -> {other}")


if __name__ == "__main__":
    main()
