"""Run the steps of a training, the same with one process or several."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from edgespec.errors import TrainingError
from edgespec.export.training.learners import Learner
from edgespec.export.training.options import TrainOptions, learning_rate
from edgespec.export.training.state import TrainingState
from edgespec.export.training.windows import Windows, batch_rows

BETAS = (0.9, 0.99)
CLIP = 1.0  # largest norm of the gradients
LOWEST = 0.01  # of the peak rate, at the end
EPOCHS = 4.0  # default number of passes over the windows
LINES = 20  # reports of a whole training
CACHE_BYTES = 1 << 30  # of the target's states of all windows
TOGETHER = 8  # windows of a pass that computes them
LOOKS = 5  # of them with held-out accuracy
Progress = Callable[[str, int, int, str], None]  # stage, done, of, detail


@dataclass
class History:
    """Losses and accuracies of a training."""

    losses: list[float] = field(default_factory=list)  # of every step
    accuracy: dict[int, list[float]] = field(default_factory=dict)  # {step: [top-1 of each head]} on held-out text


def total_steps(options: TrainOptions, windows: int) -> int:
    """Return steps of the whole training."""
    return options.steps or max(1, math.ceil((options.epochs or EPOCHS) * windows / options.rows))


def rate_at(step: int, steps: int, warmup: float) -> float:
    """Return the share of the peak rate at a step (from 0): linear rise, then half a cosine."""
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
        state: stores checkpoints, from the main process only.
        look: measures held-out top-1 accuracy by head.

    Raises:
        TrainingError: the loss or the gradients are not finite; the last checkpoint is kept.
    """
    steps, peak = total_steps(options, len(windows)), learning_rate(options, learner.width)
    optimizer, history, found = resumed(learner, peak, accelerator, state)
    if first := found.get("step", 0):
        report("train", first, steps, f"goes on at step {first} of {steps}")
    batches = Batches(learner, windows, options, accelerator, again=steps * options.rows > len(windows))
    model, optimizer = accelerator.prepare(learner, optimizer)
    scaler = accelerator.scaler  # only with fp16
    if found and scaler is not None:
        scaler.load_state_dict(found["scaler"])
    look_every, line_every = max(1, math.ceil(steps / LOOKS)), max(1, math.ceil(steps / LINES))
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = peak * rate_at(step, steps, options.warmup)
        loss = one_step(model, optimizer, accelerator, batches.of(step), step)
        history.losses.append(loss)
        done = step + 1
        if done % look_every == 0 and done < steps:
            history.accuracy[done] = look()
        if done % line_every == 0 or done in (1, steps):
            report("train", done, steps, _line(done, steps, history, line_every))
        if done % options.save_every == 0 or done == steps:
            scaling = {} if scaler is None else scaler.state_dict()
            keep(state, accelerator, learner, optimizer, history, step=done, scaler=scaling)
    return history


def resumed(learner: Learner, peak: float, accelerator: Any, state: TrainingState) -> tuple[Any, History, Any]:
    """Restore a learner from its last checkpoint -> its optimizer, its history, and the checkpoint, or {}."""
    optimizer = torch.optim.AdamW(learner.parameters(), lr=peak, betas=BETAS, weight_decay=0.0)
    found = shared(accelerator, state.checkpoint() if accelerator.is_main_process else None)
    if not found:
        return optimizer, History(), {}
    learner.load_state_dict(found["learner"])
    optimizer.load_state_dict(found["optimizer"])
    return optimizer, History(found["losses"], found["accuracy"]), found


def keep(
    state: TrainingState, accelerator: Any, learner: Learner, optimizer: Any, history: History, **more: object
) -> None:
    """Write a checkpoint; ``more``: of its progress."""
    if accelerator.is_main_process:
        trained = {"learner": learner.state_dict(), "optimizer": optimizer.state_dict()}
        state.keep_checkpoint({**trained, "losses": history.losses, "accuracy": history.accuracy, **more})
    accelerator.wait_for_everyone()


class Batches:
    """This process's part of every batch, with the target's states.

    Where windows are read ``again``, states that fit into ``CACHE_BYTES`` are computed once, in an order that an
    interruption does not change.
    """

    def __init__(
        self, learner: Learner, windows: Windows, options: TrainOptions, accelerator: Any, again: bool
    ) -> None:
        self.learner, self.windows, self.options, self.accelerator = learner, windows, options, accelerator
        self.known: Any = None  # [S, N, T, hidden]
        rows, length = windows.tokens.shape
        first = self._states(next(windows.parts(1)))
        bytes_needed = first.numel() * first.element_size() * rows
        if accelerator.num_processes == 1 and again and bytes_needed <= CACHE_BYTES:
            self.known = first.new_empty(len(first), rows, length, first.shape[-1])
            for number, part in enumerate(windows.parts(TOGETHER)):
                self.known[:, number * TOGETHER : (number + 1) * TOGETHER] = self._states(part)

    def of(self, step: int) -> tuple[Any, Any, Any]:
        """Return tokens [B, T], lengths [B] and states [S, B, T, hidden] of a step."""
        rows = batch_rows(len(self.windows), self.options.rows, step, self.options.seed)
        rows = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        batch, device = self.windows.take(rows), self.accelerator.device
        tokens, lengths = torch.from_numpy(batch.tokens).to(device), torch.from_numpy(batch.lengths).to(device)
        if self.known is None:
            return tokens, lengths, self._states(batch)
        return tokens, lengths, self.known[:, torch.from_numpy(rows).to(device), : tokens.shape[1]]

    def _states(self, windows: Windows) -> Any:
        self.learner.target.attend(windows.read)
        return self.learner.states(torch.from_numpy(windows.tokens).to(self.accelerator.device))


def one_step(model: Any, optimizer: Any, accelerator: Any, batch: tuple[Any, Any, Any], step: int) -> float:
    """Take one step -> its loss, the mean over all processes.

    Raises:
        TrainingError: the loss or the gradients are not finite.
    """
    loss = model(*batch)
    value = float(accelerator.reduce(loss.detach(), "mean"))
    if not math.isfinite(value):
        raise _broken(f"the loss of step {step + 1} is {value}")
    optimizer.zero_grad()
    accelerator.backward(loss)
    norm = float(accelerator.clip_grad_norm_(model.parameters(), CLIP))
    if not math.isfinite(norm) and accelerator.scaler is None:  # a scaler skips such steps automatically
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
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value
