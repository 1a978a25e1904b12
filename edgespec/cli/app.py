"""The ``edgespec`` command: a table of commands, each imported only when it is used."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from edgespec import __version__

# name -> one line for the overview; the module of the same name defines `command`
COMMANDS = {
    "export": "Turn a Hugging Face model into a bundle.",
    "run": "Generate text from a bundle.",
    "bench": "Compare every method of a bundle with plain decoding.",
    "verify": "Prove that a bundle's methods write what plain decoding writes.",
    "info": "Show what a bundle holds.",
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


def main() -> None:
    """Run the command line; user errors exit with 1, usage errors with 2, neither with a traceback."""
    from edgespec.errors import EdgespecError

    try:
        cli.main(standalone_mode=False)
    except EdgespecError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read us has gone; a complaint would have no reader either
        sys.exit(0)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
