"""Files and folders are written atomically; leftovers of a killed process are removed later."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.runtimes.files import staged as module
from edgespec.runtimes.files.staged import remove_stale, scratch, staged, write_staged

ROOT = Path(__file__).resolve().parents[3]
LONG_AGO = (1, 1)
locks = pytest.mark.skipif(sys.platform == "win32", reason="without locks nobody knows which parts are stale")


def test_a_file_takes_its_name_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_staged(target, "old")
    with staged(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_all_is_on_the_disk_before_the_name_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced = tmp_path / "out", dict[int, bool]()

    def sync(handle: int) -> None:  # file -> whether the name was free still
        synced[os.fstat(handle).st_ino] = not target.exists()

    monkeypatch.setattr("os.fsync", sync)
    with staged(target, folder=True) as part:
        (part / "inner").mkdir()
        files = [part / "a", part / "inner" / "b"]
        for file in files:
            file.write_text("something")
        numbers = {file.stat().st_ino for file in files}
    assert synced == dict.fromkeys(numbers, True)
    target = tmp_path / "alone"
    write_staged(target, "text")
    assert synced[target.stat().st_ino]


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_folder_takes_the_place_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_step: bool
) -> None:
    if not in_one_step:
        monkeypatch.setattr(module, "_exchange", lambda *_: False)
    target = tmp_path / "out"
    for text in ("old", "new"):
        with staged(target, folder=True) as part:
            (part / "inner").mkdir()
            (part / "inner" / "file").write_text(text)
    assert (target / "inner" / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_no_moment_without_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where names can be exchanged neither of them is renamed; whatever comes right after finds the new folder."""
    target, other = tmp_path / "out", tmp_path / "other"
    for folder in (target, other):
        folder.mkdir()
        (folder / folder.name).touch()
    if not module._exchange(target, other):
        pytest.skip("this file system cannot exchange names")
    assert (target / "other").exists()
    assert (other / "out").exists()

    def renamed(*_: object) -> None:
        raise AssertionError("renamed")

    monkeypatch.setattr(Path, "rename", renamed)
    with staged(target, folder=True) as part:
        (part / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}


def test_a_link_to_a_folder_is_replaced_and_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (tmp_path / "out").symlink_to("elsewhere")
    with staged(tmp_path / "out", folder=True):
        pass
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "elsewhere" / "file").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "elsewhere"}


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), SystemExit(143)]
)
@pytest.mark.parametrize("folder", [False, True])
def test_whatever_ends_it_leaves_nothing(tmp_path: Path, error: BaseException, folder: bool) -> None:
    with pytest.raises(type(error)), staged(tmp_path / "out", folder=folder):
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("step", ["take_lock", "_remove"])
def test_a_signal_between_two_steps_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, folder: bool
) -> None:
    original, calls = getattr(module, step), 0

    def interrupted(path: Path) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise SystemExit(143)
        return original(path)

    monkeypatch.setattr(module, step, interrupted)
    with pytest.raises(SystemExit), staged(tmp_path / "out", folder=folder):
        raise OSError("the disk is full")
    assert list(tmp_path.iterdir()) == []


WRITE = """
import sys, time
from pathlib import Path
from edgespec.runtimes.files.staged import staged
with staged(Path(sys.argv[1]), folder=True) as part:
    (part / "half").write_text("half")
    print("begun", flush=True)
    time.sleep(60)
"""


@locks
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "out"
    running = subprocess.Popen([sys.executable, "-c", WRITE, str(target)], stdout=subprocess.PIPE, cwd=ROOT)
    assert running.stdout is not None
    assert running.stdout.readline() == b"begun\n"
    (part,) = tmp_path.iterdir()
    os.utime(part, LONG_AGO)
    remove_stale(target)
    assert part.exists()  # it is being written
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    os.utime(part, LONG_AGO)
    beside = tmp_path / ".other.part-1"
    beside.write_text("somebody else's")
    with staged(target, folder=True) as mine:
        assert not part.exists()
        (mine / "whole").write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"out", beside.name}


@locks
def test_a_part_that_has_just_begun_is_left_alone(tmp_path: Path) -> None:
    part = tmp_path / ".out.part-1"
    part.mkdir()
    remove_stale(tmp_path / "out")
    assert part.exists()
    os.utime(part, LONG_AGO)
    remove_stale(tmp_path / "out")
    assert not part.exists()
    assert module._YOUNG >= 1


def test_a_scratch_folder_is_gone_whatever_happens(tmp_path: Path) -> None:
    with scratch(tmp_path / "out") as folder:
        (folder / "file").touch()
        assert folder.parent == tmp_path
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(FileNotFoundError), scratch(tmp_path / "out") as folder:
        (folder / "missing" / "file").touch()
    assert [*tmp_path.iterdir()] == []


@locks
def test_a_scratch_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """Also one next to a part: that of an unfinished bundle."""
    for name in (".out.part-1", "..out.part-1.part-2"):
        (tmp_path / name / "inner").mkdir(parents=True)
        os.utime(tmp_path / name, LONG_AGO)
    with staged(tmp_path / "out", folder=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with staged(tmp_path / "new", folder=True) as part, scratch(part) as folder:
        assert folder.name.startswith(f".{part.name}.part-")
