"""``edgespec serve``: bundles over OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import (
    PATH,
    SAMPLING,
    GroupedCommand,
    adapters_option,
    emit_json,
    group,
    json_option,
    loading_options,
    make_load_options,
    make_ready,
    memory_options,
    option,
    prompt_cache_option,
    sampling_default_options,
)
from edgespec.cli.images import image_rows_option
from edgespec.runtimes.process import one_arena, short_turns
from edgespec.runtimes.text.call_formats import FORMATS
from edgespec.server.scheduler import Limits

KEY = "EDGESPEC_API_KEY"
FORMAT = click.Choice(list(FORMATS))


@click.command("serve", cls=GroupedCommand)
@click.argument("bundles", metavar="BUNDLE_OR_MODEL...", nargs=-1, required=True)
@option("--host", "Address to listen on.", default="127.0.0.1")
@option("--port", "Port to listen on; 0 takes a free one.", click.IntRange(0, 65535), 8000)
@option("--name", "Name of the model for clients; repeat once per model.  [default: the folder]", multiple=True)
@option("--tool-format", "Format of the model's tool calls.  [default: as its chat template says]", FORMAT)
@option("--ngram-store", "File made by `edgespec ngram build`, that method ngram also searches.", PATH)
@memory_options
@option(
    "--unload-after",
    "Free a model after this many minutes without a request.  [default: when others need the memory]",
    click.FloatRange(min=0, min_open=True),
    dest="idle_minutes",
)
@prompt_cache_option
@adapters_option
@group(
    "Access",
    option(
        "--api-key",
        f"Key that clients must send as bearer token; may be repeated.  [default: ${KEY}, else none]",
        multiple=True,
    ),
    option("--allow-host", "Host name by which clients may reach it; '*': any.", multiple=True),
    option("--allow-origin", "Origin of pages that may use it, as https://chat.example; '*': any.", multiple=True),
    option(
        "--image-folder",
        "Folder whose pictures requests may name, as file:NAME.  [default: none; pictures come with requests]",
        click.Path(exists=True, file_okay=False, path_type=Path),
    ),
    option("--no-page", "Serve only the API, no page at /.", bool),
    option("--no-log", "Do not log requests on stderr.", bool),
    option("--share-prefixes", "Share cached prompts between clients, who may notice it.", bool),
)
@sampling_default_options
@group(
    "Limits",
    image_rows_option,
    option(
        "--max-batch-size", "Maximum number of texts that are decoded together.", int, Limits.parallel, dest="parallel"
    ),
    option("--queue", "Texts that may wait.", int, Limits.queue),
    option("--max-tokens", "Maximum number of new tokens of an answer.", int, Limits.tokens, dest="most_tokens"),
    option(
        "--max-body-size",
        "Maximum size of a request body, in bytes.  [default: 1 MiB; 25 MiB for models that read sound or pictures]",
        int,
        dest="most_body",
    ),
    option("--request-timeout", "Time limit of a request, in seconds.", float, Limits.seconds, dest="seconds"),
    option(
        "--shutdown-timeout",
        "Time that running requests get when the server stops, in seconds.",
        float,
        Limits.grace,
        dest="grace",
    ),
    option("--connections", "Connections open at once.", int, Limits.connections),
    option("--read-timeout", "Time limit for receiving a request, in seconds.", float, Limits.arrive, dest="arrive"),
    option(
        "--keep-alive-timeout",
        "Seconds that a connection may stay open without a request.",
        float,
        Limits.idle,
        dest="idle",
    ),
)
@loading_options
@json_option
def command(
    bundles: tuple[str, ...],
    host: str,
    port: int,
    name: tuple[str, ...],
    idle_minutes: float | None,
    api_key: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Serve models over HTTP: OpenAI's and Anthropic's APIs, several requests decoded together.

    A model is a bundle's folder or name, or a model that `edgespec run` takes; its bundle is made first.
    With several, the field `model` of a request picks one.  It is loaded when it is first asked for, and freed when
    another one needs its memory, or after --unload-after.

    It listens on this machine only, unless --host says otherwise. If others can reach it, set a key.

    \b
    edgespec serve demo                     # http://127.0.0.1:8000/ is a page to talk to it
    edgespec serve demo --port 9000 --max-batch-size 8 --api-key secret
    edgespec serve Qwen/Qwen2.5-0.5B-Instruct --name qwen
    edgespec serve qwen coder embedder --budget 6GiB --unload-after 15
    edgespec serve qwen --adapter poet=./lora   # clients ask for the model qwen or qwen:poet
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"model": "demo", "prompt": "ROMEO:", "max_tokens": 40, "temperature": 0}'
    """
    from edgespec.server.app import Access, make_app
    from edgespec.server.audio import MOST_BODY
    from edgespec.server.hosts import is_local
    from edgespec.server.models import Models, named_bundles
    from edgespec.server.requestlog import LogWriter
    from edgespec.server.serving import Server, listen

    if options["adapters"] and len(bundles) > 1:
        raise click.UsageError("--adapter belongs to one model: serve it alone")
    one_arena()
    short_turns()
    options |= {"tokens": options["most_tokens"], "body": options["most_body"] or Limits.body}
    limits = Limits(**{field.name: options[field.name] for field in fields(Limits)})
    keys = api_key or ((os.environ[KEY],) if KEY in os.environ else ())
    access = Access(keys, (*options["allow_host"], host), options["allow_origin"])
    with listen(host, port) as socket:
        folders = [make_ready(one, options, takes_format=False) for one in bundles]
        if options["most_body"] is None and any(_takes_much(folder) for folder in folders):
            limits = replace(limits, body=MOST_BODY)
        idle = None if idle_minutes is None else 60 * idle_minutes
        models = Models(
            named_bundles(folders, name),
            make_load_options(options),
            limits,
            shared=options["share_prefixes"],
            calls=options["tool_format"],
            idle=idle,
            pictures=str(options["image_folder"] or ""),
            sampling={name: options[name] for name in SAMPLING if options[name] is not None},
        )
        names = list(models.all)
        first = models.all[names[0]]
        if len(names) == 1:
            models.open(names[0])
        root = f"http://{host}:{socket.getsockname()[1]}"
        url, page = f"{root}/v1", None if options["no_page"] else f"{root}/"
        app = make_app(models, access, page is not None, None if options["no_log"] else _log)
        if not keys and not is_local(host):
            click.echo(f"warning: everyone who reaches {host} may use this server; --api-key asks for a key", err=True)

        def started() -> None:
            click.echo(
                f"{', '.join(names)} at {url} (Ctrl-C stops)" + (f"; a page to talk to it at {page}" if page else ""),
                err=True,
            )
            if as_json:
                said = {"model": first.name, "models": names, "url": url, "page": page}
                emit_json(said | {"methods": list(first.manifest.methods), "context": first.run.context})

        say = LogWriter(_log)
        Server(app, socket, limits, say, started, not options["no_log"]).run()
        say.flush()


def _takes_much(folder: Path) -> bool:
    """Whether recordings or pictures are sent to a model."""
    from edgespec.runtimes.files.manifest import read_manifest

    manifest = read_manifest(folder)
    return manifest.hears or manifest.target.image is not None


def _log(line: str) -> None:
    """Write a line on stderr, without the lock of Python's streams: the process may end at the same time."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode("utf-8", "replace"))
