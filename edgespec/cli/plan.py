"""``edgespec plan``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import emit_json, json_option, table_console

if TYPE_CHECKING:
    from edgespec.planning.plan import Plan, Wish
    from edgespec.planning.profile import Profile

FORMATS = ("int4", "int8", "w8a8", "fp32")


@click.command("plan")
@click.argument("source", metavar="MODEL|BUNDLE")
@click.option("--budget", help="Most memory, as in 1.5GiB.  [default: what is free here, or the device's]")
@click.option("--context", type=int, help="Tokens to hold.  [default: 4096, fewer where they do not fit]")
@click.option("--batch", type=click.IntRange(min=1), help="Sequences together.  [default: 1; for goal batch 4]")
@click.option(
    "--goal",
    type=click.Choice(["auto", "chat", "batch", "memory", "quality"]),
    default="auto",
    show_default=True,
    help="Most tokens a second (auto, chat), of several sequences, least memory, or the finest format that fits.",
)
@click.option(
    "--device",
    "device",
    default="cpu",
    show_default=True,
    help="cpu, webgpu, or a file of `calibrate -o`.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of ONNX Runtime.  [default: all]")
@click.option(
    "--operators",
    type=click.Choice(["auto", "native", "stock"]),
    default="auto",
    show_default=True,
    help="edgespec's own, or ONNX Runtime's.",
)
@click.option(
    "--attention",
    type=click.Choice(["f32", "f16", "int8", "int4", "nomad", "nomad2"]),
    help="How native operators keep keys.  [default: the bundle's; int8 where nothing else fits]",
)
@click.option("--format", "formats", multiple=True, type=click.Choice(FORMATS), help="Of a model: only these.")
@click.option("--method", "methods", multiple=True, help="Only these; may be repeated.  [default: all]")
@click.option("--draft", help="Of a model: the draft for method speculative: folder, hub id or builtin:NAME.")
@click.option("--revision", help="Of a hub model.")
@click.option("--recipe", help="Take context, methods, format and budget from a recipe; --recipe list shows them.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the memory parts into this PNG.")
@json_option
def command(source: str, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Say what fits a memory budget, how fast it will be, and why.

    Nothing is loaded: a bundle is planned by its manifest, a model by its config.json.  Speeds rest on what
    `edgespec calibrate` measured of the device, else on the export's figures or on assumptions, which are named.

    \b
    edgespec plan demo --budget 1GiB
    edgespec plan ./Qwen2.5-0.5B-Instruct --budget 1.5GiB --context 4096 --goal quality
    edgespec plan builtin:shakespeare --budget 300MB --json
    edgespec plan demo --device phone.json --plot memory.png
    """
    from edgespec.planning.plan import make_plan

    start = time.perf_counter()
    if plot is not None:
        from edgespec.bench import check_plot

        check_plot(plot)
    options = _by_recipe(options)
    wish = _wish(source, options)
    plan = make_plan(_options(source, options), wish)
    if plot is not None:
        from edgespec.planning.plot import plot_plan

        plot_plan(plan, plot)
    if as_json:
        emit_json({"source": source, "seconds": time.perf_counter() - start} | plan.as_dict())
    else:
        _show(plan)
    if plan.pick is None:
        from edgespec.errors import BudgetError

        raise BudgetError(plan.reason, "; ".join(plan.hints))


def _by_recipe(options: dict[str, Any]) -> dict[str, Any]:
    """Options with those of a recipe where none were given."""
    name = options.pop("recipe")
    if name is None:
        return options
    from edgespec.planning.recipes import plan_defaults

    given = {key: value for key, value in options.items() if value not in (None, ())}
    source = click.get_current_context().get_parameter_source
    asked = {key: value for key, value in given.items() if str(source(key)) != "ParameterSource.DEFAULT"}
    return options | plan_defaults(name) | asked


