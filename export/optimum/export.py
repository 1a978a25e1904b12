"""Calling optimum's exporter in a process of its own: torch's memory goes with it, and so does whatever it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from edgespec.errors import ExportError

_ERROR = re.compile(r"[\w.]+(Error|Exception|Killed|Exit): ")
TASK = "text-generation-with-past"
_CALL = """
import sys
from optimum.exporters.onnx import main_export
main_export(sys.argv[1], output=sys.argv[2], task=sys.argv[3], dtype="fp32", device="cpu", trust_remote_code=False)
"""


def optimum_missing() -> str | None:
    """Why optimum's exporter cannot be called in this environment; None = it can."""
    for name in ("optimum", "optimum.exporters", "optimum.exporters.onnx", "torch", "transformers"):
        try:
            if find_spec(name) is None:
                return f"{'optimum-onnx' if name.startswith('optimum') else name} is not installed here"
        except ImportError as error:
            return f"{name} cannot be imported here: {error}"
    return None


def export_graph(model: Path, folder: Path) -> None:
    """Let optimum export a checkpoint in float32 into a new folder.

    Raises:
        ExportError: it fails; the message has the line that names the error, or the last one.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", _CALL, str(model.resolve()), str(folder.resolve()), TASK]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        # messages of several lines begin with the error's name, and end with general advice
        named = [line for line in lines if _ERROR.match(line)]
        last = (named or lines or [f"exit code {done.returncode}"])[-1]
        raise ExportError(
            f"{model}: optimum's exporter failed: {last}",
            f"see what it knows: `optimum-cli export onnx --model {model} --task {TASK} DIR`",
        )
