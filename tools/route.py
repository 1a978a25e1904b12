"""The route of one warm plain request: how many functions of the package it passes, in how many files.

    python tools/route.py BUNDLE [--method ar] [--list]

A request warms the engine; the second one, of 24 tokens, is watched with ``sys.setprofile``.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
NEW = 24  # tokens
PACKAGE = ("edgespec", "export", "runtimes", "configs")


def own_file(name: str) -> str | None:
    """A file of the package as it lies in the checkout; None = another one, as of a virtual environment in it."""
    path = Path(name).resolve()
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PACKAGE:
        return None
    return path.relative_to(ROOT).as_posix()


def route(bundle: Path, method: str) -> Counter[tuple[str, str]]:
    """How often each function of the package is called, by (file, line and name); comprehensions are no functions."""
    import edgespec

    called: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and (file := own_file(code.co_filename)):
            called[file, f"{code.co_firstlineno}: {code.co_name}"] += 1

    with edgespec.load(bundle, threads=1) as engine:
        tokens = engine.codec.encode("To be, or not")
        for watch in (None, note):
            sys.setprofile(watch)
            engine.generate(tokens, method=method, max_new_tokens=NEW, ignore_eos=True)
            sys.setprofile(None)
    return called


def main() -> None:
    """Print the figures, or every function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--method", default="ar")
    parser.add_argument("--list", action="store_true", help="print every function, with its calls")
    options = parser.parse_args()
    called = route(options.bundle, options.method)
    if options.list:
        for (file, name), times in called.items():
            print(f"{times:6} {file}:{name}")
    print(f"{len(called)} functions in {len({file for file, _ in called})} files, {sum(called.values())} calls")


if __name__ == "__main__":
    main()
