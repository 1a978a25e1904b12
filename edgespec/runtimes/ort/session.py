"""ONNX Runtime: sessions made the same way everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.ort.native_library import native_library

if TYPE_CHECKING:
    import onnxruntime


MOST_THREADS = 512  # more than these machines have cores; ONNX Runtime would start any number


def check_threads(threads: int | None) -> None:
    """Refuse a pool that cannot be.

    Raises:
        InvalidRequest: no threads, or too many.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InvalidRequest(f"threads {threads}: expected 1 to {MOST_THREADS}")


def processors() -> set[int]:
    """List the processors that this process may use."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS or Windows
        return set(range(os.cpu_count() or 1))


def default_threads() -> int:
    """Count the threads that a session gets when none are asked for: the processors this process may use."""
    return len(processors())


def make_session(path: Path, threads: int | None = None, native: bool = False) -> onnxruntime.InferenceSession:
    """Open a graph for the CPU; external weights are memory-mapped by ONNX Runtime.

    Thread pools never spin: spinning pools of two sessions fight for the cores, and drain a phone's battery.

    ``threads`` of its pool: None = all processors this process may use; ``native``: it uses edgespec's own operators.

    Raises:
        BundleError: ONNX Runtime rejects the graph, or native operators are missing.
    """
    import onnxruntime as ort

    ort.disable_telemetry_events()  # on Windows, builds send events to the system regardless of the environment
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or default_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come back as exceptions; the log would print them a second time
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if native:
        library = native_library()
        if library.path is None:
            raise BundleError(f"{path}: needs native operators: {library.reason}", "use stock operators")
        options.register_custom_ops_library(str(library.path))
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no public base class
        raise BundleError(f"{path}: ONNX Runtime {ort.__version__} cannot load this graph: {error}") from error
