"""Count phrases that are not plain English in pages, docstrings, comments, help texts and messages.

    python -m tools.prose [FILE...]     # where they are, and what to write instead
    python -m tools.prose --record      # keep the counts of all files; refuses to raise one

``tools/prose_rules.json`` has the rules, ``tests/docs/prose_counts.json`` the recorded count of each file: a file that
is not in it has none.  ``tests/docs/test_prose.py`` fails where a count rises.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "tools/prose_rules.json"
COUNTS = ROOT / "tests/docs/prose_counts.json"
FOLDERS = (".github", "android_demo", "docs", "edgespec", "examples", "tools")
SUFFIXES = {".md", ".py", ".kt", ".cpp", ".h", ".inl", ".js", ".rs"}
OTHERS = {"build", "target", "vendor"}  # folders of outputs and of other projects
_PYTHON = re.compile(r'"""(.*?)"""|"((?:[^"\\\n]|\\.)*)"|\'(?:[^\'\\\n]|\\.)*\'|#([^\n]*)', re.S)
_BRACES = re.compile(r'/\*(.*?)\*/|//([^\n]*)|"((?:[^"\\\n]|\\.)*)"', re.S)


@cache
def rules() -> dict[str, dict[str, str]]:
    """Read the rules: by name, ``find`` (an expression), ``write`` (what to write instead), ``fails`` (an example)."""
    found: dict[str, dict[str, str]] = json.loads(RULES.read_text("utf-8"))
    return found


@cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Join the rules, one group each: those for small letters, and those for letters as they are."""
    small: list[str] = []
    exact: list[str] = []
    for at, rule in enumerate(rules().values()):
        (exact if "case" in rule else small).append(f"(?P<r{at}>{rule['find']})")
    # a phrase begins at a word's edge: trying only those places is three times as fast
    return re.compile(rf"\b(?=[a-z,])(?:{'|'.join(small)})"), re.compile("|".join(exact), re.M)


def hits(text: str) -> Iterator[tuple[str, str]]:
    """Find phrases in prose: the rule's name and the phrase."""
    names = list(rules())
    small, exact = _patterns()
    for pattern, searched in ((small, text.lower()), (exact, text)):
        for found in pattern.finditer(searched):
            yield names[int((found.lastgroup or "")[1:])], found[0].strip()


def prose(text: str, suffix: str) -> str:
    """Return the prose of a file: Markdown without code; docstrings, comments and texts of programs."""
    if suffix == ".md":
        text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"``?[^`\n]+``?", "X", text))
        return re.sub(r"^[-*#> |]+", "", re.sub(r"\n(?=[a-z])", " ", text), flags=re.M)
    parts = ["".join(groups) for groups in (_PYTHON if suffix == ".py" else _BRACES).findall(text)]
    return "\n".join(re.sub(r"\s*\n[\s*]*(?=[a-z])", " ", part).strip("* \n") for part in parts if " " in part)


def files() -> list[str]:
    """List the files that are checked, by their paths from the top."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    paths = [path.relative_to(ROOT) for path in found if path.suffix in SUFFIXES]
    return sorted(path.as_posix() for path in paths if OTHERS.isdisjoint(path.parts))


def counts() -> dict[str, int]:
    """Count the phrases of every file that has some."""
    found = {}
    for name in files():
        path = ROOT / name
        if number := sum(1 for _ in hits(prose(path.read_text("utf-8"), path.suffix))):
            found[name] = number
    return found


def rises(found: Mapping[str, int], recorded: Mapping[str, int]) -> list[str]:
    """List the files with more phrases than were recorded."""
    return [
        f"{name}: {number} phrases, {recorded.get(name, 0)} recorded; `python -m tools.prose {name}` shows them"
        for name, number in found.items()
        if number > recorded.get(name, 0)
    ]


def record(found: Mapping[str, int], path: Path = COUNTS) -> list[str]:
    """Write the counts, unless one rose: then list what did, and write nothing."""
    raised = rises(found, json.loads(path.read_text("utf-8"))) if path.exists() else []
    if not raised:
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    return raised


def main() -> int:
    """Show phrases, or record their counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files to show  [default: all]")
    parser.add_argument("--record", action="store_true", help="keep the counts of all files")
    options = parser.parse_args()
    if options.record:
        found = counts()
        raised = record(found)
        print("\n".join(raised) if raised else f"{sum(found.values())} phrases in {len(found)} files")
        return 1 if raised else 0
    for name in options.files or files():
        path = ROOT / name
        for rule, phrase in hits(prose(path.read_text("utf-8"), path.suffix)):
            print(f"{name}: {phrase!r} ({rule}): write {rules()[rule]['write']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
