"""Run the tests, then run failed ones once more, separately: an accident on a busy machine must not fail the whole run.

    python tools/retest.py [ARGUMENTS OF PYTEST]

The first run does not rewrite assertions, which saves every process eight seconds; values of a failed assertion are
still shown.  The second run takes the failed tests by name, in sequence in one process, and reports the difference.  A
test that fails twice fails the run.  A test that passes the second time is named and counted, and does not.  All other
errors (while tests are collected, an interruption, more than ``MOST`` failures) fail immediately.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 25  # failures; more are not an accident


def run(cache: Path, arguments: list[str]) -> tuple[int, list[str]]:
    """Run pytest with a separate cache folder -> its exit code, and the names of the tests that failed."""
    code = subprocess.run([sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]).returncode
    failed = cache / "v" / "cache" / "lastfailed"  # a test during which a worker crashed is among them
    return code, sorted(json.loads(failed.read_text("utf-8"))) if failed.exists() else []


def main(arguments: list[str]) -> int:
    """Run twice at most -> the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        code, failed = run(Path(folder) / "together", ["--assert=plain", "-l", *arguments])
        tests = all("::" in name for name in failed)  # else a file that cannot be read is among them
        if code != 1 or not tests or not 0 < len(failed) <= MOST:  # 1: tests ran, and some failed
            return code
        print(f"\n{len(failed)} failed; they run again, alone", flush=True)
        code, again = run(Path(folder) / "alone", ["-n0", *failed])
    if code not in (0, 1) or (code == 1 and not again):  # not found any more, or the process broke off
        print(f"the second run ended with code {code}: failed")
        return code
    for name in failed:
        print(f"failed twice: {name}" if name in again else f"passed only alone: {name}")
    print(f"{len(failed) - len(again)} passed only alone, {len(again)} failed twice", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
