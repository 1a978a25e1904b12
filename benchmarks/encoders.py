"""Time an encoder's vectors, compared with ONNX Runtime's and CTranslate2's in int8, by length and number.

    python -m benchmarks.encoders BUNDLE --onnx model_int8.onnx --ctranslate2 FOLDER --threads 2 --texts 1,32,128

All run interleaved in one process over the same random token ids, with the same number of threads, and each makes a
mean of rows.  ``--onnx`` is a graph with the inputs of BERT, ``--ctranslate2`` a folder of its converter.  Figures are
medians in milliseconds; a ratio above 1 means that edgespec is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edgespec
from benchmarks.common import alternate, conditions, ratio, show

Ids = list[list[int]]
Embed = Callable[[Ids], Any]
PAUSE = 0.05  # seconds


def unit(rows: NDArray[Any]) -> NDArray[Any]:  # [n, width]
    """Divide vectors by their lengths."""
    found: NDArray[Any] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def by_onnxruntime(file: str, threads: int) -> Embed:
    """Open a graph of ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options)
    names = [one.name for one in session.get_inputs()]

    def embed(texts: Ids) -> object:
        ids = np.array(texts, np.int64)
        given = {name: ids if name == "input_ids" else np.full_like(ids, name == "attention_mask") for name in names}
        return unit(session.run(None, given)[0].mean(1))

    return embed


def by_ctranslate2(folder: str, threads: int) -> Embed:
    """Open a model of CTranslate2."""
    import ctranslate2

    encoder = ctranslate2.Encoder(folder, compute_type="int8", intra_threads=threads)

    def embed(texts: Ids) -> object:
        return unit(np.asarray(encoder.forward_batch(texts).last_hidden_state).mean(1))

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--onnx")
    parser.add_argument("--ctranslate2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", default="16,128")
    parser.add_argument("--texts", default="1,32,128")
    parser.add_argument("--pairs", type=int, default=9)
    asked = parser.parse_args()
    random, found = np.random.default_rng(0), list[dict[str, Any]]()
    with edgespec.load(asked.bundle, threads=asked.threads) as engine:
        vocab = engine.bundle.manifest.target.facts.vocab
        others = {"onnxruntime": (by_onnxruntime, asked.onnx), "ctranslate2": (by_ctranslate2, asked.ctranslate2)}
        runs: dict[str, Embed] = {"edgespec": engine.embed}
        runs |= {name: make(path, asked.threads) for name, (make, path) in others.items() if path}
        for length in map(int, asked.lengths.split(",")):
            for count in map(int, asked.texts.split(",")):
                texts = random.integers(vocab // 10, vocab, (count, length)).tolist()

                timed = {name: partial(embed, texts) for name, embed in runs.items()}
                times = alternate(timed, asked.pairs, 1, PAUSE)
                row: dict[str, Any] = {"tokens": length, "texts": count}
                row |= {name: round(median(each), 2) for name, each in times.items()}
                mine = times.pop("edgespec")
                row |= {f"over {name}": ratio(each, mine) for name, each in times.items()}
                found.append(row)
    show({"conditions": conditions(threads=asked.threads), "figures": found})


if __name__ == "__main__":
    main()
