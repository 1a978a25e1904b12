"""Where the tensors of a weight file lie, for whoever converts it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from edgespec.export.storage.plan import StoragePlan
from edgespec.runtimes.files.manifest import Layout


def index_text(plans: Mapping[Layout, StoragePlan]) -> str:
    """Where each tensor lies in either layout, and which matrices differ between them, as JSON.

    With it a bundle's weights can be converted without looking into its graphs.
    """
    packed = {name: asdict(matrix.packed) for name, matrix in plans["native"].matrices.items() if matrix.packed}
    entries = {
        layout: {
            name: [entry.offset, entry.length, entry.dtype.str, list(entry.dims)]
            for name, entry in plans[layout].entries.items()
        }
        for layout in ("stock", "native")
    }
    return json.dumps({"matrices": packed, **entries})
