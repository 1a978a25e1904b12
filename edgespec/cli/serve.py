"""``edgespec serve``: a bundle behind OpenAI's API."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import (
    PATH,
    GroupedCommand,
    bundle_argument,
    emit_json,
    group,
    json_option,
    loading_options,
    memory_options,
    open_engine,
    option,
    prompt_cache_option,
)
from edgespec.planning.footprint import SERVER
from edgespec.runtimes.process import one_arena
from edgespec.runtimes.text.call_formats import FORMATS
from edgespec.server.scheduler import Limits

KEY = "EDGESPEC_API_KEY"
FORMAT = click.Choice(list(FORMATS))


@click.command("serve", cls=GroupedCommand)
@bundle_argument
@option("--host", "Address to listen on.", default="127.0.0.1")
@option("--port", "0 takes a free one.", click.IntRange(0, 65535), 8000)
@option("--name", "What clients call the model.  [default: the bundle's folder]")
@option("--tool-format", "How the model writes calls of tools.  [default: as its chat template says]", FORMAT)
@option("--ngram-store", "A file of `edgespec ngram build`.", PATH)
@memory_options
@prompt_cache_option
@group(
    "Access",
    option(
        "--api-key",
        f"What clients must send as bearer token; several: any.  [default: ${KEY}, else none]",
        multiple=True,
    ),
    option("--allow-host", "A name by which clients may call it; '*': any.", multiple=True),
    option("--allow-origin", "Web pages that may use it, as https://chat.example; '*': any.", multiple=True),
    option("--no-page", "No page at /: only the API.", bool),
    option("--no-log", "No line on stderr for each request.", bool),
    option("--share-prefixes", "Reuse what was computed for one client for others, who may notice.", bool),
)
@group(
    "Limits",
    option("--parallel", "Texts decoded together.", int, Limits.parallel),
    option("--queue", "Texts that may wait.", int, Limits.queue),
    option("--most-tokens", "New tokens of a text.", int, Limits.tokens),
    option("--most-body", "Bytes of a request's body.", int, Limits.body),
    option("--seconds", "Time of a request.", float, Limits.seconds),
    option("--grace", "Seconds to end them at a stop.", float, Limits.grace),
    option("--connections", "Open at once.", int, Limits.connections),
    option("--arrive", "Seconds for a request to be there whole.", float, Limits.arrive),
    option("--idle", "Seconds between two requests.", float, Limits.idle),
)
@loading_options
@json_option
def command(
    bundle: Path, host: str, port: int, name: str | None, api_key: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Serve a bundle: OpenAI's completions and chats over HTTP, several requests decoded together.

    \b
    edgespec serve demo                     # http://127.0.0.1:8000/ is a page to talk to it
    edgespec serve demo --port 9000 --parallel 8 --api-key secret
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"model": "demo", "prompt": "ROMEO:", "max_tokens": 40, "temperature": 0}'

    It listens on this machine alone unless --host says otherwise; then set a key.
    """
    from edgespec.server.app import Access, make_app
    from edgespec.server.guard import is_local
    from edgespec.server.serving import Server, listen

    one_arena()
    options |= {"tokens": options["most_tokens"], "body": options["most_body"]}
    limits = Limits(**{field.name: options[field.name] for field in fields(Limits)})
    keys = api_key or ((os.environ[KEY],) if KEY in os.environ else ())
    access = Access(keys, (*options["allow_host"], host), options["allow_origin"], options["share_prefixes"])
    with listen(host, port) as socket:
        engine = open_engine(bundle, options)
        engine.allowance.set_aside(SERVER)
        engine.allowance.admit_bundle(options.get("context"))
        model, root = name or bundle.resolve().name, f"http://{host}:{socket.getsockname()[1]}"
        url, page = f"{root}/v1", None if options["no_page"] else f"{root}/"
        app = make_app(
            engine, model, limits, access, page is not None, options["tool_format"], None if options["no_log"] else _log
        )
        if not keys and not is_local(host):
            click.echo(f"warning: whoever reaches {host} may use this server; --api-key asks for a key", err=True)

        def started() -> None:
            click.echo(
                f"{model} at {url} (Ctrl-C stops)" + (f"; a page to talk to it at {page}" if page else ""), err=True
            )
            if as_json:
                said = {"model": model, "url": url, "page": page}
                emit_json(said | {"methods": engine.methods, "context": engine.context})

        Server(app, socket, limits, lambda text: click.echo(text, err=True), started).run()


def _log(line: str) -> None:
    """Write a line on stderr, without the lock of Python's own streams: the process may end meanwhile."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode("utf-8", "replace"))
