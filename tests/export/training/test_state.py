"""Where an unfinished training is kept, and how finished files appear; nothing here needs torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import TrainingError
from edgespec.export.drafters.heads import DESCRIPTION
from edgespec.export.training.data import Windows
from edgespec.export.training.loop import FOLDER, TrainingState, written

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
    assert state.begin(ARGUMENTS, restart=False, overwrite=False) is True  # it goes on
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
