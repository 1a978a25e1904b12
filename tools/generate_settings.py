"""Write what is generated from the declarations of settings: a ``TypedDict``, the command line's table, a page's table.

python -m tools.generate_settings           # write them
python -m tools.generate_settings --check   # exit with 1 if one is not current
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path

from edgespec.declared import Setting, declared
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import DraftOptions, Settings, every_setting
from edgespec.runtimes.options import LoadOptions

ROOT = Path(__file__).resolve().parents[1]
CODE, LOADING = "edgespec/decoding/settings.py", "edgespec/runtimes/options.py"
TABLE, PAGE = "edgespec/cli/settings.json", "docs/reference/settings.md"
KINDS = (Settings, SamplingParams, DraftOptions)


def settings() -> Iterator[tuple[Field[object], Setting]]:
    """Yield all settings of a request, in the order of the page."""
    for kind in KINDS:
        yield from declared(kind)


def changes() -> str:
    """Write the ``TypedDict`` of all settings by name."""
    lines = ["class SettingsChanges(TypedDict, total=False):",
             '    """All settings by name, for editors (``Settings.changed``)."""', "",
             "    sampling: SamplingParams", "    drafts: DraftOptions"]  # fmt: skip
    lines += [f"    {one.name}: {found.takes or one.type}" for one, found in settings()]
    return "\n".join(lines).replace("'", '"')


def load_changes() -> str:
    """Write the ``TypedDict`` of the options of loading."""
    lines = [
        "class LoadChanges(TypedDict, total=False):",
        '    """Fields of ``LoadOptions`` by name, for editors."""',
        "",
    ]
    return "\n".join([*lines, *(f"    {one.name}: {one.type}" for one in fields(LoadOptions))])


def table() -> str:
    """Write the file that the command line reads: plain data, so that a help text needs no library."""
    options = {option: _sentence(found.help) for _, found in settings() for option in found.option.split()}
    names = {one.name.replace("_", "-"): found.help for one, found in every_setting() if found.set}
    return json.dumps({"options": options, "set": names}, indent=1) + "\n"


def page() -> str:
    """Write the page's table."""
    lines = ["| Python | command line | default | meaning |", "|---|---|---|---|"]
    for one, found in settings():
        shown = ", ".join(f"`{option}`" for option in found.option.split())
        shown = shown or (f"`--set {one.name.replace('_', '-')}=`" if found.set else "")
        default = found.shown or _default(one.default)
        lines.append(f"| `{one.name}` | {shown} | {default} | {found.help} |")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    plain = text.replace("`", "")
    return plain[0].upper() + plain[1:] + "."


def _default(value: object) -> str:
    if isinstance(value, str):
        return f"`{value}`"
    return (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else f"{value:g}" if value is not None else ""
    )


def generated() -> dict[str, str]:
    """Return the files with what is generated in its place, by path."""
    code = (ROOT / CODE).read_text("utf-8")
    code = re.sub(r"(?<=\n)class SettingsChanges\(.*?(?=\n\n\n# -- end )", lambda _: changes(), code, flags=re.S)
    loading = (ROOT / LOADING).read_text("utf-8")
    loading = re.sub(
        r"(?<=\n)class LoadChanges\(.*?(?=\n\n\n@dataclass)", lambda _: load_changes(), loading, flags=re.S
    )
    shown = (ROOT / PAGE).read_text("utf-8")
    shown = re.sub(r"\| Python \|.*?(?=\n\n)", lambda _: page(), shown, count=1, flags=re.S)
    return {CODE: code, LOADING: loading, TABLE: table(), PAGE: shown}


def main() -> int:
    """Write them, or check that they are current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = generated()
    old = [
        name for name, text in made.items() if not (ROOT / name).is_file() or (ROOT / name).read_text("utf-8") != text
    ]
    if not check:
        for name in old:
            (ROOT / name).write_text(made[name], "utf-8")
    print(*(f"{name}: {'not current' if check else 'written'}" for name in old), sep="\n")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
