"""An installation's dependencies and files, and things that it never does: network at import or run, pickles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIRECT = {
    "click", "huggingface-hub", "jinja2", "numpy", "onnxruntime", "prompt-toolkit", "pydantic", "rich", "safetensors",
    "tokenizers",
}  # fmt: skip
PICKLES = {"pickle", "dill", "joblib", "shelve", "cloudpickle"}
ELSEWHERE = re.compile(r"(sys_platform|platform_system) == .(win32|Windows|emscripten)")
MOST = 50  # distributions that `pip install .` brings, these and theirs


def requirements(name: str) -> Iterator[str]:
    """Names that a distribution needs where none of its extras are asked for."""
    for line in metadata.requires(name) or []:
        wanted, _, marker = line.partition(";")
        if "extra ==" not in marker and not ELSEWHERE.search(marker):
            found = re.match(r"[A-Za-z0-9._-]+", wanted)
            assert found, line
            yield found[0].lower().replace("_", "-")


def test_what_an_installation_pulls() -> None:
    assert set(requirements("edgespec")) == DIRECT
    waiting, found = list(DIRECT), set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            waiting += requirements(name)
        except metadata.PackageNotFoundError:  # needed on another version of Python or another system
            continue
        found.add(name)
    assert found >= DIRECT
    assert len(found) <= MOST, sorted(found)


def sources() -> list[Path]:
    return list((ROOT / "edgespec").rglob("*.py"))


def test_no_pickle_is_read_or_written() -> None:
    """No module or function that opens pickles is used; torch reads only weights."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not PICKLES & {name.split(".")[0] for name in names}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert keywords.get("allow_pickle", "False") == "False", path
                if ast.unparse(node.func) == "torch.load":
                    assert keywords.get("weights_only") == "True", path
