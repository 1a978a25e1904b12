"""A bundle on disk: opening it, checking every file, reading its parts."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import BundleError
from edgespec.runtimes.files.manifest import MANIFEST, Manifest, ModelPart, read_manifest


def sha256(path: Path) -> str:
    """SHA-256 of a file as hex digits, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Attributes:
        path: its folder.
        manifest: the validated manifest.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str], check: bool = True) -> Bundle:
        """Open a bundle and check its files.

        Args:
            path: the folder.
            check: compare the SHA-256 of every file; presence and size are always checked.

        Raises:
            BundleError: the file that is missing, short, altered or outside the folder is named.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        bundle = cls(folder, manifest)
        named = _named(manifest.target)
        if manifest.draft:
            named += _named(manifest.draft)
        for name in named:
            if name not in manifest.files:
                raise BundleError(f"{folder / MANIFEST}: uses {name!r} but does not list it under files")
        for name, entry in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise BundleError(f"{file}: missing from the bundle", "copy the whole folder, or export again")
            if not file.resolve().is_relative_to(folder.resolve()):
                raise BundleError(f"{file}: a link that leaves the bundle is not allowed")
            size = file.stat().st_size
            if size != entry.size:
                word = "truncated" if size < entry.size else "altered"
                raise BundleError(f"{file}: {word}: expected {entry.size} bytes, got {size}", "copy or export it again")
            if check and (got := sha256(file)) != entry.sha256:
                raise BundleError(
                    f"{file}: altered: expected SHA-256 {entry.sha256[:12]}..., got {got[:12]}...",
                    "export it again, or pass --no-check if you changed it on purpose",
                )
        return bundle

    def part(self, name: str) -> ModelPart:
        """The model called ``target`` or ``draft``."""
        part = self.manifest.target if name == "target" else self.manifest.draft
        if part is None:
            raise BundleError(f"{self.path}: has no {name} model", "export with `--method speculative --draft MODEL2`")
        return part


def _named(part: ModelPart) -> list[str]:
    """Every file that a model's entry in the manifest uses."""
    index = [part.index] if part.index else []
    tables = [part.attention.tables] if part.attention and part.attention.tables else []
    tokens = [part.head_vocab.file] if part.head_vocab else []
    return [part.weights, *index, *tables, *tokens, *(graph.file for graph in part.graphs.values())]
