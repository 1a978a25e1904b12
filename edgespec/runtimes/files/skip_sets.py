"""Files of skip sets that searches found while decoding: ``CACHE/skip-sets/WEIGHTS-OPERATORS-KIND.json``."""

from __future__ import annotations

from pathlib import Path

from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.manifest import Manifest


def set_file(manifest: Manifest, operators: str, kind: str) -> Path:
    """Name the file of a bundle's weights, the operators that run, and a kind of text.

    Args:
        manifest: the bundle's; one whose files are not listed has no name for its weights.
        operators: as ``GraphPart.operators`` names them.
        kind: part of a file's name: lower-case letters, digits and dashes.
    """
    return _folder() / f"{_identity(manifest)}-{operators}-{kind}.json"


def stored_sets(manifest: Manifest) -> list[Path]:
    """List the files of this bundle, whatever operators and kind of text."""
    return sorted(_folder().glob(f"{_identity(manifest)}-*.json"))


def forget_sets(manifest: Manifest) -> int:
    """Delete the skip sets that were found for this bundle; returns the number of files."""
    files = stored_sets(manifest)
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _folder() -> Path:
    return cache_folder() / "skip-sets"


def _identity(manifest: Manifest) -> str:
    entry = manifest.files.get(manifest.target.weights)
    return entry.sha256[:24] if entry else "unknown"
