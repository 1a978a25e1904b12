"""Print the structure of the code: packages, what imports what, import cycles, layers, classes, longest files.

    python tools/structure.py             # a table of packages, and what is counted of all
    python tools/structure.py --imports   # and every import between packages, with what causes it

Every import is counted, including those inside functions and those used only for types.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOP = ("plugins", "__main__", "cli", "server", "exporter", "transformers", "library")
LAYERS = (*TOP, "export", "judge", "reports", "engine", "planning", "control", "drafters", "runtimes", "decoding",
          "formulas", "configs", "signatures", "declared", "extensions", "errors", "version")  # fmt: skip
"""The layers of the package, the highest first: a layer imports lower ones only.  Some are one module."""

Graph = Mapping[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Find every module by its import name."""
    found = {}
    for path in sorted((root / "edgespec").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(found: Mapping[str, Path]) -> dict[str, set[str]]:
    """Find what each module imports of this package, anywhere in it.

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


def package(module: str, found: Mapping[str, Path]) -> str:
    """Return the package of a module, by its import name; a module at the top is its own package."""
    folder = module if found[module].name == "__init__.py" else module.rpartition(".")[0]
    return module if folder == "edgespec" else folder


def layer(module: str) -> str:
    """Give the layer that a module belongs to, the word after `edgespec.`; the package itself is named `edgespec`."""
    return module.split(".")[1] if "." in module else module


def between_packages(graph: Graph, found: Mapping[str, Path]) -> dict[str, set[str]]:
    """Give the same imports, of packages instead of modules."""
    between: dict[str, set[str]] = defaultdict(set)
    for module, used in graph.items():
        here = package(module, found)
        between[here] |= {package(other, found) for other in used} - {here}
    return dict(between)


def cycles(graph: Graph) -> list[list[str]]:
    """Find the groups of nodes that reach each other (Tarjan 1972), each sorted."""
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


def upward(graph: Graph) -> list[tuple[str, str]]:
    """Find the imports of a higher layer from a lower one.

    Raises:
        KeyError: a module that is in no layer.
    """
    rank = {name: place for place, name in enumerate(("edgespec", *LAYERS))}
    pairs = ((module, other) for module, used in graph.items() for other in sorted(used))
    return [(a, b) for a, b in pairs if rank[layer(b)] < rank[layer(a)]]


def lines(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text("utf-8").splitlines())


@dataclass(frozen=True)
class Class:
    """A class of the package: its bases in the package, and what it has that has no underscore."""

    bases: tuple[str, ...]
    members: tuple[str, ...]


def classes(found: Mapping[str, Path]) -> dict[str, Class]:
    """Find the classes of all modules, by module and name."""
    made = {}
    for module, path in found.items():
        tree = ast.parse(path.read_text("utf-8"))
        named = {node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                named |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [named.get(ast.unparse(base).split("[")[0], "") for base in node.bases]
                own = [one.name if isinstance(one, ast.FunctionDef) else ast.unparse(one.target)
                       for one in node.body if isinstance(one, (ast.FunctionDef, ast.AnnAssign))]  # fmt: skip
                members = dict.fromkeys(name for name in own if not name.startswith("_"))
                made[f"{module}.{node.name}"] = Class(tuple(bases), tuple(members))
    return made


def chain(name: str, known: Mapping[str, Class]) -> list[str]:
    """Give a class and its bases in this package, on the longest way up."""
    ways = [chain(base, known) for base in known[name].bases if base in known]
    return [name, *max(ways, key=len, default=[])]


def table(found: Mapping[str, Path]) -> Iterator[str]:
    """Give a line a package: files, lines, classes, the longest file."""
    packages: dict[str, list[str]] = defaultdict(list)
    for module, path in found.items():
        own = package(module, found)
        packages["edgespec" if own == module and path.name != "__init__.py" else own].append(module)
    made = Counter(name.rpartition(".")[0] for name in classes(found))
    for name, inside in sorted(packages.items()):
        sizes = {found[module].name: lines(found[module]) for module in inside}
        longest = max(sizes, key=lambda file: sizes[file])
        total, many = sum(lines(found[module]) for module in inside), sum(made[module] for module in inside)
        yield f"{name:34} {len(inside):3} files {total:6} lines {many:4} classes   longest {longest} ({sizes[longest]})"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imports", action="store_true", help="print every import between packages")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    found = modules(options.root)
    graph, known = imports(found), classes(found)
    packages, total = between_packages(graph, found), sum(map(lines, found.values()))
    print(*table(found), sep="\n")
    print(f"\n{len(found)} modules, {len(packages)} packages, {total} lines, {len(known)} classes")
    longest = max((chain(name, known) for name in known), key=len)
    print(f"longest chain of inheritance ({len(longest)}):", " < ".join(longest))
    members = known["edgespec.decoding.drafter.Drafter"].members
    print(f"members of Drafter ({len(members)}):", ", ".join(members))
    print("import cycles of modules:", cycles(graph) or "none")
    print("import cycles of packages:", cycles(packages) or "none")
    print("imports of a higher layer:", upward(graph) or "none")
    if options.imports:
        for module, used in sorted(graph.items()):
            for other in sorted(used):
                if package(module, found) != package(other, found):
                    print(f"{package(module, found)} -> {package(other, found)}: {module} -> {other}")


if __name__ == "__main__":
    main()
