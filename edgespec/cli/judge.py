"""``edgespec judge``."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from edgespec.cli.common import COUNT, OUTPUT, GroupedCommand, emit_json, group, json_option, option, progress
from edgespec.judge.recipes import RECIPES


def _fields(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any]:
    try:
        found = json.loads(value or "{}")
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}", ctx, param) from None
    if not isinstance(found, dict):
        raise click.BadParameter("expected an object, such as '{\"top_k\": 0}'", ctx, param)
    return found


def _recipe(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value:
        click.echo(RECIPES[value].show(value))
        ctx.exit()


@click.command("judge", cls=GroupedCommand)
@click.argument("url", required=False)
@option("--against", "URL of the reference: the same model, decoded plainly.")
@option("--command", "Command that starts the server, instead of a URL; {port} is replaced by a free port.")
@option("--against-command", "Command that starts the reference.")
@option("--plain", "Fields of a request, as JSON, that make the same server decode plainly.", callback=_fields)
@option("--fields", "Fields, as JSON, for every request to the server.", callback=_fields)
@option("--model", "Name of the model.  [default: the first that the server lists]", default="")
@option("--api-key", "Bearer token of the server.", default="")
@option("--recipe", "Show how to start an engine and judge it.", list(RECIPES), callback=_recipe, is_eager=True,
        expose_value=False)  # fmt: skip
@group(
    "Work",
    option(
        "--prompts",
        "File with a prompt on each line, or a JSON string on each.  [default: eight built-in ones]",
        click.Path(path_type=Path),
    ),
    option("--max-prompts", "Maximum number of prompts.", COUNT, 8),
    option("--max-new-tokens", "Tokens of a greedy text.", COUNT, 48),
    option("--concurrency", "Number of requests at once, where texts are generated in parallel.", COUNT, 4),
    option("--repeats", "How often they are.", COUNT, 2),
    option("--greedy-duration", "Seconds after which no further prompt is asked.", click.FloatRange(min=0), 600.0),
    option("--duration", "Seconds for sampled texts; 0 = none.", click.FloatRange(min=0), 60.0),
    option("--draws", "Sampled texts at most, at each temperature.", COUNT, 4000),
    option("--length", "Tokens of a sampled text.", COUNT, 3),
    option(
        "--temperature",
        "Temperature of the sampled texts; may be repeated.  [default: 0.6 and 1]",
        click.FloatRange(min=0, min_open=True),
        multiple=True,
    ),
    option("--noise", "Nats between two tokens that are a near-tie.  [default: measured]", click.FloatRange(min=0)),
)
@group(
    OUTPUT,
    option("--strict", "Exit with 1 for near-ties as well.", bool),
    option("--report", "Write a page in HTML.", click.Path(dir_okay=False, path_type=Path)),
)
@json_option
def command(url: str | None, against: str | None, plain: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Judge how exact a server is: any with OpenAI's completions or chats.

    It asks for the same texts from the server and from a reference that decodes plainly: alone, in parallel, with a
    cold and a warm prompt cache.  Where greedy texts differ, it asks for the margin of the two tokens.  Sampled texts
    are tested against the distribution that the reference reports.  The verdict is one of three: identical; near-ties,
    which rounding explains; wrong.

    Without a reference, rows of one-token requests to the same server take its place: no draft guesses there.
    Exits with 0, with 1 if the server is wrong, and with 2 if it cannot be asked.

    \b
    edgespec judge http://127.0.0.1:8080
    edgespec judge http://127.0.0.1:8080 --against http://127.0.0.1:8081 --report judged.html
    edgespec judge --command "llama-server -m big.gguf -md small.gguf --port {port}" \\
                   --against-command "llama-server -m big.gguf --port {port}"
    edgespec judge http://127.0.0.1:8000 --fields '{"edgespec": {"method": "speculative"}}' \\
                   --plain '{"edgespec": {"method": "ar"}}'
    edgespec judge --recipe llama-server
    """
    from edgespec.judge.client import Server, ServerError
    from edgespec.judge.judging import PROMPTS, Options, judge
    from edgespec.judge.launch import running
    from edgespec.judge.page import write_page
    from edgespec.judge.sampled import Plan

    _check(url, against, plain, options)
    prompts = list(PROMPTS) if options["prompts"] is None else _prompts(options["prompts"])
    temperatures = options["temperature"] or Plan.temperatures
    plan = Plan(
        draws=options["draws"],
        seconds=options["duration"] / len(temperatures),
        length=options["length"],
        temperatures=temperatures,
        lanes=options["concurrency"],
    )
    asked = Options(
        tokens=options["max_new_tokens"],
        lanes=options["concurrency"],
        repeats=options["repeats"],
        noise=options["noise"],
        seconds=options["greedy_duration"],
        plan=plan if options["duration"] else None,
    )
    about = {"model": options["model"], "key": options["api_key"]}
    try:
        with ExitStack() as open_servers, progress() as report:

            def started(command: str) -> str:
                return open_servers.enter_context(running(command, lambda waited: report("start", 0, 1, "the server")))

            url = url or started(options["command"])
            if options["against_command"]:
                against = started(options["against_command"])
            server = Server(url, fields=options["fields"], **about)
            reference = Server(against, **about) if against else None
            if plain:
                reference = Server(url, fields=options["fields"] | plain, **about)
            found = judge(server, reference, prompts[: options["max_prompts"]], asked,
                          lambda done, of, what: report("judge", done, of, what), plain)  # fmt: skip
    except ServerError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        emit_json(found.as_dict())
    else:
        for note in found.notes:
            click.echo(f"note: {note}")
        for item in found.greedy:
            click.echo(f"{item.what}: {item.verdict}: {item.equal} of {item.prompts} texts equal, "
                       f"{item.agreed} of {item.tokens} tokens before the first difference")  # fmt: skip
        click.echo(found.line)
    if options["report"] is not None:
        write_page(options["report"], found)
    if found.verdict == "wrong" or (options["strict"] and found.verdict != "identical"):
        sys.exit(1)


def _check(url: str | None, against: str | None, plain: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuse options that do not go together, before anything is asked."""
    if (url is None) == (options["command"] is None):
        raise click.UsageError("expected a URL or --command, and not both")
    if sum(map(bool, (against, options["against_command"], plain))) > 1:
        raise click.UsageError("expected one of --against, --against-command and --plain")
    if options["report"] is not None and not options["report"].absolute().parent.is_dir():
        raise click.UsageError(f"--report {options['report']}: no such folder")


def _prompts(file: Path) -> list[str]:
    """Read a prompt from each line: as it is, or a JSON string."""
    found = []
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file}: expected text in UTF-8: {error}") from None
    except OSError as error:
        raise click.UsageError(f"--prompts {file}: {error.strerror or error}") from None
    for line in filter(str.strip, lines):
        try:
            prompt = json.loads(line)
        except ValueError:
            prompt = line
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt")
        found.append(prompt if isinstance(prompt, str) else line)
    if not found:
        raise click.UsageError(f"{file}: no prompts")
    return found
