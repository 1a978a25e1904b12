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

METHODS = ("medusa", "blockwise", "paradecode", "draft", "eagle", "dspark", "dflash", "mtp")
DRAFTERS = ("eagle", "dspark", "dflash", "mtp")


@click.command("train", cls=GroupedCommand)
@click.argument("method", type=click.Choice(METHODS))
@click.argument("model")
@option("-o --output", "Folder for the heads or the draft.  [required]", PATH)
@option("--self-distill", "Texts that the model writes itself to train on; 0: none, or 1000 without --data.", int, 0)
@option(
    "--data",
    "Text to train on: a text file, or .jsonl with `text`, `prompt` or `turns`; may be repeated.  Of an "
    "encoder-decoder what it reads, a line each.",
    PATH,
    multiple=True,
)
@option("--minutes", "Drafters: most time; it ends before when acceptance has stopped rising.  [default: 10]", float)
@option("--epochs", "Passes over the windows.  [default: 4; drafters: until it stops improving]", float)
@option("--batch", "Windows a step, over all processes.  [default: 16; where it ends by itself: 8]", int)
@option("--lr", "Peak of the learning rate, a cosine after the warm-up.  [default: the method's]", float)
@option("--seed", "Same seed, same result, on one CPU bit for bit.", int, 0)
@option("--overwrite", "Replace finished heads or a finished draft.", bool)
@option("--restart", "Forget an unfinished training instead of going on with it.", bool)
@group(
    "Text",
    option(
        "--greedy-share",
        "The share of those that goes on greedily; the others are drawn at temperature 1.",
        float,
        0.25,
    ),
    option("--length", "Tokens of a window.  [default: 256, or the context]", int),
    option("--held-out", "Texts that accuracy is measured on.", int, 20),
    option("--new-tokens", "Length of each, after a prompt of 16.", int, 200),
    option("--revision", "Branch, tag or commit of a hub model."),
)
@group(
    "Heads (medusa, blockwise, paradecode)",
    option("--heads", "medusa, blockwise: guesses beyond the next token; eagle, mtp: steps deep.", int, 4),
    option("--own-lm-heads", "medusa: an LM head for each head, instead of the model's.", bool),
    option(
        "--inner",
        "blockwise: width of the hidden layer; eagle: of its MLP.  [default: heads * hidden; the model's]",
        int,
    ),
    option("--exits", "paradecode: after how many layers, as 8,16,24.  [default: each quarter]"),
)
@group(
    "Draft",
    option("--draft-layers", "draft, dspark, dflash: layers.", int, 2),
    option("--draft-hidden", "draft: width.  [default: about a quarter of the model's]", int),
    option("--draft-intermediate", "draft: width of its MLPs.  [default: in proportion]", int),
    option("--draft-heads", "draft: attention heads.  [default: of the model's head size]", int),
)
@group(
    "Training",
    option(
        "--loss",
        "kl: divergence from the model's own distribution; lk: the more both overlap, the overlap; ce: cross entropy "
        "of the text; d-pace, of drafters: the same, weighted by the tokens that a guess brings.",
        ("kl", "lk", "ce", "d-pace"),
        "kl",
    ),
    option("--ce-share", "draft: share of ce in another loss.", float, 0.0),
    option("--steps", "Instead of --epochs.", int),
    option("--warmup", "Share of the steps in which it rises.", float, 0.05),
    option("--save-every", "Steps between checkpoints.", int, 100),
)
@group(
    "Devices",
    option("--precision", "no is float32; fp16 needs a GPU.", ("no", "bf16", "fp16"), "no"),
    option("--gradient-checkpointing", "Less memory for more time.", bool),
    option("--fsdp", "Share the model's layers among the processes (FSDP2).", bool),
    option("--threads", "Threads of torch on a CPU.  [default: torch's choice]", THREADS),
)
@group(
    OUTPUT,
    option("--plot", "Draw loss and held-out accuracy into this PNG.", PATH),
    option("--layout", "Files of another program, which edgespec reads, too.", ("sglang", "speculators", "medusa")),
)
@json_option
def command(method: Any, model: str, output: Path | None, exits: str | None, as_json: bool, **rest: Any) -> None:
    """Train heads, a draft or a drafter for a model.

    METHOD is medusa, blockwise, paradecode, draft, eagle, dspark, dflash or mtp.  MODEL, which stays as it is, is a
    local folder, a hub id, or builtin:NAME.  Interrupted, the same command goes on where it was.

    \b
    edgespec train medusa builtin:shakespeare --self-distill 256 -o heads
    edgespec train eagle ./model -o drafter
    edgespec train dspark ./model --self-distill 20000 --epochs 4 --layout sglang -o drafter
    edgespec train draft ./model --data my-texts.jsonl --self-distill 2000 -o draft
    edgespec train paradecode ./model --exits 8,16,24 --data my-text.txt -o exits --plot loss.png
    accelerate launch -m edgespec train medusa ./model --self-distill 20000 --precision bf16 -o heads
    """
    if output is None:
        raise click.UsageError("say where to write the result: -o FOLDER")
    if output.resolve() == Path.cwd():
        raise click.UsageError("the result cannot take the place of the current folder: name another with -o")
    if model.endswith(".gguf"):  # before torch is asked for
        raise TrainingError(
            f"{model}: a GGUF file cannot be trained on: expected a Hugging Face folder or a hub id",
            "train on the checkpoint that it was made of",
        )
    import torch  # noqa: F401  missing: better now than after the model is read
    from accelerate import Accelerator  # noqa: F401

    from edgespec.export.training.options import TrainOptions
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
    click.echo(f"{output}: {method} for {model}, {steps} steps on {trained.windows} windows in {seconds:.0f} s")
    for line in _results(found):
        click.echo(line)
    how = f"--method {method} --{'drafter' if method in DRAFTERS else 'heads'}"
    how = "--method speculative --draft" if method == "draft" else how
    click.echo(f"next: edgespec export {shlex.quote(model)} {how} {shlex.quote(str(output))}")


def _results(found: dict[str, Any]) -> list[str]:
    """List the measurements, a line each."""
    lines = []
    for kind, heads in found.get("ranks", {}).items():
        tops = ", ".join(f"{ranks[0]:.3f} / {sum(ranks[:5]):.3f}" for ranks in heads)
        lines.append(f"held-out, {kind}: top-1 / top-5 by head: {tops}")
    training = found["training"]
    if tokens := training.get("tokens_per_round"):
        minutes, texts = training["seconds"] / 60, training["texts"]
        lines.append(f"ended after {minutes:.1f} minutes: {training['ended']}; {texts} texts")
        said = ", ".join(f"{kind} {value:.2f}" for kind, value in tokens.items())
        more = training["ten_minutes_more"]
        worth = "" if more is None else f"; another ten minutes would be worth about +{more:.2f}"
        lines.append(f"held-out, tokens a round: {said}{worth}")
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
