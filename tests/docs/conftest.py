"""Pages for readers: the site's, the README, CONTRIBUTING and those next to data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.M)


@cache
def text_of(page: str) -> str:
    """Read a page's text."""
    return (ROOT / page).read_text("utf-8")


def blocks(page: str, *kinds: str) -> list[str]:
    """Fenced blocks of these languages."""
    return [body for kind, body in _FENCE.findall(text_of(page)) if kind in kinds]


def commands(page: str) -> Iterator[str]:
    """Lines of console blocks and indented ones, continued lines joined."""
    prose = _FENCE.sub("", text_of(page))
    for block in [*blocks(page, "console", "bash", "sh"), *_INDENTED.findall(prose)]:
        yield from block.replace("\\\n", " ").splitlines()


def inline(page: str) -> list[str]:
    """List the text between single backticks outside blocks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _FENCE.sub("", text_of(page)))


def section(page: str, heading: str) -> str:
    """Give the text under a heading, up to the next heading."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", text_of(page), re.M | re.S)
    assert found, f"{page} has no section {heading}"
    return found[1]


def tables(text: str) -> list[str]:
    """Give the tables of a text."""
    return re.findall(r"(?:^\|.*\n)+", text, re.M)


def first_column(table: str) -> set[str]:
    """Code in the first cell of every row."""
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
