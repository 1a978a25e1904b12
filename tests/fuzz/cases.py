"""Failures found once, as small files: what was changed in a sound bundle or source, and how using it must end.

A case of ``cases/*.json`` names a seed and changes of its files:

    {"file": F, "at": [path], "value": V}       a value of its JSON
    {"file": F, "drop": [path]}                 without it
    {"file": F, "text": T, "times": N, "then": E}    other contents: T, N times, and E
    {"file": F, "offset": N, "hex": H}          bytes put in at an offset
    {"file": F, "old": A, "new": B}             text put in the place of another one
    {"file": F, "is": "folder"}                 a folder, a pipe, a link to outside or to itself in its place

``says`` is part of the error; null = it runs.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.files.manifest import MANIFEST

CASES = Path(__file__).with_name("cases")
Case = dict[str, Any]


def cases() -> Iterator[Case]:
    """All of them."""
    for file in sorted(CASES.glob("*.json")):
        yield from json.loads(file.read_text("utf-8"))


def make_case(case: Case, seed: Path, folder: Path) -> None:
    """Make a copy of a seed with the changes of a case."""
    shutil.copytree(seed, folder)
    for change in case["changes"]:
        _make(folder / change["file"], change)
    follow_hashes(folder)


def _make(file: Path, change: dict[str, Any]) -> None:
    if "is" in change:
        put(file, change["is"])
    elif "text" in change:
        file.write_text(change["text"] * change.get("times", 1) + change.get("then", ""), "utf-8")
    elif "hex" in change:
        data, at = file.read_bytes(), change["offset"]
        file.write_bytes(data[:at] + bytes.fromhex(change["hex"]) + data[at:])
    elif "old" in change:
        data, old = file.read_bytes(), change["old"].encode()
        if old not in data:
            raise ValueError(f"{file.name}: there is no {old!r} to replace")
        file.write_bytes(data.replace(old, change["new"].encode()))
    else:
        value = here = json.loads(file.read_bytes())
        *path, last = change["at"] if "at" in change else change["drop"]
        for step in path:
            here = here[step]
        if "at" in change:
            here[last] = change["value"]
        else:
            del here[last]
        file.write_text(json.dumps(value), "utf-8")


def put(file: Path, how: str) -> None:
    """Something else in the place of a file."""
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "outside":
        outside = Path(tempfile.gettempdir(), "edgespec-outside-a-folder")
        outside.write_text("{{ messages }}", "utf-8")
        file.symlink_to(outside)
    elif how == "loop":
        file.symlink_to(file.name)
    elif how == "private":
        file.write_bytes(b"x")
        file.chmod(0)
    elif how == "pipe":
        os.mkfifo(file)


def follow_hashes(folder: Path) -> None:
    """Write the sizes and hashes of a bundle's files into its manifest."""
    if not (folder / MANIFEST).is_file():  # a pipe has no end
        return
    try:
        data = json.loads((folder / MANIFEST).read_bytes())
        for name, entry in data["files"].items():
            if (folder / name).is_file():
                entry |= {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        text = json.dumps(data)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    (folder / MANIFEST).write_text(text, "utf-8")
