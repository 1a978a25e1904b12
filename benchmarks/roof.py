"""The machine's two roofs: how fast it reads memory, and how fast each instruction set multiplies bytes.

    python -m benchmarks.roof [--threads 1,2]

A pass can take no less than its bytes over the first, and its multiply-adds over the second.  The products are those of
the matrix kernels, only in registers.  A kernel of 4-bit weights in blocks of 32 also unpacks and scales, on the same
ports: it can reach about three quarters (docs/dev/log.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.common import conditions, show
from edgespec.runtimes.ort.native_library import measure_roofs, native_library
from tests.support.selftest import ISAS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--this", action="store_true", help="the instruction set of this process alone")
    arguments = parser.parse_args()
    if arguments.this:
        show({"isa": native_library().isa, "threads": _roofs(arguments.threads)})
        return
    found: dict[str, Any] = {}
    for isa in (name.removeprefix("isa_") for name in ISAS):
        command = [sys.executable, "-m", "benchmarks.roof", "--this", "--threads", arguments.threads]
        ran = subprocess.run(
            command, env=os.environ | {"EDGESPEC_ISA": isa}, capture_output=True, text=True, check=True
        )
        one = json.loads(ran.stdout)
        if one["isa"] == isa:  # else the processor or the build lacks it
            found[isa] = one["threads"]
    show(conditions(isas=found))


def _roofs(threads: str) -> dict[str, Any]:
    found = {}
    for count in threads.split(","):
        roofs = measure_roofs(int(count))
        found[count] = {"read_gb_s": round(roofs.bandwidth / 1e9, 1), "dots_gmac_s": round(roofs.dots / 1e9, 1)}
    return found


if __name__ == "__main__":
    main()
