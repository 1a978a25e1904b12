"""Remember the times of a bundle's passes, and that their rows are exact, for later processes of this machine.

The first request of a process would otherwise time passes before it reads its prompt, and prove its rows after its
text: half a second each for a model of 1.5 billion weights.
"""

from __future__ import annotations

import time
from contextlib import suppress

from edgespec.planning.profiles import manifest_hash, run_id
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.options import RunOptions

Times = dict[str, dict[int, float]]  # measured on this machine: milliseconds by rows, by kind of pass

LASTS = 86400.0  # seconds that times are relied on: they may have been measured in a busy moment


class PassRecord:
    """A record in the cache, for one way to run a bundle; without a cache it is empty and stays so.

    Attributes:
        times: milliseconds by rows, by kind of pass; empty = none were measured within a day.
        exact: whether rows were proven to have the bits of plain decoding's.
    """

    def __init__(self, manifest: Manifest, run: RunOptions) -> None:
        name = run_id(manifest_hash(manifest), run)
        self._path, self._purpose = cache_folder() / "passes" / f"{name}.json", f"passes {name}"
        self.times: Times = {}
        self.exact, self._measured = False, 0.0
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, damaged, of another user
            found = read_sealed(self._path, self._purpose)
            self.exact, self._measured = found["exact"] is True, float(found["measured"])
            if 0 <= time.time() - self._measured < LASTS:
                self.times = {
                    kind: {int(rows): float(ms) for rows, ms in taken.items()} for kind, taken in found["times"].items()
                }

    def keep_times(self, kind: str, times: dict[int, float]) -> None:
        """Record times of a kind of pass that were measured now."""
        self.times, self._measured = {**self.times, kind: times}, time.time()
        self._write()

    def keep_exact(self) -> None:
        """Record that rows are exact."""
        self.exact = True
        self._write()

    def _write(self) -> None:
        times = {kind: {str(rows): ms for rows, ms in taken.items()} for kind, taken in self.times.items()}
        with suppress(OSError):
            write_sealed(self._path, self._purpose, {"exact": self.exact, "measured": self._measured, "times": times})
