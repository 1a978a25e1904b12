"""Check commit subjects: `area: verb object`, lower case, at most 72 characters (CONTRIBUTING.md, "Commits").

python tools/commit_subjects.py [RANGE]     # default: everything since the convention began
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SINCE = "f50e8b99"  # the last commit before the convention
LONGEST = 72  # characters
LANDED: set[str] = set()  # hashes, as `%h` prints them, of wrong subjects that cannot be changed any more
SUBJECT = re.compile(r"[a-z][a-z0-9_/-]*(?:, [a-z][a-z0-9_/-]*)*: [a-z].*[^.]")


def fault(subject: str) -> str | None:
    """Say what is wrong with a subject; None = nothing."""
    if len(subject) > LONGEST:
        return f"{len(subject)} characters: expected at most {LONGEST}"
    return None if SUBJECT.fullmatch(subject) else "expected `area: verb object`, lower case, without a full stop"


def main() -> None:
    """Check the commits of a range, merges left out."""
    known = subprocess.run(["git", "cat-file", "-e", SINCE], cwd=ROOT, capture_output=True, check=False)
    commits = sys.argv[1] if len(sys.argv) > 1 else f"{SINCE}..HEAD" if known.returncode == 0 else "-1"  # shallow clone
    git = ["git", "log", "--no-merges", "--format=%h %s", commits]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [line.split(" ", 1) for line in listed.stdout.splitlines()]
    wrong = [f"{commit} {subject}: {why}" for commit, subject in found
             if commit not in LANDED and (why := fault(subject))]  # fmt: skip
    print("\n".join(wrong) or f"{len(found)} commit subjects are in order")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
