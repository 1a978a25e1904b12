"""The steps of a training, the same with one process or several, and an unfinished one on disk.

``.training/`` in the output folder holds ``arguments.json`` (what was asked for), ``texts/`` (what the target wrote,
a file a batch) and ``checkpoint.pt``.  It is removed once the finished files are there.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.errors import TrainingError
from edgespec.export.drafters.heads import DESCRIPTION
from edgespec.export.training.data import Windows, batch_rows
from edgespec.export.training.learners import Learner
from edgespec.export.training.options import TrainOptions, learning_rate
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


def write_json(path: Path, value: Any) -> None:
    """``written`` for JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    written(path, lambda part: part.write_text(text, "utf-8"))


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
        write_json(arguments, identity)
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
            return Windows(arrays["tokens"].astype(np.int64), arrays["lengths"].astype(np.int64))

    def keep_texts(self, name: str, texts: Windows) -> None:
        """Write a batch of texts."""

        def write(part: Path) -> None:
            with part.open("wb") as file:
                np.savez_compressed(file, tokens=texts.tokens.astype(np.int32), lengths=texts.lengths)

        written(self.folder / TEXTS / f"{name}.npz", write)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint; None if there is none."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds
            raise TrainingError(f"{path}: not readable: {error}", "pass --restart to begin anew") from error
        return found

    def keep_checkpoint(self, value: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
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


BETAS = (0.9, 0.99)
CLIP = 1.0  # largest norm of the gradients
LOWEST = 0.01  # of the peak rate, at the end
LINES = 20  # reports of a whole training
CACHE_BYTES = 1 << 30  # of the target's states of all windows
TOGETHER = 8  # windows of a pass that computes them
LOOKS = 5  # of them with held-out accuracy
Progress = Callable[[str, int, int, str], None]  # stage, done, of, detail


@dataclass
class History:
    """What a training has seen.

    Attributes:
        losses: of every step.
        accuracy: {step: [top-1 of each head]} on held-out text.
    """

    losses: list[float] = field(default_factory=list)
    accuracy: dict[int, list[float]] = field(default_factory=dict)


def total_steps(options: TrainOptions, windows: int) -> int:
    """Return steps of the whole training."""
    return options.steps or max(1, math.ceil(options.epochs * windows / options.batch))


def rate_at(step: int, steps: int, warmup: float) -> float:
    """Share of the peak rate at a step (from 0): linear rise, then half a cosine."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done))


def run_steps(
    learner: Learner,
    windows: Windows,
    options: TrainOptions,
    accelerator: Any,
    state: TrainingState,
    look: Callable[[], list[float]],
    report: Progress,
) -> History:
    """Train a learner in place, from the last checkpoint if there is one.

    Args:
        accelerator: of accelerate; its processes share every batch.
        state: where checkpoints are kept, by the main process alone.
        look: measures held-out top-1 accuracy by head.

    Raises:
        TrainingError: the loss or the gradients are not finite; the last checkpoint is kept.
    """
    steps, peak = total_steps(options, len(windows)), learning_rate(options, learner.width)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=peak, betas=BETAS, weight_decay=0.0)
    history, first = History(), 0
    if found := shared(accelerator, state.checkpoint() if accelerator.is_main_process else None):
        learner.load_state_dict(found["learner"])
        optimizer.load_state_dict(found["optimizer"])
        history, first = History(found["losses"], found["accuracy"]), found["step"]
        report("train", first, steps, f"goes on at step {first} of {steps}")
    batches = _Batches(learner, windows, options, accelerator)
    model, optimizer = accelerator.prepare(learner, optimizer)
    scaler = accelerator.scaler  # only with fp16
    if found and scaler is not None:
        scaler.load_state_dict(found["scaler"])
    look_every, line_every = max(1, math.ceil(steps / LOOKS)), max(1, math.ceil(steps / LINES))
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * rate_at(step, steps, options.warmup)
        loss = _one_step(model, optimizer, accelerator, batches.of(step), step)
        history.losses.append(loss)
        done = step + 1
        if done % look_every == 0 and done < steps:
            history.accuracy[done] = look()
        if done % line_every == 0 or done in (1, steps):
            report("train", done, steps, _line(done, steps, history, line_every))
        if done % options.save_every == 0 or done == steps:
            if accelerator.is_main_process:
                state.keep_checkpoint(
                    {
                        "step": done,
                        "learner": learner.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "losses": history.losses,
                        "accuracy": history.accuracy,
                        "scaler": scaler.state_dict() if scaler is not None else {},
                    }
                )
            accelerator.wait_for_everyone()
    return history


class _Batches:
    """This process's part of every batch, with what the target makes of it.

    States that fit into ``CACHE_BYTES`` are computed once, in an order that an interruption does not change.
    """

    def __init__(self, learner: Learner, windows: Windows, options: TrainOptions, accelerator: Any) -> None:
        self.learner, self.windows, self.options, self.accelerator = learner, windows, options, accelerator
        self.known: Any = None  # [S, N, T, hidden]
        rows, length = windows.tokens.shape
        first = self._states(windows.tokens[:1])
        bytes_needed = first.numel() * first.element_size() * rows
        again = total_steps(options, rows) * options.batch > rows
        if accelerator.num_processes == 1 and again and bytes_needed <= CACHE_BYTES:
            self.known = first.new_empty(len(first), rows, length, first.shape[-1])
            for start in range(0, rows, TOGETHER):
                self.known[:, start : start + TOGETHER] = self._states(windows.tokens[start : start + TOGETHER])

    def of(self, step: int) -> tuple[Any, Any, Any]:
        """Tokens [B, T], lengths [B] and states [S, B, T, hidden] of a step."""
        rows = batch_rows(len(self.windows), self.options.batch, step, self.options.seed)
        rows = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        batch, device = self.windows.take(rows), self.accelerator.device
        tokens, lengths = torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.lengths).to(device)
        if self.known is None:
            return tokens, lengths, self._states(batch.tokens)
        return tokens, lengths, self.known[:, torch.from_numpy(rows).to(device), : tokens.shape[1]]

    def _states(self, tokens: NDArray[np.int64]) -> Any:
        return self.learner.states(torch.from_numpy(tokens).to(self.accelerator.device))


def _one_step(model: Any, optimizer: Any, accelerator: Any, batch: tuple[Any, Any, Any], step: int) -> float:
    loss = model(*batch)
    value = float(accelerator.reduce(loss.detach(), "mean"))
    if not math.isfinite(value):
        raise _broken(f"the loss of step {step + 1} is {value}")
    optimizer.zero_grad()
    accelerator.backward(loss)
    norm = float(accelerator.clip_grad_norm_(model.parameters(), CLIP))
    if not math.isfinite(norm) and accelerator.scaler is None:  # a scaler leaves such steps out by itself
        raise _broken(f"the gradients of step {step + 1} are not finite")
    optimizer.step()
    return value


def _broken(what: str) -> TrainingError:
    return TrainingError(
        f"{what}; the last checkpoint is kept", "train with a smaller --lr (and --restart), or with --precision no"
    )


def _line(done: int, steps: int, history: History, window: int) -> str:
    recent = history.losses[-window:]
    text = f"step {done}/{steps} loss {sum(recent) / len(recent):.4f}"
    if history.accuracy:
        at = max(history.accuracy)
        text += f", held-out top-1 at {at}: " + " ".join(f"{share:.3f}" for share in history.accuracy[at])
    return text


def shared(accelerator: Any, value: Any) -> Any:
    """Return the main process's value, in every process."""
    if accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]
