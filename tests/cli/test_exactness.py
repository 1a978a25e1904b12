"""All commands use the same words for exact texts and for possible near-ties, and never both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.engine.exactness import EXACT, NEAR_TIES
from edgespec.runtimes.slots.pairs import VARIABLE
from tests.cli.conftest import Command
from tests.support.wide import wide_bundle

COMMANDS = {
    "verify": ("--max-new-tokens", 20),
    "info": (),  # after one that opens the bundle
    "run": ("--prompt", "the boat that", "--max-new-tokens", 60, "--method", "speculative", "--stats"),
    "bench": ("--repeats", 2, "--max-new-tokens", 12, "--max-prompts", 1),
    "calibrate": ("--duration", "0.3", "--context", "100"),
}
TAKES_PROMPTS = ("verify", "bench")


@pytest.fixture
def said(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], dict[str, tuple[str, str]]]:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_NATIVE", "0")
    (tmp_path / "prompts.txt").write_text("There was nothing left to do but wait. She had\n", "utf-8")

    def run(bundle: Path) -> dict[str, tuple[str, str]]:
        found = {}
        for name, how in COMMANDS.items():
            prompts = ("--prompts", tmp_path / "prompts.txt") if name in TAKES_PROMPTS else ()
            done = command(name, bundle, *how, *prompts, *(() if name == "info" else ("--operators", "stock")))
            assert done.code == 0, done.err
            found[name] = done.out, done.err
        return found

    return run


@pytest.mark.parametrize("pairs", ["0", "1"])
def test_where_the_probe_fails(
    said: Callable[[Path], dict[str, tuple[str, str]]], tmp_path: Path, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, pairs)
    for name, texts in said(wide_bundle(tmp_path / "differing", exact=False)).items():
        assert NEAR_TIES in "".join(texts), name


def test_where_rows_are_exact(said: Callable[[Path], dict[str, tuple[str, str]]], tmp_path: Path) -> None:
    for name, texts in said(wide_bundle(tmp_path / "today")).items():
        assert NEAR_TIES not in "".join(texts), name
        assert name in ("run", "bench") or EXACT in texts[0], name
        assert name not in ("run", "bench") or "same text" in "".join(texts), name
