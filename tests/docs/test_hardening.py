"""The page of defects names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "hardening.md"


def test_every_defect_names_tests_that_are_there() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| (?!what )", line)]
    assert len(rows) > 40
    for row in rows:
        file, named = None, 0
        for name in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1]):
            if name.startswith("cases/"):
                assert (TESTS / "fuzz" / name).is_file(), row
            else:
                path, _, test = name.partition("::") if ".py" in name else ("", "", name)
                file = TESTS / path if path else file
                assert file is not None, row
                assert file.is_file(), row
                assert not test or re.search(rf"^def {test}\(", file.read_text("utf-8"), re.MULTILINE), (test, row)
            named += 1
        assert named, row
