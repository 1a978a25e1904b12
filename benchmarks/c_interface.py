"""Compare passes of a native bundle through the C interface with those of the operator in ONNX Runtime.

python -m benchmarks.c_interface BUNDLE [--rows 1,4,128] [--turns N]

Prints JSON: seconds to load and run a first pass, and the largest resident memory, each in a fresh process, the best
of several; milliseconds of passes after 256 tokens, both ways interleaved, best and median; sizes of the libraries.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from tests.support.c_interface import Native

PAST = 256  # tokens before the passes

LOAD = """
import json, resource, sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from benchmarks.c_interface import by_c, by_operator
from tests.support import c_interface
if sys.argv[1] == "operator":
    import onnxruntime
else:  # looking for the library would load ONNX Runtime
    c_interface.native_library = lambda: SimpleNamespace(path=sys.argv[3])
start = perf_counter()
{"c": by_c, "operator": by_operator}[sys.argv[1]](Path(sys.argv[2]), 0)(1)
print(json.dumps({"load_and_first_pass_s": round(perf_counter() - start, 4),
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}))
"""


def by_c(folder: Path, past: int = PAST) -> Callable[[int], object]:
    """Open a bundle through the C interface -> run a pass of the given number of rows."""
    native = Native(folder / "model.native.onnx", tokens=PAST + 128, threads=0)
    native.prefill([1] * past)
    return lambda rows: native.forward([1 + at % 50 for at in range(rows)], top=1)


def by_operator(folder: Path, past: int = PAST) -> Callable[[int], object]:
    """Open it in ONNX Runtime -> run a pass of the given number of rows."""
    slot = open_slot(Model(folder, read_manifest(folder).target, "native"))
    assert isinstance(slot, NativeSlot)
    slot.prefill([1] * past)
    return lambda rows: slot.forward(np.array([1 + at % 50 for at in range(rows)]), None, True)


def loads(folder: Path, turns: int) -> dict[str, dict[str, float]]:
    """Measure loading in fresh processes, interleaved; the best of each."""
    found: dict[str, list[dict[str, float]]] = {"c": [], "operator": []}
    for _ in range(turns):
        for name, all_of_it in found.items():
            command = [sys.executable, "-c", LOAD, name, str(folder), str(native_library().path)]
            all_of_it.append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    return {name: {key: min(one[key] for one in those) for key in those[0]} for name, those in found.items()}


def passes(folder: Path, rows: list[int], turns: int) -> dict[str, dict[str, list[float]]]:
    """Measure passes, interleaved -> by rows and way, [best, median] milliseconds."""
    runs = {"c": by_c(folder), "operator": by_operator(folder)}
    found: dict[str, dict[str, list[float]]] = {}
    for count in rows:
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(turns + 2):
            for name, run in runs.items():
                start = perf_counter()
                run(count)
                if turn > 1:
                    times[name].append(1e3 * (perf_counter() - start))
        found[str(count)] = {name: [round(min(t), 3), round(statistics.median(t), 3)] for name, t in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rows", default="1,4,128")
    parser.add_argument("--turns", type=int, default=30)
    arguments = parser.parse_args()
    import onnxruntime

    library = native_library().path
    capi = Path(onnxruntime.__file__).parent / "capi"
    print(json.dumps({
        "loading": loads(arguments.bundle, 3),
        "passes_ms": passes(arguments.bundle, [int(count) for count in arguments.rows.split(",")], arguments.turns),
        "library_mb": round(library.stat().st_size / 1e6, 2) if library else None,
        "onnxruntime_mb": round(sum(file.stat().st_size for file in capi.glob("*.so*")) / 1e6, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
