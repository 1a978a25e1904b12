"""Swift and chains on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command, export
from tests.conftest import TARGET

SHORT = ("--prompt", "ROMEO:", "--max-new-tokens", 40, "--no-fallback", "--operators", "stock", "--json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for swift: no search at export."""
    return export(tmp_path_factory.mktemp("swift") / "bundle", TARGET, "--method", "swift", "--operators", "stock")


def test_swift_writes_the_same_text_and_its_sets_can_be_forgotten(
    command: Command, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    plain = command("run", made, *SHORT, "--method", "ar").json
    found = command("run", made, *SHORT, "--method", "swift", "--set", "kind=play").json
    assert found["tokens"] == plain["tokens"]
    assert "sets tried" in found["reason"]
    command("run", made, *SHORT, "--method", "swift", "--set", "kind=../x").refused(1, "stream kind")
    result = command("info", made, "--forget-skip-sets")
    assert result.code == 0
    assert "files deleted" in result.err
    assert not list((tmp_path / "swift").glob("*.json"))


def test_a_chain_writes_the_same_text(command: Command, made: Path) -> None:
    plain = command("run", made, *SHORT, "--method", "ar").json
    for wanted in (("--method", "chain"), ("--set", "proposers=swift,ngram")):
        found = command("run", made, *SHORT, *wanted).json
        assert found["tokens"] == plain["tokens"]
        assert found["method_used"] == "chain"
    command("run", made, *SHORT, "--method", "chain", "--set", "proposers=self-spec").refused(
        1, "'self-spec' is not in this bundle", "export it with"
    )
    command("run", made, *SHORT, "--method", "chain", "--set", "proposers=nonsense").refused(1, "check the spelling")
    command("run", made, *SHORT, "--method", "ar", "--set", "proposers=ngram").refused(2, "belongs to --method chain")
