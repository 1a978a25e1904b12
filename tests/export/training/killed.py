"""Train in processes that kill themselves, two one after the other, and then to the end; one JSON object on stdout.

    python -m tests.export.training.killed MODEL OUTPUT METHOD PAIRS SEED

The processes are forks of this one, so that torch is loaded once.  A moment is a number of function calls, so that it
does not depend on how busy the machine is.  The first of a pair starts from the beginning and is killed in one of
``STAGES``, which take turns, at a random moment of it; the second continues from there until any moment.  Whenever a
training has completed, the finished files must exist, and equal those of a training without interruptions.
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
from types import FrameType
from typing import Any

import torch

from edgespec.export.training.state import CHECKPOINT, FOLDER, TrainingState
from edgespec.export.training.train import Trainer
from tests.export.training.conftest import short

DONE = {"draft": "config.json"}
STAGES = {
    "texts": TrainingState.begin,
    "checkpoint": TrainingState.keep_checkpoint,
}  # each begins when that has first returned


def trained(options: Any, after: int | None, counted: Path | None = None) -> bool:
    """Train in a fork that kills itself after ``after`` function calls -> whether it finished before.

    ``counted``: a file that gets the number of calls at which each stage began, and of all.
    """
    child = os.fork()
    if child == 0:
        calls, begun = 0, dict[str, int]()
        names = {function.__code__: name for name, function in STAGES.items()}

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1
            if calls == after:
                os.kill(os.getpid(), signal.SIGKILL)
            if event == "return" and frame.f_code in names:
                begun.setdefault(names[frame.f_code], calls)

        try:
            sys.setprofile(count)
            Trainer(options).run()
            sys.setprofile(None)
            if counted:
                counted.write_text(json.dumps([*begun.values(), calls]), "ascii")
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0 or (after is not None and os.WIFSIGNALED(status)), status
    return status == 0


def main() -> None:
    model, output, method, pairs, seed = sys.argv[1:]
    torch.set_num_threads(1)
    folder, numbers = Path(output), random.Random(int(seed))
    chosen: Any = method
    options = replace(short(model, folder / "whole", chosen), save_every=1)
    assert trained(options, None, folder / "calls")
    *starts, whole = json.loads((folder / "calls").read_text("ascii"))
    expected = {path.name: path.read_bytes() for path in (folder / "whole").iterdir()}
    options = replace(options, output=folder / "out")
    there, marker = options.output / FOLDER, options.output / DONE.get(method, "edgespec_heads.json")
    killed = []
    for pair in range(int(pairs)):
        at = (pair + 1) % len(STAGES)
        first = numbers.randrange(starts[at] + 1, [*starts, whole][at + 1])
        for after in (first, numbers.randrange(1, whole), None):
            if not (done := trained(options, after)):
                killed.append("checkpoint" if (there / CHECKPOINT).is_file() else "texts" if there.is_dir() else "none")
            if done or (marker.is_file() and not there.is_dir()):  # killed after all was written, or not at all
                break
        found = {path.name: path.read_bytes() for path in options.output.iterdir() if not path.name.startswith(".")}
        assert found == expected, sorted(found)
        shutil.rmtree(options.output)
    print(json.dumps(killed))  # noqa: T201


if __name__ == "__main__":
    main()
