"""Files that are written in large aligned pieces hold the same bytes as those written one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.runtimes.files.large_writes import PIECE, SCATTERED, LargeWrites


def test_bytes_at_their_places(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = [1, 0, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7, 5]
    pieces = [random.integers(0, 256, size).astype(np.uint8) for size in sizes]
    wanted = bytearray(sum(sizes) + 4 * PIECE)
    with LargeWrites(tmp_path / "file") as file:
        at = 100  # what lies before is a hole
        for piece in pieces:
            wanted[at : at + len(piece)] = piece.tobytes()
            at += file.write_at(at, piece.data)
        for offset, value in ((7, 3), (at + PIECE, 9), (at - 1, 4)):  # out of order
            wanted[offset] = value
            assert file.write_at(offset, bytes([value])) == 1
    found = (tmp_path / "file").read_bytes()
    assert len(found) == at + PIECE + 1
    assert found == wanted[: len(found)]


def test_only_whole_aligned_pieces_reach_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[tuple[int, int]] = []
    with LargeWrites(tmp_path / "file") as file:
        own = file._file

        class Seen:
            def seek(self, offset: int) -> int:
                return own.seek(offset)

            def write(self, data: memoryview) -> int:
                writes.append((own.tell(), data.nbytes))
                return own.write(data)

            def close(self) -> None:
                own.close()

        monkeypatch.setattr(file, "_file", Seen())
        at = 0
        for _ in range(100):
            at += file.write_at(at, np.zeros(123_457, np.uint8).data)
    assert len(writes) > 1
    assert all(offset % PIECE == 0 for offset, _ in writes)
    assert [size for _, size in writes[:-1]] == [PIECE] * (len(writes) - 1)


def test_scattered_pieces_are_small_and_at_their_places(tmp_path: Path) -> None:
    data = np.arange(3 * SCATTERED + 11, dtype=np.uint32)
    with LargeWrites(tmp_path / "file") as file:
        file.write_at(0, b"begin")
        assert file.write_at(5, data.data, scattered=True) == data.nbytes
        file.write_at(5 + data.nbytes, b"end")
    assert (tmp_path / "file").read_bytes() == b"begin" + data.tobytes() + b"end"


def test_a_full_disk_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), LargeWrites(Path("/dev/full")) as file:
        file.write_at(0, b"x")
