"""Tests.  One thread of each process computes for numpy and torch, because there is a process a core already.

Both libraries read this when they are first imported, which is later.  With a thread a core in every process, threads
that are not running are waited for in loops: on a busy machine a third of the processor time of exports, on a quiet one
nothing.
"""

import os

import edgespec  # noqa: F401  it silences ONNX Runtime, which some tests import before anything of edgespec

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
