"""Print the walks of CONTRIBUTING.md with lines: every file and function that they name, in order.

python -m tools.walk
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = "## Three walks"
_PATH, _NAME = r"`([\w./]+\.(?:py|cpp))`", r"`(\w+(?:(?:\.|::)\w+)*)`"
_STEP = re.compile(rf"{_PATH}, {_NAME}|{_NAME} \({_PATH}\)|{_NAME} in {_PATH}")


def _text(page: str) -> str:
    """Return the walks, each paragraph in one line."""
    return re.sub(r"\s*\n\s+", " ", page.partition(HEADING)[2].partition("\n## ")[0])


def methods(page: str) -> set[str]:
    """Return all methods that the walks name, with a file or without."""
    return set(re.findall(r"`(_?[A-Z]\w*\.\w+)`", _text(page)))


def steps(page: str) -> list[tuple[str, str]]:
    """Return the (file, function) pairs that the walks of a page name, in order."""
    found = []
    for first, second, third, fourth, fifth, sixth in _STEP.findall(_text(page)):
        path, name = (first, second) if first else (fourth, third) if fourth else (sixth, fifth)
        found.append((path, name))
    return found


def line_of(path: str, name: str) -> int:
    """Return the line where a file defines a function or class.

    Raises:
        LookupError: the file does not exist, or does not define it.
    """
    if not (ROOT / path).is_file():
        raise LookupError(f"no file {path}")
    found = defined(path).get(name)
    if found is None:
        raise LookupError(f"{path} defines no {name}")
    return found


@cache
def defined(path: str) -> dict[str, int]:
    """Return the lines of all functions and classes of a file, by dotted name."""
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".cpp"):
        lines = enumerate(text.splitlines(), 1)
        return {
            name: at for at, line in lines if not line.startswith(" ") for name in re.findall(r"(\w+::\w+)\(", line)
        }
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + one.name] = one.lineno  # of overloads, the last one
                visit(one, f"{prefix}{one.name}.")

    visit(ast.parse(text), "")
    return found


def main() -> None:
    for path, name in steps((ROOT / "CONTRIBUTING.md").read_text("utf-8")):
        print(f"{path}:{line_of(path, name)}  {name}")


if __name__ == "__main__":
    main()
