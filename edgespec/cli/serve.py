"""``edgespec serve``: a bundle behind OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import bundle_argument, emit_json, json_option, loading_options, memory_options, open_engine
from edgespec.cli.groups import GroupedCommand, group
from edgespec.errors import InvalidRequest
from edgespec.runtimes.process import one_arena
from edgespec.server.limits import Limits

KEY = "EDGESPEC_API_KEY"


@click.command("serve", cls=GroupedCommand)
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--name", help="What clients call the model.  [default: the bundle's folder]")
@click.option("--api-key", help=f"What clients must send as bearer token.  [default: ${KEY}, else none]")
@click.option("--ngram-store", type=click.Path(path_type=Path), help="A file of `edgespec ngram build`.")
@memory_options
@group(
    "Limits",
    click.option("--parallel", type=int, default=Limits.parallel, show_default=True, help="Requests decoded together."),
    click.option("--queue", type=int, default=Limits.queue, show_default=True, help="Requests that may wait."),
    click.option("--most-tokens", type=int, default=Limits.tokens, show_default=True, help="New tokens of a request."),
    click.option("--most-body", type=int, default=Limits.body, show_default=True, help="Bytes of a request's body."),
    click.option("--seconds", type=float, default=Limits.seconds, show_default=True, help="Time of a request."),
    click.option("--grace", type=float, default=Limits.grace, show_default=True, help="Seconds to end them at a stop."),
)
@loading_options
@json_option
def command(
    bundle: Path,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    parallel: int,
    queue: int,
    most_tokens: int,
    most_body: int,
    seconds: float,
    grace: float,
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
    import uvicorn

    from edgespec.server.app import make_app

    one_arena()
    limits = Limits(parallel, queue, most_tokens, most_body, seconds, grace)
    engine = open_engine(bundle, how)
    app = make_app(engine, name or bundle.resolve().name, limits, api_key or os.environ.get(KEY) or None)
    config = uvicorn.Config(
        app, host, port, log_level="warning", timeout_graceful_shutdown=max(1, round(grace)), lifespan="on"
    )
    server = uvicorn.Server(config)
    try:
        socket = config.bind_socket()
    except SystemExit as error:  # it has logged why
        raise InvalidRequest(f"cannot listen on {host}:{port}", "--port 0 takes a free port") from error
    socket.listen(config.backlog)  # whoever reads the address below may connect at once
    model, url = name or bundle.resolve().name, f"http://{host}:{socket.getsockname()[1]}/v1"
    click.echo(f"{model} at {url} (Ctrl-C stops)", err=True)
    if as_json:
        emit_json({"model": model, "url": url, "methods": engine.methods, "context": engine.context})
    server.run(sockets=[socket])
