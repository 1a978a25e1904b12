"""Texts that are cut say so, and structured ones exit with a code of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.conftest import Command

PROMPT = "ROMEO:"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"],
          "additionalProperties": False}  # fmt: skip


def test_structured_text_is_clean_and_complete(command: Command, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), "utf-8")
    ask = ("run", demo, "--prompt", PROMPT, "--json-schema", tmp_path / "schema.json")
    made = command(*ask)
    assert made.code == 0
    assert json.loads(made.out).keys() == {"name"}
    assert "cut" not in made.err


def test_structured_text_that_is_cut_exits_with_3(command: Command, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), "utf-8")
    (tmp_path / "grammar.lark").write_text('start: ("a" | "b")* "c"', "utf-8")
    for kind, rule in (
        ("--json-schema", tmp_path / "schema.json"),
        ("--regex", "[ab]{900}"),
        ("--grammar", tmp_path / "grammar.lark"),
    ):
        ask = ("run", demo, "--prompt", PROMPT, kind, rule, "--max-new-tokens", 2)
        made, as_json = command(*ask), command(*ask, "--json")
        assert (made.code, as_json.code) == (3, 3)
        for shown in (made, as_json):
            assert "warning: cut after 2 tokens, before the grammar was complete: --max-new-tokens" in shown.err
        assert json.loads(as_json.out)["text"] == made.out.removesuffix("\n")
    stopped = command("run", demo, "--prompt", PROMPT, "--regex", "a{9}b{9}", "--stop", "b")
    assert (stopped.code, stopped.out) == (3, "a" * 9 + "\n")
    assert "a stop string came" in stopped.err


def test_what_cut_a_text_is_said(command: Command, demo: Path) -> None:
    ask = ("run", demo, "--prompt", PROMPT)
    assert "note: cut after 128 tokens: --max-new-tokens N allows more" in command(*ask).err
    full = command(*ask, "--context", 40, "--max-new-tokens", 100)
    assert full.code == 0
    assert re.search(r"note: cut after 3\d tokens: the context of 40 tokens is full", full.err)
    text = command(*ask, "--max-new-tokens", 24, "--json").json["text"]
    assert "cut" not in command(*ask, "--stop", text[9:12]).err
