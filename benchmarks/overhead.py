"""Time our own code around ONNX Runtime's run, per plain step, on a graph that costs next to nothing.

    python -m benchmarks.overhead BUNDLE

The decode loop runs as it is; the session's run and the argmax are timed inside it and subtracted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import edgespec.decoding.verify
from benchmarks.common import conditions, show
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.verify import RowSampler
from edgespec.drafters.plain import Plain
from edgespec.reports.bench import bootstrap
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model


class Timed:
    """Wraps a callable and adds up the time of its calls."""

    def __init__(self, call: Any) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any) -> Any:
        start = perf_counter()
        result = self.call(*args)
        self.seconds += perf_counter() - start
        return result


class TimedSession:
    """A session whose runs are timed; all else is the session's own."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.run_with_iobinding = Timed(session.run_with_iobinding)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--graph", default="plain", help="plain, or native: what runs")
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    model = Model(bundle.path, bundle.manifest.target, arguments.graph, 1)
    session = TimedSession(model.session)
    model.session = session
    argmax = Timed(RowSampler.choose)
    RowSampler.choose = lambda self, row: argmax(self, row)  # type: ignore[method-assign]
    assert edgespec.decoding.verify  # the loop chooses through RowSampler
    added: list[float] = []
    runs: list[float] = []
    run = session.run_with_iobinding
    for repeat in range(arguments.repeats + 1):
        slot = open_slot(model)
        rounds = decode(slot, Plain(), [1, 2, 3], DecodeOptions(max_new_tokens=arguments.steps))
        next(rounds)
        while True:
            run.seconds = argmax.seconds = 0.0
            start = perf_counter()
            ended = next(rounds, None) is None
            total = perf_counter() - start
            if ended:
                break
            if repeat:  # the first text warms up
                runs.append(1e6 * run.seconds)
                added.append(1e6 * (total - run.seconds - argmax.seconds))
    low, high = bootstrap(added[:: max(1, len(added) // 500)])
    show(
        conditions(bundle=arguments.bundle.name, threads=1, steps=arguments.steps)
        | {
            "run_us": round(median(runs), 1),
            "added_us": round(median(added), 1),
            "low": round(low, 1),
            "high": round(high, 1),
        }
    )


if __name__ == "__main__":
    main()
