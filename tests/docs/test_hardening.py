"""The page of defects names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_defect_names_tests_that_are_there() -> None:
    page = (ROOT / "docs/dev/hardening.md").read_text("utf-8")
    rows = re.findall(r"^\| (?!defect ).*\| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 40
    for row in rows:
        names, source = re.findall(r"`([^`]+)`", row), ""
        assert names, row
        for name in names:
            path, _, test = name.rpartition("::") if "::" in name else (name, "", "") if "/" in name else ("", "", name)
            if path:
                source = (ROOT / path).read_text("utf-8")
            assert not test or re.search(rf"^def {test}\(", source, re.MULTILINE), (test, row)
