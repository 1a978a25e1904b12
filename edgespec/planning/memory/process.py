"""What a process takes beside a model: Python and its libraries, sessions, the tokenizer.

The figures were measured (docs/planning.md, "Bytes"): x86-64 Linux, Python 3.11, ONNX Runtime 1.31, numpy 2.4.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class Resident:
    """Resident bytes: private ones, and those of mapped files."""

    private: int
    file: int

    @property
    def all(self) -> int:
        """Both."""
        return self.private + self.file


# Python with all that a run imports, before a bundle is opened
PROCESS = Resident(int(35.2 * MIB), int(34.2 * MIB))
# what opening a tiny bundle adds, and running it: code of the libraries, thread pools, allocators
LOADING = Resident(int(1.4 * MIB), int(9.3 * MIB))
RUNNING = Resident(int(1.9 * MIB), int(2.4 * MIB))
STOCK_CODE = int(2.0 * MIB)  # more code of ONNX Runtime's that stock operators run
# of a session: a node's kernel, its attributes and shapes; by the size of the graph's file
SESSION, SESSION_GRAPH = int(0.6 * MIB), 2.0
STOCK_SESSION, STOCK_GRAPH = int(2.9 * MIB), 12.5
# what a server adds: its libraries, connections, bodies, answers that wait to be read
SERVER = int(20.0 * MIB)
# of a tokenizer: its tables once they are made, and what making them takes, over the size of tokenizer.json
TOKENIZER, TOKENIZER_LOADING = 8.7, 2.9
# private bytes of a token of the text: the lists of the request, of the slot and of the loop, and their numbers
TEXT = 100
# of the index of method ngram
NGRAM = 340

_IMPORTS = "import numpy, onnxruntime, tokenizers, edgespec.engine.loading, edgespec.planning.memory.process as process"
_LIBRARY = "from edgespec.runtimes.ort.native_library import native_library; native_library()"
_PRINT = "print(*process.resident_now())"


def resident_now(status: Path = Path("/proc/self/status")) -> tuple[int, int]:
    """Private and file-backed resident bytes of this process; zeros where the system does not tell."""
    try:
        text = status.read_text("utf-8", "replace")
    except OSError:
        return 0, 0
    found = {name: 1024 * int(size) for name, size in re.findall(r"^(Rss\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return found.get("RssAnon", 0), found.get("RssFile", 0) + found.get("RssShmem", 0)


def process_bytes() -> int:
    """Resident bytes of a process on this machine once all that a run needs is imported, before a bundle is opened.

    Measured in a process of its own, so that it does not matter what this one has done; the default where that fails.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-c", f"{_IMPORTS}; {_LIBRARY}; {_PRINT}"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return sum(int(part) for part in ran.stdout.split()[-2:]) or PROCESS.all
    except (OSError, ValueError, subprocess.SubprocessError):
        return PROCESS.all


def split_process(process: int | None) -> Resident:
    """A measured figure in the proportions of the default; None = the default."""
    if process is None:
        return PROCESS
    private = process * PROCESS.private // PROCESS.all
    return Resident(private, process - private)


def session_bytes(graph_file: int, stock: bool) -> int:
    """Private bytes of a session, by the size of its graph's file."""
    fixed, each = (STOCK_SESSION, STOCK_GRAPH) if stock else (SESSION, SESSION_GRAPH)
    return fixed + int(each * graph_file)


def tokenizer_bytes(file: int) -> tuple[int, int]:
    """(private bytes that stay, private bytes while loading) of a tokenizer.json of so many bytes."""
    return int(TOKENIZER * file), int(TOKENIZER_LOADING * file)
