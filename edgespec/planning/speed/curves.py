"""Verify curves where nothing was measured: v(n), the time of a pass over n rows over that of one row.

Measured on the machines of docs/project/measurements.md and docs/planning.md, 2 threads, short contexts: what reads the
keys and values of a long one is added to them.  Whoever uses them says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.formulas.cost import ASSUMED_VERIFY
from edgespec.runtimes.files.manifest import Format, Operators

CURVES: Mapping[Operators, Mapping[Format, Mapping[int, float]]] = {
    "native": {
        "int4": {1: 1.0, 2: 1.04, 4: 1.13, 8: 1.64, 16: 3.05},
        "int4-64": {1: 1.0, 2: 1.02, 4: 1.08, 8: 1.6, 16: 2.84},
        "int8": {1: 1.0, 2: 1.08, 4: 1.16, 8: 1.55, 16: 2.2},
        "w8a8": {1: 1.0, 2: 1.04, 4: 1.05, 8: 1.25, 16: 1.75},
        "fp32": {1: 1.0, 2: 1.03, 4: 1.1, 8: 1.45, 16: 2.2},
    },
    "stock": {
        "int4": ASSUMED_VERIFY,
        "int4-64": ASSUMED_VERIFY,
        "int8": ASSUMED_VERIFY,
        "w8a8": {1: 1.0, 2: 1.06, 4: 1.2, 8: 1.48, 16: 2.06},
        "fp32": {1: 1.0, 2: 1.13, 4: 1.31, 8: 1.6, 16: 2.3},
    },
}
# what a byte of weights takes over one of int4's: a row of int4-64 takes as long as one of int4, .95 to 1.06
# (docs/project/measurements.md), though it reads 17 bytes for 32 weights and int4 18
STEP: Mapping[Format, float] = {"int4-64": 18 / 17}
STRICT = 1.04  # a strict pass of stock operators over a plain one, one row at depth 64 (docs/project/measurements.md)
# what a byte of weights takes with stock operators over native ones: 16.8 and 8.9 ms a step of the 0.5B shape
# (docs/project/measurements.md) for 20 and 18 bytes of 32 weights
STOCK_STEP: Mapping[Format, float] = {"int4": 1.7, "int4-64": 1.7}
