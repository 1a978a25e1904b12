"""``optimum-cli export edgespec``: the options are those of ``edgespec export``.

optimum finds this file by its place in the namespace ``optimum.commands.register``, where no package has an
``__init__.py``.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

from edgespec.cli.export import command


class EdgespecExportCommand(BaseOptimumCLICommand):  # type: ignore[misc] # optimum has no types
    """Exports a model into a bundle of edgespec."""

    COMMAND = CommandInfo(name="edgespec", help="Export a model into a bundle of edgespec.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Add the options of ``edgespec export``; the model is one too, as optimum's exports have it."""
        parser.add_argument("-m", "--model", required=True, help="Folder, .gguf file or hub id.")
        for option in _options():
            more: dict[str, Any] = {"action": "store_true"} if option.is_flag else {"metavar": "VALUE"}
            if option.multiple:
                more["action"] = "append"
            said = (option.help or "").replace("%", "%%")
            parser.add_argument(*option.opts, dest=option.name, help=said, default=None, **more)

    def run(self) -> None:
        """Run ``edgespec export``; it ends the process with the exit code of that command."""
        from edgespec.__main__ import main

        given = vars(self.args)
        words = ["export", given["model"]]
        for option in _options():
            value = given[option.name]
            if option.is_flag:
                words += [option.opts[-1]] if value else []
            elif value is not None:
                words += [word for one in (value if option.multiple else [value]) for word in (option.opts[-1], one)]
        sys.argv = ["edgespec", *words]
        main()


def _options() -> list[click.Option]:
    return [one for one in command.params if isinstance(one, click.Option) and one.name != "help"]


REGISTER_COMMANDS = [(EdgespecExportCommand, ExportCommand)]
