"""Change one thing in a module, run its tests, and see whether they notice: how good the tests are, in numbers.

    python -m tools.mutate edgespec/decoding/verify.py tests/decoding --sample 40

A mutant is one operator of ``mutants`` at one place: a comparison turned or moved by one, arithmetic exchanged, a
condition negated, a number moved by one, ``and`` for ``or``, a statement dropped.  ``--seed`` selects the sample.
Every mutant runs in a fork that imports it in place of the module (nothing is written), with ``pytest -x``.  Its limit
is ``LONGER`` times the processor time of the unchanged tests; a mutant that exceeds it counts as caught.  Survivors are
printed as diffs.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import random
import resource
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType

UNREAD = 99  # the exit code where the tests ran without the module
LONGER, LEAST = 2.0, 10  # the limit: a factor of the tests' own time, and additional seconds
COMPARED: dict[type[ast.cmpop], list[str]] = {
    ast.Lt: ["<=", ">="], ast.LtE: ["<", ">"], ast.Gt: [">=", "<="], ast.GtE: [">", "<"],
    ast.Eq: ["!="], ast.NotEq: ["=="], ast.Is: ["is not"], ast.IsNot: ["is"], ast.In: ["not in"], ast.NotIn: ["in"],
}  # fmt: skip
ADDED: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.MatMult: "*",
}  # fmt: skip
PRELOADED = ("edgespec", "numpy", "onnxruntime", "onnx", "tokenizers", "pydantic", "hypothesis", "safetensors",
             "optuna", "ml_dtypes")  # fmt: skip

SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.BitAnd: "&", ast.BitOr: "|", ast.MatMult: "@",
}  # fmt: skip

Change = tuple[int, int, str]  # from, to (in characters), replacement


class Text:
    """The source of a module, whose nodes have places in characters."""

    def __init__(self, source: str) -> None:
        self.source, self.lines = source, source.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]

    def at(self, line: int, column: int) -> int:
        """Give the place of a column, which counts bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Give where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        """Exchange an operator, where it is found; else there is one of several lines, with a comment in it."""
        begin, end = self.span(left)[1], self.span(right)[0]
        if self.source.count(old, begin, end) == 1:
            place = self.source.index(old, begin, end)
            yield place, place + len(old), new


def _operators(text: Text, node: ast.AST) -> Iterator[Change]:
    """Exchange comparisons, arithmetic, ``and`` and ``or``."""
    if isinstance(node, ast.Compare):
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            for new in COMPARED[type(operator)]:
                yield from text.between(left, right, SYMBOLS[type(operator)], new)
    elif isinstance(node, ast.BinOp) and type(node.op) in ADDED:
        yield from text.between(node.left, node.right, SYMBOLS[type(node.op)], ADDED[type(node.op)])
    elif isinstance(node, ast.AugAssign) and type(node.op) in ADDED:
        yield from text.between(node.target, node.value, SYMBOLS[type(node.op)] + "=", ADDED[type(node.op)] + "=")
    elif isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from text.between(node.values[0], node.values[1], old, new)


def _values(text: Text, node: ast.AST) -> Iterator[Change]:
    """Drop a sign, negate a condition, move a number by one."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield text.span(node)[0], text.span(node.operand)[0], ""
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, ast.Constant):
        begin, end = text.span(node.test)
        yield begin, end, f"(not ({text.source[begin:end]}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = node.value
        others: Sequence[object] = [not value] if isinstance(value, bool) else [value + 1, value - 1]
        for other in others:
            yield (*text.span(node), repr(other))


def _statements(text: Text, node: ast.AST) -> Iterator[Change]:
    """Drop a statement."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break)) and not (
        isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Yield))
    ):
        yield (*text.span(node), "pass")


def mutants(source: str) -> list[Change]:
    """Find every change of a module, in the order of the text; annotations, docstrings and imports stay unchanged."""
    text = Text(source)

    def walk(node: ast.AST, inside: bool) -> Iterator[Change]:
        if inside:
            for rule in (_operators, _values, _statements):
                yield from rule(text, node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, inside or isinstance(node, ast.FunctionDef))

    return sorted(set(walk(ast.parse(source), False)))


def changed(source: str, change: Change) -> str:
    """Give the module with one change."""
    begin, end, new = change
    return source[:begin] + new + source[end:]


class Instead(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module, and gives its source another text."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source
        self.used = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Give the module, if it is the one."""
        if fullname != self.name:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, origin=str(self.path))
        assert spec is not None
        spec.has_location = True
        self.used = True
        return spec

    def get_source(self, fullname: str) -> str:
        """Give the other text."""
        return self.source

    def get_code(self, fullname: str) -> CodeType:
        """Give the other text, compiled."""
        return compile(self.source, str(self.path), "exec")


def passes(name: str, path: Path, source: str, tests: list[str], limit: int | None) -> tuple[bool, float]:
    """Run tests in a fork, with this source for a module -> whether all pass, and seconds of processor time.

    ``limit``: maximum seconds; None = no limit.
    """
    child = os.fork()
    if child == 0:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent, stream)
        instead = Instead(name, path, source)
        sys.meta_path.insert(0, instead)
        import pytest

        code = 1
        try:
            preloaded = "-W", "ignore::pytest.PytestAssertRewriteWarning"
            code = int(pytest.main(["-x", "-n0", "-p", "no:cacheprovider", *preloaded, *tests]))
            code = code or (0 if instead.used else UNREAD)
        finally:
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == UNREAD:
        sys.exit(f"{path}: the tests do not import {name}, or it was imported before them")
    return status == 0, used.ru_utime + used.ru_stime


def diff(source: str, other: str, name: str) -> str:
    """Give the line that changed."""
    lines = difflib.unified_diff(source.splitlines(), other.splitlines(), name, name, n=0, lineterm="")
    return "\n".join(list(lines)[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="a file, by its path")
    parser.add_argument("tests", nargs="+", help="what pytest runs, the quickest first")
    parser.add_argument("--sample", type=int, default=40, help="mutants; 0 = all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preload", nargs="*", default=[], help="further packages that the tests import")
    given = parser.parse_args()
    for package in (*PRELOADED, *given.preload):
        importlib.import_module(package)
    path = Path("" if given.module.parts[0] in ("edgespec", "tools") else "edgespec") / given.module
    name, source = ".".join(path.with_suffix("").parts), path.read_text("utf-8")
    every = mutants(source)
    order = random.Random(given.seed).sample(every, len(every))
    good, seconds = passes(name, given.module, source, given.tests, None)
    if not good:
        sys.exit(f"{given.module}: its tests fail without any change")
    caught = 0
    survivors: list[Change] = []
    for change in order:
        if given.sample and caught + len(survivors) >= given.sample:
            break
        other = changed(source, change)
        try:
            compile(other, name, "exec")
        except SyntaxError:
            continue
        survived, _ = passes(name, given.module, other, given.tests, int(LEAST + LONGER * seconds))
        caught += not survived
        if survived:
            survivors.append(change)
            print(diff(source, other, str(given.module)), flush=True)
    total = caught + len(survivors)
    print(f"{given.module}: {caught} of {total} caught ({len(every)} possible, seed {given.seed})", flush=True)


if __name__ == "__main__":
    main()
