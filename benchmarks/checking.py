"""What checking costs when a bundle is loaded: nothing compared, digests remembered, all digests taken.

    python -m benchmarks.checking BUNDLE [--operators stock] [--pairs 9]

The three take turns, files in the page cache.  ``share`` is what the check adds to a load without one, over the whole
load with it.  With operators of the other layout converted weights in the cache are checked as well.  Nothing is
remembered of files that were written in the last second, nor where times of change are not kept (SECURITY.md): ``read``
says how many digests a load took although all might be remembered.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import alternate, conditions, ratio, show
from edgespec.engine.loading import load
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.checked import records


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--operators", choices=["auto", "native", "stock"], default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    how: dict[str, Any] = {"operators": options.operators, "threads": options.threads}

    def opened(check: bool) -> None:
        load(options.bundle, check=check, **how).close()

    def anew() -> None:
        shutil.rmtree(records(), ignore_errors=True)
        opened(check=True)

    opened(check=True)
    runs: dict[str, Callable[[], None]] = {
        "without": partial(opened, check=False),
        "remembered": partial(opened, check=True),
        "taken": anew,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.pairs):
        anew()  # which the next one but one remembers
        opened(check=True)
        for name, found in alternate(runs, 1, warm=0).items():
            times[name] += found
    opened(check=True)
    bundle = Bundle.open(options.bundle)
    show(
        {
            "conditions": conditions(),
            "operators": load(options.bundle, **how).operators.kind,
            "bytes": sum(entry.size for entry in bundle.manifest.files.values()),
            "read": bundle.checked.read,
            "load_ms": {name: round(median(found), 2) for name, found in times.items()},
            "share": {
                name: round(1 - median(times["without"]) / median(times[name]), 4) for name in ("remembered", "taken")
            },
            "over_without": {name: ratio(times[name], times["without"]) for name in ("remembered", "taken")},
        }
    )


if __name__ == "__main__":
    main()
