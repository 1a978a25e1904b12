"""An unfinished training on disk, which goes on where it was interrupted.

``.training/`` in the output folder holds ``arguments.json`` (what was asked for), ``texts/`` (what the target wrote,
a file a batch) and ``checkpoint.pt``.  It is removed once the finished files are there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import TrainingError
from edgespec.export.drafters.heads import DESCRIPTION
from edgespec.export.training.windows import Windows
from edgespec.runtimes.files.json_file import read_object
from edgespec.runtimes.files.staged import staged, take_lock

FOLDER = ".training"
DRAFT_REPORT = "edgespec_draft.json"
ARGUMENTS, CHECKPOINT, TEXTS = "arguments.json", "checkpoint.pt", "texts"


def written(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one step: ``write`` gets a temporary name, which becomes ``path`` when all is on disk."""
    try:
        with staged(path) as part:
            write(part)
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written: {error.strerror or error}", "free some space") from error


class TrainingState:
    """What is known of a training in a folder."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output / FOLDER
        self._lock: int | None = None

    def begin(self, identity: Mapping[str, Any], restart: bool, overwrite: bool) -> bool:
        """Start, or go on with what is there -> whether it goes on.

        Args:
            restart: forget an unfinished training.
            overwrite: replace finished heads at the end.

        Raises:
            TrainingError: an unfinished training with other arguments, finished heads, a folder of something else, or
                one that another process trains into.
        """
        arguments = self.folder / ARGUMENTS
        if self.output.exists() and not self.output.is_dir():
            raise TrainingError(f"{self.output}: expected a folder, found a file", "choose another with -o")
        self._take()
        if arguments.is_file() and not restart:
            self._check(arguments, json.loads(json.dumps(identity)))
            return True
        finished = any((self.output / name).is_file() for name in (DESCRIPTION, DRAFT_REPORT))
        if finished and not overwrite and not arguments.is_file():
            raise TrainingError(
                f"{self.output}: trained heads are already there",
                "pass --overwrite to replace them, or choose another -o",
            )
        if not finished and any(not path.name.startswith(".") for path in self.output.iterdir()):
            raise TrainingError(f"{self.output}: exists and holds no trained heads", "choose another folder with -o")
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            (self.folder / TEXTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        text = json.dumps(identity, indent=1, ensure_ascii=False) + "\n"
        written(arguments, lambda part: part.write_text(text, "utf-8"))
        return False

    def _take(self) -> None:
        """Make the folder, and keep other processes out of it as long as this one trains."""
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = take_lock(self.output)
        except BlockingIOError as error:
            raise TrainingError(
                f"{self.output}: another process trains into this folder", "wait for it, or choose another with -o"
            ) from error
        except OSError as error:
            raise self._unusable(error) from error

    def release(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _unusable(self, error: OSError) -> TrainingError:
        return TrainingError(f"{self.output}: cannot write here: {error.strerror}", "choose another folder with -o")

    def _check(self, arguments: Path, identity: dict[str, Any]) -> None:
        before = read_object(arguments, TrainingError, "pass --restart to begin anew")
        keys = sorted(set(before) | set(identity))
        if other := [key for key in keys if before.get(key) != identity.get(key)]:
            said = "; ".join(f"{key} was {_short(before.get(key))}, is {_short(identity.get(key))}" for key in other)
            raise TrainingError(
                f"{self.output}: holds an unfinished training with other arguments: {said}",
                "give the same arguments to go on, --restart to begin anew, or another -o",
            )

    # -- texts -----------------------------------------------------------------------------------------------------

    def texts(self, name: str) -> Windows | None:
        """Return a batch of texts by its name; None if it is not there."""
        path = self.folder / TEXTS / f"{name}.npz"
        if not path.is_file():
            return None
        with np.load(path) as arrays:
            read = arrays["read"].astype(np.int64) if "read" in arrays else None
            return Windows(arrays["tokens"].astype(np.int64), arrays["lengths"].astype(np.int64), read)

    def keep_texts(self, name: str, texts: Windows) -> None:
        """Write a batch of texts."""

        def write(part: Path) -> None:
            with part.open("wb") as file:
                arrays: dict[str, Any] = {"tokens": texts.tokens.astype(np.int32), "lengths": texts.lengths}
                if texts.read is not None:
                    arrays["read"] = texts.read.astype(np.int32)
                np.savez_compressed(file, **arrays)

        written(self.folder / TEXTS / f"{name}.npz", write)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint; None if there is none."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return None
        try:
            import torch

            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds
            raise TrainingError(f"{path}: not readable: {error}", "pass --restart to begin anew") from error
        return found

    def keep_checkpoint(self, value: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        import torch

        written(self.folder / CHECKPOINT, lambda part: torch.save(dict(value), part))

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self, files: Mapping[str, Callable[[Path], object]]) -> None:
        """Write the finished files and forget the training.

        Args:
            files: name -> how it is written; the last one says that the others are there, and is removed first.
        """
        *_, last = files
        (self.output / last).unlink(missing_ok=True)
        for name, write in files.items():
            written(self.output / name, write)
        done = self.folder.with_name(f"{FOLDER}.done")
        shutil.rmtree(done, ignore_errors=True)
        self.folder.rename(done)  # in one step: half a state must not look like an unfinished training
        shutil.rmtree(done, ignore_errors=True)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    text = json.dumps(value)
    return f"{text[1:13]}..." if isinstance(value, str) and len(value) >= 64 else text
