"""Download the packages of other projects that the server's page bundles, and record their files.

    python -m tools.vendor          # the versions below
    python -m tools.vendor --check  # only compare the existing files with their packages

npm compares each package with its registry's hash; the table, and the test that reads it, hold the files themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "edgespec" / "server" / "page" / "vendor"
TABLE = FOLDER / "README.md"


@dataclass(frozen=True)
class Bundled:
    """A package, and which of its files are taken, under which names."""

    package: str
    version: str
    license: str
    files: tuple[tuple[str, str], ...]  # of the package, and here


BUNDLED = (
    Bundled(
        "markdown-it",
        "15.0.3",
        "MIT",
        (
            ("dist/browser/markdown-it.esm.min.mjs", "markdown-it.esm.min.mjs"),
            ("LICENSE", "markdown-it.LICENSE"),
        ),
    ),
    Bundled(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "BSD-3-Clause",
        (("es/highlight.min.js", "highlight.min.mjs"), ("LICENSE", "highlight.LICENSE")),
    ),
)
HEAD = """# Files of other projects

The page at `/` reads Markdown by markdown-it and colors code by highlight.js. These are their files as released.
`python -m tools.vendor` fetches them again, and `tests/server/test_page.py` compares them with this table.

| file | package | version | license | SHA-256 |
|---|---|---|---|---|
"""


def fetch(bundled: Bundled) -> dict[str, bytes]:
    """Fetch a package by npm -> the files that are taken, by their names here."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--ignore-scripts", f"{bundled.package}@{bundled.version}"]
        packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[-1]
        with tarfile.open(Path(folder) / packed) as archive:
            found = {}
            for name, here in bundled.files:
                member = archive.extractfile(f"package/{name}")
                assert member is not None, name
                found[here] = member.read()
            return found


def row(bundled: Bundled, name: str, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    return f"| {name} | {bundled.package} | {bundled.version} | {bundled.license} | {digest} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    only_check = parser.parse_args().check
    rows, wrong = [], []
    for bundled in BUNDLED:
        for name, content in fetch(bundled).items():
            rows.append(row(bundled, name, content))
            if not only_check:
                (FOLDER / name).write_bytes(content)
            elif (FOLDER / name).read_bytes() != content:
                wrong.append(name)
    if only_check:
        sys.exit(f"other files than those of their packages: {', '.join(wrong)}" if wrong else 0)
    TABLE.write_text(HEAD + "".join(rows), "utf-8")


if __name__ == "__main__":
    main()
