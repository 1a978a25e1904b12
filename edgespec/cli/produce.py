"""``edgespec run -o FILE``: what a model draws or speaks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.answer import conclude, end
from edgespec.cli.common import GRAMMARS, PATH, emit_json, group, make_settings, option, refuse_beside
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.runtimes.files.manifest import Manifest

made_options = group(
    "Models that draw or speak",
    option("-o", "File of the picture or the speech: picture.png, speech.wav; - is stdout.", PATH, dest="made"),
    option("--voice", "Voice name.  [default: the model's first voice]"),
)
BESIDE = ("chat", "session", "input", "images", "system", "tools", "mcp", "template", "stop", "show_drafts", "beams",
          *GRAMMARS)  # fmt: skip


def check_made(manifest: Manifest, made: Path | None, options: dict[str, Any]) -> None:
    """Reject -o for text, a missing -o for pictures and speech, and options that do not fit.

    Raises:
        click.UsageError: it is named.
    """
    from edgespec.engine.outputs import output_of

    output = output_of(manifest)
    usual = output.file if output else ""
    ending = Path(usual).suffix
    if (output is None) != (made is None):
        raise click.UsageError("-o is only for image and speech models" if made else f"name a file: -o {usual}")
    if options.get("voice") and not (output and "voice" in output.options):
        raise click.UsageError("--voice is only for speech models")
    refuse_beside("-o", BESIDE if made else (), options)
    if made and made.suffix != ending and str(made) != "-":
        raise click.UsageError(f"-o {made}: expected a name that ends with {ending}, or -")
    if str(made) == "-" and options["as_json"]:
        raise click.UsageError("--json does not go with -o -: both would write to stdout")


def produce(engine: Engine, bundle: str, texts: Sequence[str], method: str | None, options: dict[str, Any]) -> None:
    """Write the file, and say how it was decoded."""
    if len(texts) != 1:
        raise click.UsageError("give one --prompt TEXT: the picture or the speech")
    from edgespec.engine.outputs import output_of

    text, made = texts[0], options["made"]
    output = output_of(engine.bundle.manifest)
    assert output is not None
    settings = make_settings(method, options, output.defaults(engine))
    live = sys.stdout.buffer if str(made) == "-" else None
    found = output.write(engine, text, settings, live, **{name: options[name] for name in output.options})
    if live is None:
        _write(made, found.data)
    result = found.result
    if options["as_json"]:
        emit_json({"bundle": bundle, "prompt": text.strip(), "file": str(made)} | found.more | result.as_dict())
    else:
        click.echo(f"{made}: {found.what}", err=True)
        conclude(engine, result, settings, options["show_stats"])
    end(engine, result, settings)


def _write(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be written: {error.strerror}", "name another file") from error
