"""The ``edgespec`` command: a table of commands, each imported only when it is used."""

from __future__ import annotations

import io
import signal
import sys
from contextlib import suppress
from importlib import import_module

import click

from edgespec import __version__

# name -> one line for the overview; the module of the same name defines `command`
COMMANDS = {
    "pull": "Download a model from the hub.",
    "export": "Turn a Hugging Face model into a bundle.",
    "models": "Show which models can be exported, or what a model is.",
    "plan": "Say what fits a memory budget, how fast it will be, and why.",
    "calibrate": "Measure this device with a bundle.",
    "train": "Train heads or a draft for a model.",
    "run": "Generate text from a bundle.",
    "bench": "Compare every method of a bundle with plain decoding.",
    "verify": "Prove that a bundle's methods write what plain decoding writes.",
    "serve": "Serve a bundle over HTTP, by OpenAI's API.",
    "info": "Show what a bundle holds.",
    "devices": "Show where bundles can run here, and why not elsewhere.",
    "ngram": "Build, show and remove n-gram stores.",
    "cache": "Show, clear and limit what is kept between runs.",
}


class Lazy(click.Group):
    """Commands by name; the overview needs none of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"edgespec.cli.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            if near := get_close_matches(args[0], COMMANDS, 1):
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgespec")
def cli() -> None:
    """Lossless accelerated decoding of language models on devices.

    \b
    edgespec export builtin:shakespeare --method self-spec -o demo
    edgespec run demo --prompt "ROMEO:" --show-drafts
    edgespec bench demo
    edgespec verify demo
    """


# modules that come with an extra, so that a missing one can be answered with what to install
EXTRAS = {
    "ml_dtypes": "export",
    "onnx": "export",
    "optuna": "export",
    "llguidance": "guidance",
    "matplotlib": "bench",
    "torch": "train",
    "transformers": "train",
    "accelerate": "train",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "uvicorn": "serve",
}


def main() -> None:
    """Run the command line; user errors exit with 1, usage errors with 2, neither with a traceback."""
    from edgespec.errors import EdgespecError

    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a model may write what a Windows code page has no room for
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: what is half done is cleared away
    try:
        cli.main(standalone_mode=False)  # click ends quietly, with 1, when whoever read us has gone
    except EdgespecError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        click.echo(f"error: this command needs {error.name}, which is not installed", err=True)
        click.echo(f"hint: pip install 'edgespec[{EXTRAS[error.name]}]'", err=True)
        sys.exit(1)
    except MemoryError as error:
        click.echo(f"error: out of memory: {error or 'the system has no more'}", err=True)
        click.echo("hint: --budget keeps within a limit, and `edgespec plan` says what fits", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
