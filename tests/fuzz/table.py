"""``python -m tests.fuzz.table LOG...``: logs of ``python -m tests.fuzz --log`` as tables of Markdown."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from tests.fuzz.judge import CLASSES


def main(logs: list[str]) -> None:
    lines = [json.loads(line) for log in logs for line in Path(log).read_text("utf-8").splitlines()]
    kinds = Counter((line["seed"].split()[0], line["ended"]) for line in lines)
    changed = Counter((what, line["ended"]) for line in lines for what in {what for what, _ in line["done"]})
    # a change that is alone in its mutant, and whose file the error names
    named = Counter(
        what
        for line in lines
        for what, how in line["done"][:1]
        if len(line["done"]) == 1 and line["ended"] == "clean" and how.split(":")[0].split("/")[-1] in line["as"]
    )
    for title, counts in (("mutants of", kinds), ("changed", changed)):
        more = ["refused by name"] if counts is changed else []
        rows = [[title, *CLASSES, *more], ["---", *["---:"] * (len(CLASSES) + len(more))]]
        rows += [
            [name, *(str(counts[name, ended]) for ended in CLASSES), *([str(named[name])] if more else [])]
            for name in sorted({name for name, _ in counts})
        ]
        sys.stdout.writelines("| " + " | ".join(row) + " |\n" for row in [*rows])
        sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
