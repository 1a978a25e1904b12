"""Reading small files that anybody may have put there: regular ones, up to a size, without waiting for anybody."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: Path, most: int) -> bytes:
    """Read the file at ``path``; a pipe, a device or a socket is refused before it is read, at once.

    Args:
        path: the file; a link is followed, and what it leads to must be a regular file too.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError: it is larger.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(None, "is no regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data
