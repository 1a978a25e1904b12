"""``edgespec plan``: candidate bundles for a plan, and the output of a plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgespec.cli.common import (
    COMMON,
    COUNT,
    OUTPUT,
    PATH,
    GroupedCommand,
    emit_json,
    group,
    json_option,
    make_load_options,
    method_names,
    operators_option,
    option,
    precision_option,
    table_console,
    threads_option,
)
from edgespec.cli.recipes import recipe_option
from edgespec.drafters.registry import EAGLE, METHODS, SPECULATIVE, complete, needing
from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files.formats import ATTENTIONS, FILE, FORMATS
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest

if TYPE_CHECKING:
    from edgespec.planning.plan import Option, Plan, PlannedRun, PlanRequest
    from edgespec.planning.profiles import Profile

DRAFT, DRAFTER = "draft", "drafter"  # folders of what is still to be trained


def _is_bundle(source: str) -> bool:
    return (Path(source) / MANIFEST).is_file()


def _options(source: str, options: dict[str, Any], here: bool) -> list[Option]:
    """List the candidates; ``here``: for this machine, with its calibration."""
    from edgespec.library import named

    source = str(named(source) or source)
    return (_of_bundle if _is_bundle(source) else _of_model)(source, options, here)


def _of_bundle(source: str, options: dict[str, Any], here: bool) -> list[Option]:
    """Plan for a bundle; only its manifest is read, and what was measured with it."""
    from edgespec.engine.encoders import require_writer
    from edgespec.planning.plan import Option
    from edgespec.planning.profiles import find_profile
    from edgespec.planning.streaming import seen_reads
    from edgespec.runtimes.files.bundle import check_sizes
    from edgespec.runtimes.files.operators import choose_operators

    for name in ("formats", "draft", "revision", "text_only"):
        if options[name]:
            raise click.UsageError(f"--{name.rstrip('s').replace('_', '-')} is for models that are not exported yet")
    manifest, methods = complete(read_manifest(Path(source))), options["methods"]
    require_writer(manifest)
    check_sizes(Path(source), manifest)
    profile, target = None, manifest.target
    if here:
        load = replace(make_load_options(options), context=None, budget=None)
        if load.device != "cpu" and load.device not in target.graphs:
            choose_operators("stock", target)  # whose error says where it can run
            why = f"export it again with `--device {load.device}`"
            raise BundleError(f"{source}: has no graphs for {load.device}", why)
        load.resolve(manifest)  # what loading would refuse
        profile = find_profile(manifest, load)
    if unknown := [name for name in methods if name not in manifest.methods]:
        raise InvalidRequest(
            f"method {unknown[0]!r} is not in {source}; it has: {', '.join(manifest.methods)}",
            f"export it with `--method {unknown[0]}`",
        )
    if methods:
        kept = {name: part for name, part in manifest.methods.items() if name in methods}
        manifest = manifest.model_copy(update={"methods": kept})
    hits = seen_reads(manifest) if here and target.facts.experts else None
    found = Option(manifest, source, profile=profile, hits=hits)
    native = options["operators"] != "stock" and options["device"] != "webgpu" and target.layout == "native"
    if not (native and target.planes):
        return [found]
    high = Option(complete(manifest.at_high_precision()), source)
    return [high] if options["precision"] == "high" else [found, high]


def _of_model(source: str, options: dict[str, Any], here: bool) -> list[Option]:
    """Plan for the bundles that an export of a model could make, one for each format; from its config.json."""
    from edgespec.export.emit.stock import keeps_weights
    from edgespec.export.options import ExportOptions
    from edgespec.export.plan_manifest import PlannedSource, plan_bundle, possible_methods
    from edgespec.export.quantization.native_packing import lacks_packing
    from edgespec.planning.plan import Option
    from edgespec.planning.profiles import latest_profile

    draft, context, text_only = options["draft"], options["context"], options["text_only"]
    how: dict[str, Any] = {name: options[name] for name in ("draft", "context", "revision", "text_only")}
    opened = PlannedSource(source, options["revision"])
    if _recipe_chose_context(options) and context > opened.architecture(text_only=text_only).most_context:
        how["context"] = context = None  # the model's own, as in an export by a recipe
    how["methods"] = options["methods"] or (
        *possible_methods(opened, text_only),
        *(needing("draft") if draft else ()),
    )
    command = [*(("--context", str(context)) if context else ()), *(("--text-only",) if text_only else ())]
    # what was measured here with another bundle tells how fast the machine is
    profile = latest_profile(options["threads"], options["device"]) if here else None
    found = []
    arch = opened.architecture(None, text_only)
    own = (FILE,) if arch.encoder is None and keeps_weights(arch, "stock" if lacks_packing() else "native") else ()
    for form in options["formats"] or (*own, *FORMATS):
        planned = plan_bundle(ExportOptions(source, format=form, **how), opened)
        needs = {name: need for name in planned.methods if (need := _need(name, source, draft))}
        found.append(Option(planned, source, ("--format", form, *command), needs, profile))
    return found


def _need(method: str, source: str, draft: str | None) -> str:
    """Describe what must be made or given before a model can be exported with this method; empty = nothing."""
    if METHODS[method].needs == "heads":
        return f"needs trained heads: edgespec train {method} {source} -o {method}-heads"
    if method == EAGLE:
        return f"needs a drafter: edgespec train {method} {source} -o {DRAFTER}"
    if METHODS[method].apart:
        return "needs a drafter that was published for this model"
    return f"needs a draft: edgespec train draft {source} -o {DRAFT}" if method == SPECULATIVE and not draft else ""


def _export_command(option: Option, method: str) -> str | None:
    """Write the command that makes a bundle with that method; None = it exists."""
    if option.export is None:
        return None
    of, draft = METHODS[method], option.manifest.provenance.get("draft", DRAFT)
    given = {"heads": f"--heads {method}-heads", "draft": f"--draft {draft}"}
    words = ["edgespec", "export", option.name, *option.export]
    words += [f"--method {method}"] if of.needs != "text" else []
    words += [f"--drafter {DRAFTER}"] if of.apart else []
    return " ".join([*words, *filter(None, [given.get(of.needs)])])


MOST_LINES = 12


@click.command("plan", cls=GroupedCommand)
@click.argument("sources", metavar="BUNDLE_OR_MODEL...", nargs=-1, required=True)
@option(
    "--budget",
    "Memory limit, such as 1.5GiB.  [default: the free memory here, or that of --device FILE]",
)
@option("--context", "Context length in tokens.  [default: 4096, fewer if they do not fit]", int)
@option("--batch", "Sequences together.  [default: 1; for goal batch 4]", COUNT)
@option(
    "--goal",
    "Highest speed of one sequence (auto, chat) or of several (batch), least memory, or the finest format that fits.",
    ["auto", "chat", "batch", "memory", "quality"],
    "auto",
)
@option(
    "--method",
    "Method to consider; may be repeated.  [default: all]",
    dest="methods",
    multiple=True,
    callback=method_names,
)
@group(COMMON, recipe_option("context, methods, format and budget"))
@group(
    "A model that is not exported yet",
    option(
        "--format",
        "Format to consider; may be repeated.  [default: all]",
        (*FORMATS, FILE),
        dest="formats",
        multiple=True,
    ),
    option("--draft", "The draft for method speculative: folder, hub id or builtin:NAME."),
    option("--revision", "Branch, tag or commit of a hub model."),
    option("--text-only", "The text half of a model that reads images or sound.", bool),
)
@group(
    "Devices",
    option("--device", "cpu, webgpu, or a file of `calibrate -o`.", default="cpu"),
    threads_option,
    operators_option,
    precision_option,
    option(
        "--attention",
        "Format of keys in the KV cache of native operators.  [default: the bundle's; int8 if nothing else fits]",
        ATTENTIONS,
    ),
)
@group(
    OUTPUT,
    option("--plot", "Draw the memory parts into this PNG.", PATH),
    option("--all", "Show every candidate.  [default: the best 12]", bool, dest="everything"),
)
@json_option
def command(sources: tuple[str, ...], as_json: bool, everything: bool, plot: Path | None, **options: Any) -> None:
    """Say what fits a memory budget, how fast it will be, and why.

    Nothing is loaded: a bundle is planned by its manifest, a model by its config.json.  Plain speed is memory bandwidth
    over the bytes that a token reads.  What a method gains is never guessed: calibrate, the export or bench measure it.

    \b
    edgespec plan demo --budget 1GiB
    edgespec plan ./Qwen2.5-0.5B-Instruct --budget 1.5GiB --context 4096 --goal quality
    edgespec plan builtin:shakespeare --budget 300MB --json
    edgespec plan demo --device phone.json --plot memory.png
    """
    from edgespec.planning.plan import make_plan

    start = time.perf_counter()
    if plot is not None:
        from edgespec.reports.bench import check_output

        check_output(plot, ".png")
    options = _by_recipe(options, sources)
    profile = _foreign(options["device"])
    found = [option for source in dict.fromkeys(sources) for option in _options(source, options, profile is None)]
    if _recipe_chose_context(options):
        most = max(one.manifest.target.facts.context for one in found)
        options |= {"context": min(options["context"], most)}
    plan = make_plan(
        found, _request(options, profile or next((one.profile for one in found if one.profile), None), profile, found)
    )
    if plot is not None:
        from edgespec.reports.pages import plot_plan

        plot_plan(plan, plot)
    if as_json:
        emit_json({"sources": list(sources), "seconds": time.perf_counter() - start} | plan.as_dict())
    else:
        _show(plan, everything)
    if plan.pick is None:
        from edgespec.errors import BudgetError

        error = BudgetError(plan.reason, "; ".join(plan.hints))
        if not as_json:
            raise error
        click.echo(f"error: {error}", err=True)  # stdout has its one object, whose pick is null
        sys.exit(1)


def _by_recipe(options: dict[str, Any], sources: tuple[str, ...]) -> dict[str, Any]:
    """Options with those of a recipe where none were given; a bundle has its format already."""
    name = options.pop("recipe")
    if name is None:
        return options
    from edgespec.planning.recipes import plan_defaults

    given = {key: value for key, value in options.items() if value not in (None, ())}
    source = click.get_current_context().get_parameter_source
    asked = {key: value for key, value in given.items() if source(key) is not ParameterSource.DEFAULT}
    found = plan_defaults(name)
    if any(_is_bundle(source) for source in sources):
        del found["formats"]
    return options | found | asked


def _recipe_chose_context(options: dict[str, Any]) -> bool:
    """Whether the context is a recipe's, which is cut to the model's own."""
    source = click.get_current_context().get_parameter_source("context")
    return options["context"] is not None and source is ParameterSource.DEFAULT


def _foreign(device: str) -> Profile | None:
    """Read the profile of another device, where a file was named."""
    if device in ("cpu", "webgpu"):
        return None
    from edgespec.planning.profiles import read_profile

    return read_profile(Path(device))


def _request(
    options: dict[str, Any], profile: Profile | None, foreign: Profile | None, found: Sequence[Option]
) -> PlanRequest:
    from edgespec.errors import InvalidRequest
    from edgespec.planning.budget import available_memory, check_budget, parse_bytes, show_bytes
    from edgespec.planning.plan import PlanRequest
    from edgespec.planning.speed import read_bandwidth
    from edgespec.runtimes.ort.session import default_threads

    if options["budget"] is None:
        budget = foreign.machine.memory if foreign else available_memory().reachable
    else:
        budget = parse_bytes(options["budget"])
        if not foreign:
            check_budget(budget, available_memory())
        elif budget > foreign.machine.memory:
            raise InvalidRequest(
                f"a budget of {show_bytes(budget)}: the device of {options['device']} has "
                f"{show_bytes(foreign.machine.memory)}",
                "give a smaller budget, or none",
            )
    load = replace(
        make_load_options(options),
        threads=options["threads"] or (profile.threads if profile else None),
        device=foreign.device if foreign else options["device"],
    )
    batch = options["batch"] or (4 if options["goal"] == "batch" else 1)
    bandwidth = None
    if foreign is None and load.device == "cpu":
        bandwidth = read_bandwidth(load.threads or default_threads())
    disk = _disk(found, budget) if foreign is None else None
    return PlanRequest(budget, options["goal"], batch, load, foreign, bandwidth, disk)


def _disk(found: Sequence[Option], budget: int) -> float | None:
    """Measure how fast the disk of a bundle that does not fit reads weights; None = all fit, or none exists."""
    from edgespec.planning.streaming import can_stream, disk_of
    from edgespec.planning.weights import streamed_bytes
    from edgespec.runtimes.options import RunOptions

    for one in found:
        target = one.manifest.target
        large = streamed_bytes(target, one.manifest.files) > budget // 2 and can_stream(target, RunOptions())
        if large and (rate := disk_of(Path(one.name), one.manifest)):
            return rate
    return None


def _show(plan: Plan, everything: bool) -> None:
    from rich.table import Table

    from edgespec.planning.budget import show_bytes
    from edgespec.planning.plan import label

    table = Table(box=None, pad_edge=False)
    left_out = () if any(one.kl is not None for one in plan.candidates) else ("KL",)
    sizes = ("context", "peak", "private", "mapped", "tok/s", "speed-up")
    for title in ("", "format", "KL", "method", "keys", *sizes, "source"):
        side: Any = "right" if title in ("KL", *sizes) else "left"
        if title not in left_out:
            table.add_column(title, justify=side, no_wrap=True)
    shown = plan.candidates if everything else _shown(plan)
    for one in shown:
        rate = one.speed.tokens_per_second
        table.add_row(
            "pick" if one is plan.pick else "" if one.fits else "too large",
            one.format + (" high" if one.precision == "high" else ""),
            *(() if left_out else ("-" if one.kl is None else f"{one.kl:.2g}",)),
            one.use.method,
            one.use.attention or "",
            str(one.use.context),
            *(show_bytes(count) for count in (one.memory.peak, one.memory.private, one.memory.file)),
            f"{rate:.1f}" if rate else "-",
            f"{one.speed.speedup:.2f}x" if one.speed.speedup else "-",
            one.speed.basis or "",
        )
    console = table_console()
    console.width = max(console.width, 110)  # a narrower table says nothing
    console.print(table)
    if left := len(plan.candidates) - len(shown):
        own = (
            ", those with only the high planes to a different text"
            if any(one.precision == "high" for one in plan.candidates)
            else ""
        )
        click.echo(f"{left} more with --all or --json; every one is lossless{own}")
    if plan.pick is None:
        return
    click.echo(f"pick: {label(plan.pick)}: {plan.reason}")
    if plan.pick.precision == "high":
        click.echo("run it: --precision high")
    if typed := _export_command(plan.pick.option, plan.pick.use.method):
        click.echo(f"make it: {typed}")
    for hint in plan.hints:
        click.echo(f"hint: {hint}")


def _shown(plan: Plan) -> Sequence[PlannedRun]:
    """Pick the candidates worth a line: coarser keys only where they are the way out, and the best of high planes."""
    if plan.pick is None or plan.pick.approximates:
        return plan.candidates[:MOST_LINES]
    own = [one for one in plan.candidates if not one.approximates]
    high = [one for one in plan.candidates if one.approximates == 2][:1]
    return [*own[: MOST_LINES - len(high)], *high]
