"""Compare the quality of every block type with llama.cpp's, on the same file.

    python -m benchmarks.block_types FILE.gguf --llama BIN --text TEXT [--types Q8_0,Q4_K_S]

llama-quantize (with ``--pure``) quantizes FILE to each type, edgespec exports it with its own weights, and both are
compared with a float32 run of the new file, as in ``benchmarks.real``.  This says how well a type is run, and nothing
about how good the type is: FILE is quantized already, and its grid favors its own type.  Rows that do not fill a type's
blocks get another type, so a model whose rows are no multiples of 256 shows little of K-quants.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from benchmarks.common import conditions, show
from benchmarks.real import command, judge_by_llama, quality
from edgespec.export.source.gguf_files import read_gguf_header

TYPES = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K",
         "IQ4_XS")  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--text", type=Path, required=True, help="at least 8,000 tokens")
    parser.add_argument("--types", default=",".join(TYPES), help="names of llama-quantize")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    found = {}
    for name in arguments.types.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _quality(arguments, name, Path(folder))
        print(name, found[name], file=sys.stderr)
    show(conditions(threads=arguments.threads) | {"model": arguments.model.name, "types": found})


def _quality(arguments: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    file, bundle = folder / "model.gguf", folder / "bundle"
    program, threads = arguments.llama / "llama-quantize", str(arguments.threads)
    line = [str(program), "--allow-requantize", "--pure", str(arguments.model), str(file), name, threads]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    command("export", file, "-o", bundle, "--threads", arguments.threads, stderr=subprocess.DEVNULL)
    judged = judge_by_llama(arguments.llama, file, arguments.text, arguments.threads, folder / "base")
    entries = read_gguf_header(file)[1].values()
    stored = Counter(GGMLQuantizationType(entry.kind).name for entry in entries if len(entry.shape) == 2)
    return quality(bundle, file, judged, arguments.threads) | {"tensors": dict(stored)}


if __name__ == "__main__":
    main()
