"""How far an export is: lines or a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

Progress = Callable[[str, int, int, str], None]  # stage, steps done, all steps, what is done
EACH = 5.0  # seconds between the lines of a stage
SAID = ("choice", "warning")  # stages that are single messages, without work


def silent(stage: str, done: int, of: int, detail: str) -> None:
    """Report nothing."""


class Lines:
    """Writes how far work is as lines of text, for a log.

    Args:
        write: is given each line.
        clock: seconds.
    """

    def __init__(self, write: Callable[[str], Any], clock: Callable[[], float] = monotonic) -> None:
        self._write, self._clock = write, clock
        self._seen: dict[str, tuple[int, int]] = {}  # by stage, the last count that was written
        self._at = clock()

    def __call__(self, stage: str, done: int, of: int, detail: str) -> None:
        """Tell how far a stage is."""
        now, count = self._clock(), (done, of)
        if stage in SAID:
            self._write(f"{detail}\n" if stage == "choice" else f"{stage}: {detail}\n")
        elif stage not in self._seen:
            self._write(f"{stage}: {detail}\n")
        elif now - self._at < EACH or self._seen[stage] == count:
            return
        else:
            self._write(f"{stage}: {done} of {of}, {detail}\n")
        self._seen[stage], self._at = count, now


@contextmanager
def shown(progress: Progress | None = None, lines: bool = False) -> Iterator[Progress]:
    """Yield the receiver of progress reports: ``progress``, or otherwise a bar on stderr.

    Args:
        progress: the caller's own receiver.
        lines: write lines if stderr is not a terminal: one at the beginning of each stage, and one with its count
            whenever ``EACH`` seconds have passed; otherwise nothing is written there.
    """
    if progress is not None:
        yield progress
        return
    if sys.stderr is None or not sys.stderr.isatty():
        yield Lines(lambda text: sys.stderr.write(text) if lines else None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.fields[stage]:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, TimeRemainingColumn(), TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, of: int, detail: str) -> None:
            if stage in SAID:
                bar.console.print(detail, highlight=False, markup=False)
                return
            if stage not in tasks:
                tasks[stage] = bar.add_task(detail, total=of, stage=stage)
            bar.update(tasks[stage], completed=done, total=of, description=detail)

        yield update
