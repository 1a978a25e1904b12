"""Answer a corpus on many machines with Ray Data: each worker is a loaded bundle.

    pip install -e '.[ray]'    # in a clone of the repository
    python examples/ray_batch.py BUNDLE prompts.jsonl answers --workers 2

The input is JSONL with a column ``prompt``.  The answers are JSONL files in a folder, with the columns ``text``,
``tokens``, ``exact`` and ``worker``, the process that answered.  ``--workers`` processes start where the cluster has
room (``RAY_ADDRESS`` names one; by default it is this machine).  Each loads the bundle once, so all machines need
access to its folder.  Texts do not depend on the number of workers: each is the same as for a single prompt.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]


class Answers:
    """A worker: a bundle that is loaded once, and answers batches of prompts.

    Args:
        bundle: its folder.
        settings: of ``generate_batch``.
        threads: of this worker.
    """

    def __init__(self, bundle: str, settings: dict[str, Any], threads: int) -> None:
        import edgespec

        self._engine = edgespec.load(bundle, threads=threads)
        self._settings = settings

    def __call__(self, columns: Columns) -> Columns:
        results = self._engine.generate_batch([str(prompt) for prompt in columns["prompt"]], **self._settings)
        return columns | {
            "text": np.array([result.text for result in results]),
            "tokens": np.array([len(result.tokens) for result in results]),
            "exact": np.array([bool(result.exact) for result in results]),
            "worker": np.full(len(results), os.getpid()),
        }


def answer(source: str, output: str, bundle: str, workers: int, threads: int, **settings: Any) -> None:
    """Answer the prompts of a JSONL file, and write folders of JSONL.

    Args:
        source: a file, or a folder of files, that all machines see.
        output: a folder.
        bundle: a folder that all machines see.
        workers: processes.
        threads: of each.
        **settings: of ``Engine.generate_batch``; ``batch`` prompts are decoded together.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves the cluster
    import ray

    ray.data.DataContext.get_current().wait_for_min_actors_s = 600  # every worker has its share
    free = {"num_cpus": 0}  # file access needs no processors: workers may use all of them
    prompts = ray.data.read_json(source, ray_remote_args=free, override_num_blocks=4 * workers)
    answers = prompts.map_batches(
        Answers,
        fn_constructor_args=(str(Path(bundle).resolve()), settings, threads),
        batch_size=8 * int(settings.get("batch", 4)),
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        num_cpus=threads,
    )
    answers.write_json(output, ray_remote_args=free)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("source")
    parser.add_argument("output")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--method", default=None)
    asked = parser.parse_args()
    answer(
        asked.source, asked.output, asked.bundle, asked.workers, asked.threads,
        batch=asked.batch, max_new_tokens=asked.max_new_tokens, method=asked.method,
    )  # fmt: skip


if __name__ == "__main__":
    main()
