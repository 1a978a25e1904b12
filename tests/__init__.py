"""Tests.  One thread of each process computes for numpy and torch, because there is a process a core already.

Both libraries read this when they are first imported, which is later.  With a thread a core in every process, threads
wait for each other in loops: a third of all processor time of a run.
"""

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
