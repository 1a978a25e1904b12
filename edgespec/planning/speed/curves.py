"""Verify curves where nothing was measured: v(n), the time of a pass over n rows over that of one row.

Measured on the machines of docs/project/measurements.md and docs/planning.md, 2 threads, short contexts: what reads the
keys and values of a long one is added to them.  Whoever uses them says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.formulas.cost import ASSUMED_VERIFY
from edgespec.runtimes.files.formats import FOUR_BITS, SPECS, Format
from edgespec.runtimes.files.manifest import Operators

CURVES: Mapping[Operators, Mapping[Format, Mapping[int, float]]] = {
    "native": {name: spec.verify for name, spec in SPECS.items()},
    "stock": {name: spec.stock_verify or ASSUMED_VERIFY for name, spec in SPECS.items()},
}
STEP: Mapping[Format, float] = {name: spec.step for name, spec in SPECS.items()}
STRICT = 1.04  # a strict pass of stock operators over a plain one, one row at depth 64 (docs/project/measurements.md)
# what a byte of weights takes with stock operators over native ones: 16.8 and 8.9 ms a step of the 0.5B shape
# (docs/project/measurements.md) for 20 and 18 bytes of 32 weights
STOCK_STEP: Mapping[Format, float] = dict.fromkeys(FOUR_BITS, 1.7)
