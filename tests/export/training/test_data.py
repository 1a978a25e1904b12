"""Texts, windows and their order; these tests do not need torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgespec.errors import TrainingError
from edgespec.export.training.windows import (
    Windows,
    batch_rows,
    data_files,
    files_digest,
    read_texts,
    split_texts,
    without,
)
from edgespec.runtimes.text.codec import TextCodec


@pytest.fixture(scope="module")
def codec(model: Path) -> TextCodec:
    return TextCodec(model)


def test_texts_of_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text('\ufeff{"text": "not json"\n\nthe whole', "utf-8")
    items = [{"text": "one"}, {"prompt": "tw", "text": "o"}, {"turns": ["three", "four"]}, {"prompt": " "}]
    lines.write_text("\n\n".join(json.dumps(item) for item in items), "utf-8")
    assert read_texts([plain, lines]) == ['{"text": "not json"\n\nthe whole', "one", "two", "three"]
    assert read_texts([]) == []
    assert data_files([lines, tmp_path]) == [lines, plain, lines]
    assert len(set(files_digest([plain, lines]))) == 2


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.jsonl", b"{}", "cannot read texts: 'prompt'(.|\n)*hint: give a text file"),
        ("a.jsonl", b"[1]", "cannot read texts"),
        ("a.jsonl", b"nonsense", "cannot read texts"),
        ("a.txt", b"\xff\xfe\xff", "cannot read texts"),
        ("a.txt", b" \n", "no text in there"),
        ("a.jsonl", b"", "no text in there"),
        ("a.txt", None, "cannot read texts"),
    ],
)
def test_files_without_texts(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingError, match=said):
        read_texts([tmp_path / name])


def test_a_long_text_is_cut_into_windows_and_its_end_is_held_out(codec: TextCodec) -> None:
    text = "the tide came in and the wind went down. " * 40
    tokens = codec.encode(text, special=False)
    train, held = split_texts([text], codec, 16, 0)
    assert (train.tokens[:, 0] == 0).all()  # BOS
    joined = [token for row, n in zip(train.tokens, train.lengths, strict=True) for token in row[1:n].tolist()]
    joined += [token for row, n in zip(held.tokens, held.lengths, strict=True) for token in row[1:n].tolist()]
    assert joined == tokens[: len(joined)]
    assert len(tokens) - len(joined) < 8  # the rest is too short for a window
    assert 1 <= len(held) < len(train)


def test_of_many_texts_whole_ones_are_held_out(codec: TextCodec) -> None:
    texts = [f"the boat number {number} came home without its crew" for number in range(60)]
    train, held = split_texts(texts, codec, 64, 0)
    assert (len(train), len(held)) == (57, 3)
    assert not {tuple(row) for row in train.tokens.tolist()} & {tuple(row) for row in held.tokens.tolist()}
    assert split_texts(texts, codec, 64, 1)[1].tokens.tolist() != held.tokens.tolist()
    assert split_texts(texts, codec, 64, 0)[1].tokens.tolist() == held.tokens.tolist()


@pytest.mark.parametrize("texts", [["short"], ["the boat came home"], []])
def test_too_little_text(codec: TextCodec, texts: list[str]) -> None:
    with pytest.raises(TrainingError, match=r"tokens: expected at least two windows of 32 tokens(.|\n)*--length"):
        split_texts(texts, codec, 32, 0)


def test_windows() -> None:
    few, more = Windows.of([[1, 2], [3]], 2), Windows.of([[4, 5, 6]], 4)
    assert few.tokens.tolist() == [[1, 2], [3, 0]]
    both = Windows.joined([few, more, Windows.joined([])])
    assert both.tokens.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0]]
    assert both.take(np.array([1, 0])).tokens.tolist() == [[3, 0], [1, 2]]  # no longer than they are
    assert without(both, Windows.of([[1, 9]], 2), 1).tokens.tolist() == [[3, 0, 0], [4, 5, 6]]


def test_every_pass_reads_every_window_once_in_an_order_of_its_own() -> None:
    rows = np.concatenate([batch_rows(10, 4, step, 0) for step in range(5)])
    first, second = rows[:10].tolist(), rows[10:].tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert batch_rows(10, 4, 3, 0).tolist() == rows[12:16].tolist()  # nothing but the step is needed
    assert batch_rows(3, 8, 0, 0).shape == (8,)  # more than there are
    assert batch_rows(10, 4, 3, 1).tolist() != rows[12:16].tolist()
