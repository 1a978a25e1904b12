"""``optimum-cli export edgespec``, in an environment that has optimum and an editable installation of edgespec."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.elsewhere import python_with

pytestmark = pytest.mark.nightly


def call(*words: str) -> subprocess.CompletedProcess[str]:
    """Run optimum's command line far from the checkout."""
    command = [python_with("optimum"), "-m", "optimum.commands.optimum_cli", "export", "edgespec", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path("/"), timeout=600)


def test_options_are_those_of_export(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    made = call("-m", "builtin:shakespeare", "-o", str(bundle), "--format", "int8", "--method", "self-spec", "--quick",
                "--json")  # fmt: skip
    assert made.returncode == 0, made.stderr
    manifest = json.loads((bundle / "edgespec.json").read_text("utf-8"))
    assert manifest["target"]["format"] == "int8"
    assert "self-spec" in manifest["methods"]


def test_errors_have_edgespec_s_exit_codes(tmp_path: Path) -> None:
    assert call("-m", str(tmp_path / "nothing")).returncode == 1
    assert call("-m", "builtin:shakespeare", "--format", "int5").returncode == 2
    assert call("-o", str(tmp_path / "bundle")).returncode == 2
