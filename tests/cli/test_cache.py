"""``edgespec cache``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Command, export
from tests.conftest import DRAFT


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    folder = tmp_path / "own"
    monkeypatch.setenv("EDGESPEC_CACHE", str(folder))
    return folder


@pytest.mark.usefixtures("native")
def test_converted_weights_are_shown_limited_and_cleared(command: Command, own: Path, tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle", DRAFT, "--quantizer", "rtn")
    assert command("cache", "clear").code == 0  # what the export kept
    assert command("cache", "list").out == f"0 B in {own}, limit 32.00 GiB\n"
    kinds = [
        command("run", bundle, "--operators", kind, "--prompt", "A", "--json").code for kind in ("stock", "native")
    ]
    assert kinds == [0, 0]
    found = command("cache", "list", "--json").json
    assert (found["folder"], found["limit"]) == (str(own), 32 << 30)
    (weights,) = [entry for entry in found["entries"] if entry["kind"] == "weights"]
    assert weights["source"].startswith(str(bundle))
    assert found["bytes"] == sum(entry["bytes"] for entry in found["entries"]) >= weights["bytes"] > 0
    assert command("cache", "clear", "--gone", "--json").json["removed"] == []
    shutil.rmtree(bundle)
    shown = command("cache", "list").out
    assert "(gone)" in shown
    assert "edgespec cache clear weights --gone" in shown
    limited = command("cache", "limit", "1KiB", "--json").json
    assert [entry["path"] for entry in limited["removed"]] == [weights["path"]]
    assert not Path(weights["path"]).exists()
    assert command("cache", "list", "--json").json["limit"] == 1024
    assert command("cache", "limit", "off").code == 0
    assert "no limit" in command("cache", "list").out
    cleared = command("cache", "clear")
    assert (cleared.code, cleared.out[:8]) == (0, "removed ")
    assert command("cache", "list", "--json").json["entries"] == []


def test_refusals(command: Command, own: Path) -> None:
    command("cache", "limit", "huge").refused(1, "'huge' is no amount of memory", "hint: ")
    command("cache", "limit").refused(2, "SIZE")
    command("cache", "clear", "everything").refused(2, "everything")
    assert not own.exists()
