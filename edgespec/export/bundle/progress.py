"""How far an export is: lines or a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int, str], None]  # stage, steps done, all steps, what is done


@contextmanager
def shown(progress: Progress | None = None, lines: bool = False) -> Iterator[Progress]:
    """Give what is told how far the work is: ``progress``, else a bar on stderr.

    Args:
        progress: somebody else's.
        lines: write a line for each stage where stderr is not a terminal; else nothing is written there.
    """
    if progress is not None:
        yield progress
        return
    if sys.stderr is None or not sys.stderr.isatty():
        seen: list[str] = []

        def line(stage: str, done: int, of: int, detail: str) -> None:
            if lines and stage not in seen:
                seen.append(stage)
                sys.stderr.write(f"{stage}: {detail}\n")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.fields[stage]:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, TimeRemainingColumn(), TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, of: int, detail: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(detail, total=of, stage=stage)
            bar.update(tasks[stage], completed=done, total=of, description=detail)

        yield update
