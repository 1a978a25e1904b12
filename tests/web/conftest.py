"""The npm package, built once: its modules by Zig, its scripts by npm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.required import need
from tools.build_web import ROOT

PACKAGE = ROOT / "web"


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of the built package's files: ``EDGESPEC_WEB``, such as web/dist, or one that is built here."""
    if built := os.environ.get("EDGESPEC_WEB"):
        return Path(built).resolve()
    need("npm", "to build the npm package")
    pytest.importorskip("ziglang", reason="no Zig to build WebAssembly: pip install ziglang")
    folder = tmp_path_factory.mktemp("web")
    for name in ("package.json", "package-lock.json", "tsconfig.json", "src", "README.md", "LICENSE", "THIRD-PARTY.md"):
        source = PACKAGE / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    for command in (["npm", "ci", "--silent"], ["npm", "run", "build", "--silent"]):
        subprocess.run(command, cwd=folder, check=True, timeout=600)
    build = [sys.executable, "-m", "tools.build_web", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, timeout=1800)
    return folder / "dist"


@pytest.fixture(scope="session")
def node(package: Path) -> str:
    """Give the Node that the package's lock names: Debian 12's has no relaxed SIMD yet."""
    return str(package.parent / "node_modules" / "node" / "bin" / "node")
