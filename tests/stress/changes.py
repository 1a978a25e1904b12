"""Change files without edgespec's knowledge, except the manifest: no result may be called exact, lossless or passed.

    python -m tests.stress.changes [--count 1000] [--minutes 10] [--seed 0]

A case begins with a loaded bundle, so that everything is in the cache.  Then one file of the bundle, of the cache, or a
session file changes, with the same size and time of modification.  Then the bundle is loaded again.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from click.testing import CliRunner

from edgespec.cli.app import cli as command_line
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.result import Result
from edgespec.errors import EdgespecError
from edgespec.runtimes.files import checked
from edgespec.runtimes.files.manifest import MANIFEST, Operators
from edgespec.runtimes.files.session_file import LINE

PROMPT = "QUEEN MARGARET:\nWhat, "
METHODS: Mapping[Operators, str] = {"native": "swift", "stock": "ar"}  # exact for heads of any size
QUIET = 0.03  # seconds instead of one: a case must not wait for long
BUNDLE, CACHE, SESSION = "bundle", "cache", "session"


def in_place(file: Path, content: bytes) -> None:
    """Write into the existing file."""
    with file.open("r+b") as out:
        out.write(content)


def by_rename(file: Path, content: bytes) -> None:
    """Put another file in its place."""
    other = file.with_name(f"{file.name}.other")
    other.write_bytes(content)
    other.replace(file)


def by_mapping(file: Path, content: bytes) -> None:
    """Write through a mapping, where there are bytes to map."""
    with file.open("r+b") as out, mmap.mmap(out.fileno(), 0) as mapped:
        mapped[:] = content


WAYS: Mapping[str, Callable[[Path, bytes], None]] = {
    "in place": in_place,
    "by rename": by_rename,
    "through a mapping": by_mapping,
}


@dataclass
class Case:
    """One change, and what became of it.

    Attributes:
        kind: of what: ``bundle``, ``cache`` or ``session``.
        file: which, relative to the case's folder.
        way: how.
        running: it changed after the bundle was loaded, before it was asked.
        found: what edgespec said.
        wrong: what it should not have said; "" = nothing.
    """

    kind: str
    file: str
    way: str
    running: bool
    found: str = ""
    wrong: str = ""


@dataclass
class Bench:
    """Bundles, and what their plain decoding writes.

    Args:
        bundle: in the native layout.
        other: another bundle of the same names.
        folder: where cases are made.
        verify: whether ``edgespec verify`` is asked too.
    """

    bundle: Path
    other: Path
    folder: Path
    verify: bool = False
    expected: dict[str, list[int]] = field(default_factory=dict)

    def run(self, random: random.Random) -> Case:
        """Make a case and judge it."""
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        environment = {"EDGESPEC_CACHE": str(place / "cache"), "EDGESPEC_KEY": str(self.folder / "key")}
        with mock.patch.dict(os.environ, environment), mock.patch.object(checked, "QUIET", QUIET):
            bundle = Path(shutil.copytree(self.bundle, place / "bundle"))
            time.sleep(2 * QUIET)
            operators: Operators = random.choice(("native", "stock"))
            self._before(bundle, place, operators)
            time.sleep(2 * QUIET)
            case, file = self._choose(place, random)
            old = file.read_bytes()
            if not case.running:
                self._change(file, case, random)
            try:
                with self._opened(bundle, operators) as engine:
                    if case.kind == SESSION:
                        if case.running:
                            self._change(file, case, random)
                        engine.restore_session(file)
                    elif case.running:
                        self._change(file, case, random)
                    result = _ask(engine)
            except EdgespecError as error:
                case.found = f"refused: {error.message[:60]}"
                return case
            self._judge(case, result, file.is_file() and file.read_bytes() == old, operators)
            if self.verify and not case.wrong and case.kind == BUNDLE and not case.running:
                told = CliRunner().invoke(
                    command_line, ["verify", str(bundle), "--max-prompts", "1", "--method", "swift"]
                )
                if told.exit_code == 0:
                    case.wrong = "verify passed"
            return case

    @contextmanager
    def _opened(self, bundle: Path, operators: Operators) -> Iterator[Engine]:
        with load(bundle, threads=1, operators=operators) as engine:
            yield engine

    def _before(self, bundle: Path, place: Path, operators: Operators) -> None:
        """Say what a user has done before: all of it is remembered."""
        with self._opened(bundle, operators) as engine:
            result = _ask(engine)
            assert result.exact, result.unverified
            assert self.expected.setdefault(operators, result.tokens) == result.tokens
            engine.save_session(place / "a.session", PROMPT)

    def _choose(self, place: Path, random: random.Random) -> tuple[Case, Path]:
        kind = random.choice((BUNDLE, BUNDLE, CACHE, CACHE, SESSION))
        files = {
            BUNDLE: [path for path in (place / "bundle").rglob("*") if path.is_file() and path.name != MANIFEST],
            CACHE: [path for path in (place / "cache").rglob("*") if path.is_file()],
            SESSION: [place / "a.session"],
        }[kind]
        file = random.choice([path for path in files if path.stat().st_size])
        running = random.random() < 0.25
        return Case(kind, str(file.relative_to(place)), random.choice(list(WAYS)), running), file

    def _change(self, file: Path, case: Case, random: random.Random) -> None:
        """Other bytes of the same length; size and time of modification are as they were."""
        stat, content = file.stat(), bytearray(file.read_bytes())
        theirs = self.other / file.relative_to(self.folder / "case" / "bundle") if case.kind == BUNDLE else None
        if theirs is not None and theirs.is_file() and random.random() < 0.3:  # as of another version of the bundle
            their = theirs.read_bytes()[: len(content)]
            content[: len(their)] = their
        if bytes(content) == file.read_bytes():
            size = random.choice((1, 1, 16, max(1, len(content) // 4)))
            start = random.randrange(max(1, len(content) - size))
            for at in range(start, min(len(content), start + size)):
                content[at] ^= random.randrange(1, 256)
        if case.kind == SESSION and random.random() < 0.7:  # a seal cannot be forged
            size = LINE + int.from_bytes(content[12:16], "little")
            content[:size] = file.read_bytes()[:size]
            at = random.randrange(size, len(content))
            content[at] ^= random.choice((1, 64))
            content[16:48] = hashlib.sha256(content[LINE:]).digest()
        WAYS[case.way](file, bytes(content))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def _judge(self, case: Case, result: Result, restored: bool, operators: Operators) -> None:
        case.found = "made again" if restored else "; ".join(result.unverified)[:60] or "not used"
        claimed = result.exact is True or result.lossless is True
        if not claimed:
            return
        if result.tokens != self.expected[operators]:
            case.wrong = "another text is called exact"
        elif case.kind != CACHE and not restored:
            case.wrong = "a changed file is called exact"
        elif case.kind == CACHE and not restored and "model" in Path(case.file).name:
            case.wrong = "changed weights or graphs of the cache are called exact"


def _ask(engine: Engine) -> Result:
    return engine.generate(PROMPT, method=METHODS[engine.operators.kind], max_new_tokens=12)


def old_cache_copied_back(bench: Bench) -> Case:
    """Return the bundle becomes another one of the same sizes; the cache is that of before, whole, records too."""
    case, place = Case(CACHE, "all of it", "copied back", False), bench.folder / "old"
    shutil.rmtree(place, ignore_errors=True)
    environment = {"EDGESPEC_CACHE": str(place / "cache"), "EDGESPEC_KEY": str(bench.folder / "key")}
    with mock.patch.dict(os.environ, environment), mock.patch.object(checked, "QUIET", QUIET):
        bundle = Path(shutil.copytree(bench.bundle, place / "bundle"))
        time.sleep(2 * QUIET)
        with bench._opened(bundle, "stock") as engine:
            _ask(engine)
        shutil.copytree(place / "cache", place / "kept")
        times = {path.name: path.stat() for path in bundle.iterdir()}
        for file in bench.other.rglob("*"):
            if file.is_file():
                shutil.copyfile(file, bundle / file.relative_to(bench.other))
        for name, stat in times.items():
            os.utime(bundle / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        shutil.rmtree(place / "cache")
        shutil.copytree(place / "kept", place / "cache")
        with bench._opened(bundle, "stock") as engine:
            result = _ask(engine)
        with bench._opened(bench.other, "stock") as engine:
            right = _ask(engine)
    case.found = "made again"
    case.wrong = "" if result.tokens == right.tokens else "the old bundle's text"
    return case


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    end, random_ = time.monotonic() + 60 * arguments.minutes, random.Random(arguments.seed)
    found: Counter[tuple[str, str]] = Counter()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        bench = make_bench(Path(folder), verify=True)
        cases = 0
        while cases < arguments.count and time.monotonic() < end:
            case = bench.run(random_) if cases % 100 else old_cache_copied_back(bench)
            cases += 1
            found[case.kind, case.found.split(":")[0][:40]] += 1
            if case.wrong:
                wrong.append(case)
    lines = [f"{kind:<8} {number:>5}  {what}" for (kind, what), number in sorted(found.items())]
    lines += [str(case) for case in wrong]
    sys.stdout.write("\n".join([*lines, f"{cases} changes, {len(wrong)} called exact, lossless or passed", ""]))
    return 1 if wrong else 0


def make_bench(folder: Path, verify: bool = False) -> Bench:
    """Two bundles of the embedded model, with methods swift and speculative."""
    made = []
    for name, more in (("one", ()), ("two", ("--quantizer", "rtn"))):
        words = ["export", "builtin:shakespeare", "-o", str(folder / name), "--method", "swift", *more]
        done = CliRunner().invoke(command_line, words)
        if done.exit_code:
            raise RuntimeError(done.output)
        made.append(folder / name)
    return Bench(made[0], made[1], folder, verify)


if __name__ == "__main__":
    sys.exit(main())
