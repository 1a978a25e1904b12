"""Verify curves where nothing was measured: v(n), the time of a pass over n rows over that of one row.

Measured on the machines of docs/measurements.md and docs/planning.md ("Seconds"), 2 threads, short contexts: what reads
the keys and values of a long one is added to them.  Whoever uses them says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.cost import ASSUMED_VERIFY
from edgespec.runtimes.manifest import Format, Operators

CURVES: Mapping[Operators, Mapping[Format, Mapping[int, float]]] = {
    "native": {
        "int4": {1: 1.0, 2: 1.04, 4: 1.13, 8: 1.64, 16: 3.05},
        "int8": {1: 1.0, 2: 1.04, 4: 1.13, 8: 1.64, 16: 3.05},
        "w8a8": {1: 1.0, 2: 1.04, 4: 1.13, 8: 1.64, 16: 3.05},
        "fp32": {1: 1.0, 2: 1.04, 4: 1.13, 8: 1.64, 16: 3.05},
    },
    "stock": {
        "int4": ASSUMED_VERIFY,
        "int8": ASSUMED_VERIFY,
        "w8a8": ASSUMED_VERIFY,
        "fp32": ASSUMED_VERIFY,
    },
}
STRICT = 1.04  # a strict pass of stock operators over a plain one, one row at depth 64 (docs/measurements.md)
