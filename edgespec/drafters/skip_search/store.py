"""Skip sets found while decoding, kept in the user's cache folder: counts by set, nothing of any text.

One small JSON file for a bundle (by its weights), the operators and a kind of text:
``CACHE/swift/WEIGHTS-OPERATORS-KIND.json``.  It is sealed (``runtimes.files.sealed``): what
somebody else wrote there is ignored.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from edgespec.decoding.target import SkipSet
from edgespec.drafters.skip_search.search import OnlineSearch, Record
from edgespec.errors import InvalidRequest, first_line
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.files.sealed import read_sealed, write_sealed

VERSION = 1
_KIND = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def store_folder() -> Path:
    """The folder of all files of this kind."""
    return cache_folder() / "swift"


def stored_sets(manifest: Manifest) -> list[Path]:
    """Files of this bundle, whatever operators and kind of text."""
    return sorted(store_folder().glob(f"{_identity(manifest)}-*.json"))


def forget_sets(manifest: Manifest) -> int:
    """Delete what was found for this bundle; returns how many files there were."""
    files = stored_sets(manifest)
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _identity(manifest: Manifest) -> str:
    """Names the weights; a bundle whose files are not listed has only its name for them."""
    entry = manifest.files.get(manifest.target.weights)
    return entry.sha256[:24] if entry else "unknown"


class SkipStore:
    """Reads and writes what one search has learned.

    Args:
        manifest: of the bundle.
        operators: that run; acceptance and costs differ a little between them.
        kind: of the text.

    Attributes:
        purpose: what its file is sealed for.
        note: why something could not be read or written; "" = nothing of the sort.

    Raises:
        InvalidRequest: a kind that cannot be part of a file's name.
    """

    def __init__(self, manifest: Manifest, operators: str, kind: str) -> None:
        if not _KIND.fullmatch(kind):
            raise InvalidRequest(
                f"stream kind {kind!r}: expected up to 32 lower-case letters, digits or dashes", "for example: code"
            )
        self.path = store_folder() / f"{_identity(manifest)}-{operators}-{kind}.json"
        self.purpose = f"skip sets of {self.path.stem}"  # another bundle's, or another kind's, are no record of this
        self.note = ""
        self._read = 0  # time of the file that was read or written last

    def load(self, search: OnlineSearch) -> bool:
        """Let ``search`` go on from what is stored; whether there was something new to go on from."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        if stat.st_mtime_ns == self._read:
            return False
        self._read = stat.st_mtime_ns
        try:
            data = read_sealed(self.path, self.purpose)
            if data["version"] != VERSION or data["layers"] != search.layers:
                raise ValueError("it is of another version or model")
            records = dict(_record(item, search.layers) for item in data["records"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.note = f"a stored skip set was ignored: {first_line(error)}"
            return False
        search.resume(records)
        return True

    def save(self, search: OnlineSearch) -> None:
        """Replace the file by what ``search`` knows; a folder that cannot be written is no failure."""
        records = [
            {
                "attention": list(skip.attention),
                "mlp": list(skip.mlp),
                "matched": round(record.matched, 3),
                "seen": round(record.seen, 3),
                "windows": record.windows,
            }
            for skip, record in search.records.items()
        ]
        data = {"version": VERSION, "layers": search.layers, "records": records}
        try:
            write_sealed(self.path, self.purpose, data)
            self._read = self.path.stat().st_mtime_ns
        except OSError as error:
            self.note = f"skip sets cannot be kept: {error}"


def _record(item: Any, layers: int) -> tuple[SkipSet, Record]:
    """A set and its counts.

    Raises:
        ValueError, KeyError, TypeError: it is not one.
    """
    lists = [[int(layer) for layer in item[name]] for name in ("attention", "mlp")]
    if any(found != sorted(set(found)) or (found and not 0 < found[0] <= found[-1] < layers - 1) for found in lists):
        raise ValueError("it leaves out layers that cannot be")
    matched, seen, windows = float(item["matched"]), float(item["seen"]), int(item["windows"])
    if not 0 <= matched <= seen <= 1e6 or not 0 <= windows <= 10**6:
        raise ValueError("its counts make no sense")
    return SkipSet(tuple(lists[0]), tuple(lists[1])), Record(matched, seen, windows)
