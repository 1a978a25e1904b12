"""A checkout whose links Git could not make."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.links import LINKS, mend


def test_files_that_stand_for_links_become_links(tmp_path: Path) -> None:
    made, clone = tmp_path / "made", tmp_path / "clone"
    (made / "edgespec").mkdir(parents=True)
    for name in LINKS:
        (made / name).mkdir()
        (made / name / "here.txt").write_text(name)
        (made / "edgespec" / name).symlink_to(f"../{name}")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=made, check=True)
    subprocess.run([*git, "clone", "-q", "-c", "core.symlinks=false", str(made), str(clone)], check=True)
    assert (clone / "edgespec" / "export").is_file()
    assert mend(clone) == list(LINKS)
    for name in LINKS:
        assert (clone / "edgespec" / name / "here.txt").read_text() == name
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True, check=True)
    assert status.stdout == ""
    assert mend(clone) == []
    (clone / "edgespec" / "export").unlink()
    with pytest.raises(SystemExit, match="expected a link"):
        mend(clone)
