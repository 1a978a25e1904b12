"""Run a training from beginning to end: model, texts, steps, measurement, files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed

from edgespec.errors import EdgespecError, TrainingError
from edgespec.export.training.answers import Answers, Server, read_prompts
from edgespec.export.training.blocks import Blocks
from edgespec.export.training.data import TOGETHER, Order, Writes, greedy_texts, orders, write_texts
from edgespec.export.training.drafters import Draft, Eagle
from edgespec.export.training.early_stopping import run_until
from edgespec.export.training.learners import Blockwise, EarlyExitHeads, Learner, Medusa
from edgespec.export.training.loop import History, Progress, run_steps, shared
from edgespec.export.training.mtp import Mtp
from edgespec.export.training.options import (
    EXITS,
    LAST_HIDDEN,
    PROMPT,
    SELF_DRAFT,
    TrainOptions,
    check_options,
    choose_exits,
    draft_shape,
    window_length,
)
from edgespec.export.training.pairs import Reader
from edgespec.export.training.save import draft_acceptance, finished_files, joint_shares, rank_shares
from edgespec.export.training.self_draft import SelfDraft
from edgespec.export.training.state import TrainingState
from edgespec.export.training.target import Source, Target
from edgespec.export.training.windows import (
    Windows,
    data_files,
    files_digest,
    read_texts,
    split_texts,
    split_tokens,
    without,
)
from edgespec.export.training.writer import NativeWriter
from edgespec.runtimes.ort.native_library import native_library
from edgespec.version import __version__

LEARNERS: dict[str, type[Learner]] = {
    "medusa": Medusa,
    "blockwise": Blockwise,
    **dict.fromkeys(EXITS, EarlyExitHeads),
    "draft": Draft,
    "eagle": Eagle,
    "dspark": Blocks,
    "dflash": Blocks,
    "mtp": Mtp,
    SELF_DRAFT: SelfDraft,
}
REPORTED = ("self_distill", "greedy_fraction", "loss", "ce_share", "batch", "precision", "seed")  # options
ANSWERS = "answers.jsonl"  # in the folder of an unfinished training
DRAWN = 2 * PROMPT  # first greedy token of a training text: differs from that of the held-out texts
FIRST_TEXTS = 96  # minimum number of texts generated at a time, if there is time
LOOKED_AT = 8  # held-out texts that are measured during the training


@dataclass(frozen=True)
class Trained:
    """Result of a training.

    Attributes:
        history: losses and accuracies.
        report: ranks of heads, or acceptance of a draft, and the training's settings, as written next to the weights.
        windows: trained on.
    """

    history: History
    report: dict[str, Any]
    windows: int


class Trainer:
    """One run of ``edgespec train``.

    Args:
        report: called with (stage, done, of, detail), only by the main process.
    """

    def __init__(self, options: TrainOptions, report: Progress | None = None) -> None:
        check_options(options)
        self.options, self.begun = options, time.monotonic()
        self.data = data_files(options.data)
        self.texts = [] if options.answers_from else read_texts(self.data)
        self.source = Source.open(options.model, options.revision)
        facts, reader = self.source.arch.facts, self.source.reader
        self.prompts = read_prompts(self.data, self.source.codec) if options.answers_from else []
        if reader is not None:
            if options.method not in LAST_HIDDEN:
                raise TrainingError(
                    f"{options.model}: is an encoder-decoder, for which {' and '.join(LAST_HIDDEN)} heads are trained, "
                    f"and not {options.method}",
                    "draft by another size of its family: `edgespec export --method speculative --draft MODEL2`",
                )
            if self.prompts:
                raise TrainingError(
                    f"{options.model}: is an encoder-decoder: --answers-from is for models that continue a text",
                    "leave it out: edgespec writes its texts",
                )
            self.texts = read_texts(self.data, sources=True)
        self.given = PROMPT if reader is None else len(reader.begin)  # tokens of a held-out text that are not measured
        self.length = window_length(options, facts)
        self.measured = min(self.given + options.new_tokens, facts.context)  # tokens of a held-out text
        if options.method in EXITS:
            self.options = options = replace(options, exits=choose_exits(options.exits, facts.layers))
        if options.method == "draft":
            draft_shape(options, facts)
        if options.threads:
            torch.set_num_threads(options.threads)
        self.accelerator = _accelerator(options)
        if options.fsdp and self.accelerator.num_processes == 1:
            raise TrainingError("--fsdp shares the model among processes, and there is one", "start it by torchrun")
        if options.rows % self.accelerator.num_processes:
            raise TrainingError(
                f"--batch {options.rows} is not a multiple of {self.accelerator.num_processes} processes",
                "choose one that is",
            )
        self.state = TrainingState(options.output)
        self._native: Writes | None = None  # what writes texts; None = not chosen yet
        main = self.accelerator.is_main_process
        self.report: Progress = report if report and main else lambda stage, done, of, detail: None

    def run(self) -> Trained:
        """Train, or resume an interrupted training, and write the finished files."""
        try:
            return self._run()
        finally:
            self._native = None
            self.state.release()

    def _run(self) -> Trained:
        options, main = self.options, self.accelerator.is_main_process
        if main:
            self.state.begin(
                options.identity({**self.source.fingerprints, "data": files_digest(self.data)}),
                options.restart,
                options.overwrite,
            )
        self.accelerator.wait_for_everyone()
        set_seed(options.seed)
        target = Target(self.source, options.precision, self.accelerator.device, options.fsdp)
        windows, held = self._windows(target)
        learner = LEARNERS[options.method](target, options)
        look = held["sampled"].first(LOOKED_AT)
        if options.ends_itself:
            return self._until_done(learner, target, windows, held)
        history = run_steps(
            learner,
            windows,
            options,
            self.accelerator,
            self.state,
            lambda: [ranks[0] for ranks in rank_shares(learner, look, self.given)],
            self.report,
        )
        return self._finished(learner, held, history, len(windows))

    def _finished(
        self,
        learner: Learner,
        held: dict[str, Windows],
        history: History,
        windows: int,
        more: dict[str, Any] | None = None,
    ) -> Trained:
        """Measure and write the trained parameters; ``more``: of the report."""
        found = self._measured(learner, held, history, windows)
        found["training"] |= more or {}
        if self.accelerator.is_main_process:
            self.state.finish(finished_files(learner, self.source, found, self.options))
        self.accelerator.wait_for_everyone()
        return Trained(history, found, windows)

    def _until_done(self, learner: Learner, target: Target, windows: Windows, held: dict[str, Windows]) -> Trained:
        """Train until held-out acceptance has stopped rising or time is over."""
        seen = Windows.joined([held["greedy"], held["sampled"]])
        pool = _Pool(self, target, windows, held)
        if not self.options.self_distill and len(pool.windows) < FIRST_TEXTS:
            pool.grow(60 * self.options.time / 8)

        def look(of: Windows | None) -> tuple[float, list[float]]:
            shares = joint_shares(learner, seen if of is None else of.first(LOOKED_AT), PROMPT if of is None else 1)
            return 1 + sum(shares), shares

        history, course = run_until(
            learner, pool, self.options, self.accelerator, self.state, look, self.report, self.begun
        )
        more = {
            "ended": course.ended,
            "seconds": round(course.seconds, 1),
            "texts": len(pool.windows),
            "tokens_per_round": {
                kind: round(1 + sum(joint_shares(learner, held[kind], PROMPT)), 3) for kind in ("greedy", "sampled")
            },
            "curve": [[round(at, 1), round(tokens, 3)] for at, tokens in course.tokens],
            "ten_minutes_more": None if (worth := course.worth()) is None else round(worth, 3),
        }
        return self._finished(learner, held, history, len(pool.windows), more)

    # -- texts -----------------------------------------------------------------------------------------------------

    def _windows(self, target: Target) -> tuple[Windows, dict[str, Windows]]:
        """Return training text, and held-out text by kind."""
        options = self.options
        if self.source.reader is not None:
            return self._pairs(target, self.source.reader)
        train, held = [], {}
        if self.prompts:
            begin = self.source.codec.encode("")[:1]
            text, held["text"] = split_tokens(self._answered(begin), begin, self.length, options.seed)
            train.append(text)
        if self.texts:
            text, held["text"] = split_texts(self.texts, self.source.codec, self.length, options.seed)
            train.append(text)
        sampled = self._written(target, orders("held", options.held_out, self.measured), "held-out texts")
        prompt = min(PROMPT, self.measured - 1)
        held["sampled"] = sampled.take((sampled.lengths > prompt).nonzero()[0])
        if not len(held["sampled"]):
            raise TrainingError(
                f"none of the {options.held_out} held-out texts is longer than {prompt} tokens: the model ends at once",
                "give a larger --held-out",
            )
        held["greedy"] = self._greedy(target, held["sampled"], prompt)
        count = options.own_texts
        greedy = round(count * options.greedy_fraction)
        asked = [*orders("drawn", count - greedy, self.length), *orders("greedy", greedy, self.length, DRAWN)]
        # texts with the same sampled tokens are the same, which is likely for a few tokens
        train.append(self._own(target, asked, held))
        windows = Windows.joined(train)
        if not len(windows):
            raise TrainingError("nothing to train on: every text is one of the held-out texts", "give more text")
        return windows, held

    def _answered(self, begin: list[int]) -> list[list[int]]:
        """Return prompts, without ``begin``, with a server's answers; the main process asks for those missing."""
        options, codec, found = self.options, self.source.codec, list[tuple[str, bool]]()
        if self.accelerator.is_main_process:
            assert options.answers_from is not None
            server, file = Server(options.answers_from, options.answers_model), self.state.folder / ANSWERS
            answers = Answers(server, self.prompts, file, self.length, options.greedy_fraction, options.seed)
            found = answers.collect(
                lambda done, of: self.report("texts", done, of, f"the server writes {of} texts: {done} done")
            )
        found = shared(self.accelerator, found)
        ends = list(self.source.eos[:1])
        return [
            [*(prompt[len(begin) :] if prompt[: len(begin)] == begin else prompt)]
            + codec.encode(text, special=False)
            + (ends if ended else [])
            for prompt, (text, ended) in zip(self.prompts, found, strict=True)
        ]

    def _pairs(self, target: Target, reader: Reader) -> tuple[Windows, dict[str, Windows]]:
        """Return an encoder-decoder's texts: about sources to train on, and about others."""
        options = self.options
        read, other = reader.sources(self.texts, options.own_texts, options.held_out, options.seed)
        count, drawn = len(read), round(len(read) * (1 - options.greedy_fraction))
        held = {
            kind: self._written(target, orders(f"held-{kind}", len(other), self.measured, at, other), "held-out texts")
            for kind, at in (("sampled", None), ("greedy", 0))
        }
        asked = [
            *orders("drawn", drawn, self.length, None, read[:drawn]),
            *orders("greedy", count - drawn, self.length, 0, read[drawn:]),
        ]
        return self._written(target, asked, "texts"), held

    def _own(self, target: Target, asked: list[Order], held: dict[str, Windows]) -> Windows:
        """Generate the target's texts, without held-out ones."""
        own = self._written(target, asked, "texts")
        for texts in (held["sampled"], held["greedy"]):
            own = without(own, texts, min(DRAWN, self.length, self.measured))
        return own

    def _written(self, target: Target, asked: list[Order], what: str) -> Windows:
        """Return texts of the target, stored or generated now; every process generates a part of them or all."""
        accelerator, known = self.accelerator, {}
        writers = 1 if target.sharded else accelerator.num_processes
        if accelerator.is_main_process:
            known = {order.name: texts for order in asked if (texts := self.state.texts(order.name)) is not None}
        known = shared(accelerator, known)
        left = [order for order in asked if order.name not in known]
        count, total = sum(order.count for order in asked), sum(order.count for order in left)
        done = count - total
        # held-out texts are the model's own, to the last bit
        writer = self._writer(target) if left and not left[0].name.startswith("held") else target
        for start in range(0, len(left), writers):
            mine = left[start + accelerator.process_index % writers :][:1]
            self.report("texts", done, count, f"{count} {what} are generated: {done} done")
            made = []
            for order in mine:
                report = self._text_report(what, done, count, order)
                made.append((order.name, write_texts(writer, order, self.options.seed, self.texts, report)))
            if writers > 1:
                made = gather_object(made)
            for name, texts in made:
                known[name] = texts
                done += len(texts)
                if accelerator.is_main_process:
                    self.state.keep_texts(name, texts)
        if count:
            self.report("texts", count, count, f"{count} {what}")
        return Windows.joined(known[order.name] for order in asked)

    def _text_report(self, what: str, done: int, count: int, order: Order) -> Callable[[int], None]:
        """Return what reports the tokens of texts that are being written, after ``done`` of ``count`` texts."""
        return lambda tokens: self.report(
            "texts",
            done + order.count * tokens // order.length,
            count,
            f"{count} {what} are generated: {done} done, {order.count} have {tokens} of {order.length} tokens",
        )

    def _writer(self, target: Target) -> Writes:
        """Return what writes training texts: native operators on a CPU, where they can, else the target."""
        if self._native is None:
            alone = self.accelerator.num_processes == 1 and self.accelerator.device.type == "cpu"
            self._native = target
            if alone and self.source.reader is None and native_library().path is not None:
                folder = self.state.folder / "model"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                with suppress(EdgespecError):
                    self._native = NativeWriter(self.source, folder, self.options.threads)
        return self._native

    def _greedy(self, target: Target, sampled: Windows, prompt: int) -> Windows:
        """Generate greedy continuations of held-out prompts."""
        texts = None
        if self.accelerator.is_main_process:
            texts = self.state.texts("held-greedy")
        known: Windows | None = shared(self.accelerator, texts)
        if known is None:
            order = Order("held-greedy", len(sampled), self.measured)
            known = greedy_texts(
                target, sampled, prompt, self.measured, self._text_report("greedy texts", 0, len(sampled), order)
            )
            if self.accelerator.is_main_process:
                self.state.keep_texts("held-greedy", known)
        return known

    # -- the end ---------------------------------------------------------------------------------------------------

    def _measured(self, learner: Learner, held: dict[str, Windows], history: History, windows: int) -> dict[str, Any]:
        """Measure the saved parameters on held-out text of every kind, and report how they were trained."""
        self.report("measure", 0, 1, "held-out accuracy")
        _round(learner)
        starts = {"text": 1}
        options, recent = self.options, history.losses[-max(1, len(history.losses) // 20) :]
        training = {
            "edgespec": __version__,
            "method": options.method,
            "windows": windows,
            "length": self.length,
            "steps": len(history.losses),
            "loss_at_end": sum(recent) / len(recent),
            "processes": self.accelerator.num_processes,
            **{name: getattr(options, name) for name in REPORTED},
            "data": [file.name for file in options.data],
        }
        found: dict[str, Any] = {"training": training}
        if isinstance(learner, Draft):
            found["acceptance"] = {
                kind: draft_acceptance(learner.logits, learner.target, texts, starts.get(kind, self.given))
                for kind, texts in held.items()
            }
        else:
            found["ranks"] = {
                kind: rank_shares(learner, texts, starts.get(kind, self.given)) for kind, texts in held.items()
            }
            if isinstance(learner, SelfDraft):
                found["joint"] = [round(share, 4) for share in joint_shares(learner, held["greedy"], self.given)]
        self.report("measure", 1, 1, "measured")
        return found


class _Pool:
    """Texts of a training that ends when it stops improving; further ones are generated batch by batch."""

    def __init__(self, trainer: Trainer, target: Target, windows: Windows, held: dict[str, Windows]) -> None:
        self.trainer, self.target, self.windows, self.held = trainer, target, windows, held
        self.seconds, self._batches = 0.0, 0
        while self._known():  # of an interrupted training
            self._add()

    def _order(self) -> Order:
        greedy = self._batches % max(1, round(1 / max(self.trainer.options.greedy_fraction, 0.01))) == 0
        return Order(f"more-{self._batches:05}", TOGETHER, self.trainer.length, DRAWN if greedy else None)

    def _known(self) -> bool:
        main = self.trainer.accelerator.is_main_process
        known: bool = shared(
            self.trainer.accelerator, main and self.trainer.state.texts(self._order().name) is not None
        )
        return known

    def _add(self) -> int:
        more = self.trainer._own(self.target, [self._order()], self.held)
        self._batches += 1
        self.windows = Windows.joined([self.windows, more])
        return len(more)

    def grow(self, most: float) -> int:
        """Generate as many texts as there are, at least ``FIRST_TEXTS``, or for about ``most`` seconds -> how many."""
        wrote, wanted, start = 0, max(len(self.windows), FIRST_TEXTS), time.monotonic()
        while wrote < wanted:
            wrote += self._add()
            if shared(self.trainer.accelerator, time.monotonic() - start) > most:
                break
        self.seconds += time.monotonic() - start
        return wrote


@torch.no_grad()
def _round(learner: Learner) -> None:
    """Round the parameters to float16, as their files are."""
    for value in learner.parameters():
        value.copy_(value.half().float())


def _accelerator(options: TrainOptions) -> Accelerator:
    other = f"--precision {options.precision}", "train with --precision no or bf16"
    try:
        accelerator = Accelerator(mixed_precision=options.precision)
    except ValueError as error:
        raise TrainingError(f"{other[0]}: {error}", other[1]) from error
    if options.precision == "fp16" and accelerator.device.type == "cpu":
        raise TrainingError(f"{other[0]} needs a GPU, and accelerate found none", other[1])
    return accelerator
