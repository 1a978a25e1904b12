"""The route of one warm request, or of one round of it: how many functions of the package it passes, in which files.

    python tools/route.py BUNDLE [--method ar] [--round] [--list]

Requests warm the engine until it has all sessions that it keeps; the next one, of 24 tokens, is watched with
``sys.setprofile``.  With ``--round`` it is one round in the middle, and only the algorithm is counted: what a reader
reads who wants to know what a round does.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
NEW = 24  # tokens
PACKAGE = "edgespec"
ALGORITHM = ("edgespec/decoding/", "edgespec/control/", "edgespec/drafters/", "edgespec/formulas/")


def own_file(name: str) -> str | None:
    """Return a package file's path in the checkout; None = another file, as of a virtual environment in it."""
    path = Path(name).resolve()
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] != PACKAGE:
        return None
    return path.relative_to(ROOT).as_posix()


def route(bundle: Path, method: str) -> Counter[tuple[str, str]]:
    """Count the calls of each function of the package, by (file, line and name); comprehensions do not count."""
    import edgespec
    from edgespec.engine.pool import MOST_IDLE

    called: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and (file := own_file(code.co_filename)):
            called[file, f"{code.co_firstlineno}: {code.co_name}"] += 1

    with edgespec.load(bundle, threads=1) as engine:
        tokens = engine.codec.encode("To be, or not")
        for watch in (*[None] * MOST_IDLE, note):
            sys.setprofile(watch)
            engine.generate(tokens, method=method, max_new_tokens=NEW, ignore_eos=True)
            sys.setprofile(None)
    return called


def watched_round(bundle: Path, method: str) -> dict[str, tuple[set[str], set[int]]]:
    """Watch a round in the middle of a request -> {file: (functions called, their lines of code)}."""
    import edgespec

    found: dict[str, tuple[set[str], set[int]]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code, file = frame.f_code, own_file(frame.f_code.co_filename)
        if event == "call" and file and file.startswith(ALGORITHM):
            functions, lines = found.setdefault(file, (set(), set()))
            functions.add(code.co_name)
            lines.update(line for _, _, line in code.co_lines() if line)

    with edgespec.load(bundle, threads=1) as engine:
        tokens = engine.codec.encode("To be, or not")
        engine.generate(tokens, method=method, max_new_tokens=NEW, ignore_eos=True)
        stream = engine.stream(tokens, method=method, max_new_tokens=4 * NEW, ignore_eos=True)
        for number, chunk in enumerate(stream):
            guessed = chunk.round is not None and bool(chunk.round.drafted)
            sys.setprofile(None)
            if number > 2 and found and (guessed or method == "ar"):
                break
            found.clear()
            sys.setprofile(note)
        sys.setprofile(None)
        stream.close()
    return found


def main() -> None:
    """Print the figures, or every function."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--method", default="ar")
    parser.add_argument("--list", action="store_true", help="print every function, with its calls")
    parser.add_argument("--round", action="store_true", help="one round, and the algorithm alone")
    options = parser.parse_args()
    if options.round:
        found = watched_round(options.bundle, options.method)
        for file, (functions, lines) in sorted(found.items()):
            print(f"{len(lines):6} lines of {len(functions):2} functions in {file}")
            if options.list:
                print(f"       {', '.join(sorted(functions))}")
        print(f"{sum(len(lines) for _, lines in found.values())} lines of code in {len(found)} files")
        return
    called = route(options.bundle, options.method)
    if options.list:
        for (file, name), times in called.items():
            print(f"{times:6} {file}:{name}")
    print(f"{len(called)} functions in {len({file for file, _ in called})} files, {sum(called.values())} calls")


if __name__ == "__main__":
    main()
