"""Attention formats on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgespec.cli.app import cli
from edgespec.runtimes.ort.native_library import native_library
from tests.cli.conftest import Command
from tests.conftest import TARGET, THREADS, fixed_skip_set

pytestmark = pytest.mark.skipif(native_library().path is None, reason="no native operators here")

DRAFTING = ("--method", "self-spec", "--no-fallback", "--operators", "native", "--max-new-tokens", 20)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Export with self-speculation; nomad is the default, nomad2 is there."""
    folder = tmp_path_factory.mktemp("attention")
    attention = ("--attention", "nomad", "--attention", "nomad2")
    skip = ("--method", "self-spec", "--skip-set", str(fixed_skip_set(folder, TARGET)))
    words = ["export", TARGET, "-o", str(folder / "bundle"), "--threads", str(THREADS), *skip, *attention]
    return folder / "bundle", CliRunner().invoke(cli, words)


@pytest.fixture
def bundle(exported: tuple[Path, Result]) -> Path:
    return exported[0]


def test_info(command: Command, bundle: Path) -> None:
    text = " ".join(command("info", bundle).out.split())
    assert "attention nomad is the default" in text
    assert "nomad passed its quality gate: perplexity" in text
    assert command("info", bundle, "--json").json["manifest"]["target"]["attention"]["default"] == "nomad"


def test_drafts_of_coarser_keys(command: Command, bundle: Path) -> None:
    plain = command(
        "run", bundle, "--prompt", "ROMEO:", "--method", "ar", "--operators", "native", "--max-new-tokens", 20, "--json"
    ).json
    made = command("run", bundle, "--prompt", "ROMEO:", "--draft-attention", "nomad2", *DRAFTING, "--json").json
    assert made["draft_attention"] == "nomad2"
    assert made["exact"]
    assert made["text"] == plain["text"]
    assert "nomad (d_sub 1) keys, float16 for the newest 64" in made["approximations"]
    proof = command("verify", bundle, "--attention", "f16", "--draft-attention", "nomad", *DRAFTING, "--json").json
    assert proof["passed"]
    assert (proof["golden"]["of"], proof["golden"]["required"]) == (0, False)  # those are the default attention's
    figures = command(
        "bench", bundle, "--draft-attention", "nomad2", *DRAFTING, "--repeats", 1, "--max-prompts", 1, "--json"
    )
    assert figures.json["methods"][1]["lossless"]


def test_what_is_refused(command: Command, bundle: Path, tmp_path: Path) -> None:
    run = ("run", bundle, "--prompt", "x", "--operators")
    command(*run, "native", "--attention", "int4").refused(1, "attention int4 needs tables", "--attention int4")
    command(*run, "stock", "--attention", "nomad").refused(1, "attention nomad needs native operators")
    command(*run, "native", "--draft-attention", "f16").refused(2, "Invalid value for '--draft-attention'")
    wanted = ("export", TARGET, "-o", tmp_path / "out", "--attention", "int4")
    command(*wanted, "--operators", "stock").refused(1, "--attention int4 needs native operators")
    assert not (tmp_path / "out").exists()


def test_export_says_what_it_measured(exported: tuple[Path, Result]) -> None:
    _, done = exported
    assert done.exit_code == 0, done.stderr
    assert "attention: nomad is the default" in done.stdout
    assert done.stdout.count("quality gate: perplexity") == 2
    assert "attention: learning nomad1, nomad2 keys" in done.stderr
