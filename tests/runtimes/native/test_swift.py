"""The module of Swift's package, read by clang."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULE = ROOT / "swift" / "Sources" / "CEdgespec" / "module.modulemap"
HEADER = MODULE.with_name("edgespec.h")
USES = """\
#pragma clang module import CEdgespec
int main(void) {
  edgespec_settings settings = EDGESPEC_INIT(edgespec_settings);
  edgespec_round round = EDGESPEC_INIT(edgespec_round);
  edgespec_bundle *bundle = 0;
  edgespec_session *session = 0;
  int64_t prompt = 1;
  return edgespec_bundle_open("bundle", 1, &bundle) || edgespec_session_open(bundle, 0, &session) ||
         edgespec_begin(session, &prompt, 1, &settings) || edgespec_next(session, &round) == EDGESPEC_BROKEN;
}
"""


@pytest.mark.nightly  # clang is no part of what the tests of every change install
@pytest.mark.parametrize(("language", "standard"), [("c", "c11"), ("c++", "c++17"), ("objective-c", "c11")])
def test_the_module(language: str, standard: str, tmp_path: Path) -> None:
    clang = next(filter(None, map(shutil.which, ("clang", "clang-19", "clang-16", "clang-14"))), None)
    if not clang:
        pytest.skip("no clang to read the module (clang-16)")
    assert HEADER.resolve() == ROOT / "edgespec" / "runtimes" / "native" / "edgespec.h"
    (tmp_path / "uses").write_text(USES)
    strict = ("-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    modules = ("-fmodules", "-fcxx-modules", f"-fmodules-cache-path={tmp_path / 'modules'}")
    command = [clang, "-x", language, f"-std={standard}", *strict, *modules, f"-fmodule-map-file={MODULE}",
               str(tmp_path / "uses")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    broken = (tmp_path / "uses").read_text().replace("edgespec_begin(", "edgespec_start(")
    (tmp_path / "uses").write_text(broken)
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_the_package_names_the_module() -> None:
    """No Swift compiler reads Package.swift here: its names are those of the folder, the module and CMake's file."""
    package = (ROOT / "swift" / "Package.swift").read_text("utf-8")
    (target, config) = re.findall(r'\.systemLibrary\(name: "(\w+)", pkgConfig: "(\w+)"\)', package)[0]
    assert (ROOT / "swift" / "Sources" / target / "module.modulemap") == MODULE  # where SwiftPM looks for it
    assert re.findall(r"^module (\w+) \{", MODULE.read_text("utf-8")) == [target]
    assert f'.library(name: "{target}", targets: ["{target}"])' in package
    assert list((ROOT / "cmake").glob(f"{config}.pc*"))
