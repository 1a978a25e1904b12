"""Train in processes that kill themselves at random moments, until one lives to the end; one JSON object on stdout.

    python -m tests.export.training.killed MODEL OUTPUT METHOD KILLS SEED

The processes are forks of this one, so that torch is loaded once.  A moment is a number of function calls, so that it
does not depend on how busy the machine is.  After the kills asked for, or whenever a training
has come to its end, the finished files must be there; in between no heads may be.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from edgespec.export.training.state import FOLDER
from edgespec.export.training.train import Trainer
from tests.export.training.conftest import short

DONE = {"draft": "config.json"}


def trained(options: Any, after: int | None, counted: Path | None = None) -> bool:
    """Train in a fork that kills itself after so many function calls -> whether it was done before.

    ``counted``: a file that gets the number of all calls.
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1
            if calls == after:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            Trainer(options).run()
            sys.setprofile(None)
            if counted:
                counted.write_text(str(calls), "ascii")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0 or (after is not None and os.WIFSIGNALED(status)), status
    return status == 0


def main() -> None:
    model, output, method, kills, seed = sys.argv[1:]
    torch.set_num_threads(1)
    folder, numbers = Path(output), random.Random(int(seed))
    chosen: Any = method
    options = replace(short(model, folder / "whole"), method=chosen, save_every=1)
    assert trained(options, None, folder / "calls")
    whole = int((folder / "calls").read_text("ascii"))
    expected = {path.name: path.read_bytes() for path in (folder / "whole").iterdir()}
    marker = DONE.get(method, "edgespec_heads.json")
    killed, finished, stages = 0, 0, []
    options = replace(options, output=folder / "out")
    while True:
        # the last one is left alone
        done = trained(options, numbers.randrange(1, whole) if killed < int(kills) else None)
        there = options.output / FOLDER
        if not done:
            killed += 1
            stages.append(
                "checkpoint" if (there / "checkpoint.pt").is_file() else "texts" if there.is_dir() else "none"
            )
            if there.is_dir() or not (options.output / marker).is_file():
                continue
        finished += 1  # killed after all was written, or not at all
        found = {path.name: path.read_bytes() for path in options.output.iterdir() if not path.name.startswith(".")}
        assert found == expected, sorted(found)
        if killed >= int(kills):
            break
        shutil.rmtree(options.output)
    print(json.dumps({"killed": killed, "finished": finished, "stages": stages}))  # noqa: T201


if __name__ == "__main__":
    main()
