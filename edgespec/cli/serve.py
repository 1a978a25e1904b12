"""``edgespec serve``: a bundle behind OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import bundle_argument, emit_json, json_option, loading_options, memory_options, open_engine
from edgespec.cli.groups import GroupedCommand, group
from edgespec.planning.footprint import SERVER
from edgespec.runtimes.process import one_arena
from edgespec.server.limits import Limits

KEY = "EDGESPEC_API_KEY"


@click.command("serve", cls=GroupedCommand)
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--name", help="What clients call the model.  [default: the bundle's folder]")
@click.option("--ngram-store", type=click.Path(path_type=Path), help="A file of `edgespec ngram build`.")
@memory_options
@group(
    "Access",
    click.option(
        "--api-key",
        multiple=True,
        help=f"What clients must send as bearer token; several: any.  [default: ${KEY}, else none]",
    ),
    click.option("--allow-host", multiple=True, help="A name by which clients may call it; '*': any."),
    click.option(
        "--allow-origin", multiple=True, help="Of web pages that may use it, as https://chat.example; '*': any."
    ),
    click.option(
        "--share-prefixes", is_flag=True, help="Reuse what was computed for one client for others, who may notice."
    ),
)
@group(
    "Limits",
    click.option("--parallel", type=int, default=Limits.parallel, show_default=True, help="Texts decoded together."),
    click.option("--queue", type=int, default=Limits.queue, show_default=True, help="Texts that may wait."),
    click.option("--most-tokens", type=int, default=Limits.tokens, show_default=True, help="New tokens of a text."),
    click.option("--most-body", type=int, default=Limits.body, show_default=True, help="Bytes of a request's body."),
    click.option("--seconds", type=float, default=Limits.seconds, show_default=True, help="Time of a request."),
    click.option("--grace", type=float, default=Limits.grace, show_default=True, help="Seconds to end them at a stop."),
    click.option("--connections", type=int, default=Limits.connections, show_default=True, help="Open at once."),
    click.option(
        "--arrive",
        type=float,
        default=Limits.arrive,
        show_default=True,
        help="Seconds for a request to be there whole.",
    ),
    click.option("--idle", type=float, default=Limits.idle, show_default=True, help="Seconds between two requests."),
)
@loading_options
@json_option
def command(
    bundle: Path,
    host: str,
    port: int,
    name: str | None,
    api_key: tuple[str, ...],
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    share_prefixes: bool,
    parallel: int,
    queue: int,
    most_tokens: int,
    most_body: int,
    seconds: float,
    grace: float,
    connections: int,
    arrive: float,
    idle: float,
    as_json: bool,
    **how: Any,
) -> None:
    """Serve a bundle: OpenAI's completions and chats over HTTP, several requests decoded together.

    \b
    edgespec serve demo
    edgespec serve demo --port 9000 --parallel 8 --api-key secret
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"model": "demo", "prompt": "ROMEO:", "max_tokens": 40, "temperature": 0}'

    It listens on this machine alone unless --host says otherwise; then set a key.
    """
    from edgespec.server.app import Access, make_app
    from edgespec.server.guard import is_local
    from edgespec.server.serving import Server, listen

    one_arena()
    limits = Limits(parallel, queue, most_tokens, most_body, seconds, grace, connections, arrive, idle)
    keys = api_key or ((os.environ[KEY],) if KEY in os.environ else ())
    access = Access(keys, (*allow_host, host), allow_origin, share_prefixes)
    with listen(host, port) as socket:
        engine = open_engine(bundle, how)
        engine.allowance.set_aside(SERVER)
        engine.allowance.admit_bundle(how.get("context"))
        model, url = name or bundle.resolve().name, f"http://{host}:{socket.getsockname()[1]}/v1"
        app = make_app(engine, model, limits, access)
        if not keys and not is_local(host):
            click.echo(f"warning: whoever reaches {host} may use this server; --api-key asks for a key", err=True)

        def started() -> None:
            click.echo(f"{model} at {url} (Ctrl-C stops)", err=True)
            if as_json:
                emit_json({"model": model, "url": url, "methods": engine.methods, "context": engine.context})

        Server(app, socket, limits, lambda text: click.echo(text, err=True), started).run()
