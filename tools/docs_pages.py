"""Generate pages and tables of the site: commands from their help, supported models, pages of the repository's top.

mkdocs calls ``on_files`` and ``on_page_markdown`` (``hooks`` of mkdocs.yml).  ``python -m tools.docs_pages`` prints the
commands, ``python -m tools.docs_pages --write`` rewrites the table of models in docs/models.md.
"""

from __future__ import annotations

import re
import sys
from inspect import cleandoc
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

import click

from edgespec.cli.app import COMMANDS, cli
from edgespec.cli.common import COMMON, GroupedCommand
from edgespec.cli.method_settings import NAMES

COMMANDS_PAGE = "reference/commands.md"
TOP_PAGES = {name: f"about/{name.lower()}" for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
ROOT = Path(__file__).resolve().parents[1]
MODELS_PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- models:begin -->\n", "<!-- models:end -->"  # around the table that ``models_table`` makes
NATIVE = "; native operators only"


def commands_page() -> str:
    """Every command with its arguments, options by group, and examples, in Markdown."""
    context = click.Context(cli)
    parts = [
        "# Commands\n",
        "This page is built from the help of the commands: `edgespec COMMAND --help` says the same.\n",
        "Errors of use exit with 2, other errors with 1, each with a hint.  Ctrl-C exits with 130.\n",
        *(_command(f"edgespec {name}", found) for name in COMMANDS if (found := cli.get_command(context, name))),
        "## Rare settings {#set}\n",
        "`--set NAME=VALUE` of `run`, `bench` and `verify`; `--set list` prints them.\n",
        _table(("name", "what it sets"), [(f"`{name}`", what) for name, what in NAMES.items()]),
    ]
    return "\n".join(parts)


def _command(path: str, command: click.Command) -> str:
    """Make a section of the page; the commands of a group follow."""
    ctx = click.Context(command, info_name=path)
    level = "##" if path.count(" ") == 1 else "###"
    what, _, examples = (command.help or "").partition("\b\n")
    lines = [
        f"{level} {path}\n",
        f"`{' '.join([path, *command.collect_usage_pieces(ctx)])}`\n",
        _code(cleandoc(what)) + "\n",
    ]
    if examples:
        lines.append("```bash\n" + "\n".join(line.strip() for line in examples.strip().splitlines()) + "\n```\n")
    if isinstance(command, click.Group):
        subs = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
        return "\n".join(lines + [_command(f"{path} {name}", found) for name, found in subs if found])
    sections = command.sections(ctx) if isinstance(command, GroupedCommand) else {COMMON: command.get_params(ctx)}
    for heading, params in sections.items():
        shown = [param for param in params if isinstance(param, click.Option) and "--help" not in param.opts]
        records = [found for param in shown if (found := param.get_help_record(ctx))]
        if records:
            head = "option" if heading == COMMON else heading.lower()
            lines.append(_table((head, "meaning"), [(f"`{name}`", _code(text)) for name, text in records]))
    return "\n".join(lines)


def _code(text: str) -> str:
    """Options, names in capitals and paths of a help text as Markdown wants them."""
    return re.sub(r"(?<![`\w-])(--[a-z][a-z-]+|[A-Z]{2,}(?:=[A-Z]+)+)(?![`\w])", r"`\1`", text)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    cells = [head, ("---", "---"), *((name, text.replace("|", "\\|")) for name, text in rows)]  # names are code
    return "\n".join(f"| {name} | {text} |" for name, text in cells) + "\n"


def models_table() -> str:
    """Make the table of supported models from the registered architectures and the types with images or sound."""
    from edgespec.export.architectures import ARCHITECTURES
    from edgespec.export.architectures.sights import READ
    from edgespec.export.source.gguf_kinds import model_types

    files = model_types()
    files["umt5"] = files["t5"]  # by the tensors of the file
    rows = [("model_type", "for example", "kind", "operators", "GGUF architecture"), ("---",) * 5]
    for name, kind in ARCHITECTURES.items():
        pair = any(base.__name__ == "EncoderDecoder" for base in kind.__mro__)
        what = "encoder-decoder" if pair else "pictures" if kind.features.startswith("codes of pictures") else "decoder"
        operators = "native" if pair or NATIVE in kind.features else "native, stock"
        rows.append((f"`{name}`", kind.example, what, operators, ", ".join(f"`{one}`" for one in files.get(name, ()))))
    for sense, types in READ.items():
        names = ", ".join(f"`{name}`" for name in sorted(types))
        rows.append((names, f"[below](#{sense})", f"decoder with {sense}", "native", ""))
    return "".join("|" + "|".join(row) + "|\n" for row in rows)


def write_models() -> None:
    """Replace the table in the page of supported models."""
    before, rest = MODELS_PAGE.read_text("utf-8").split(BEGIN)
    MODELS_PAGE.write_text(before + BEGIN + models_table() + END + rest.split(END)[1], "utf-8")


def _linked(text: str, source: str, page: str) -> str:
    """Make links of ``source`` (a path in the repository) lead where the site has the files; ``page`` is in docs/.

    Links to files that the site does not have become plain text.
    """

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target) or not target:
            return found[0]
        file = normpath(f"{source.rpartition('/')[0]}/{target}".lstrip("/"))
        place = TOP_PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
        return f"[{words}]({relpath(place, page.rpartition('/')[0] or '.')}{anchor})" if place else words

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)", link, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site's files (mkdocs calls this)."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, COMMANDS_PAGE, content=commands_page()))
    for name, page in TOP_PAGES.items():
        text = _linked((ROOT / name).read_text("utf-8"), name, page)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links to pages at the repository's top lead to the site's copies (mkdocs calls this)."""
    path = page.file.src_uri
    if path.startswith("dev/"):
        page.meta["search"] = {"exclude": True}  # pages for contributors
    return markdown if path in TOP_PAGES.values() else _linked(markdown, f"docs/{path}", path)


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_models()
    else:
        print(commands_page())
