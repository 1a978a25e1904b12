"""``edgespec ngram``, and what ``run``, ``bench`` and ``verify`` do with a store."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.app import cli
from edgespec.drafters.ngram_stores import HEADER_BYTES, NGramStore
from edgespec.errors import StoreError
from tests.cli.conftest import Command

TEXT = "ROMEO:\nO, speak again, bright angel!\n\nJULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\n\n"
FACTS = {"store", "version", "vocab", "vocabulary", "texts", "tokens", "entries", "by_length", "left_out", "bytes"}
RUN = ("--prompt", "ROMEO:", "--method", "ngram", "--no-fallback", "--max-new-tokens", 48, "--json")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 3, "utf-8")
    return file


@pytest.fixture
def store(command: Command, demo: Path, text: Path, tmp_path: Path) -> Path:
    """Make a store of what the bundle writes after the prompt of RUN, among other text."""
    written = command("run", demo, *RUN, "--method", "ar").json["text"]
    other = tmp_path / "own.txt"
    other.write_text("ROMEO:" + written, "utf-8")
    file = tmp_path / "demo.store"
    assert command("ngram", "build", text, other, "--tokenizer", demo, "-o", file).code == 0
    return file


@pytest.mark.parametrize("name", ["build", "info", "clear"])
def test_every_subcommand_explains_itself(name: str) -> None:
    result = CliRunner().invoke(cli, ["ngram", name, "--help"], prog_name="edgespec")
    assert result.exit_code == 0
    assert f"\n  edgespec ngram {name} " in result.stdout
    assert "--json" in result.stdout


def test_help_says_that_a_store_keeps_the_text() -> None:
    for arguments in (["ngram", "--help"], ["ngram", "build", "--help"]):
        assert "treat it like" in " ".join(CliRunner().invoke(cli, arguments).stdout.split())


def test_build_and_info(command: Command, demo: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.store"
    result = command("ngram", "build", text, "--tokenizer", demo, "-o", file)
    assert result.code == 0
    assert "tokens in 1 text, " in result.out
    assert result.err.splitlines() == ["read: characters of 1 files", "count: n-grams of 1 to 4 tokens"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    found = command("ngram", "info", file, "--json").json
    assert found.keys() == FACTS
    assert found["bytes"] == file.stat().st_size == HEADER_BYTES + 16 * found["entries"]
    assert (found["texts"], found["left_out"], sum(found["by_length"])) == (1, 0, found["entries"])
    again = command("ngram", "build", text, "--tokenizer", demo, "-o", file, "--overwrite", "--json").json
    assert again == found
    shown = command("ngram", "info", file).out
    assert str(found["entries"]) in shown
    assert found["vocabulary"][:12] in shown


def test_conversations(command: Command, demo: Path, tmp_path: Path) -> None:
    file, items = tmp_path / "a.jsonl", [{"prompt": TEXT}, {"turns": [TEXT, "not read"]}]
    file.write_text("\n".join(json.dumps(item) for item in items), "utf-8")
    made = command("ngram", "build", file, "--tokenizer", demo, "-o", tmp_path / "a.store", "--json").json
    assert made["texts"] == 2


def test_the_size_is_kept_and_what_is_left_out_is_said(
    command: Command, demo: Path, text: Path, tmp_path: Path
) -> None:
    file = tmp_path / "small.store"
    options = "--tokenizer", demo, "-o", file, "--max-size", "1KiB"
    result = command("ngram", "build", text, *options)
    assert file.stat().st_size == 1024
    left = command("ngram", "info", file, "--json").json["left_out"]
    assert left > 0
    assert f"no room for {left} n-grams" in result.out
    command("ngram", "build", text, *options[:-1], "100B", "--overwrite").refused(1, "holds nothing", "272 bytes")
    command("ngram", "build", text, *options[:-1], "much").refused(1, "'much'", "1.5GiB")


def test_the_text_is_that_of_plain_decoding(command: Command, demo: Path, store: Path) -> None:
    plain = command("run", demo, *RUN, "--method", "ar").json
    own = command("run", demo, *RUN).json
    helped = command("run", demo, *RUN, "--ngram-store", store).json
    assert helped["tokens"] == own["tokens"] == plain["tokens"]
    assert helped["exact"]
    assert helped["stats"]["rounds"] < own["stats"]["rounds"]  # it knows this text


def test_verify_and_bench_take_a_store(command: Command, demo: Path, store: Path) -> None:
    quick = "--method", "ngram", "--ngram-store", store, "--max-prompts", 2, "--max-new-tokens", 16, "--json"
    assert command("verify", demo, *quick).json["passed"] is True
    rows = command("bench", demo, *quick, "--repeats", 1).json["methods"]
    assert [row["same_text"] for row in rows] == [2, 2]


def test_from_python(demo: Path, store: Path) -> None:
    before = store.read_bytes()
    engine = edgespec.load(demo, ngram_store=store)
    prompts = ["ROMEO:", "JULIET:\nO Romeo, "]
    samplings: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 1, "acceptance": "coupled"}]
    for sampling in samplings:
        plain = [engine.generate(prompt, method="ar", max_new_tokens=32, **sampling).tokens for prompt in prompts]
        for fallback in (True, False):
            options: dict[str, Any] = {"method": "ngram", "max_new_tokens": 32, "fallback": fallback, **sampling}
            assert [engine.generate(prompt, **options).tokens for prompt in prompts] == plain
    assert store.read_bytes() == before
    assert engine.store is not None


def test_a_name_that_is_taken(command: Command, demo: Path, text: Path, store: Path, tmp_path: Path) -> None:
    before = store.read_bytes()
    build = "ngram", "build", text, "--tokenizer", demo, "-o"
    command(*build, store).refused(1, "exists", "--overwrite")
    assert store.read_bytes() == before
    command(*build, store, "--overwrite")
    assert store.read_bytes() != before
    content = text.read_bytes()
    command(*build, text, "--overwrite").refused(1, "is not an n-gram store")
    assert text.read_bytes() == content
    command(*build, tmp_path / "no" / "a.store").refused(1, "cannot write", "-o")


def test_texts_that_hold_nothing(command: Command, demo: Path, tmp_path: Path) -> None:
    file, store = tmp_path / "a.txt", tmp_path / "a.store"
    options = "--tokenizer", demo, "-o", store
    file.write_text(" \n", "utf-8")
    command("ngram", "build", file, *options).refused(1, str(file), "has no text")
    file.write_text("a", "utf-8")
    command("ngram", "build", file, *options).refused(1, "no n-gram worth keeping", "more text")
    file.write_bytes(b"\xff\xfe\x00")
    command("ngram", "build", file, *options).refused(1, "cannot read text")
    command("ngram", "build", tmp_path / "none.txt", *options).refused(1, "cannot read text")
    command("ngram", "build", file, "--tokenizer", tmp_path, "-o", store).refused(1, "has no tokenizer.json")
    assert not store.exists()


def test_damaged_stores_are_refused_before_decoding(command: Command, demo: Path, store: Path) -> None:
    good = store.read_bytes()
    broken = {
        "altered: expected SHA-256": good[:-1] + bytes([good[-1] ^ 1]),
        "header does not match": good[:30] + bytes([good[30] ^ 1]) + good[31:],
        "truncated: expected": good[:-5],
        "truncated: expected 256 bytes": good[:100],
        "altered: expected": good + b"x",
        "version 9; this edgespec reads version 1": good[:8] + b"\x09" + good[9:],
        "not an n-gram store": b"PK" + good[2:],
    }
    for message, content in broken.items():
        store.write_bytes(content)
        command("ngram", "info", store).refused(1, str(store), message, "hint: ")
        command("run", demo, *RUN, "--ngram-store", store).refused(1, str(store), message)
    store.write_bytes(b"")
    command("run", demo, *RUN, "--ngram-store", store).refused(1, "not an n-gram store")
    command("run", demo, *RUN, "--ngram-store", store.parent).refused(1, "cannot read it")
    command("run", demo, *RUN, "--ngram-store", store.parent / "none").refused(1, "cannot read it")


def test_unchecked_damage_changes_no_text(command: Command, demo: Path, store: Path) -> None:
    content = store.read_bytes()
    store.write_bytes(content[:HEADER_BYTES] + bytes(255 - byte for byte in content[HEADER_BYTES:]))
    plain = command("run", demo, *RUN, "--method", "ar").json
    assert command("run", demo, *RUN, "--ngram-store", store, "--no-check").json["tokens"] == plain["tokens"]


def test_another_tokenizer_is_refused(command: Command, demo: Path, chatty: Path, store: Path) -> None:
    facts = NGramStore(store).facts
    result = command("run", chatty, *RUN, "--ngram-store", store)
    result.refused(1, "another tokenizer", facts.vocabulary[:12], f"{facts.vocab} tokens", "edgespec ngram build")
    with pytest.raises(StoreError, match=r"the model's [0-9a-f]{12}"):
        edgespec.load(chatty, ngram_store=store)


def test_clear_removes_stores_and_nothing_else(command: Command, store: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.store"
    other.write_bytes(store.read_bytes()[:40])  # damaged, but a store
    for wrong in (text, tmp_path, tmp_path / "none"):
        command("ngram", "clear", other, wrong, store).refused(1, str(wrong), "nothing was removed")
    assert store.exists()
    assert other.exists()
    made = command("ngram", "clear", store, other, store, "--json").json
    assert made.keys() == {"removed", "bytes"}
    assert made["removed"] == [str(store), str(other)]
    assert not store.exists()
    assert not other.exists()
    assert text.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="links and permissions of POSIX")
def test_links_and_permissions(command: Command, store: Path, tmp_path: Path) -> None:
    assert store.stat().st_mode & 0o077 == 0  # it contains parts of the texts
    link = tmp_path / "link.store"
    os.symlink(store, link)  # noqa: PTH211
    command("ngram", "clear", link).refused(1, "is a link")
    assert store.exists()
    assert "removed 1 store, " in command("ngram", "clear", store).out
