"""Print every network system call of a day with edgespec, seen from outside by strace.

    python tools/network.py [--bundle FOLDER]

Each command runs in an environment like a user's: it has only PATH and HOME, so that no variable silences a library.
Sockets of the internet count, not those between processes of this machine.  `edgespec serve` may listen on one loopback
address; everything else must use no network, and leave no file in the home outside edgespec's cache.  The exit code
reports whether it did.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# network access: sockets of the internet, and any bind, connect or send with an address of it
CALL = re.compile(r"\bsocket\(AF_INET|\b(bind|connect|sendto|sendmsg|sendmmsg)\(.*\bsin6?_addr")
SERVES = re.compile(r'\bsocket\(AF_INET,|\bbind\(.*inet_addr\("127\.0\.0\.1"\)')
LIMIT = 300  # seconds of a command; strace slows those that start many threads

API = """
import edgespec
with edgespec.load({bundle!r}, threads=1) as engine:
    assert len(engine.generate("ROMEO:", max_new_tokens=16, ignore_eos=True).tokens) == 16
"""


@dataclass(frozen=True)
class Traced:
    """Recorded behavior of a command.

    Attributes:
        name: of the command, for a person.
        code: its exit code.
        said: its output, both streams.
        calls: lines of strace: network system calls that are not local to the machine.
        left: files in its home afterwards, relative, without edgespec's own cache.
    """

    name: str
    code: int
    said: str
    calls: tuple[str, ...]
    left: tuple[str, ...]


def environment(home: Path) -> dict[str, str]:
    """Make a user's: PATH and HOME, without CI and ORT_DISABLE_TELEMETRY, which would hide what is looked for."""
    return {"PATH": os.environ["PATH"], "HOME": str(home)}


def network_calls(log: str) -> list[str]:
    """Return the lines of strace's log that reach a network; sockets of other kinds stay on this machine."""
    return [line for line in log.splitlines() if CALL.search(line)]


def traced(command: Sequence[str], home: Path, log: Path) -> list[str]:
    """Make the command that runs ``command`` and writes its network system calls, and its children's, to a file."""
    # -D: the command itself is the child, so that signals reach it
    return ["strace", "-D", "--seccomp-bpf", "-f", "-qq", "-s", "100", "-e", "trace=network", "-o", str(log), *command]


def left_in(home: Path) -> tuple[str, ...]:
    """Files of a home, relative; edgespec's own cache and key left out."""
    found = (str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
    return tuple(sorted(name for name in found if "edgespec" not in Path(name).parts))


def run(name: str, command: Sequence[str], home: Path) -> Traced:
    """Run a command under strace in an environment like a user's."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        done = subprocess.run(
            traced(command, home, log), cwd=folder, env=environment(home), capture_output=True, text=True, timeout=LIMIT
        )
        calls = network_calls(log.read_text("utf-8", errors="replace"))
    return Traced(name, done.returncode, done.stdout + done.stderr, tuple(calls), left_in(home))


def serve(bundle: Path, home: Path) -> Traced:
    """Run `edgespec serve` under strace, and ask it something."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "calls"
        command = [*EDGESPEC, "serve", str(bundle), "--port", "0", "--threads", "1", "--json"]
        with subprocess.Popen(
            traced(command, home, log), cwd=folder, env=environment(home),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        ) as server:  # fmt: skip
            assert server.stdout is not None
            try:
                about = json.loads(server.stdout.readline())
                asked = json.dumps({"model": about["model"], "prompt": "ROMEO:", "max_tokens": 8}).encode()
                request = urllib.request.Request(
                    f"{about['url']}/completions", asked, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                    said = answer.read().decode()
            finally:
                server.terminate()
            code = server.wait(LIMIT)
        calls = network_calls(log.read_text("utf-8", errors="replace"))
    return Traced("serve", code, said, tuple(calls), left_in(home))


EDGESPEC = [sys.executable, "-m", "edgespec"]


def day(bundle: Path, home: Path) -> Iterator[Traced]:
    """Run a day's commands, one after the other: exporting, looking, running, proving, measuring, serving, Python."""
    if not bundle.exists():
        export = ["export", "builtin:shakespeare", "--method", "speculative", "--draft", "builtin:shakespeare-draft"]
        yield run("export", [*EDGESPEC, *export, "-o", str(bundle)], home)
    few = ["--threads", "1", "--max-new-tokens", "16"]
    for words in (
        ["--version"],
        ["models"],
        ["plan", str(bundle)],
        ["info", str(bundle)],
        ["run", str(bundle), "--prompt", "ROMEO:", *few],
        ["verify", str(bundle), "--max-prompts", "2", *few],
        ["bench", str(bundle), "--max-prompts", "1", "--repeats", "1", *few],
        ["cache", "list"],
    ):
        yield run(words[0], [*EDGESPEC, *words], home)
    yield run("import edgespec", [sys.executable, "-c", API.format(bundle=str(bundle))], home)
    yield serve(bundle, home)


def wrong(one: Traced) -> list[str]:
    """Give what a command did that none may do: calls beyond a server's loopback address, files of others, failures."""
    calls = [line for line in one.calls if one.name != "serve" or not SERVES.search(line)]
    found = calls + [f"left {name}" for name in one.left]
    # a signal ends the server
    return found + ([f"exit code {one.code}: {one.said[-400:]}"] if one.code and one.name != "serve" else [])


def main() -> int:
    """Print the log -> 1 if anything was done that must not be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, help="a bundle; without it one is exported")
    bundle = parser.parse_args().bundle
    if shutil.which("strace") is None:
        parser.error("strace is not installed")
    bad = 0
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
        for one in day(bundle.resolve() if bundle else Path(work) / "demo", Path(home)):
            print(f"{one.name}: {len(one.calls)} network system calls", *one.calls, sep="\n  ", flush=True)
            if found := wrong(one):
                bad += 1
                print("  must not be:", *found, sep="\n    ", flush=True)
    print("nothing leaves this machine" if not bad else f"{bad} commands did what they must not")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
