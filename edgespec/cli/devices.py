"""``edgespec devices``."""

from __future__ import annotations

from dataclasses import asdict

import click

from edgespec.cli.common import emit_json, json_option


@click.command("devices")
@json_option
def command(as_json: bool) -> None:
    """Show where bundles can run here, and why not elsewhere.

    \b
    edgespec devices
    edgespec devices --json
    """
    from edgespec.runtimes.devices.webgpu import device_states

    found = device_states()
    if as_json:
        emit_json({"devices": [asdict(state) for state in found]})
        return
    for state in found:
        kinds = f" ({', '.join(state.precisions)})" if state.precisions else ""
        click.echo(f"{state.name}: {'usable' if state.usable else 'not usable'}: {state.reason}{kinds}")
        if state.hint:
            click.echo(f"  hint: {state.hint}")
