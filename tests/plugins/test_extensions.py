"""Plug-ins: what is registered, what is found, what is refused; the core names none of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec import extensions
from edgespec.drafters.registry import METHODS, Method
from edgespec.extensions import DRAFTERS, GROUPS, OWN, Table
from tests.support.installed import importable
from tools.structure import ROOT, imports, modules

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PLUGINS = ROOT / "edgespec" / "plugins"


def package(folder: Path, name: str, entries: str, code: str) -> Path:
    """Write an installed package of one module, as pip leaves it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(entries, "utf-8")
    (folder / f"{name}.py").write_text(code, "utf-8")
    return folder


def test_the_list_of_a_checkout_is_that_of_the_metadata() -> None:
    made = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    listed = extensions.listed(OWN)
    assert {group: entries for group, entries in listed.items() if entries} == made
    assert set(made) <= set(GROUPS)


def test_every_plugin_can_be_loaded() -> None:
    for group in GROUPS:
        for plugin in extensions.plugins(group).values():
            assert plugin.load() is not None


def test_no_module_imports_a_plugin() -> None:
    graph = imports(modules())
    for module, used in graph.items():
        if not module.startswith("edgespec.plugins"):
            assert not [other for other in used if other.startswith("edgespec.plugins")], module


def words(path: Path) -> str:
    """Return the names and the strings of a module, docstrings and comments left out."""
    tree = ast.parse(path.read_text("utf-8"))
    docs = {id(node.body[0].value) for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body
            and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append(node.value)
        found += [getattr(node, name) for name in ("id", "attr", "name", "arg", "module")
                  if isinstance(getattr(node, name, None), str)]  # fmt: skip
    return "\n".join(found)


@pytest.mark.parametrize("name", sorted(path.name for path in PLUGINS.iterdir() if (path / "__init__.py").is_file()))
def test_the_core_names_no_plugin(name: str) -> None:
    # names of its rules, because the core also uses the word
    found = {"lossy": "lantern|edgespec.plugins"}.get(name, name)
    named = re.compile(rf"(?i)(?<![a-z])({found})(?![a-z])")
    core = [path for path in sorted((ROOT / "edgespec").rglob("*.py")) if PLUGINS not in path.parents]
    assert len(core) > 200
    naming = [str(path.relative_to(ROOT)) for path in core if named.search(words(path))]
    assert not naming, "rename the plug-in, or say in `found` what of it the core must not name"


def test_a_broken_package_takes_nothing_along(tmp_path: Path) -> None:
    entries = "[edgespec.drafters]\nboom = broken:METHOD\nodd = broken_odd:METHOD\nngram = broken_odd:OTHER\n"
    package(tmp_path, "broken", entries, "raise OSError('no such device')\n")
    (tmp_path / "broken_odd.py").write_text("METHOD = OTHER = 3\n", "utf-8")
    with importable(tmp_path):
        assert "swift" in METHODS
        assert METHODS["ngram"].builder == "edgespec.drafters.ngram:build"
        assert not {"boom", "odd"} & set(METHODS)
        assert "package broken cannot be imported: no such device" in str(METHODS.refused("method", "boom"))
        assert "has no entry for edgespec.drafters" in str(METHODS.refused("method", "odd"))
    assert "an entry point in edgespec.drafters" in str(METHODS.refused("method", "boom"))


def test_the_first_of_a_name_has_it(tmp_path: Path) -> None:
    code = "from edgespec.drafters.registry import Method\nMETHOD = Method('{}', 'x:y')\n"
    for name in ("aaa", "bbb"):
        package(
            tmp_path, name, f"[edgespec.drafters]\nmine = {name}:METHOD\nswift = {name}:METHOD\n", code.format(name)
        )
    with importable(tmp_path):
        assert METHODS["mine"].help == "aaa"
        assert METHODS["swift"].builder.startswith("edgespec.plugins.")


def test_nothing_is_read_before_a_table_is_looked_at() -> None:
    table = Table[Method](DRAFTERS, {"own": METHODS["ar"]}, lambda made: isinstance(made, Method))
    extensions.refresh()
    assert table["own"] is METHODS["ar"]
    assert extensions._plugins.cache_info().currsize == 0
    assert list(table)[:2] == ["own", "swift"]


def test_help_reads_no_metadata_and_one_drafter_imports_no_other() -> None:
    code = """
import sys
from edgespec.__main__ import main
sys.argv = ["edgespec", "--help"]
try:
    main()
except SystemExit:
    pass
print("importlib.metadata" in sys.modules, any(name.startswith("edgespec.plugins") for name in sys.modules))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False False"
    listed = "import sys, edgespec.drafters.registry, edgespec.drafters.{}; print(*sys.modules)"
    drafters = {method.builder.partition(":")[0] for method in METHODS.values()}
    for name in ("plain", "ngram", "draft_models"):
        ran = subprocess.run([sys.executable, "-c", listed.format(name)], capture_output=True, text=True, check=True)
        assert drafters & set(ran.stdout.split()) == {f"edgespec.drafters.{name}"}
