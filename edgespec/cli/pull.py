"""``edgespec pull``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import emit_json, json_option, table_console
from edgespec.cli.groups import option
from edgespec.planning.budget import show_bytes


@click.command("pull")
@click.argument("model", required=False)
@option("--revision", "Branch, tag or commit.  [default: the model's main branch]")
@option("--list", "Show the models that were downloaded before.", bool, dest="listing")
@json_option
def command(model: str | None, revision: str | None, listing: bool, as_json: bool) -> None:
    """Download a model from the hub, the files that an export needs and no others.

    They lie in the hub's own cache (HF_HOME), where `edgespec export` finds them without a network.  A token for models
    behind a gate is taken from where the hub's own tools keep it.

    \b
    edgespec pull HuggingFaceTB/SmolLM2-135M-Instruct
    edgespec pull --list
    """
    if listing == (model is not None):
        raise click.UsageError("give a model's hub id, or --list")
    if model is None:
        _list(as_json)
        return
    from edgespec.errors import InvalidRequest
    from edgespec.export.source.source import resolve

    if model.count("/") != 1 or Path(model).exists():
        raise InvalidRequest(f"{model}: expected a hub id, as in OWNER/NAME", "a local model need not be pulled")
    folder = resolve(model, revision)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if as_json:
        emit_json({"model": model, "folder": str(folder), "bytes": size})
    else:
        click.echo(f"{model}: {show_bytes(size)} in {folder}")
        click.echo(f"next: edgespec export {model} --method self-spec")


def _list(as_json: bool) -> None:
    """The models in the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except CacheNotFound:
        repos = []
    rows: list[dict[str, Any]] = [
        {"model": repo.repo_id, "bytes": repo.size_on_disk, "folder": str(repo.repo_path)}
        for repo in repos
        if repo.repo_type == "model"
    ]
    if as_json:
        emit_json({"models": rows})
        return
    if not rows:
        click.echo("no model was downloaded yet")
        return
    from rich.table import Table

    table = Table("model", "size", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["model"], show_bytes(row["bytes"]))
    table_console().print(table)
