"""Run passes of one model with one runtime, on request: a process of benchmarks.rivals.

    python -m benchmarks.rivals.worker edgespec|onnx|openvino|torch MODEL THREADS CONTEXT

It reads lines "DEPTH ROWS" and answers with the milliseconds of a pass of ROWS rows after DEPTH tokens, whose keys and
values are random where the runtime allows that.  Each runtime comes from the current environment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

Pass = Callable[[], object]


def edgespec(model: str, threads: int, context: int) -> Callable[[int, int], Pass]:
    """Give the best token of every row; keys and values in the format after a comma in ``model``, or the bundle's."""
    from edgespec.engine.engine import Engine
    from edgespec.runtimes.files.bundle import Bundle
    from edgespec.runtimes.opening import open_slot
    from edgespec.runtimes.options import LoadOptions

    path, _, attention = model.partition(",")
    kept: Any = attention or None
    options = LoadOptions(threads=threads, attention=kept, strict=False, budget="off")
    engine = Engine(Bundle.open(path, check=False), options)
    slot: Any = open_slot(engine.model, reserve=context)
    behind = -1

    def pass_of(depth: int, rows: int) -> Pass:
        nonlocal behind
        if behind != depth:
            slot.follow([])
            slot.stand_in(depth)
            behind = depth
        tokens = _tokens(rows) % slot.vocab_size
        if depth == 0 and rows > 64:  # a prompt
            behind = -1
            return lambda: slot.prefill(tokens.tolist())
        best = partial(slot.forward, best=True)
        return lambda: best(tokens)

    return pass_of


def onnx(model: str, threads: int, context: int) -> Callable[[int, int], Pass]:
    """onnxruntime-genai's graph in onnxruntime, keys and values appended in place as genai does; all logits."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(Path(model) / "model.onnx"), options)
    shape = json.loads((Path(model) / "genai_config.json").read_text())["model"]["decoder"]
    shape = (1, shape["num_key_value_heads"], context, shape["head_size"])
    inputs, vocab = [one.name for one in session.get_inputs()], session.get_outputs()[0].shape[-1]
    held = {name: ort.OrtValue.ortvalue_from_numpy(_noise(shape)) for name in inputs if name.startswith("past_")}

    def pass_of(depth: int, rows: int) -> Pass:
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", _tokens(rows)[None] % vocab)
        binding.bind_cpu_input("attention_mask", np.ones((1, depth + rows), np.int64))
        if "position_ids" in inputs:
            binding.bind_cpu_input("position_ids", np.arange(depth, depth + rows)[None])
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        logits = np.empty((1, rows, vocab), np.float32)
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        return lambda: session.run_with_iobinding(binding)

    return pass_of


def openvino(model: str, threads: int, context: int) -> Callable[[int, int], Pass]:
    """OpenVINO's own graph of the GGUF file, stateful; all logits."""
    import openvino as ov  # type: ignore[import-not-found,unused-ignore]

    compiled = ov.Core().compile_model(
        str(Path(model) / "openvino_model.xml"), "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    request = compiled.create_infer_request()

    def infer(depth: int, rows: int) -> None:
        inputs = {
            "input_ids": _tokens(rows)[None],
            "attention_mask": np.ones((1, depth + rows), np.int64),
            "position_ids": np.arange(depth, depth + rows)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer(inputs, share_inputs=True, share_outputs=True)

    def pass_of(depth: int, rows: int) -> Pass:
        request.reset_state()
        if depth:  # the states of a short text, repeated
            infer(0, min(depth, 64))
            for state in request.query_state():  # [batch, KV heads, tokens, dim]
                many = [1, 1, -(-depth // 64), 1]
                state.state = ov.Tensor(np.ascontiguousarray(np.tile(state.state.data, many)[:, :, :depth]))
            infer(depth, 1)  # a pass is never the first with its states
        return lambda: infer(depth + 1 if depth else 0, rows)

    return pass_of


def torch(model: str, threads: int, context: int) -> Callable[[int, int], Pass]:
    """Run transformers, bfloat16, eager; all logits."""
    import torch as library
    from transformers import AutoModelForCausalLM, DynamicCache

    library.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=library.bfloat16).eval()
    cache: Any = DynamicCache(config=loaded.config)

    @library.inference_mode()
    def run(tokens: Any) -> None:
        loaded(library.from_numpy(tokens)[None], past_key_values=cache)

    def pass_of(depth: int, rows: int) -> Pass:
        if cache.get_seq_length() < depth:
            run(_tokens(depth - cache.get_seq_length()))
        if extra := cache.get_seq_length() - depth:
            cache.crop(-extra)
        return lambda: run(_tokens(rows))

    return pass_of


def _noise(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _tokens(rows: int) -> Any:
    return np.random.default_rng(rows).integers(2, 5000, rows, dtype=np.int64)


def main() -> None:
    runtime, model, threads, context = sys.argv[1:5]
    kinds = {"edgespec": edgespec, "onnx": onnx, "openvino": openvino, "torch": torch}
    pass_of = kinds[runtime](model, int(threads), int(context))
    print("ready", flush=True)
    for line in sys.stdin:
        run = pass_of(*map(int, line.split()))
        start = perf_counter()
        run()
        print(1000 * (perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
