"""How rows of strict stock graphs get the same bits in every pass: tried once a machine, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import get_args

from edgespec.planning.profiles import this_machine
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.slots.cpu import DEPTHS, SIZES, StockRows, try_rows
from edgespec.runtimes.slots.pairs import VARIABLE
from edgespec.runtimes.slots.shared import Model

SEALED = "rows"  # purpose of the record's seal
# variables that change what is found: ONNX Runtime's choice of attention's kernels, and how lone rows go
_KERNELS = ("ORT_GQA_DISABLE_FLASH_ATTENTION", VARIABLE)


def stock_rows_exact(bundle: Bundle, model: Model) -> bool:
    """Tell whether rows of a strict graph have the same bits in every pass, and set ``model.pairs`` so that they have.

    An earlier result of this machine is taken from the cache.
    """
    key, known = _key(bundle, model.threads), _known()
    if key not in known:
        known[key] = try_rows(model)
        with suppress(OSError):  # no cache: it is tried again next time
            write_sealed(_file(), SEALED, known)
    model.pairs = known[key] == "pairs"
    return known[key] != "differ"


def tried_rows(bundle: Bundle, threads: int) -> StockRows | None:
    """Return what was found of the bundle's strict graph on this machine; None = it was not tried."""
    return _known().get(_key(bundle, threads))


def _key(bundle: Bundle, threads: int) -> str:
    target, machine = bundle.manifest.target, this_machine()
    facts = [
        bundle.manifest.files[target.graphs[target.main].file].sha256,
        machine.processor,
        machine.onnxruntime,
        min(threads, 2),  # one, or several
        [os.environ.get(name, "") for name in _KERNELS],
        [DEPTHS, SIZES],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _file() -> Path:
    return cache_folder() / "rows.json"


def _known() -> dict[str, StockRows]:
    try:
        found = read_sealed(_file(), SEALED)
    except (OSError, ValueError):  # absent, damaged or of another user: it is tried again
        return {}
    return {key: value for key, value in found.items() if value in get_args(StockRows)}
