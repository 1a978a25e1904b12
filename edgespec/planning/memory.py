"""Bytes: what a bundle takes while it loads and while it runs, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgespec.planning.use import Use
from edgespec.runtimes.manifest import Manifest


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory.

    Attributes:
        name: what it is, a stable key such as ``weights`` or ``kv``.
        private: bytes that only this process has, which count against every limit.
        file: bytes of mapped files, which the system may drop and read again.
        loading: bytes that are there only while loading.
        note: what it is made of, for people.
    """

    name: str
    private: int = 0
    file: int = 0
    loading: int = 0
    note: str = ""


@dataclass(frozen=True)
class Memory:
    """All of it.  ``after`` is resident memory once ``context`` tokens are held; ``peak`` the most at any time."""

    parts: tuple[MemoryPart, ...]

    @property
    def private(self) -> int:
        """Private bytes after loading, with the context full."""
        return sum(part.private for part in self.parts)

    @property
    def file(self) -> int:
        """Resident bytes of mapped files."""
        return sum(part.file for part in self.parts)

    @property
    def after(self) -> int:
        """Resident bytes after loading, with the context full."""
        return self.private + self.file

    @property
    def peak(self) -> int:
        """The most resident bytes at any time."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        figures = {"peak": self.peak, "after": self.after, "private": self.private, "file": self.file}
        return figures | {"parts": [asdict(part) for part in self.parts]}


def memory_of(manifest: Manifest, use: Use) -> Memory:
    """What running a bundle in this way takes; from its manifest alone, no file is opened."""
    raise NotImplementedError
