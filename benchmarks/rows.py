"""Time whole passes of 1 to 16 rows over a bundle at several depths, compared with onnxruntime-genai's plain step.

    python -m benchmarks.rows BUNDLE [--genai GENAI] [--threads 2] [--depths 0,200,2048,8192] [--attention int8]

Passes of all sizes and the rival's step are interleaved.  It prints the time of a row, v(n) = time of n rows over time
of one, and the share of the memory bandwidth that a single step uses.  For the bandwidth, four streams per
thread read 512 MB between steps, so a large cache keeps only a few of the weights.  It also prints prefill of 512
tokens, the peak of resident memory, and each pass over the rival's step.  Keys and values of a depth are random.
``--beside`` names another bundle, whose passes and prefills are interleaved with these.  ``--trees`` adds trees with
the same numbers of rows, and their cost over a chain: two draft tokens at every node of the first path, as with ``--set
branch=2``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import alternate, conditions, ratio, show
from benchmarks.plain import genai_generator
from edgespec.decoding.target import BEST
from edgespec.engine.engine import Engine
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.options import LoadOptions
from edgespec.runtimes.ort.native_library import read_bandwidth
from edgespec.runtimes.process import peak_bytes
from edgespec.runtimes.slots.slot import Slot

PREFILL = 512
READ = 512  # MB of a read that tells the bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--genai", type=Path, help="an onnxruntime-genai build of the same model")
    parser.add_argument("--beside", type=Path, help="another bundle of the same shape, in another format")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depths", default="200")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--operators", choices=["auto", "native", "stock"], default="auto")
    parser.add_argument("--attention")
    parser.add_argument("--trees", action="store_true", help="trees beside chains, of more than two rows")
    arguments = parser.parse_args()
    rows = [int(text) for text in arguments.rows.split(",")]
    start = perf_counter()
    options = LoadOptions(
        threads=arguments.threads,
        operators=arguments.operators,
        attention=arguments.attention,
        strict=False,
        budget="off",
    )
    engine = Engine(Bundle.open(arguments.bundle, check=False), options)
    load_ms = 1000 * (perf_counter() - start)
    weights = engine.bundle.manifest.files[engine.bundle.manifest.target.weights].size
    bandwidths: list[float] = []
    found: dict[str, Any] = {}
    other = Engine(Bundle.open(arguments.beside, check=False), options) if arguments.beside else None
    prefills = _prefills([engine, *([other] if other else [])])
    for depth in (int(text) for text in arguments.depths.split(",")):
        slot = open_slot(engine.model, reserve=depth + 64)
        tokens = np.random.default_rng(0).integers(2, 5000, depth + max(rows)) % slot.vocab_size
        slot.stand_in(depth)
        runs: dict[str, Callable[[], None]] = {str(n): _pass(slot, tokens[depth : depth + n]) for n in rows}
        trees = [n for n in rows if n > 2] if arguments.trees else []
        runs |= {f"tree {n}": _pass(slot, tokens[depth : depth + n], comb(n)) for n in trees}
        if arguments.genai:
            length = max(depth, 1) + arguments.pairs + 16
            generator, _model = genai_generator(arguments.genai, arguments.threads, tokens[: max(depth, 1)], length)
            runs["genai"] = generator.generate_next_token
        if other:
            its = open_slot(other.model, reserve=depth + 64)
            its.stand_in(depth)
            runs |= {f"beside {n}": _pass(its, tokens[depth : depth + n]) for n in rows}
        turns = alternate(runs, arguments.pairs)
        times = {name: median(ms) for name, ms in turns.items()}
        found[str(depth)] = {
            "ms": {name: round(ms, 2) for name, ms in times.items()},
            "v": {str(n): round(times[str(n)] / times[str(rows[0])], 2) for n in rows},
            "share_of_bandwidth": _share(runs[str(rows[0])], weights, arguments.threads, bandwidths),
        }
        if trees:
            found[str(depth)]["tree_over_chain"] = {str(n): ratio(turns[f"tree {n}"], turns[str(n)]) for n in trees}
        if other:
            found[str(depth)]["v_beside"] = {
                str(n): round(times[f"beside {n}"] / times[f"beside {rows[0]}"], 2) for n in rows
            }
            found[str(depth)]["over_beside"] = {str(n): round(times[str(n)] / times[f"beside {n}"], 3) for n in rows}
        if "genai" in times:
            found[str(depth)]["speed_over_genai"] = round(times["genai"] / times[str(rows[0])], 2)
            found[str(depth)]["over_genai_step_by_1.5"] = {
                str(n): round(times[str(n)] / (times["genai"] / 1.5), 2) for n in rows
            }
    show(
        conditions(
            bundle=arguments.bundle.name,
            operators=engine.operators.kind,
            kv=f"{engine.model.kv.keys}/{engine.model.kv.values}",
            threads=arguments.threads,
            load_ms=round(load_ms),
            bandwidth_gb_s=round(median(bandwidths), 1),
            weight_mb=round(weights / 1e6),
            prefill_tokens_per_second=round(prefills[0]),
            prefill_beside=round(prefills[1]) if other else None,
            peak_mb=round(peak_bytes() / 1e6),
        )
        | {"depths": found}
    )


def _share(step: Callable[[], None], weights: int, threads: int, bandwidths: list[float]) -> dict[str, Any] | None:
    """GB/s of a step over those of a read in the same turn; adds the latter to ``bandwidths``.

    None = without the native library nothing can be read like that.
    """
    read: list[float] = []
    turns = alternate({"step": step, "read": lambda: read.append(read_bandwidth(threads, 4, READ, 1))}, 11, warm=0)
    bandwidths += read
    return ratio([weights / ms / 1e6 for ms in turns["step"]], read) if all(read) else None


def _prefills(engines: list[Engine]) -> list[float]:
    """Measure tokens per second for a prompt of PREFILL tokens, the fastest of three of each, interleaved."""
    slots = [open_slot(engine.model) for engine in engines]
    tokens = np.random.default_rng(0).integers(2, slots[0].vocab_size, PREFILL).tolist()

    def read(slot: Slot) -> None:
        slot.follow([])
        slot.prefill(tokens)

    runs = {str(at): partial(read, slot) for at, slot in enumerate(slots)}
    return [PREFILL * 1000 / min(ms) for ms in alternate(runs, 3, warm=1).values()]  # warm: weights come from the disk


def comb(rows: int) -> NDArray[np.int64]:
    """Parents [rows]: of two rows each, the first has children."""
    return np.array([-1, *((row - 1) // 2 * 2 - 1 if row > 2 else 0 for row in range(1, rows))])


def _pass(slot: Slot, tokens: Any, parents: NDArray[np.int64] | None = None) -> Callable[[], None]:
    if BEST in slot.can:
        return lambda: (slot.forward(tokens, parents, True), None)[1]
    return lambda: (slot.forward(tokens, parents).logits.argmax(-1), None)[1]


if __name__ == "__main__":
    main()
