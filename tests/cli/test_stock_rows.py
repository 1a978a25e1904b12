"""A bundle whose rows depend on their neighbours here says so on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.export.emit import wide_heads
from tests.cli.conftest import Command
from tests.support.wide import wide_bundle

STOCK = ("--operators", "stock", "--max-new-tokens", 90)


def asked(folder: Path) -> tuple[str, Path]:
    (folder / "prompts.txt").write_text("the boat that\nThere was nothing left to do but wait\n", "utf-8")
    return "--prompts", folder / "prompts.txt"


def test_an_older_bundle_with_wide_heads(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_NATIVE", "0")
    with monkeypatch.context() as patch:
        patch.setattr(wide_heads, "WHOLE_SUM", 1 << 20)  # as in versions that knew nothing of wide heads
        older = wide_bundle(tmp_path / "older")
    (tmp_path / "cache" / "rows.json").unlink(missing_ok=True)  # an export opens what it wrote
    assert "tried when it is first opened here" in command("info", older).out
    assert command("info", older, "--json").json["operators"]["exact_rows"] is None
    done = command("verify", older, *STOCK, *asked(tmp_path))
    assert done.code == 0
    assert "near-ties may differ" in done.err
    assert done.out.endswith("passed\n")
    assert command("verify", older, *STOCK, *asked(tmp_path), "--json").json["strict"] is False
    assert "approximate" in command("info", older).out
    assert command("info", older, "--json").json["operators"]["exact_rows"] is False


def test_one_of_today(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_NATIVE", "0")
    today = wide_bundle(tmp_path / "today")
    told = command("verify", today, *STOCK, *asked(tmp_path), "--json").json
    assert (told["strict"], told["passed"]) == (True, True)
    assert all(method["exact"] for method in told["methods"])
    assert "the same bits in every pass" in command("info", today).out
