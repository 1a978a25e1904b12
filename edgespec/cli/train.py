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

from edgespec.cli.common import emit_json, json_option, progress
from edgespec.cli.groups import OUTPUT, GroupedCommand, group

METHODS = ("medusa", "blockwise", "paradecode", "draft", "eagle")


@click.command("train", cls=GroupedCommand)
@click.argument("method", type=click.Choice(METHODS))
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the heads or the draft.  [required]")
@click.option(
    "--self-distill", type=int, default=0, show_default=True, help="Texts that the model writes itself to train on."
)
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Text to train on: a text file, or .jsonl with `text`, `prompt` or `turns`; may be repeated.",
)
@click.option("--epochs", type=float, default=4.0, show_default=True, help="Passes over the windows.")
@click.option("--batch", type=int, default=16, show_default=True, help="Windows a step, over all processes.")
@click.option(
    "--lr", type=float, help="Peak of the learning rate, a cosine after the warm-up.  [default: the method's]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same result, on one CPU bit for bit.")
@click.option("--overwrite", is_flag=True, help="Replace finished heads or a finished draft.")
@click.option("--restart", is_flag=True, help="Forget an unfinished training instead of going on with it.")
@group(
    "Text",
    click.option(
        "--greedy-share",
        type=float,
        default=0.25,
        show_default=True,
        help="Of those, the share that goes on greedily; the others are drawn at temperature 1.",
    ),
    click.option("--length", type=int, help="Tokens of a window.  [default: 256, or the context]"),
    click.option("--held-out", type=int, default=20, show_default=True, help="Texts that accuracy is measured on."),
    click.option("--new-tokens", type=int, default=200, show_default=True, help="Of each, after a prompt of 16."),
    click.option("--revision", help="Of a hub model."),
)
@group(
    "Heads (medusa, blockwise, paradecode)",
    click.option(
        "--heads",
        type=int,
        default=4,
        show_default=True,
        help="medusa, blockwise: guesses beyond the next token; eagle: steps deep.",
    ),
    click.option("--own-lm-heads", is_flag=True, help="medusa: an LM head for each head, instead of the model's."),
    click.option(
        "--inner",
        type=int,
        help="blockwise: width of the hidden layer; eagle: of its MLP.  [default: heads * hidden; the model's]",
    ),
    click.option("--exits", help="paradecode: after how many layers, as 8,16,24.  [default: each quarter]"),
)
@group(
    "Draft",
    click.option("--draft-layers", type=int, default=2, show_default=True, help="draft: layers."),
    click.option("--draft-hidden", type=int, help="draft: width.  [default: about a quarter of the model's]"),
    click.option("--draft-intermediate", type=int, help="draft: width of its MLPs.  [default: in proportion]"),
    click.option("--draft-heads", type=int, help="draft: attention heads.  [default: of the model's head size]"),
)
@group(
    "Training",
    click.option(
        "--loss",
        type=click.Choice(("kl", "ce")),
        default="kl",
        show_default=True,
        help="Divergence from the model's own distribution, or cross entropy of the text.",
    ),
    click.option("--ce-share", type=float, default=0.0, show_default=True, help="draft: share of ce in a kl loss."),
    click.option("--steps", type=int, help="Instead of --epochs."),
    click.option("--warmup", type=float, default=0.05, show_default=True, help="Share of the steps in which it rises."),
    click.option("--save-every", type=int, default=100, show_default=True, help="Steps between checkpoints."),
)
@group(
    "Devices",
    click.option(
        "--precision",
        type=click.Choice(("no", "bf16", "fp16")),
        default="no",
        show_default=True,
        help="no is float32; fp16 needs a GPU.",
    ),
    click.option("--gradient-checkpointing", is_flag=True, help="Less memory for more time."),
    click.option("--threads", type=click.IntRange(1, 512), help="Of torch on a CPU.  [default: torch's choice]"),
)
@group(
    OUTPUT,
    click.option("--plot", type=click.Path(path_type=Path), help="Draw loss and held-out accuracy into this PNG."),
)
@json_option
def command(method: Any, model: str, output: Path | None, exits: str | None, as_json: bool, **rest: Any) -> None:
    """Train heads, a draft or a drafter for a model.

    METHOD is medusa, blockwise, paradecode, draft or eagle.  MODEL, which stays as it is, is a local folder, a hub id,
    or builtin:NAME.  Interrupted, the same command goes on where it was.

    \b
    edgespec train medusa builtin:shakespeare --self-distill 256 -o heads
    edgespec train eagle ./model --self-distill 20000 -o drafter
    edgespec train draft ./model --data my-texts.jsonl --self-distill 2000 -o draft
    edgespec train paradecode ./model --exits 8,16,24 --data my-text.txt -o exits --plot loss.png
    accelerate launch -m edgespec train medusa ./model --self-distill 20000 --precision bf16 -o heads
    """
    if output is None:
        raise click.UsageError("say where to write the result: -o FOLDER")
    if output.resolve() == Path.cwd():
        raise click.UsageError("the result cannot take the place of the current folder: name another with -o")
    import torch  # noqa: F401  missing: better now than after the model is read
    from accelerate import Accelerator  # noqa: F401

    from edgespec.export.training.options import TrainOptions
    from edgespec.export.training.train import Trainer

    plot = rest["plot"]
    if plot is not None:
        from edgespec.reports.bench import check_plot

        check_plot(plot)
    options = TrainOptions(method=method, model=model, output=output, exits=_numbers(exits), **rest)
    start = time.perf_counter()
    with _lines() as report:
        trainer = Trainer(options, report)
        trained = trainer.run()
    if not trainer.accelerator.is_main_process:
        return
    seconds = time.perf_counter() - start
    if plot is not None:
        from edgespec.export.training.plot import draw

        draw(trained.history, plot, f"{method} for {model}")
    found = trained.report
    if as_json:
        accuracy = {str(step): tops for step, tops in trained.history.accuracy.items()}
        about = {
            "output": str(output),
            "method": method,
            "model": model,
            "seconds": seconds,
            "windows": trained.windows,
        }
        results = {"ranks": found.get("ranks"), "acceptance": found.get("acceptance"), "training": found["training"]}
        emit_json({**about, **results, "losses": trained.history.losses, "accuracy": accuracy})
        return
    steps = found["training"]["steps"]
    click.echo(f"{output}: {method} for {model}, {steps} steps on {trained.windows} windows in {seconds:.0f} s")
    for line in _results(found):
        click.echo(line)
    how = {"draft": "--method speculative --draft", "eagle": "--method eagle --drafter"}.get(
        method, f"--method {method} --heads"
    )
    click.echo(f"next: edgespec export {shlex.quote(model)} {how} {shlex.quote(str(output))}")


def _results(found: dict[str, Any]) -> list[str]:
    """What was measured, a line each."""
    lines = []
    for kind, heads in found.get("ranks", {}).items():
        tops = ", ".join(f"{ranks[0]:.3f} / {sum(ranks[:5]):.3f}" for ranks in heads)
        lines.append(f"held-out, {kind}: top-1 / top-5 by head: {tops}")
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
    """A progress bar on a terminal; elsewhere a line whenever there is something new to say."""
    if sys.stderr.isatty():
        with progress() as report:
            yield report
        return
    yield lambda stage, done, of, detail: click.echo(f"{stage}: {detail}", err=True)