def _options(source: str, options: dict[str, Any]) -> list[Any]:
    from edgespec.cli.plan_options import bundle_option, is_bundle, model_options
    from edgespec.errors import InvalidRequest

    if not is_bundle(source):
        names = ("formats", "methods", "draft", "context", "revision")
        return model_options(source, **{name: options[name] for name in names})
    for name in ("formats", "draft", "revision"):
        if options[name]:
            raise click.UsageError(f"--{name.rstrip('s')} is for models that are not exported yet")
    found = bundle_option(source)
    methods = options["methods"]
    if unknown := [name for name in methods if name not in found.manifest.methods]:
        raise InvalidRequest(
            f"method {unknown[0]!r} is not in this bundle; it has: {', '.join(found.manifest.methods)}",
            f"export it with `--method {unknown[0]}`",
        )
    if methods:
        kept = {name: part for name, part in found.manifest.methods.items() if name in methods}
        found = type(found)(found.manifest.model_copy(update={"methods": kept}), found.name)
    return [found]


def _wish(source: str, options: dict[str, Any]) -> Wish:
    """What is asked for: the budget and the device."""
    from edgespec.errors import InvalidRequest
    from edgespec.planning.budget import available_memory, check_budget, parse_bytes, show_bytes
    from edgespec.planning.plan import Wish
    from edgespec.runtimes.operators import choose_operators
    from edgespec.runtimes.ort import default_threads

    device, profile = _device(source, options)
    foreign = device == "cpu" and options["device"] not in ("cpu", "webgpu")
    if options["budget"] is not None:
        budget = parse_bytes(options["budget"])
        if not foreign:
            check_budget(budget, available_memory())
        elif profile is not None and budget > profile.machine.memory:
            raise InvalidRequest(
                f"a budget of {show_bytes(budget)}: the device of {options['device']} has "
                f"{show_bytes(profile.machine.memory)}",
                "give a smaller budget, or none",
            )
    else:
        budget = profile.machine.memory if foreign and profile else available_memory().available
    wanted = options["operators"]
    return Wish(
        budget,
        options["goal"],
        options["context"],
        options["batch"] or (4 if options["goal"] == "batch" else 1),
        (lambda manifest: profile.operators) if foreign and profile and wanted == "auto"
        else (lambda manifest: choose_operators(wanted, manifest.target).kind),
        options["attention"],
        options["threads"] or (profile.threads if profile else default_threads()),
        profile,
        device,
    )  # fmt: skip


def _device(source: str, options: dict[str, Any]) -> tuple[Any, Profile | None]:
    """The kind of device, and what was measured of it."""
    from edgespec.cli.plan_options import is_bundle
    from edgespec.planning.profile import find_profile, read_profile

    asked = options["device"]
    if asked not in ("cpu", "webgpu"):
        profile = read_profile(Path(asked))
        return profile.device, profile
    bundle = Path(source) if is_bundle(source) else None
    return asked, find_profile(bundle, device=asked, threads=options["threads"])


def _show(plan: Plan) -> None:
    from rich.table import Table

    from edgespec.planning.budget import show_bytes
    from edgespec.planning.plan import label

    console = table_console()
    table = Table(box=None, pad_edge=False)
    for title in ("", "candidate", "context", "peak", "private", "mapped", "tokens/s", "speed-up", "basis", "lossless"):
        table.add_column(title, justify="right" if title in ("context", "peak", "private", "mapped") else "left")
    for one in plan.candidates:
        rate = one.speed.tokens_per_second
        mark = "pick" if one is plan.pick else "" if one.fits else "too large"
        table.add_row(
            mark,
            label(one),
            str(one.use.context),
            show_bytes(one.memory.peak),
            show_bytes(one.memory.private),
            show_bytes(one.memory.file),
            f"{rate:.1f}" if rate else "-",
            f"{one.speed.speedup:.2f}x",
            one.speed.basis,
            "yes, int8 keys" if one.approximates else "yes",
        )
    console.print(table)
    if plan.pick is None:
        return
    click.echo(f"pick: {label(plan.pick)}: {plan.reason}")
    from edgespec.cli.plan_options import export_command

    if typed := export_command(plan.pick.option, plan.pick.use.method):
        click.echo(f"make it: {typed}")
    for hint in plan.hints:
        click.echo(f"hint: {hint}")
