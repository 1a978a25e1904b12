"""Compare a foreign graph with edgespec's own description of the same model: milliseconds per pass.

    python -m benchmarks.foreign FOLDER [--layers 4] [--hidden 2048] [--threads 2] [--rows 1 8] [--depth 200]

FOLDER gets a llama with random weights, an export of it in optimum's form, and a bundle of each in int4.  Passes of
all bundles take turns.  ``native``: the foreign graph on native operators; ``stock``: on none of them.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import alternate, conditions, ratio, show
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.manifest import read_manifest
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.support import hf
from tests.support.foreign import write_export

WAYS = {"own": ("own", "native"), "native": ("foreign", "native"), "stock": ("foreign", "strict")}


def make(folder: Path, layers: int, hidden: int) -> None:
    """Write both sources and their bundles, as far as they do not exist."""
    heads = hidden // 64
    config = hf.CONFIGS["llama_tied_gqa"] | {
        "hidden_size": hidden, "intermediate_size": hidden * 11 // 4 // 32 * 32, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 4, "head_dim": 64,
        "vocab_size": 4096, "max_position_embeddings": 1024,
    }  # fmt: skip
    for name in ("own", "foreign"):
        bundle, source = folder / name, folder / f"{name}-source"
        if bundle.exists():
            continue
        if name == "own":
            hf.write_checkpoint(source, config, 1)
        else:
            write_export(source, config, 1, external=True)
        options = ExportOptions(str(source), bundle, format="int4", context=512, quantizer="rtn", threads=1)
        export_model(options, golden=False)


def _pass(slot: Slot, tokens: NDArray[np.int64]) -> None:
    slot.forward(tokens)


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--depth", type=int, default=200)
    parser.add_argument("--times", type=int, default=40)
    given = parser.parse_args()
    make(given.folder, given.layers, given.hidden)
    slots = {}
    for way, (bundle, graph) in WAYS.items():
        part = read_manifest(given.folder / bundle).target
        slots[way] = open_slot(Model(given.folder / bundle, part, graph, given.threads))
    tokens = np.random.default_rng(0).integers(2, 4096, given.depth + max(given.rows))
    for slot in slots.values():
        slot.prefill(tokens[: given.depth].tolist())
    figures = {}
    for rows in given.rows:
        piece = tokens[given.depth : given.depth + rows]
        runs = {way: partial(_pass, slot, piece) for way, slot in slots.items()}
        took = alternate(runs, given.times)
        for way, found in took.items():
            speed = ratio(took["own"], found)
            figures[f"{rows} rows, {way}"] = {"ms": round(median(found), 2), "least": round(min(found), 2)} | speed
    show({"conditions": conditions(), "layers": given.layers, "hidden": given.hidden, "figures": figures})


if __name__ == "__main__":
    main()
