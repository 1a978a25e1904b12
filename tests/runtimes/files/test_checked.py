"""When a digest is remembered, and when it is taken again."""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec.errors import BundleError
from edgespec.runtimes.files import checked as module
from edgespec.runtimes.files.checked import Checked, move_digests, records
from edgespec.runtimes.files.sealed import key_file

CONTENT = b"weights " * 1000


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file, and give the test a separate cache and a short time until a file counts as quiet."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_KEY", str(tmp_path / "key"))
    monkeypatch.setattr(module, "QUIET", 0.05)
    made = tmp_path / "folder" / "model.data"
    made.parent.mkdir()
    made.write_bytes(CONTENT)
    return made


def settle() -> None:
    time.sleep(0.1)


def load(path: Path) -> Checked:
    """As a process does that opens a bundle."""
    found = Checked()
    found.digest(path)
    found.save()
    return found


@pytest.fixture
def remembered(file: Path) -> Path:
    """Load ``file`` until its digest is remembered; return it."""
    settle()
    assert load(file).read == 1
    if load(file).read:
        pytest.skip("this file system's times of change are not relied on, so nothing is remembered here")
    return file


def in_place(file: Path) -> None:
    with file.open("r+b") as out:
        out.seek(4000)
        out.write(b"X")


def by_rename(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(CONTENT[:-1] + b"X")
    stat = file.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)


def by_mapping(file: Path) -> None:
    with file.open("r+b") as out, mmap.mmap(out.fileno(), 0) as mapped:
        mapped[4000:4001] = b"X"


@pytest.mark.parametrize("change", [in_place, by_rename, by_mapping])
def test_what_changed_is_read_again_though_size_and_time_are_the_same(
    remembered: Path, change: Callable[[Path], None]
) -> None:
    before, stat = Checked().digest(remembered), remembered.stat()
    change(remembered)
    os.utime(remembered, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = remembered.stat()
    assert (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    found = load(remembered)
    assert found.read == 1
    assert found.digest(remembered) != before


def test_a_file_that_was_just_written_is_read_each_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET", 60.0)
    for _ in range(2):
        assert load(file).read == 1
    assert not list(records().glob("*"))


def test_a_page_that_is_dirty_is_written_back_first(remembered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping that was written before the digest was taken changes the time again when it is written after it."""
    import ctypes

    libc = ctypes.CDLL(None)
    monkeypatch.setattr("os.fsync", libc.fsync)  # which tests do without elsewhere
    with remembered.open("r+b") as out, mmap.mmap(out.fileno(), 0) as mapped:
        mapped[0:1] = b"Y"
        settle()
        assert load(remembered).read == 1
        settle()
        mapped[1:2] = b"Z"
        assert load(remembered).read == 1


def test_where_times_are_not_kept_nothing_is_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEEPS_TIMES", frozenset())
    settle()
    for _ in range(2):
        assert load(file).read == 1


def test_what_somebody_else_remembers_is_not_trusted(remembered: Path) -> None:
    """Without the user's key no record can claim that a changed file is the old one."""
    (record,) = records().glob("*.json")
    text, old = record.read_text("utf-8"), remembered.stat()
    in_place(remembered)
    new = remembered.stat()
    assert old.st_ctime_ns != new.st_ctime_ns
    record.write_text(text.replace(str(old.st_ctime_ns), str(new.st_ctime_ns)), "utf-8")
    assert load(remembered).read == 1
    key = key_file()
    assert key is not None
    key.unlink()
    assert load(remembered).read == 1


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3, "seal": ""}', '{"files": {"model.data": [1]}}'])
def test_a_damaged_record_is_as_none(remembered: Path, content: str) -> None:
    (record,) = records().glob("*.json")
    record.write_text(content, "utf-8")
    assert load(remembered).read == 1
    settle()
    assert load(remembered).read == 0


def test_without_a_cache_all_is_read(remembered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocked").write_text("in the way", "utf-8")
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "blocked"))
    assert load(remembered).read == 1
    assert load(remembered).unverified() == []


def test_a_change_while_it_is_used_is_said(remembered: Path) -> None:
    used, gone = load(remembered), load(remembered)
    assert used.unverified() == []
    in_place(remembered)
    assert used.unverified() == ["model.data was changed, replaced or removed after it was checked"]
    remembered.write_bytes(CONTENT)
    assert len(used.unverified()) == 1
    remembered.unlink()
    assert len(gone.unverified()) == 1
    with pytest.raises(BundleError, match=r"model\.data: cannot be read"):
        Checked().digest(remembered)


def test_digests_are_taken_again_whatever_is_remembered(remembered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by ``verify``: a disk that changes bytes without a time is found."""
    used = load(remembered)
    assert used.retake() == (1, len(CONTENT))
    stamp = module.FileStat.of(remembered.stat())
    in_place(remembered)
    monkeypatch.setattr(module.FileStat, "of", classmethod(lambda cls, _: stamp))
    assert load(remembered).read == 0
    with pytest.raises(BundleError, match="altered, though its times say that it is not"):
        used.retake()
    assert load(remembered).read == 1


def test_records_of_many_folders_are_bounded(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RECORDS", 2)
    for name in "abcd":
        made = tmp_path / name / "file"
        made.parent.mkdir()
        made.write_bytes(b"x")
        settle()
        load(made)
    assert len(list(records().glob("*.json"))) <= 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all digests are taken each time")
def test_it_is_remembered_on_this_kind_of_file_system(file: Path) -> None:
    """Said only where it is so: the temporary folder may be a tmpfs."""
    settle()
    load(file)
    with file.open("rb") as opened:
        assert (load(file).read == 0) == module._keeps_times(opened.fileno())


def test_a_folder_that_is_renamed_takes_its_digests_along(remembered: Path) -> None:
    """An export does this with new files: the first load reads nothing again."""
    inside = remembered.parent / "draft" / "model.data"
    inside.parent.mkdir()
    inside.write_bytes(CONTENT[:-1])
    settle()
    load(inside)
    old, new = remembered.parent, remembered.parent.with_name("renamed")
    old.rename(new)
    move_digests(old, new)
    assert [load(new / "model.data").read, load(new / "draft" / "model.data").read] == [0, 0]
    assert len(list(records().glob("*.json"))) == 2
    in_place(new / "model.data")
    assert load(new / "model.data").read == 1


def test_a_digest_that_was_begun_is_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the file is quiet, and so lasts, although the file was just written."""
    monkeypatch.setattr(module, "LARGE", 0)
    found = Checked()
    found.begin(file)
    assert found.digest(file) == hashlib.sha256(CONTENT).hexdigest()
    assert found.read == 1
    found.save()
    with file.open("rb") as opened:
        lasts = module._keeps_times(opened.fileno())
    assert load(file).read == int(not lasts)


def test_a_begun_digest_of_a_file_that_goes(file: Path) -> None:
    found = Checked()
    file.unlink()
    found._begun[file] = ThreadPoolExecutor(1).submit(module._after_rest, file)
    with pytest.raises(BundleError, match="cannot be read"):
        found.digest(file)


def test_small_files_are_not_begun(file: Path) -> None:
    found = Checked()
    found.begin(file)
    assert not found._begun
