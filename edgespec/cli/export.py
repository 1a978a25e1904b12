"""``edgespec export``."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec import extensions
from edgespec.cli.common import (
    COUNT,
    OUTPUT,
    PATH,
    THREADS,
    GroupedCommand,
    accepting,
    ask_words,
    attention_lines,
    emit_json,
    group,
    json_option,
    method_names,
    option,
    progress,
)
from edgespec.cli.recipes import recipe_option, with_recipe
from edgespec.drafters.registry import drafters_apart, needing
from edgespec.planning.budget import parse_bytes, show_bytes
from edgespec.runtimes.files.formats import ATTENTIONS, BLOCK_FORMATS, EXPORT_FORMATS, FILE, FORMATS, FOUR_BITS, listed

if TYPE_CHECKING:
    from edgespec.export.options import ExportOptions
    from edgespec.runtimes.files.manifest import Manifest

QUANTIZERS = ("rtn", "mse", "awq", "gptq", *extensions.plugins(extensions.QUANTIZERS))
LOW_AGREEMENT = 0.75  # top-1: int4 of working models keeps more than this


@click.command("export", cls=GroupedCommand)
@click.argument("model")
@option("-o --output", "The bundle's folder.  [default: NAME-edge]", PATH)
@option(
    "--method",
    f"{listed(needing('draft', 'layers', 'heads', 'drafter'))}; may be repeated.  plain and ngram always work.",
    dest="methods",
    multiple=True,
    callback=method_names,
)
@option(
    "--format",
    "Format of the weights.  [default: the fastest that loses at most 1 % of perplexity; int4 with --quantizer, "
    "--head-format, --target-size or --target-kl; of a quantized model its own weights (file)]",
    EXPORT_FORMATS,
    dest="form",
)
@option("--context", "Maximum context length in tokens.  [default: the model's limit]", int)
@option("--draft", "Draft model for --method speculative: folder, hub id or builtin:NAME.")
@option("--heads", f"Folder of trained heads, for {listed(needing('heads'))}; may be repeated.", multiple=True)
@option("--drafter", f"Drafter for --method {listed(drafters_apart())}: folder, hub id or builtin:NAME.")
@recipe_option("format, methods, context and the like")
@option("--overwrite", "Replace an older bundle of that name.", bool)
@option("--dry-run", "Only print the files and their sizes.", bool)
@group(
    "Quality",
    option("--budget", "Memory that the bundle must fit, if no --format is given.  1.5GiB  [default: the free memory]"),
    option(
        "--quantizer",
        f"How levels of {listed(BLOCK_FORMATS, 'and')} are chosen; awq and gptq calibrate.  "
        "[default: for 4 bits gptq where it loses less than mse, else mse]",
        QUANTIZERS,
    ),
    option("--quick", "Choose levels without calibration, by mse: minutes sooner, for more error.", bool),
    option(
        "--head-format", "Format of the LM head and the embedding tied to it.  [default: as --format]", BLOCK_FORMATS
    ),
    option(
        "--target-size",
        f"Maximum size of the target's weights: {listed(FOUR_BITS)}, int8 where it helps most.  450MiB",
    ),
    option(
        "--target-kl",
        "Smallest mixed model with a divergence of at most N nats from the source.  0.01",
        click.FloatRange(min=0, min_open=True),
    ),
    option(
        "--calibration",
        "Text to calibrate and measure on; for a speech model, recordings: a file or a folder.  "
        "[default: text that the model generates; the model's or ours]",
        PATH,
    ),
    option(
        "--attention",
        "Learn and measure such keys; may be repeated.  The first that passes its quality gate is the default.",
        ATTENTIONS,
        multiple=True,
    ),
)
@group(
    "Source",
    option("--adapter", "LoRA adapter to merge into MODEL: folder or hub id."),
    option("--revision", "Branch, tag or commit of a hub model."),
    option("--text-only", "Export only the language model of a model that reads images or sound.", bool),
    option(
        "--codec",
        "Folder of the decoder of a model's codes (pictures or sound).  [default: MODEL/codes]",
        PATH,
        dest="codes",
    ),
    option(
        "--max-image-tokens",
        "Maximum number of tokens per image: smaller pictures, fewer tiles.  [default: the model's]",
        COUNT,
        dest="image_rows",
    ),
)
@group(
    "Drafting",
    option("--head-vocab", "Let heads guess only the N most frequent tokens.  [default: all]", int),
    option(
        "--draft-vocab",
        "Tokens that the draft model or the drafter can guess; 0 = all.  [default: the fastest; the drafter's]",
        int,
    ),
    option(
        "--draft-format",
        "Format of the draft model's weights.  [default: as --format; int4 for int8]",
        (*FORMATS, FILE),
    ),
    option("--skip-set", "JSON with a published skip set, instead of a search.", PATH),
    option("--trials", "Trials of the skip-set search.", COUNT, 64),
    option("--seed", "Seed of the skip-set search.", int, 0),
)
@group(
    "Devices",
    option("--threads", "Threads for calibration and measurements.  [default: all]", THREADS),
    option(
        "--operators",
        "Whose layout the weights get; auto is native, and other operators convert them when they first run.",
        ["auto", "native", "stock"],
        "auto",
    ),
    option(
        "--device",
        "Also write graphs for this device (they are small); every bundle runs on the CPU.",
        ["webgpu"],
        dest="devices",
        multiple=True,
    ),
    option(
        "--device-precision",
        "Type of activations, keys and values there; repeatable.  fp16 needs GPUs with shader-f16.  [default: fp32]",
        ["fp32", "fp16"],
        dest="device_precisions",
        multiple=True,
    ),
)
@group(OUTPUT, option("--verbose", "Also print the prediction for each method.", bool))
@json_option
def command(
    model: str, output: Path | None, form: Any, dry_run: bool, verbose: bool, as_json: bool, **rest: Any
) -> None:
    """Turn a Hugging Face model into a bundle.

    MODEL is a local folder, a .gguf file, a hub id, or builtin:NAME; docs/models.md says what it may hold.
    An architecture that edgespec does not support itself goes through transformers: install the extra
    transformers, or give the folder of an ONNX export by optimum.

    Without --format the loss of each format is measured on a text, and a line reports the choice.

    \b
    edgespec export builtin:shakespeare --method self-spec -o demo
    edgespec export ./Qwen2.5-0.5B-Instruct --method self-spec --format int4
    edgespec export ./my-model --method self-spec --quick
    edgespec export ./my-model --target-size 450MiB
    edgespec export ./Llama-3.2-1B-Q4_K_M.gguf -o llama
    edgespec export ./base --adapter ./lora
    edgespec export ./target --method speculative --draft ./draft --context 4096
    edgespec export ./model --method medusa --heads ./medusa-heads --head-vocab 8192
    edgespec export ./Qwen3-4B --method eagle --drafter AngelSlim/Qwen3-4B_eagle3
    edgespec export ./Qwen3.5-4B --method mtp
    edgespec export ./Qwen3-4B --method dflash --drafter z-lab/Qwen3-4B-DFlash-b16
    edgespec export ./Llama-3.2-3B --recipe laptop-3b-chat --draft ./Llama-3.2-1B
    edgespec export ./model --dry-run --json
    """
    from edgespec.export import pipeline

    target = output or default_output(model)
    if target.resolve() == Path.cwd():
        raise click.UsageError("the bundle cannot take the place of the current folder: name another with -o")
    recipe, name = None, rest.pop("recipe")
    asked: dict[str, Any] = {"model": model, "output": target, "format": form, **rest}
    if name is not None:
        recipe, asked = with_recipe(name, model, asked)
    options = _options(asked)
    accept = f"edgespec export {shlex.quote(model)}" + (f" -o {shlex.quote(str(output))}" if output else "")
    start = time.perf_counter()
    with accepting(accept), progress() as report:
        if dry_run:
            plan = pipeline.dry_run(options, report)
        else:
            manifest = pipeline.export_model(options, report)
    if dry_run:
        _show_plan(plan, as_json)
        return
    seconds = time.perf_counter() - start
    if (low := _low_agreement(manifest)) is not None:
        click.echo(low, err=True)
    if as_json:
        choice = manifest.provenance.get("format_choice")
        found = {"bundle": str(target), "seconds": seconds, "manifest": manifest.model_dump(mode="json")}
        emit_json(found | {"choice": choice})
        return
    size = sum(entry.size for entry in manifest.files.values())
    parity = manifest.parity
    against = parity.get("against", "the source")
    what = f"methods {', '.join(manifest.methods)}" if manifest.methods else _encoder_words(manifest)
    click.echo(f"{target}: {show_bytes(size)} in {seconds:.1f} s, {what}")
    if parity:
        click.echo(
            f"against {against}: top-1 agreement {100 * parity['top1_agreement']:.0f} % on {parity['positions']} "
            f"positions, perplexity {parity['perplexity']:.2f} ({parity['perplexity_source']:.2f} before), "
            f"divergence {parity['kl']:.3g} nats"
        )
    for line in attention_lines(manifest.target.attention):
        click.echo(f"attention: {line}")
    for note in manifest.provenance.get("notes", []):
        click.echo(f"note: {note}")
    if verbose:
        _explain(manifest)
    _show_next(target, recipe, manifest)


def _show_next(target: Path, recipe: Any, manifest: Manifest) -> None:
    """Print the command that uses the bundle."""
    quoted = shlex.quote(str(target))
    if manifest.is_encoder:
        scores = manifest.embedding is not None and manifest.embedding.scores
        click.echo(f"next: edgespec embed {quoted} '...'" + (" --query '...'" if scores else ""))
        return
    if recipe is not None:
        click.echo(f"recipe {recipe.name}: {recipe.reason}")
    ask = ask_words(manifest)
    run = f"edgespec run {quoted} {ask}" if recipe is None else recipe.run_command(quoted, manifest, ask)
    click.echo(f"next: {run}")


def _encoder_words(manifest: Manifest) -> str:
    """Say what an encoder does, and how near it is to its source."""
    part = manifest.embedding
    assert part is not None
    if part.quality is None:
        return "an encoder"
    if part.scores:
        return f"scores pairs of texts, at most {part.quality.score_max_error:.2g} from the source"
    near = f"cosine {part.quality.cosine:.5f} with the source on {part.quality.texts} texts"
    return f"{manifest.pooling} embeddings, {near}"


def _options(asked: dict[str, Any]) -> ExportOptions:
    """Make the options of an export; without a format one is chosen."""
    from edgespec.export.options import ExportOptions

    for size in ("target_size", "budget"):
        if asked[size] is not None:
            asked[size] = parse_bytes(asked[size])
    if asked["format"] is not None:
        return ExportOptions(**asked)
    options = ExportOptions(**{name: value for name, value in asked.items() if name != "format"})
    return replace(options, choose=not options.names_format)


def _low_agreement(manifest: Manifest) -> str | None:
    """Warn where the bundle seldom chooses as its source does."""
    if not manifest.parity:
        return None
    found, positions = manifest.parity["top1_agreement"], manifest.parity["positions"]
    if found >= LOW_AGREEMENT:
        return None
    more = "" if manifest.target.format in ("int8", "fp32") else "; try --head-format int8, or --format int8"
    return (
        f"warning: on {positions} positions the bundle's most likely token is the source's only {100 * found:.0f} % of "
        f"the time: its text will be another model's{more}"
    )


def default_output(model: str) -> Path:
    """``NAME-edge`` in the current folder, NAME being the last part of the model's name."""
    name = Path(model).resolve().name if Path(model).exists() else model.rstrip("/").rsplit("/", 1)[-1]
    name = name.removesuffix(".gguf")
    return Path(f"{name.removeprefix('builtin:')}-edge")


def _explain(manifest: Manifest) -> None:
    """Print the prediction of each method."""
    from edgespec.formulas.cost import WORTH

    for method, part in manifest.methods.items():
        if part.predicted_speedup:
            what = f"{part.skip.words}, " if part.skip else ""
            click.echo(
                f"{method}: {what}predicted {part.predicted_speedup:.2f}x plain decoding on this machine "
                f"at acceptance {part.measured[0].acceptance[0]:.2f}"
                + ("" if part.predicted_speedup >= WORTH else ": hardly worth it here")
            )


def _show_plan(plan: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(plan)
        return
    weights = plan["format"] + (f" by {plan['quantizer']}" if plan["quantizer"] else "")
    if plan["head_format"] != plan["format"]:
        weights += f", head {plan['head_format']}"
    methods = f"methods {', '.join(plan['methods'])}" if plan["methods"] else "an encoder"
    click.echo(f"{plan['model']}: {plan['architecture']}, {weights}, {methods}")
    for part, size in plan["weight_bytes"].items():
        click.echo(f"{part} weights: {show_bytes(size)}")
    for note in plan["notes"]:
        click.echo(f"note: {note}")
    click.echo(f"KV: {show_bytes(plan['kv_bytes_per_token'])} per token, context {plan['context']}")
