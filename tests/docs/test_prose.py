"""No file has more phrases of foreign English than were counted in it; ``python -m tools.prose`` shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.prose import COUNTS, counts, hits, prose, record, rises, rules


def test_no_file_has_more_phrases_than_recorded() -> None:
    assert not rises(counts(), json.loads(COUNTS.read_text("utf-8")))


@pytest.mark.parametrize("rule", rules())
@pytest.mark.parametrize(
    ("suffix", "form"),
    [(".md", "A page.\n\n{}\n"), (".py", 'def f():\n    """Do it.\n\n    {}\n    """\n'), (".py", "x = 1  # {}\n"),
     (".py", 'raise E("{}")\n'), (".kt", "/** {} */\nval x = 1\n"), (".cpp", "int x; // {}\n")],
)  # fmt: skip
def test_a_planted_phrase_fails(rule: str, suffix: str, form: str) -> None:
    planted = form.format(rules()[rule]["fails"])
    found = [name for name, _ in hits(prose(planted, suffix))]
    assert rule in found
    assert rises({"a": len(found)}, {"a": len(found) - 1})


@pytest.mark.parametrize("rule", rules())
def test_what_to_write_instead_passes(rule: str) -> None:
    assert not [*hits(rules()[rule]["write"])]


@pytest.mark.parametrize(
    "text", ["```\nnobody lies beside it\n```", "See `apart` there.", "[x](beside/behind.md)", "He is behind a proxy."]
)
def test_code_links_and_plain_words_pass(text: str) -> None:
    assert not [*hits(prose(text, ".md"))]


def test_counts_only_fall(tmp_path: Path) -> None:
    kept = tmp_path / "counts.json"
    assert not record({"a": 3, "b": 1}, kept)
    assert record({"a": 2, "b": 2}, kept)
    assert record({"a": 3, "b": 1, "new": 1}, kept)
    assert json.loads(kept.read_text("utf-8")) == {"a": 3, "b": 1}
    assert not record({"a": 2}, kept)
    assert json.loads(kept.read_text("utf-8")) == {"a": 2}
