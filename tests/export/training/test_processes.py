"""What only processes show: kills, several processes at once, the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.export.drafters.heads import read_heads
from edgespec.export.training.loop import FOLDER
from tests.cli.conftest import ROOT, Command, command

__all__ = ["command"]

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and POSIX signals")


def python(*arguments: object, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


SHORT = ("--self-distill", 12, "--heads", 2, "--batch", 4, "--length", 24, "--steps", 6, "--held-out", 3,
         "--new-tokens", 16, "--threads", 1)  # fmt: skip


@posix
@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("method, pairs", [("medusa", 4), ("draft", 1)])
def test_killed_at_any_moment(model: Path, tmp_path: Path, method: str, pairs: int) -> None:
    done = python("-m", "tests.export.training.killed", model, tmp_path, method, pairs, 0, cwd=ROOT)
    stages = {"texts", "checkpoint"} if pairs > 1 else {"checkpoint"}  # before and after the training began
    assert stages <= set(json.loads(done.stdout))
    assert "Error" not in done.stderr


@posix
@pytest.mark.usefixtures("torch")
def test_two_processes(model: Path, tmp_path: Path) -> None:
    # `accelerate launch --cpu` starts one process however many are asked for, unless there is MPI: torchrun starts two
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, "-m", "edgespec"
    command = *launch, "train", "medusa", model, *SHORT, "--json", "-o", tmp_path / "two"
    done = python(*command, cwd=tmp_path, ACCELERATE_USE_CPU="1")
    found = json.loads(done.stdout)  # of the main process alone
    assert found["training"]["processes"] == 2
    launch = "-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1, "-m", "edgespec"
    one = python(*launch, "train", "medusa", model, *SHORT, "--json", "-o", tmp_path / "one", cwd=tmp_path)
    # each process takes the mean over its own windows, which are not equally long
    assert found["losses"] == pytest.approx(json.loads(one.stdout)["losses"], rel=0.05)
    assert read_heads(tmp_path / "one").groups == read_heads(tmp_path / "two").groups


@pytest.mark.usefixtures("torch", "fresh_accelerate")
@pytest.mark.filterwarnings("default")
def test_the_command(command: Command, model: Path, tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    shown = command("train", "paradecode", model, "-o", tmp_path / "a", *SHORT, "--plot", plot)
    assert shown.code == 0, shown.err
    assert f"{tmp_path / 'a'}: paradecode for {model}, 6 steps on 12 windows in " in shown.out
    assert "held-out, sampled: top-1 / top-5 by head: 0." in shown.out
    assert f"--method paradecode --heads {tmp_path / 'a'}" in shown.out
    assert "train: step 6/6 loss " in shown.err
    assert ", held-out top-1 at 4: 0." in shown.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = command("train", "draft", model, "-o", tmp_path / "b", *SHORT, "--json").json
    assert set(found) == {"output", "method", "model", "seconds", "windows", "ranks", "acceptance", "training",
                          "losses", "accuracy"}  # fmt: skip
    assert found["ranks"] is None
    assert set(found["acceptance"]["sampled"]) == {"overlap", "agreement", "positions"}
    command("train", "draft", model, "-o", tmp_path / "b", *SHORT).refused(1, "already there", "--overwrite")
    assert command("train", "draft", model, "-o", tmp_path / "b", *SHORT, "--overwrite", "--seed", 1).code == 0


@pytest.mark.usefixtures("torch", "fresh_accelerate")
def test_mistakes_on_the_command_line(
    command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command("train").refused(2, "Missing argument '{medusa|blockwise|paradecode|draft|eagle}'")
    command("train", "hydra", model, "-o", "o").refused(2, "'hydra' is not one of 'medusa'")
    command("train", "medusa", model).refused(2, "-o FOLDER")
    command("train", "medusa", model, "-o", ".").refused(2, "the current folder")
    command("train", "medusa", model, "-o", "o").refused(1, "nothing to train on", "--self-distill N")
    command("train", "medusa", model, "-o", "o", "--data", "none.txt").refused(1, "none.txt: cannot read texts")
    (tmp_path / "empty.txt").write_text("\n")
    command("train", "medusa", model, "-o", "o", "--data", "empty.txt").refused(1, "no text in there")
    command("train", "paradecode", model, *SHORT, "-o", "o", "--exits", "1,x").refused(2, "--exits: expected numbers")
    command("train", "paradecode", model, *SHORT, "-o", "o", "--exits", "7").refused(1, "from 1 to 1")
    command("train", "medusa", model, *SHORT, "-o", "o", "--plot", "x.jpg").refused(1, "ends in .png")
    assert not (tmp_path / "o" / FOLDER).exists()


def test_without_torch_the_extra_is_named(command: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    refused = command("train", "medusa", model, "-o", "o", "--self-distill", 4)
    refused.refused(1, "needs torch, which is not installed", "hint: pip install 'edgespec[train]'")
