"""Install packages of ``examples/`` into a new folder, without network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgespec import extensions

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def install(name: str, folder: Path) -> Path:
    """Install ``examples/NAME`` into ``folder``, from a copy: a build leaves files where it runs."""
    copy = folder / f"{name}-source"
    copy.mkdir(parents=True)
    for file in (EXAMPLES / name).iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    target = folder / f"{name}-installed"
    words = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--target", str(target), str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


@contextmanager
def importable(target: Path) -> Iterator[None]:
    """Put an installed package on the path of this process; its modules are forgotten at the end."""
    before = set(sys.modules)
    sys.path.append(str(target))
    extensions.refresh()
    try:
        yield
    finally:
        sys.path.remove(str(target))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(target)):
                del sys.modules[name]
        extensions.refresh()
