"""Make the links of a checkout where Git could not: Windows without the right to make symbolic links.

python tools/links.py

Git then wrote small files with the links' targets. They become junctions, for which Windows asks no right (elsewhere
symbolic links), and Git is told to leave them alone; `git update-index --no-skip-worktree edgespec/export` undoes that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LINKS = ("configs", "export", "runtimes")


def link(place: Path, target: Path) -> None:
    """Make ``place`` lead to the folder ``target``."""
    if sys.platform == "win32":
        import _winapi

        _winapi.CreateJunction(str(target), str(place))
    else:
        place.symlink_to(os.path.relpath(target, place.parent), target_is_directory=True)


def mend(root: Path) -> list[str]:
    """Replace what Git wrote instead of links -> the names that were replaced."""
    found = []
    for name in LINKS:
        place, target = root / "edgespec" / name, root / name
        if place.is_dir():
            continue
        if not place.is_file() or place.read_text("utf-8").strip() != f"../{name}":
            raise SystemExit(f"{place}: expected a link, or the file that Git writes instead of one")
        place.unlink()
        link(place, target)
        found.append(name)
        subprocess.run(["git", "update-index", "--skip-worktree", f"edgespec/{name}"], cwd=root, check=True)
    return found


if __name__ == "__main__":
    print(", ".join(mend(Path(__file__).resolve().parents[1])) or "nothing to do")
