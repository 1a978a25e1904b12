"""Convert manifests of older schemas to the current one before validation.

Each step takes a manifest's JSON from one schema to the next.  The list includes changes in the bundle's other files,
of which the runtime reads both versions.

2 -> 3:

* Graphs of stock operators call their inputs ``input_ids`` and ``position_ids``; before, ``ids`` and ``pos``.  Slots
  check a graph's inputs (``edgespec/runtimes/slots/shared.py``).
* Graphs of the operators whose layout the bundle does not have name a missing weight file, ``converted``.  Before,
  they named the existing one, and programs other than edgespec read the wrong layout.

3 -> 4:

* int8 matrices have two planes, and a model has the size of the low ones (``low_bytes``); its native graph has
  further gates for them.  Before, there was one: kind q8, which native operators still multiply.

4 -> 5:

* A decoder may have a ``source`` that it attends over, and an ``encoder``.  Before, all models were decoder-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

OLDEST, SCHEMA = 2, 5
Json = dict[str, Any]


def migrated(data: Json, version: int) -> Json:
    """Convert a manifest from schema ``version`` to ``SCHEMA``; validation reports unexpected values later."""
    for step in range(version, SCHEMA):
        data = _STEPS[step](data)
    return data | {"schema_version": SCHEMA}


def _name_converted(data: Json) -> Json:
    """Add to ``data`` of schema 3 the names of converted weights, for each model with an index."""
    found = dict(data)
    for name in ("target", "draft", "drafter"):
        part = data.get(name)
        if isinstance(part, dict) and part.get("index") and isinstance(part.get("weights"), str):
            found[name] = {**part, "converted": PurePosixPath(part["weights"]).name}
    return found


_STEPS: Mapping[int, Callable[[Json], Json]] = {2: _name_converted, 3: dict, 4: dict}
