"""Train until held-out acceptance stops rising, or until the time limit.

The learning rate rises, stays, and falls in the last part, which begins at a share of the time or when acceptance has
stopped rising.  Each evaluation measures tokens per round on held-out text and on training text.  If the latter is
clearly better, or the text was read several times, more text is needed and is generated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any, Protocol

from edgespec.export.training.learners import Learner
from edgespec.export.training.loop import LOWEST, Batches, History, Progress, keep, one_step, resumed, shared
from edgespec.export.training.options import TrainOptions, learning_rate
from edgespec.export.training.state import TrainingState
from edgespec.export.training.windows import Windows

WARM = 20  # steps in which the rate rises
FALL = 0.3  # share of the time in which it falls, at the end
LOOKS = 16  # of the whole time
PATIENCE = 4  # evaluations without a gain before the rate falls
GAIN = 0.01  # tokens per round that count as a gain
READ = 4.0  # passes over the text before more of it is wanted
AHEAD = 0.15  # maximum tokens per round by which training text may exceed held-out text
WRITING = 0.4  # share of the time for generating texts
WORTH = 600.0  # seconds whose gain the last report estimates


class TrainingCorpus(Protocol):
    """Training texts, which can grow."""

    windows: Windows
    seconds: float  # that writing has taken

    def grow(self, most: float) -> int:
        """Generate more texts, for about ``most`` seconds -> how many."""
        ...


@dataclass
class TrainingProgress:
    """Progress of a training."""

    seconds: float = 0.0  # since it began, over all its parts
    # (seconds, tokens per round on held-out text) of every evaluation
    tokens: list[tuple[float, float]] = field(default_factory=list)
    ended: str = ""  # the reason of its end

    @property
    def best(self) -> float:
        """Return the highest tokens per round of all evaluations."""
        return max((tokens for _, tokens in self.tokens), default=1.0)

    def stalled(self) -> bool:
        """Whether the last evaluations showed no gain."""
        found = [tokens for _, tokens in self.tokens]
        return len(found) > PATIENCE and max(found[-PATIENCE:]) < max(found[:-PATIENCE]) + GAIN

    def worth(self, seconds: float = WORTH) -> float | None:
        """Estimate the gain in tokens per round of ``seconds`` more; None = too few evaluations.

        Tokens grow with the logarithm of the time.  The estimate fits a line to the later half of the evaluations, or
        their median if it falls.
        """
        later = self.tokens[len(self.tokens) // 2 :]
        if len({at for at, _ in later}) < 3:
            return None
        slope, _ = linear_regression([math.log(at) for at, _ in later], [tokens for _, tokens in later])
        return max(0.0, slope) * math.log(1 + seconds / later[-1][0])


class Schedule:
    """Decides the learning rate, and when the training ends.

    Args:
        minutes: for everything.
        course: what has happened.
    """

    def __init__(self, minutes: float, course: TrainingProgress) -> None:
        self.limit, self.course = 60 * minutes, course
        self.falls_at = (1 - FALL) * self.limit
        self.ends_at = self.limit

    def settle(self) -> None:
        """Let the rate fall from now on, over the time of the last part of a training of this length."""
        if self.course.seconds < self.falls_at:
            self.falls_at = self.course.seconds
            self.ends_at = min(self.limit, self.course.seconds / (1 - FALL))

    @property
    def falling(self) -> bool:
        """Whether the rate falls."""
        return self.course.seconds >= self.falls_at

    @property
    def over(self) -> bool:
        """Whether the training has ended."""
        return self.course.seconds >= self.ends_at

    def rate(self, step: int) -> float:
        """Return the share of the peak rate at a step (from 0)."""
        left = (self.ends_at - self.course.seconds) / max(1e-9, self.ends_at - self.falls_at)
        return min(1.0, (step + 1) / WARM, max(LOWEST, left))


def run_until(
    learner: Learner,
    pool: TrainingCorpus,
    options: TrainOptions,
    accelerator: Any,
    state: TrainingState,
    look: Callable[[Windows | None], tuple[float, list[float]]],
    report: Progress,
    begun: float,
) -> tuple[History, TrainingProgress]:
    """Train a learner in place until it is done, from the last checkpoint if there is one.

    Args:
        pool: texts, which grow.
        look: (windows; None = held-out ones) -> tokens per round, and top-1 accuracy by step.
        begun: when the command began, by ``time.monotonic``.

    Raises:
        TrainingError: the loss or the gradients are not finite; the last checkpoint is kept.
    """
    peak = learning_rate(options, learner.width)
    optimizer, history, found = resumed(learner, peak, accelerator, state)
    course, step = TrainingProgress(), found.get("step", 0)
    if found:
        course = TrainingProgress(found["seconds"], [tuple(each) for each in found["tokens"]])
        begun = time.monotonic() - course.seconds
    batches = Batches(learner, pool.windows, options, accelerator, again=True)
    model, optimizer = accelerator.prepare(learner, optimizer)
    schedule, read = Schedule(options.time, course), 0.0  # passes over the text since it grew

    def told() -> None:
        course.seconds = shared(accelerator, time.monotonic() - begun)

    told()
    started = course.seconds
    while not schedule.over or not history.losses:
        for group in optimizer.param_groups:
            group["lr"] = peak * schedule.rate(step)
        history.losses.append(one_step(model, optimizer, accelerator, batches.of(step), step))
        step, read = step + 1, read + options.rows / len(pool.windows)
        told()
        last = course.tokens[-1][0] if course.tokens else started
        if course.seconds - last < schedule.limit / LOOKS and not schedule.over:
            continue
        tokens, tops = look(None)
        told()
        course.tokens.append((course.seconds, tokens))
        history.accuracy[step] = tops
        report("train", min(int(course.seconds), int(schedule.limit)), int(schedule.limit), line(step, history, course))
        if not schedule.falling:
            if wants_text(pool, read, course, schedule, look):
                wrote = pool.grow(schedule.limit / LOOKS)
                batches, read = Batches(learner, pool.windows, options, accelerator, again=True), 0.0
                report(
                    "texts", len(pool.windows), len(pool.windows), f"wrote {wrote} texts more: now {len(pool.windows)}"
                )
                told()
            elif course.stalled():
                schedule.settle()
                course.ended = "acceptance has stopped rising"
        looks = [list(each) for each in course.tokens]
        keep(state, accelerator, learner, optimizer, history, step=step, seconds=course.seconds, tokens=looks)
    course.ended = course.ended or f"{options.time:g} minutes are over"
    return history, course


def wants_text(
    pool: TrainingCorpus,
    read: float,
    course: TrainingProgress,
    schedule: Schedule,
    look: Callable[[Windows | None], tuple[float, list[float]]],
) -> bool:
    """Whether more text is needed: it was read several times, or training text exceeds held-out text."""
    if pool.seconds > WRITING * schedule.limit or read < READ / 2:
        return False
    return read >= READ or look(pool.windows)[0] > course.tokens[-1][1] + AHEAD


def line(step: int, history: History, course: TrainingProgress) -> str:
    """Format the progress: tokens per round as a curve, and the expected gain of ten more minutes."""
    recent = history.losses[-20:]
    said = (
        f"step {step} loss {sum(recent) / len(recent):.3f}, {course.tokens[-1][1]:.2f} tokens a round {curve(course)}"
    )
    more = course.worth()
    return said if more is None else f"{said}, ten minutes more about +{more:.2f}"


BARS = "▁▂▃▄▅▆▇█"


def curve(course: TrainingProgress) -> str:
    """Draw the evaluations in a few characters."""
    values: Sequence[float] = [tokens for _, tokens in course.tokens][-24:]
    low, high = min(values), max(values)
    return "".join(BARS[int((value - low) / max(high - low, 0.05) * (len(BARS) - 1))] for value in values)
