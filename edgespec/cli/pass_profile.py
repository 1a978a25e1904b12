"""``edgespec bench --profile``: where the time of a pass goes, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import emit_json, open_engine, table_console


def show_profiles(bundles: tuple[Path, ...], options: dict[str, Any], as_json: bool) -> None:
    """Profile the passes of every bundle and print them."""
    from edgespec.reports.measuring import profile_passes

    found = []
    for bundle in dict.fromkeys(bundles):
        with open_engine(bundle, options) as engine:
            found.append({"bundle": str(bundle)} | profile_passes(engine).as_dict())
    if as_json:
        emit_json({"profiles": found})
        return
    for profile in found:
        _show(profile)


def _show(profile: dict[str, Any]) -> None:
    from rich.table import Table

    click.echo(
        f"{profile['bundle']}: {profile['isa']} kernels, {profile['threads']} threads, "
        f"{profile['depth']} tokens before a pass\n"
        f"this machine: {profile['bandwidth_gb_s']:.1f} GB/s read, {profile['dot_gmac_s']:.0f} GMAC/s multiplied; "
        f"a row reads {profile['planned_mb']:.0f} MB by the plan"
    )
    names = list(profile["passes"][0]["parts"])
    table = Table("rows", "ms", "v", "MB", "GMAC", *names, "Python", "of roof", box=None, pad_edge=False)
    for row in profile["passes"]:
        parts = row["parts"]
        cells = [f"{parts[name]['ms'] / row['ms']:.0%}{_of_roof(parts[name]['roof_share'])}" for name in names]
        table.add_row(
            str(row["rows"]),
            f"{row['ms']:.2f}",
            f"{row['v']:.2f}",
            f"{sum(part['mb'] for part in parts.values()):.0f}",
            f"{sum(part['gmac'] for part in parts.values()):.2f}",
            *cells,
            f"{row['python_ms'] / row['ms']:.0%}",
            f"{row['least_ms'] / row['ms']:.0%}",
        )
    console = table_console()
    console.width = max(console.width, 100)
    console.print(table)
    click.echo("a part: its share of the time (and what it reaches of the higher of its two roofs)")


def _of_roof(share: float | None) -> str:
    return "" if share is None else f" ({share:.0%})"
