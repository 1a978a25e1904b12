"""``edgespec cache``."""

from __future__ import annotations

import time

import click

from edgespec.cli.common import emit_json, json_option, option, print_table
from edgespec.planning.budget import parse_bytes, prompt_limit, show_bytes
from edgespec.runtimes.files.cache import KINDS, PROMPTS, Entry, cache_folder, entries, remove, set_limit, size_limit


@click.group("cache")
def command() -> None:
    """Show, clear and limit what is kept between runs: converted weights, prompts, profiles, skip sets, digests.

    All of it is recreated when needed.  The folder is EDGESPEC_CACHE, else the user's cache folder.  Every
    subcommand has --json.

    \b
    edgespec cache list
    edgespec cache limit 5GiB
    edgespec cache clear prompts
    edgespec cache clear weights --gone
    """


@command.command("list")
@json_option
def listing(as_json: bool) -> None:
    """Show what is kept, how large it is, and when it was used.

    \b
    edgespec cache list
    edgespec cache list --json
    """
    from edgespec.runtimes.files.prompts import room_for

    found, limit, most = list(entries()), size_limit(), room_for(prompt_limit())
    size = sum(entry.bytes for entry in found)
    prompts = [entry for entry in found if entry.kind == PROMPTS]
    tokens, own = sum(entry.tokens for entry in prompts), sum(entry.bytes for entry in prompts)
    if as_json:
        emit_json(
            {
                "folder": str(cache_folder()),
                "limit": limit,
                "bytes": size,
                "entries": [entry.as_dict() for entry in found],
                "prompts": {"bytes": own, "limit": most, "tokens": tokens},
            }
        )
        return
    if found:
        largest = sorted(found, key=lambda entry: -entry.bytes)
        rows = [(one.kind, show_bytes(one.bytes), _ago(one.used), _what(one)) for one in largest]
        print_table(("kind", "size", "used", "what"), rows)
    bound = "no limit" if limit is None else f"limit {show_bytes(limit)}"
    click.echo(f"{show_bytes(size - own)} in {cache_folder()}, {bound}")
    if prompts:
        click.echo(f"{show_bytes(own)} of prompts, {tokens} tokens, limit {show_bytes(most)}")
    if gone := sum(entry.bytes for entry in found if entry.gone):
        click.echo(f"{show_bytes(gone)} belong to bundles that are gone: edgespec cache clear weights --gone")


@command.command("clear")
@click.argument("kinds", type=click.Choice(list(KINDS)), nargs=-1)
@option("--gone", "Only weights and prompts whose bundle was deleted or changed.", bool)
@json_option
def clear(kinds: tuple[str, ...], gone: bool, as_json: bool) -> None:
    """Remove what is kept of these KINDS: weights, prompts, profiles, skip-sets, tokenizers, devices, digests, rows,
    passes.  None = all of them.

    \b
    edgespec cache clear
    edgespec cache clear weights --gone
    edgespec cache clear profiles skip-sets --json
    """
    wanted = [entry for entry in entries() if entry.kind in (kinds or KINDS) and (entry.gone or not gone)]
    _tell([entry for entry in wanted if remove(entry)], as_json, len(wanted))


@command.command("limit")
@click.argument("size")
@json_option
def limit(size: str, as_json: bool) -> None:
    """Keep the cache, prompts left out, below SIZE, as in 5GiB, from now on; off = no limit.

    Where it would become larger, converted weights are removed: those of bundles that are gone first, then those that
    were used longest ago.  Weights in conversion stay, regardless of their size.

    \b
    edgespec cache limit 5GiB
    edgespec cache limit off
    """
    _tell(set_limit(None if size == "off" else parse_bytes(size)), as_json)


def _tell(removed: list[Entry], as_json: bool, wanted: int = 0) -> None:
    """Report what was removed, and what could not be removed."""
    freed, kept = sum(entry.bytes for entry in removed), max(0, wanted - len(removed))
    if as_json:
        emit_json({"removed": [entry.as_dict() for entry in removed], "bytes": freed, "kept": kept})
        return
    click.echo(f"removed {len(removed)} of what was kept, {show_bytes(freed)}")
    if kept:
        click.echo(f"{kept} could not be removed: the cache cannot be written, or a process has them open", err=True)


def _ago(seconds: float) -> str:
    """How long ago, in the largest unit."""
    passed = max(0.0, time.time() - seconds)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if passed >= length:
            return f"{passed / length:.0f} {unit} ago"
    return "now"


def _what(entry: Entry) -> str:
    if entry.source is None:
        return entry.path.name
    tokens = f"{entry.tokens} tokens, " if entry.tokens else ""
    return f"{tokens}{entry.source}{' (gone)' if entry.gone else ''}"
