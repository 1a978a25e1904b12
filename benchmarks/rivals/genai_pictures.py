"""onnxruntime-genai as a process of benchmarks.seeing: a float32 graph of the tower, and its builder's int4 decoder.

    python -m benchmarks.rivals.genai_pictures NAME FOLDER write
    python -m benchmarks.rivals.genai_pictures NAME FOLDER THREADS

Its package holds the builder of decoders alone; the graphs that read pictures are written by example scripts that are
not part of it, for one checkpoint of the hub each.  What they write is torch.onnx's graph of transformers' tower, so
that is timed here, in ONNX Runtime and without the projector, and the decoder reads as many tokens as a prompt with the
picture has rows.  Its builder knows no Idefics3.  Needs torch and transformers to write, and onnxruntime-genai.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

PROMPT = 268  # tokens: 256 rows of a picture and the words around them


def write(name: str, folder: Path) -> None:
    """Write the tower's graph and what it is given, and have genai's builder write the decoder."""
    import torch
    from transformers import AutoModelForImageTextToText

    from benchmarks.towers import SHAPES, of_transformers

    shape = SHAPES[name]
    out = folder / "genai"
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(folder / "source"), "-o", str(out)]
    subprocess.run([*builder, "-p", "int4", "-e", "cpu", "-c", str(folder / "cache")], check=True)
    model = AutoModelForImageTextToText.from_pretrained(folder / "source", dtype=torch.float32)
    rows = np.random.default_rng(0).standard_normal((shape.grid[0] * shape.grid[1], 768)).astype(np.float32)
    _, (tower, given) = of_transformers(model.eval(), rows.shape[1], rows, shape)
    file = folder / "tower.onnx"
    torch.onnx.export(tower, given, str(file), dynamo=False, opset_version=17)
    np.savez(folder / "tower.npz", *(one.numpy() for one in given))


def serve(folder: Path, threads: int) -> None:
    """Answer lines with the number of new tokens."""
    import onnxruntime as ort
    import onnxruntime_genai as genai  # type: ignore[import-not-found,unused-ignore]

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(folder / "tower.onnx"), options)
    stored = np.load(folder / "tower.npz")
    feed = {one.name: stored[f"arr_{at}"] for at, one in enumerate(session.get_inputs())}
    config = genai.Config(str(folder / "genai"))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = genai.Model(config)
    print("ready", flush=True)
    for turn, line in enumerate(sys.stdin):
        print(json.dumps(answer(genai, model, lambda: session.run(None, feed), int(line), turn)), flush=True)


def answer(genai: Any, model: Any, encode: Any, new: int, turn: int) -> dict[str, float]:
    """Time a picture, a prompt as long as one with it, and steps."""
    start = perf_counter()
    encode()
    encoded = perf_counter()
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=PROMPT + new + 8, min_length=PROMPT + new + 8, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(np.random.default_rng(turn).integers(0, 256, PROMPT).astype(np.int32))
    generator.generate_next_token()
    read = perf_counter()
    for _ in range(new):
        generator.generate_next_token()
    step = (perf_counter() - read) / new
    times = {"encode": encoded - start, "prefill": read - encoded, "step": step, "first": read - start}
    return {name: 1000 * value for name, value in times.items()} | {"prompt": PROMPT}


if __name__ == "__main__":
    if sys.argv[3] == "write":
        write(sys.argv[1], Path(sys.argv[2]))
    else:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
