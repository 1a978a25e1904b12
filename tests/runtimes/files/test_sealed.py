"""The user's key, and records that no one else can write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.runtimes.files import sealed
from edgespec.runtimes.files.sealed import is_sealed, key_file, read_sealed, seal_of, user_key, write_sealed

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key of this test is made."""
    monkeypatch.setenv("EDGESPEC_KEY", str(tmp_path / "data" / "key"))
    return tmp_path / "data" / "key"


def test_a_key_is_made_once_for_its_owner_alone(key: Path) -> None:
    first = user_key()
    assert first is not None
    assert len(first) == 32
    assert user_key() == first == key.read_bytes()
    if os.name == "posix":
        assert key.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in key.parent.iterdir()] == ["key"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_none(key: Path, mode: int) -> None:
    assert user_key() is not None
    key.chmod(mode)
    assert user_key() is None


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_file_that_is_no_key(key: Path, content: bytes) -> None:
    key.parent.mkdir()
    key.write_bytes(content)
    key.chmod(0o600)
    assert user_key() is None
    assert seal_of("a", b"b") is None


def test_where_no_key_can_be_made_nothing_is_trusted(key: Path, tmp_path: Path) -> None:
    key.parent.write_text("in the way", "utf-8")
    assert user_key() is None
    write_sealed(tmp_path / "record", "test", {"a": 1})
    assert json.loads((tmp_path / "record").read_text("utf-8")) == {"a": 1, "seal": ""}
    with pytest.raises(ValueError, match="seal"):
        read_sealed(tmp_path / "record", "test")
    assert not is_sealed("a", b"", b"")


def test_its_place_is_the_users_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EDGESPEC_KEY")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert key_file() == tmp_path / "edgespec" / "key"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert key_file() == Path.home() / ".local" / "share" / "edgespec" / "key"


def test_a_record_is_read_for_its_purpose_alone(key: Path, tmp_path: Path) -> None:
    record, value = tmp_path / "folder" / "record.json", {"a": [1, 2.5, "\u00e9"], "b": {"c": None}}
    write_sealed(record, "one", value)
    assert read_sealed(record, "one") == value
    with pytest.raises(ValueError, match="does not have the seal of this user's key"):
        read_sealed(record, "other")
    key.unlink()  # another user
    with pytest.raises(ValueError, match="seal"):
        read_sealed(record, "one")


@pytest.mark.parametrize("seal", [None, "", "00" * 32, "x", 3, "00"])
def test_a_changed_record_is_refused(key: Path, tmp_path: Path, seal: object) -> None:
    record = tmp_path / "record.json"
    write_sealed(record, "one", {"a": 1})
    found = json.loads(record.read_text("utf-8"))
    for changed in ({**found, "a": 2}, {**found, "seal": seal}):
        record.write_text(json.dumps(changed), "utf-8")
        with pytest.raises(ValueError, match="seal"):
            read_sealed(record, "one")


def test_a_seal_may_be_cut_but_not_to_nothing(key: Path) -> None:
    seal = seal_of("a", b"data")
    assert seal is not None
    assert is_sealed("a", b"data", seal[:16])
    assert not is_sealed("a", b"data", seal[:15])
    assert not is_sealed("a", b"datb", seal[:16])


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices are POSIX's")
def test_pipes_and_endless_files_are_refused_at_once(key: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="not a regular file"):
            read_sealed(tmp_path / name, "x")
    (tmp_path / "large").write_bytes(bytes(sealed.MOST_BYTES + 1))
    with pytest.raises(ValueError, match="more than"):
        read_sealed(tmp_path / "large", "x")


def test_processes_that_make_it_at_once_have_the_same(key: Path) -> None:
    code = "from edgespec.runtimes.files.sealed import user_key; print(user_key().hex())"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)
    ]
    found = {process.communicate(timeout=60)[0] for process in running}
    assert found == {f"{key.read_bytes().hex()}\n"}
