"""``edgespec paths``."""

from __future__ import annotations

import click

from edgespec.cli.common import emit_json, json_option


@click.command("paths")
@json_option
def command(as_json: bool) -> None:
    """Show where programs in C find edgespec: header, library, CMake package, pkg-config file.

    \b
    edgespec paths
    edgespec paths --json
    """
    from edgespec.runtimes.ort.native_library import c_paths

    found = c_paths()
    if as_json:
        emit_json({name: str(path) for name, path in found.items()})
        return
    for name, path in found.items():
        click.echo(f"{name:10} {path}")  # whole, however narrow the terminal is
