"""Plain int4 decoding beside onnxruntime-genai: one process, steps taking turns, spinning off on both sides.

    pip install onnxruntime-genai
    python -m onnxruntime_genai.models.builder -i MODEL -o GENAI -p int4 -e cpu -c CACHE \\
        --extra_options int4_accuracy_level=4
    python -m benchmarks.plain BUNDLE GENAI [--threads 2]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import alternate, conditions, ratio, show
from edgespec.runtimes.bundle import Bundle
from edgespec.runtimes.session import Model
from edgespec.runtimes.slot import Slot

PREFIX = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("genai", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=100)
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle, check=False)
    slot = Slot(Model(bundle.path, bundle.manifest.target, "plain", arguments.threads))
    prompt = np.random.default_rng(0).integers(2, 5000, PREFIX)  # [PREFIX]
    slot.prefill(prompt.tolist())
    theirs, _model = _genai(arguments.genai, arguments.threads, prompt, PREFIX + arguments.pairs + 8)
    theirs.generate_next_token()

    def ours() -> None:
        # greedy, as theirs: the pass, the argmax, the commit
        slot.forward(np.array([7], np.int64)).logits[0].argmax()
        slot.keep([0])

    times = alternate({"edgespec": ours, "onnxruntime-genai": theirs.generate_next_token}, arguments.pairs)
    show(
        conditions(bundle=arguments.bundle.name, threads=arguments.threads, depth=PREFIX, baseline="onnxruntime-genai")
        | {name: {"median_ms": round(median(ms), 2), "best_ms": round(min(ms), 2)} for name, ms in times.items()}
        | {"speedup": ratio(times["onnxruntime-genai"], times["edgespec"])}
    )


def _genai(folder: Path, threads: int, prompt: Any, length: int) -> tuple[Any, Any]:
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
