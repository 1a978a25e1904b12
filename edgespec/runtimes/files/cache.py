"""The user's cache, of limited size: weights converted for other operators, and results measured or tried once.

Removed entries are recreated when needed.  Beyond the limit, converted weights are removed: first those whose bundle
no longer exists, then the least recently used.  Other entries are small, except prompts, which have a separate limit
(``prompts``).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.runtimes.files.json_file import parse_json, read_regular
from edgespec.runtimes.files.sealed import MOST_BYTES, write_sealed
from edgespec.runtimes.files.staged import write_staged

LIMIT = 32 << 30  # bytes, where the user has set none
WEIGHTS, PROMPTS = "weights", "prompts"
KINDS = {
    WEIGHTS: "*-stock *-native",
    PROMPTS: "prompts/*",
    "profiles": "profiles/*",
    "skip-sets": "skip-sets/*",
    "tokenizers": "tokenizers/*",
    "devices": "devices.json",
    "digests": "digests/*",
    "rows": "rows.json",
    "passes": "passes/*",
}
"""What is kept, and where: weights converted for other operators, prompts that were read, profiles of
``edgespec calibrate``, skip sets found while decoding, tokenizers that were tried, devices whose golden step was right,
digests of files that were checked, whether rows of stock operators have the same bits in every pass, and what earlier
processes measured of a bundle's passes."""
BLOCK = 256  # tokens of a whole block of a prompt
_LIMIT, ORIGIN = "limit", "origin.json"
_IN_USE = 60.0  # seconds after its last use in which a conversion may just be being opened


def cache_folder() -> Path:
    """Return the cache folder: EDGESPEC_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("EDGESPEC_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "edgespec"


@dataclass(frozen=True)
class Entry:
    """An entry of the cache."""

    kind: str  # one of ``KINDS``
    path: Path  # a file or a folder
    bytes: int  # of it
    used: float  # when it was last written or, of weights and prompts, used; seconds since 1970
    source: str | None = None  # the source weights of a conversion, or of prompts; None = unknown
    gone: bool = False  # these are missing or have changed, so the entry is useless
    tokens: int = 0  # whose keys and values are kept; 0 where there are none

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"path": str(self.path)}


def entries() -> Iterator[Entry]:
    """List all entries, without unfinished ones."""
    folder = cache_folder()
    for kind, patterns in KINDS.items():
        for path in sorted(path for pattern in patterns.split() for path in folder.glob(pattern)):
            if path.name.startswith(".") or path.is_dir() != (kind in (WEIGHTS, PROMPTS)):
                continue
            with suppress(OSError):  # another process has just removed it
                files = list(path.iterdir()) if path.is_dir() else [path]
                found = [file.stat() for file in files]
                used = max([path.stat().st_mtime, *(one.st_mtime for one in found if kind == PROMPTS)])
                tokens = sum(map(tokens_of, files)) if kind == PROMPTS else 0
                yield Entry(kind, path, sum(one.st_size for one in found), used, *_source(path), tokens)


def tokens_of(file: Path) -> int:
    """Read the number of tokens in a file of prompts from its name."""
    stop = stop_of(file.name)
    return stop % BLOCK or (BLOCK if file.suffix == ".keys" else 0)


def stop_of(name: str) -> int:
    """Read the number of tokens up to the end of a file of prompts from its name; 0 = it is another file."""
    found = Path(name).stem.split("-")[1:2] if name.endswith((".keys", ".end")) else []
    return int(found[0]) if found and found[0].isascii() and found[0].isdigit() else 0


def describe(folder: Path, weights: Path, facts: dict[str, Any], name: str) -> None:
    """Seal a record of the sources in the conversion in ``folder``; ``name``: of its folder in the cache.

    Raises:
        OSError: it cannot be written.
    """
    stat = weights.stat()
    source = {"weights": str(weights.resolve()), "bytes": stat.st_size, "changed": stat.st_mtime_ns}
    write_sealed(folder / ORIGIN, f"weights {name}", facts | source)


def is_gone(folder: Path) -> bool:
    """Whether the source file of a conversion is missing or newer."""
    return _source(folder)[1]


def touch(folder: Path) -> None:
    """Mark the conversion in ``folder`` as used now, unless the cache is not writable."""
    with suppress(OSError):
        os.utime(folder)


def size_limit() -> int | None:
    """Return the maximum bytes of the cache; None = no limit."""
    try:
        return int(read_regular(cache_folder() / _LIMIT, 64).decode("ascii").strip()) or None
    except (OSError, ValueError):
        return LIMIT


def set_limit(most: int | None) -> list[Entry]:
    """Keep the cache below a limit from now on -> the removed entries.

    Raises:
        OSError: the cache cannot be written.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    write_staged(cache_folder() / _LIMIT, str(most or 0))
    return keep_within()


def keep_within(keep: Path | None = None) -> list[Entry]:
    """Remove conversions until the cache is below its limit -> the removed ones.

    Args:
        keep: a conversion that stays even if it exceeds the limit.
    """
    limit, found = size_limit(), [entry for entry in entries() if entry.kind != PROMPTS]
    left, gone = sum(entry.bytes for entry in found), []
    for entry in sorted(found, key=lambda entry: (not entry.gone, entry.used)):
        if limit is None or left <= limit:
            break
        young = time.time() - entry.used < _IN_USE and not entry.gone
        if entry.kind == WEIGHTS and entry.path != keep and not young and remove(entry):
            left -= entry.bytes
            gone.append(entry)
    return gone


def remove(entry: Entry) -> bool:
    """Delete an entry as a whole; False = it is locked (on Windows by a process that has it open)."""
    path = entry.path
    try:
        if path.is_dir():  # half of a conversion must not look like one
            hidden = path.with_name(f".{path.name}.part-removed-{os.getpid()}")
            path.rename(hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink()
    except OSError:
        return False
    return True


def _source(path: Path) -> tuple[str | None, bool]:
    """Return the source weights of the conversion at ``path``, and whether they are gone."""
    try:
        known = parse_json(read_regular(path / ORIGIN, MOST_BYTES))
        weights = Path(known["weights"])
        expected = known["bytes"], known["changed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, False
    try:
        stat = weights.stat()
    except OSError:
        return str(weights), True
    return str(weights), (stat.st_size, stat.st_mtime_ns) != expected
