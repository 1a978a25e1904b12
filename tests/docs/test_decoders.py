"""Check what docs/models.md says of decoders that go through transformers against the table that it counts."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.support.every_decoder import BEGIN, END, HEAD, NOT_DECODERS, PAGE, TABLE, Row, summary, write_table


def test_the_page_counts_the_table() -> None:
    assert PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0] == summary(TABLE)


def test_the_table_gives_a_reason_for_each_type_that_fails() -> None:
    with TABLE.open(encoding="utf-8", newline="") as stream:
        head, *rows = csv.reader(stream)
    assert head == HEAD
    kinds = [row[0] for row in rows]
    assert kinds == sorted(set(kinds))
    assert not NOT_DECODERS & set(kinds)
    for kind, exported, equal, _, exact, operators, methods, why in rows:
        assert {exported, equal, exact} <= {"yes", "no"}
        assert operators in ("native", "linear", "stock", ""), kind
        assert (equal == exact == "yes" and methods) or why, kind


def test_only_exact_rows_at_once_count(tmp_path: Path) -> None:
    fast = Row("a", exported=True, equal=True, rows=True, exact=True, methods=("ar", "ngram"))
    rows = [
        fast,
        Row("b", exported=True, equal=True, exact=True),
        Row("c", exported=True, rows=True, exact=True),
        Row("d"),
    ]
    write_table(rows, tmp_path / "table.csv")
    assert "Of 4 types tried" in (said := summary(tmp_path / "table.csv"))
    assert "2 write transformers' text" in said
    assert "1 of those" in said
