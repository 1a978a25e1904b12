"""``edgespec train``."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import OUTPUT, PATH, THREADS, GroupedCommand, emit_json, group, json_option, option, progress
from edgespec.errors import TrainingError

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_TRAINED = {
    "medusa": "heads that guess a tree, each from the last hidden state",
    "blockwise": "heads that guess a block from the last hidden state",
    "draft": "a draft model in the model's proportions",
    "eagle": "an EAGLE-3 drafter over hidden states",
    "dspark": "a drafter of blocks whose guesses are corrected",
    "dflash": "a drafter of blocks, all guesses in one pass",
    "mtp": "a layer for multi-token prediction",
    "selfdraft": "a LoRA adapter with which the model drafts for itself",
}


def _options(kind: str) -> list[Decorator]:
    """List the options of a kind of trained part: those that all have, and its own (``ONLY_FOR``), in groups."""
    from edgespec.export.training.options import DRAFTERS, LAYOUTS, ONLY_FOR, SELF_DRAFT

    drafter = kind in DRAFTERS
    batch = 2 if kind == SELF_DRAFT else 8 if drafter else 16

    def own(**options: Decorator) -> list[Decorator]:
        return [found for name, found in options.items() if kind in ONLY_FOR.get(name, (kind,))]

    losses = ("kl", "lk", "ce", *(("d-pace",) if drafter else ()))
    weighted = "; d-pace: the same, weighted by the tokens that a guess brings" if drafter else ""
    layouts = LAYOUTS.get(kind, ())
    return [
        *own(
            output=option("-o --output", "Folder of the result.  [required]", PATH),
            self_distill=option(
                "--self-distill",
                "Training texts that the model generates itself.  [default: 1000 without --data, else 0]",
                int,
                0,
                show_default=False,
            ),
            data=option(
                "--data",
                "Training text: a text file, or .jsonl with `text`, `prompt` or `turns`; may be repeated.  For an "
                "encoder-decoder: its input, one per line.",
                PATH,
                multiple=True,
            ),
            minutes=option("--minutes", "Time limit; stops early when acceptance stops rising.  [default: 10]", float),
            epochs=option(
                "--epochs",
                f"Passes over the windows.  [default: {'until acceptance stops rising' if drafter else 4}]",
                float,
            ),
            batch=option(
                "--batch", f"Windows per step, over all processes.  [default: {batch}]", int
            ),
            lr=option("--lr", "Peak of the learning rate, a cosine after the warm-up.  [default: the kind's]", float),
            seed=option("--seed", "Same seed, same result, on one CPU bit for bit.", int, 0),
            overwrite=option("--overwrite", "Replace a finished result.", bool),
            restart=option("--restart", "Discard an unfinished training instead of resuming it.", bool),
        ),
        group(
            "Text",
            option(
                "--greedy-fraction",
                "Fraction of the generated texts that is decoded greedily; the others are sampled at temperature 1.",
                float,
                0.25,
            ),
            option("--length", "Tokens per window.  [default: 256, or the context]", int),
            option("--held-out", "Texts on which accuracy is measured.", int, 20),
            option("--new-tokens", "Tokens generated per text, after a prompt of 16.", int, 200),
            option(
                "--answers-from",
                "URL of an OpenAI-compatible server of the same model, which answers the prompts in --data: .jsonl "
                "with `prompt`, `messages` or `turns`.  The key is in OPENAI_API_KEY.",
            ),
            option("--answers-model", "Name of the model there.  [default: the first]"),
            option("--revision", "Branch, tag or commit of a hub model."),
        ),
        group(
            "Shape",
            *own(
                heads=option("--heads", "Mask rows." if kind == SELF_DRAFT else "Steps deep." if drafter
                             else "Guesses beyond the next token.", int, 4),
                rank=option("--rank", "Rank of the adapter.", int, 16),
                own_lm_heads=option("--own-lm-heads", "An LM head for each head, instead of the model's.", bool),
                hidden_size=option(
                    "--hidden-size",
                    "Width of the MLP.  [default: the model's]" if drafter
                    else "Width of the hidden layer.  [default: heads * hidden]",
                    int,
                ),
                exits=option("--exits", "Layers with an exit after them, such as 8,16,24.  [default: each quarter]"),
                draft_layers=option("--draft-layers", "Number of layers.", int, 2),
                draft_hidden=option("--draft-hidden", "Width.  [default: about a quarter of the model's]", int),
                draft_intermediate=option("--draft-intermediate", "Width of its MLPs.  [default: in proportion]", int),
                draft_heads=option("--draft-heads", "Attention heads.  [default: of the model's head size]", int),
            ),
        ),
        group(
            "Training",
            *own(
                loss=option(
                    "--loss",
                    "kl: divergence from the model's own distribution; lk: the overlap too, as it grows; ce: cross "
                    f"entropy of the text{weighted}.",
                    losses,
                    "kl",
                ),
                ce_share=option("--ce-share", "Fraction of ce in another loss.", float, 0.0),
                steps=option("--steps", "Number of optimizer steps (overrides --epochs).", int),
                warmup=option("--warmup", "Warm-up fraction of the steps.", float, 0.05),
                save_every=option("--save-every", "Steps between checkpoints.", int, 100),
            ),
        ),
        group(
            "Devices",
            *own(
                precision=option("--precision", "no is float32; fp16 needs a GPU.", ("no", "bf16", "fp16"), "no"),
                gradient_checkpointing=option("--gradient-checkpointing", "Less memory for more time.", bool),
                fsdp=option("--fsdp", "Share the model's layers among the processes (FSDP2).", bool),
                threads=option("--threads", "Threads of torch on a CPU.  [default: torch's choice]", THREADS),
            ),
        ),
        group(
            OUTPUT,
            option("--plot", "Draw loss and held-out accuracy into this PNG.", PATH),
            *([option("--layout", "Files of another program, which edgespec reads too.", layouts)] if layouts else []),
        ),
        json_option,
    ]  # fmt: skip


class Kinds(click.Group):
    """A subcommand for each kind of trained part."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from edgespec.export.training.options import METHODS

        return list(METHODS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return _kind(name) if name in self.list_commands(ctx) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Kinds"):
            formatter.write_dl([(name, _what(name)) for name in self.list_commands(ctx)])


def _what(kind: str) -> str:
    from edgespec.drafters.registry import METHODS

    return _TRAINED.get(kind) or METHODS[kind].help


def _kind(kind: str) -> click.Command:
    """Make the command of a kind of trained part."""

    def train(model: str, **options: Any) -> None:
        _train(kind, model, **options)

    train.__doc__ = (
        f"Train {_what(kind)}.\n\nMODEL, which stays as it is, is a local folder, a hub id, or builtin:NAME.  The same "
        "command resumes an interrupted training."
    )
    made: Callable[..., None] = train
    for decorator in reversed(_options(kind)):
        made = decorator(made)
    return click.command(kind, cls=GroupedCommand)(click.argument("model")(made))


@click.command("train", cls=Kinds)
def command() -> None:
    """Train heads, a draft or a drafter for a model.  Every kind has --json.

    \b
    edgespec train medusa builtin:shakespeare --self-distill 256 -o heads
    edgespec train eagle ./model -o drafter
    edgespec train dspark ./model --self-distill 20000 --epochs 4 --layout sglang -o drafter
    edgespec train draft ./model --data my-texts.jsonl --self-distill 2000 -o draft
    accelerate launch -m edgespec train medusa ./model --self-distill 20000 --precision bf16 -o heads
    """


def _train(method: str, model: str, output: Path | None, as_json: bool, exits: str | None = None, **rest: Any) -> None:
    if output is None:
        raise click.UsageError("name the output folder: -o FOLDER")
    if output.resolve() == Path.cwd():
        raise click.UsageError("the result cannot take the place of the current folder: name another with -o")
    if model.endswith(".gguf"):  # before torch is asked for
        raise TrainingError(
            f"{model}: a GGUF file cannot be trained on: expected a Hugging Face folder or a hub id",
            "train on the checkpoint that it was converted from",
        )
    import torch  # noqa: F401  missing: better now than after the model is read
    from accelerate import Accelerator  # noqa: F401

    from edgespec.export.training.options import DRAFTERS, SELF_DRAFT, TrainOptions
    from edgespec.export.training.train import Trainer

    plot = rest["plot"]
    if plot is not None:
        from edgespec.reports.bench import check_output

        check_output(plot, ".png")
    options = TrainOptions(method=method, model=model, output=output, exits=_numbers(exits), **rest)
    start = time.perf_counter()
    with _lines() as report:
        trainer = Trainer(options, report)
        trained = trainer.run()
    if not trainer.accelerator.is_main_process:
        return
    seconds = time.perf_counter() - start
    if plot is not None:
        from edgespec.export.training.save import draw

        draw(trained.history, plot, f"{method} for {model}")
    found = trained.report
    if as_json:
        accuracy = {str(step): tops for step, tops in trained.history.accuracy.items()}
        about = {"output": str(output), "method": method, "model": model, "seconds": seconds}
        measured = {name: found.get(name) for name in ("ranks", "acceptance", "training")}
        history = {"losses": trained.history.losses, "accuracy": accuracy}
        emit_json(about | {"windows": trained.windows} | measured | history)
        return
    steps = found["training"]["steps"]
    tokens = steps * options.rows * found["training"]["length"]
    click.echo(
        f"{output}: {method} for {model}, {steps} steps on {trained.windows} windows, at most {tokens:,} tokens, in "
        f"{seconds:.0f} s"
    )
    for line in _results(found):
        click.echo(line)
    how = f"--method {method} --{'drafter' if method in DRAFTERS else 'heads'}"
    how = "--method speculative --draft" if method == "draft" else how
    if method == SELF_DRAFT:
        click.echo(f"next: edgespec bench BUNDLE --method uno --draft-adapter {shlex.quote(str(output))}")
        return
    click.echo(f"next: edgespec export {shlex.quote(model)} {how} {shlex.quote(str(output))}")


def _results(found: dict[str, Any]) -> list[str]:
    """List the measurements, a line each."""
    from edgespec.export.training.options import SELF_DRAFT

    training, lines = found["training"], []
    place = "mask row" if training["method"] == SELF_DRAFT else "head"
    for kind, heads in found.get("ranks", {}).items():
        tops = ", ".join(f"{ranks[0]:.3f} / {sum(ranks[:5]):.3f}" for ranks in heads)
        lines.append(f"held-out, {kind}: top-1 / top-5 by {place}: {tops}")
    if tokens := training.get("tokens_per_round"):
        minutes = training["seconds"] / 60
        lines.append(f"ended after {minutes:.1f} minutes, and then measured: {training['ended']}")
        said = ", ".join(f"{kind} {value:.2f}" for kind, value in tokens.items())
        more = training["ten_minutes_more"]
        worth = "" if more is None else f"; another ten minutes would be worth about +{more:.2f}"
        lines.append(f"held-out, tokens per round: {said}{worth}")
    for kind, figures in found.get("acceptance", {}).items():
        lines.append(
            f"held-out, {kind}: accepted at temperature 1 {figures['overlap']:.3f}, greedy {figures['agreement']:.3f}"
        )
    return lines


def _numbers(given: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in given.split(",")) if given else ()
    except ValueError as error:
        raise click.UsageError(f"--exits: expected numbers of layers such as 8,16,24, got {given!r}") from error


@contextmanager
def _lines() -> Iterator[Callable[[str, int, int, str], None]]:
    """Show a progress bar on a terminal; elsewhere a line whenever there is something new to say."""
    if sys.stderr.isatty():
        with progress() as report:
            yield report
        return
    yield lambda stage, done, of, detail: click.echo(f"{stage}: {detail}", err=True)
