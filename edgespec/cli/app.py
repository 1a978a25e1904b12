"""The ``edgespec`` command: a table of commands, each imported only when it is used."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from edgespec.version import __version__

if TYPE_CHECKING:
    from types import FrameType

    from edgespec.errors import EdgespecError

# name -> one line for the overview; the module of the same name defines `command`, unless it is elsewhere
COMMANDS = {
    "pull": "Download a model from the hub.",
    "export": "Turn a Hugging Face model into a bundle.",
    "models": "Show which models can be exported, or what a model is.",
    "plan": "Say what fits a memory budget, how fast it will be, and why.",
    "calibrate": "Measure this device with a bundle.",
    "train": "Train heads or a draft for a model.",
    "run": "Generate text from a bundle or a model, or chat with it.",
    "embed": "Embed texts with a bundle, or rank them for a query.",
    "list": "Show the bundles that `run` has made of models.",
    "rm": "Remove bundles that `run` has made.",
    "bench": "Compare every method of a bundle with plain decoding.",
    "verify": "Prove that every method generates plain decoding's text.",
    "judge": "Judge how exact any server is, greedy and sampled.",
    "serve": "Serve a bundle: a page, and the APIs of OpenAI and Anthropic.",
    "info": "Show the parts of a bundle.",
    "devices": "Show on which devices bundles can run here.",
    "paths": "Show where programs in C find edgespec.",
    "ngram": "Build, show and remove n-gram stores.",
    "cache": "Show, clear and limit what is kept between runs.",
}


# commands in another module: its name, and theirs in it
ELSEWHERE = {
    "pull": ("models", "pull"),
    "list": ("models", "listing"),
    "rm": ("models", "removal"),
    "devices": ("info", "devices"),
}


class Lazy(click.Group):
    """Commands by name; the overview needs none of their modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = ELSEWHERE.get(name, (name, "command"))
        command: click.Command = getattr(import_module(f"edgespec.cli.{module}"), attribute)
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
    edgespec export builtin:shakespeare-73m --format int4 --quick --method speculative --draft builtin:shakespeare-draft -o demo
    edgespec run demo --prompt "ROMEO:" --show-drafts
    edgespec bench demo
    edgespec verify demo
    """  # noqa: E501


# modules of extras: an error about a missing one names the extra
EXTRAS = {
    "ml_dtypes": "export",
    "onnx": "export",
    "optuna": "export",
    "sentencepiece": "export",
    "threadpoolctl": "export",
    "llguidance": "guidance",
    "matplotlib": "bench",
    "anyio": "mcp",
    "mcp": "mcp",
    "torch": "train",
    "transformers": "train",
    "accelerate": "train",
    "httptools": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
}


def main() -> None:
    """Run the command line; user errors exit with 1, usage errors with 2, neither with a traceback.

    A failure is a message on stderr, and with ``--json`` also an object on stdout.
    """
    _open_outputs()
    gc.set_threshold(50_000, 20)  # what imports and vocabularies make stays: the default 700 took a second of an export
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a Windows code page lacks many characters
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, _terminated)
    try:
        cli.main(standalone_mode=False)  # click ends quietly, with 1, when the reader is gone
    except click.ClickException as error:
        error.show()
        _end(error.exit_code, "UsageError", error.format_message())
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        _end(130, "KeyboardInterrupt", "stopped")
    except Exception as error:
        told = _told(error)
        if told is None:
            raise
        click.echo(f"error: {told}", err=True)
        _end(1, "OSError" if isinstance(error, OSError) else type(error).__name__, told.message, told.hint)


def _open_outputs() -> None:
    """Give a process that was started without stdout or stderr ones that lead nowhere: no file may take their place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  until the end


def _terminated(_: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM, like Ctrl-C: partial results are removed.

    Within an import the process ends at once: some C modules turn an exit into another error.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(143)
        frame = frame.f_back
    sys.exit(143)


def _told(error: Exception) -> EdgespecError | None:
    """Turn a failure of the system or the user into an error to show; None = it is a defect of edgespec."""
    from edgespec.errors import EdgespecError, install_hint

    if isinstance(error, EdgespecError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        hint = install_hint(EXTRAS[error.name])
        return EdgespecError(f"this command needs {error.name}, which is not installed", hint)
    if isinstance(error, MemoryError):
        hint = "--budget keeps within a limit, and `edgespec plan` lists what fits"
        return EdgespecError(f"out of memory: {error or 'the system has no more'}", hint)
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of Path.resolve before Python 3.13
        return EdgespecError(str(error), "name another file or folder")
    return EdgespecError(str(error)) if isinstance(error, OSError) else None


def _end(code: int, kind: str, message: str, hint: str | None = None) -> NoReturn:
    """Exit, and say why where a program reads it."""
    if "--json" in sys.argv[1:]:
        from edgespec.cli.common import emit_json

        with suppress(OSError):  # the reader is gone
            emit_json({"error": {"type": kind, "message": message, "hint": hint}})
    try:
        sys.stdout.flush()
    except OSError:  # unwritten output would be retried at exit, and change the exit code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
