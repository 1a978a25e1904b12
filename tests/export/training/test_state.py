"""An interrupted training continues, in one or several processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec.errors import TrainingError
from edgespec.export.drafters.heads import DESCRIPTION, read_heads
from edgespec.export.training.options import METHODS
from edgespec.export.training.state import FOLDER, TrainingState, written
from edgespec.export.training.windows import Windows
from edgespec.runtimes.files.lora import read_pairs
from tests.cli.conftest import ROOT, Command, command

ARGUMENTS = {"lr": 0.1, "exits": [1, 2], "model": "a" * 64}


def put(content: str):  # type: ignore[no-untyped-def]
    return lambda part: part.write_text(content) and None


def test_a_beginning_and_an_end(tmp_path: Path) -> None:
    state = TrainingState(tmp_path / "o")
    assert state.begin(ARGUMENTS, restart=False, overwrite=False) is False
    assert state.begin(ARGUMENTS, restart=False, overwrite=False) is True
    assert state.texts("x") is None
    state.keep_texts("x", Windows.of([[1, 2], [3]], 2))
    kept = state.texts("x")
    assert kept is not None
    assert kept.tokens.tolist() == [[1, 2], [3, 0]]
    assert state.begin(ARGUMENTS, restart=True, overwrite=False) is False
    assert state.texts("x") is None
    state.finish({"heads.safetensors": put("tensors"), DESCRIPTION: put("{}")})
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [DESCRIPTION, "heads.safetensors"]


def test_one_process_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    first, other = TrainingState(tmp_path / "o"), TrainingState(tmp_path / "o")
    first.begin(ARGUMENTS, restart=False, overwrite=False)
    with pytest.raises(TrainingError, match=r"another process trains into this folder(.|\n)*another with -o"):
        other.begin(ARGUMENTS, restart=True, overwrite=False)
    first.release()
    assert other.begin(ARGUMENTS, restart=False, overwrite=False) is True
    other.release()


def test_other_arguments_are_named(tmp_path: Path) -> None:
    state = TrainingState(tmp_path)
    state.begin(ARGUMENTS, restart=False, overwrite=False)
    other = {"lr": 0.2, "exits": [1, 3], "model": "b" * 64}
    said = (
        r"exits was \[1, 2\], is \[1, 3\]; lr was 0.1, is 0.2; model was aaaaaaaaaaaa..., is bbbbbbbbbbbb..."
        r"(.|\n)*--restart"
    )
    with pytest.raises(TrainingError, match=said):
        state.begin(other, restart=False, overwrite=True)
    assert state.begin(other, restart=True, overwrite=False) is False
    (tmp_path / FOLDER / "arguments.json").write_text("{")
    with pytest.raises(TrainingError, match=r"not readable(.|\n)*--restart"):
        state.begin(other, restart=False, overwrite=False)


def test_finished_heads_are_not_lost(tmp_path: Path) -> None:
    state = TrainingState(tmp_path / "o")
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / DESCRIPTION).write_text("{}")
    with pytest.raises(TrainingError, match=r"already there(.|\n)*--overwrite"):
        state.begin(ARGUMENTS, restart=False, overwrite=False)
    assert state.begin(ARGUMENTS, restart=False, overwrite=True) is False
    assert state.begin(ARGUMENTS, restart=False, overwrite=False) is True  # it continues
    assert (tmp_path / "o" / DESCRIPTION).read_text() == "{}"  # until the new ones are there


def test_folders_of_other_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for name, said in (("file", "found a file"), ("folder", "exists and holds no trained heads")):
        with pytest.raises(TrainingError, match=said):
            TrainingState(tmp_path / name).begin(ARGUMENTS, restart=True, overwrite=True)
    with pytest.raises(TrainingError, match="cannot write here"):
        TrainingState(tmp_path / "file" / "below").begin(ARGUMENTS, restart=False, overwrite=False)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(part: Path) -> None:
        part.write_text("half")
        raise OSError(28, "No space left on device")

    written(tmp_path / "a", put("old"))
    with pytest.raises(TrainingError, match=r"a: cannot be written: No space left on device"):
        written(tmp_path / "a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_finished_files_while_they_are_replaced(tmp_path: Path) -> None:
    state = TrainingState(tmp_path)
    (tmp_path / DESCRIPTION).write_text("old")
    state.begin(ARGUMENTS, restart=False, overwrite=True)

    def look(part: Path) -> None:
        assert not (tmp_path / DESCRIPTION).exists()  # the old description must not describe new tensors
        part.write_text("new")

    state.finish({"heads.safetensors": look, DESCRIPTION: put("new")})
    assert (tmp_path / DESCRIPTION).read_text() == "new"


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


SHORT = ("--self-distill", 12, "--batch", 4, "--length", 24, "--steps", 6, "--held-out", 3,
         "--new-tokens", 16, "--threads", 1)  # fmt: skip


@posix
@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    "method, pairs",
    [("medusa", 1), *(pytest.param(*long, marks=pytest.mark.nightly) for long in (("medusa", 8), ("draft", 4)))],
)
def test_killed_at_any_moment(model: Path, tmp_path: Path, method: str, pairs: int) -> None:
    done = python("-m", "tests.export.training.killed", model, tmp_path, method, pairs, 0, cwd=ROOT)
    stages = {"texts", "checkpoint"} if pairs > 1 else {"checkpoint"}  # before and after the training began
    assert stages <= set(json.loads(done.stdout))
    assert "Error" not in done.stderr


@posix
@pytest.mark.nightly
@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("nodes, more", [(1, ()), (2, ()), (1, ("--fsdp",))], ids=["processes", "nodes", "fsdp"])
@pytest.mark.parametrize("method", ["medusa", "selfdraft"])
def test_two_processes(model: Path, tmp_path: Path, method: str, nodes: int, more: tuple[str, ...]) -> None:
    # `accelerate launch --cpu` always starts one process, unless there is MPI: torchrun starts two
    launch: tuple[object, ...] = "-m", "torch.distributed.run", "--nproc_per_node", 2 // nodes, "--nnodes", nodes
    with socket.create_server(("127.0.0.1", 0)) as free:
        meet = "--master_addr", "127.0.0.1", "--master_port", free.getsockname()[1], "--node_rank"
    command = "-m", "edgespec", "train", method, model, *SHORT, "--json", "-o", tmp_path / "two", *more
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(python, *launch, *meet, node, *command, cwd=tmp_path, ACCELERATE_USE_CPU="1")
            for node in range(nodes)
        ]
    found = json.loads(runs[0].result().stdout)  # only from the main process
    assert [run.result().stdout for run in runs[1:]] == [""] * (nodes - 1)
    assert found["training"]["processes"] == 2
    launch = "-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1, "-m", "edgespec"
    one = python(*launch, "train", method, model, *SHORT, "--json", "-o", tmp_path / "one", cwd=tmp_path)
    # each process takes the mean over its own windows, which are not equally long; blocks begin at other tokens
    assert found["losses"] == pytest.approx(json.loads(one.stdout)["losses"], rel=0.05)
    if method == "medusa":
        assert read_heads(tmp_path / "one").file.groups == read_heads(tmp_path / "two").file.groups
    else:
        assert len(list(read_pairs(tmp_path / "two"))) == len(list(read_pairs(tmp_path / "one"))) > 0


@pytest.mark.usefixtures("torch", "fresh_accelerate")
@pytest.mark.filterwarnings("default")
def test_the_command(command: Command, model: Path, tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    shown = command("train", "paradecode", model, "-o", tmp_path / "a", *SHORT, "--plot", plot)
    assert shown.code == 0, shown.err
    assert f"{tmp_path / 'a'}: paradecode for {model}, 6 steps on 12 windows, at most " in shown.out
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
    shown = command("train", "selfdraft", model, "-o", tmp_path / "c", "--rank", 2, *SHORT)
    assert f"next: edgespec bench BUNDLE --method uno --draft-adapter {tmp_path / 'c'}" in shown.out
    command("train", "selfdraft", model, "-o", tmp_path / "c", *SHORT).refused(1, "already there", "--overwrite")
    command("train", "medusa", model, "-o", tmp_path / "d", "--rank", 2, *SHORT).refused(2, "No such option")


@pytest.mark.usefixtures("torch", "fresh_accelerate")
def test_mistakes_on_the_command_line(
    command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command("train").refused(2, *(f"  {kind} " for kind in METHODS))
    command("train", "hydra", model, "-o", "o").refused(2, "No such command 'hydra'")
    command("train", "medusa", model, "-o", "o", "--exits", "1").refused(2, "No such option '--exits'")
    command("train", "medusa", model).refused(2, "-o FOLDER")
    command("train", "medusa", model, *SHORT, "--fsdp", "-o", "o").refused(1, "there is one", "torchrun")
    command("train", "medusa", model, "-o", ".").refused(2, "the current folder")
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
    refused.refused(1, "needs torch, which is not installed", "hint: pip install -e '.[train]'")
