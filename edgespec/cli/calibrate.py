"""``edgespec calibrate``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import (
    PATH,
    GroupedCommand,
    attention_option,
    bundle_argument,
    check_option,
    emit_json,
    group,
    json_option,
    make_load_options,
    operators_option,
    option,
    progress,
    prompts_option,
    table_console,
    threads_option,
)
from edgespec.engine.exactness import EXACT, NEAR_TIES

if TYPE_CHECKING:
    from edgespec.planning.profiles import Profile


@click.command("calibrate", cls=GroupedCommand)
@bundle_argument
@option("-o --output", "Also write the profile to this file, for `plan --device`.", PATH)
@option("--context", "Longest context to time.  [default: the bundle's]", click.IntRange(min=2))
@option(
    "--duration",
    "Time to measure, not counting loading.  [default: 15]",
    click.FloatRange(min=0.1, max=3600),
    dest="seconds",
)
@prompts_option
@option("--force", "Measure again even if there is a profile.", bool)
@group(
    "Devices and loading",
    threads_option,
    option("--device", "Device to run on.", ["cpu", "webgpu"], "cpu"),
    operators_option,
    attention_option,
    option("--strict/--no-strict", "Rows with the same bits in every pass, as `run` has it.", default=True),
    check_option,
)
@json_option
def command(
    bundle: Path, output: Path | None, prompts: Path | None, force: bool, as_json: bool, **options: Any
) -> None:
    """Measure this device with a bundle: passes, drafts, prefill, every method.

    The profile is kept, and `edgespec plan` uses it, until the machine, ONNX Runtime, the operators or the bundle
    change.  With --output, another machine can plan for this one.

    \b
    edgespec calibrate demo
    edgespec calibrate demo --duration 30 --force
    edgespec calibrate demo -o phone.json --json
    """
    from edgespec.cli.prompts import read_prompt_file
    from edgespec.engine.encoders import require_writer
    from edgespec.planning.footprint import process_bytes
    from edgespec.planning.profiles import (
        find_profile,
        manifest_hash,
        profile_path,
        save_profile,
        why_none,
        write_profile,
    )
    from edgespec.reports.calibrate import SECONDS, calibrate
    from edgespec.runtimes.files.bundle import Bundle
    from edgespec.runtimes.text.codec import TextCodec

    if options["seconds"] is not None and math.isnan(options["seconds"]):  # in no range, and yet click takes it
        raise click.UsageError("--duration nan: expected a number from 0.1 to 3600")
    load = make_load_options(options)
    opened = Bundle.open(bundle, check=load.check)
    require_writer(opened.manifest)
    where = manifest_hash(opened.manifest), load.resolve(opened.manifest)
    _check_output(output)
    texts = read_prompt_file(prompts) if prompts else []
    options["prompts"] = tuple(map(tuple, map(TextCodec(bundle).encode, texts))) if texts else ()
    profile = None if force else find_profile(opened.manifest, load)
    reasons: list[str] = []
    if profile is not None and (reasons := _unlike(profile, options)):
        profile = None
    cached = profile is not None
    if profile is None:
        reasons = reasons or (["asked for"] if force else why_none(*where, bundle.resolve().name))
        if reasons and not as_json:
            click.echo(f"calibrating again: {'; '.join(reasons)}", err=True)
        with progress() as report:
            report("load", 0, 1, str(bundle))
            how = {"seconds": options["seconds"] or SECONDS, "prompts": options["prompts"]}
            profile = calibrate(opened, load, **how, process=process_bytes(), progress=report)
        save_profile(profile)
    if output is not None:
        write_profile(profile, output)
    file = profile_path(*where)
    if as_json:
        data = profile.model_dump(mode="json")
        emit_json({"bundle": str(bundle), "cached": cached, "reasons": reasons, "file": str(file), "profile": data})
    else:
        _show(profile, cached, file, output)


def _check_output(output: Path | None) -> None:
    """Refuse early what cannot be written."""
    from edgespec.errors import ProfileError

    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        what = "is a folder" if output.is_dir() else f"there is no folder {output.resolve().parent}"
        raise ProfileError(f"{output}: cannot be written: {what}", "name a file in a folder that exists")


def _unlike(profile: Profile, options: dict[str, Any]) -> list[str]:
    """List requested settings that a stored profile lacks; other settings may differ."""
    from edgespec.planning.profiles import prompts_digest

    found = []
    if options["context"] is not None and profile.context < options["context"]:
        found.append(f"measured for a context of {profile.context} tokens only")
    if options["prompts"] and profile.prompts != prompts_digest(options["prompts"]):
        found.append("methods were tried on other prompts")
    return found


def _show(profile: Profile, cached: bool, file: Path, output: Path | None) -> None:
    from rich.table import Table

    console, machine = table_console(), profile.machine
    console.print(f"{machine.processor}, {profile.threads} threads, {profile.operators} operators, {profile.device}")
    sizes = sorted({rows for times in profile.passes.values() for rows in times})
    table = Table("depth", *(f"{rows} row{'s' * (rows > 1)}" for rows in sizes), "prefill", box=None, pad_edge=False)
    for depth, times in sorted(profile.passes.items()):
        rate = profile.prefill.get(depth)
        cells = [f"{times[rows]:.2f} ms" if rows in times else "-" for rows in sizes]
        table.add_row(str(depth), *cells, f"{rate:.0f} tok/s" if rate else "-")
    console.print(table)
    methods = Table("method", "draft step", "tok/round", "accepted", "speed-up", box=None, pad_edge=False)
    for name in dict.fromkeys([*profile.drafts, *profile.trials]):
        step, trial = profile.drafts.get(name, {}), profile.trials.get(name)
        methods.add_row(
            name,
            f"{step[min(step)]:.2f} ms" if step else "-",
            f"{trial.tokens_per_round:.2f}" if trial else "-",
            f"{100 * trial.accepted / trial.drafted:.0f} %" if trial and trial.drafted else "-",
            f"{trial.speedup:.2f}x" if trial else "-",
        )
    console.print(methods)
    console.print(f"weights are read at {profile.bandwidth / 1e9:.1f} GB/s")
    console.print(f"rows of a pass, compared with plain decoding's: {EXACT if profile.rows_exact else NEAR_TIES}")
    for note in profile.notes:
        console.print(note)
    if profile.busy:
        console.print(f"{profile.busy}. `plan` makes no use of this; calibrate again when nothing else runs.")
    if cached:
        console.print(f"measured {profile.created}, kept since; --force measures again")
    else:
        console.print(f"measured in {profile.seconds:.1f} s, kept in {file}")
    if output is not None:
        console.print(f"written to {output}")
