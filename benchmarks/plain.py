"""Compare plain int4 decoding with onnxruntime-genai: alternating steps in one process, without spinning threads.

The speed of a step varies by a tenth from process to process, by where packed weights fall in memory, so the ratio is
taken in many launches and their median reported.

    pip install onnxruntime-genai
    python -m onnxruntime_genai.models.builder -i MODEL -o GENAI -p int4 -e cpu -c CACHE \\
        --extra_options int4_accuracy_level=4
    python -m benchmarks.plain BUNDLE GENAI [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import alternate, conditions, ratio, show
from edgespec.decoding.target import BEST
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model

PREFIX = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("genai", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--operators", choices=["auto", "native", "stock"], default="auto")
    parser.add_argument("--pairs", type=int, default=40, help="steps of each in a launch")
    parser.add_argument("--launches", type=int, default=15)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.one:
        _launch(arguments)
        return
    bundle = Bundle.open(arguments.bundle, check=False)
    operators = choose_operators(arguments.operators, bundle.manifest.target)
    graph = operators.graph(bundle.manifest.target, strict=False)
    slot = open_slot(Model(bundle.path, bundle.manifest.target, graph, arguments.threads))
    prompt = np.random.default_rng(0).integers(2, 5000, PREFIX)  # [PREFIX]
    slot.prefill(prompt.tolist())
    theirs, _model = genai_generator(arguments.genai, arguments.threads, prompt, PREFIX + arguments.pairs + 8)
    theirs.generate_next_token()

    def ours() -> None:
        # greedy, as theirs: the pass, the choice, the commit
        if BEST in slot.can:
            slot.forward(np.array([7], np.int64), None, True)
        else:
            slot.forward(np.array([7], np.int64)).logits[0].argmax()
        slot.keep([0])

    times = alternate({"edgespec": ours, "onnxruntime-genai": theirs.generate_next_token}, arguments.pairs)
    json.dump({name: median(ms) for name, ms in times.items()}, sys.stdout)


def _launch(arguments: argparse.Namespace) -> None:
    ours, theirs = [], []
    for _ in range(arguments.launches):
        command = [sys.executable, "-m", "benchmarks.plain", *sys.argv[1:], "--one"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ours.append(found["edgespec"])
        theirs.append(found["onnxruntime-genai"])
    show(
        conditions(bundle=arguments.bundle.name, threads=arguments.threads, depth=PREFIX, launches=arguments.launches)
        | {"edgespec_ms": round(median(ours), 2), "onnxruntime_genai_ms": round(median(theirs), 2)}
        | {"speedup_over_onnxruntime_genai": ratio(theirs, ours)}
    )


def genai_generator(folder: Path, threads: int, prompt: Any, length: int) -> tuple[Any, Any]:
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    options = {"intra_op_num_threads": threads, "session.intra_op.allow_spinning": "0"}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = genai.Model(config)
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = genai.Generator(model, params)
    generator.append_tokens(prompt.astype(np.int32))
    return generator, model


if __name__ == "__main__":
    main()
