"""Time the first token of a long prompt after a restart, compared with the time to read the prompt.

    python -m benchmarks.prompt_cache [--shapes qwen2.5-0.5b,qwen3.5-0.8b,lfm2-350m] [--attention f16,int8]
    python -m benchmarks.prompt_cache BUNDLE [--tokens 10000] [--threads 2] [--runs 3] [--method ar]

Every cell, a shape (random weights, int4; written once) and a format of keys, has a separate cache folder.  A first
process reads the prompt, writes a short text, and ends when all is on the disk.  Then ``--runs`` processes load the
bundle, answer another short request, and are asked the same prompt: from the call to the first token, with every file
checked.  Files are in the page cache, as the first process has just written them.  Printed are milliseconds, their
ratio, bytes, and whether the texts are equal token by token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.common import conditions, show
from benchmarks.shapes import SHAPES, write_shape
from edgespec.engine import prompt_cache

DEFAULT = "qwen2.5-0.5b,qwen3.5-0.8b,lfm2-350m"
ANSWER = 16  # tokens of the text
OTHER = 40  # tokens of the other request


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=DEFAULT)
    parser.add_argument("bundle", type=Path, nargs="?", help="instead of shapes")
    parser.add_argument("--attention", default="f16,int8")
    parser.add_argument("--method", default="ar")
    parser.add_argument("--tokens", type=int, default=10000, help="of the prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--worth", type=float, default=prompt_cache.WORTH, help="seconds of reading that are kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        show(_ask(arguments))
        return
    cells = []
    with tempfile.TemporaryDirectory() as temporary:
        for shape in [] if arguments.bundle else arguments.shapes.split(","):
            print(f"writing {shape}", file=sys.stderr)
            write_shape(SHAPES[shape], Path(temporary) / shape, "int4", arguments.tokens + 512)
        for bundle in [arguments.bundle] if arguments.bundle else sorted(Path(temporary).iterdir()):
            for attention in arguments.attention.split(","):
                print(f"measuring {bundle.name}, {attention}", file=sys.stderr)
                cells.append({"bundle": bundle.name, "attention": attention} | _cell(bundle, attention, arguments))
    show(conditions(tokens=arguments.tokens, threads=arguments.threads, runs=arguments.runs) | {"cells": cells})


def _cell(bundle: Path, attention: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"EDGESPEC_CACHE": f"{folder}/cache", "EDGESPEC_KEY": f"{folder}/key"}
        environment.pop("EDGESPEC_PROMPT_CACHE", None)
        command = [sys.executable, "-m", "benchmarks.prompt_cache", "--worker", str(bundle)]
        command += ["--attention", attention, "--method", arguments.method]
        command += ["--tokens", str(arguments.tokens), "--threads", str(arguments.threads)]
        command += ["--worth", str(arguments.worth)]

        def run() -> dict[str, Any]:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        cold, warm = run(), [run() for _ in range(arguments.runs)]
        kept = [path for path in Path(folder).glob("cache/prompts/*/*") if path.suffix in (".keys", ".end")]
        first = [one["first_ms"] for one in warm]
        return {
            "prefill_ms": cold["prefill_ms"],
            "cold_first_ms": cold["first_ms"],
            "warm_first_ms": median(first),
            "warm_first_ms_each": first,
            "share_of_prefill": round(median(first) / cold["prefill_ms"], 5),
            "reused_tokens": [one["reused"] for one in warm],
            "read_again_tokens": [one["prompt"] - 1 - one["reused"] for one in warm],
            "same_text": all(one["text"] == cold["text"] for one in warm),
            "files": len(kept),
            "bytes": sum(path.stat().st_size for path in kept),
        }


def _ask(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load, answer another request, and then the prompt: one process."""
    import edgespec

    prompt_cache.WORTH = arguments.worth
    rng = Random(1)
    with edgespec.load(arguments.bundle, threads=arguments.threads, attention=arguments.attention) as engine:
        vocab = min(1000, engine.model.facts.vocab)
        prompt, other = ([rng.randrange(10, vocab) for _ in range(count)] for count in (arguments.tokens, OTHER))
        how: dict[str, Any] = {
            "method": arguments.method,
            "max_new_tokens": ANSWER,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        engine.generate(other, **how)
        start = perf_counter()
        with engine.stream(prompt, **how) as stream:
            next(stream)
            first = 1000 * (perf_counter() - start)
            for _ in stream:
                pass
            stats = stream.result.stats
        return {
            "first_ms": round(first, 1),
            "prefill_ms": round(stats.prefill_ms, 1),
            "prompt": stats.prompt_tokens,
            "reused": stats.reused_tokens,
            "text": stream.result.tokens,
        }


if __name__ == "__main__":
    main()
