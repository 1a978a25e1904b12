"""Print the processor time that tests take, their programs' with it: on a busy machine, elapsed time says nothing.

    python -m pytest -p tools.processor_time [ARGUMENTS OF PYTEST]

It prints what the files and the fixtures took, the most expensive first, and what the processes took before their first
test.  A fixture's time is also that of the file that asked for it first.  With ``-n``, put the folder that the workers
may write to into ``EDGESPEC_PROCESSOR_TIME``.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

MOST = 60  # rows of a table
Table = defaultdict[str, float]
seconds: dict[str, Table] = {name: defaultdict(float) for name in ("files", "fixtures", "tests", "start")}


def spent() -> float:
    """Sum the seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Count a test, with what it sets up and takes down."""
    before = spent()
    if not seconds["files"]:
        seconds["start"]["before the first test"] = before
    try:
        return (yield)
    finally:
        seconds["files"][item.nodeid.split("::")[0]] += spent() - before
        seconds["tests"][item.nodeid] += spent() - before


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """Count a fixture, without the fixtures that it asks for: those are set up before."""
    before = spent()
    try:
        return (yield)
    finally:
        seconds["fixtures"][f"{fixturedef.baseid}::{fixturedef.argname}"] += spent() - before


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the tables, or leave them where the main process finds them."""
    worker, folder = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("EDGESPEC_PROCESSOR_TIME")
    if worker:
        if folder:
            Path(folder, f"{worker}-{os.getpid()}.json").write_text(json.dumps(seconds), "utf-8")
        return
    for file in Path(folder).glob("gw*.json") if folder else ():
        for table, rows in json.loads(file.read_text("utf-8")).items():
            for name, value in rows.items():
                seconds[table][name] += value
    for table, counted in seconds.items():
        print(f"\n{sum(counted.values()):.1f} s of processor time: {table}")
        for name, value in sorted(counted.items(), key=lambda row: -row[1])[:MOST]:
            print(f"{value:8.2f} {name}")
