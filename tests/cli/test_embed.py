"""``edgespec embed``, and the other commands with an encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.engine.engine import Engine
from tests.cli.conftest import Command
from tests.support import encoders

TEXTS = encoders.TEXTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an encoder and a cross-encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    encoders.save(encoders.torch_model("bert"), folder / "bert")
    encoders.save(encoders.torch_model("bert", "ForSequenceClassification", num_labels=1), folder / "cross")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    edgespec.export(folder / "bert", folder / "edge", threads=1)
    with edgespec.load(folder / "edge", threads=1) as loaded:
        yield loaded


def test_vectors(command: Command, engine: Engine, folder: Path, tmp_path: Path) -> None:
    """As lines, as one object, and as a file of numpy."""
    wanted, bundle = engine.embed(TEXTS), folder / "edge"
    lines = command("embed", bundle, *TEXTS).out.splitlines()
    assert np.array([json.loads(line) for line in lines], np.float32).tobytes() == wanted.tobytes()
    (tmp_path / "texts").write_text("\n\n".join(TEXTS), "utf-8")
    found = command("embed", bundle, "--file", tmp_path / "texts", "--json").json
    assert np.array(found["embeddings"], np.float32).tobytes() == wanted.tobytes()
    result = command("embed", bundle, "--file", tmp_path / "texts", "-o", tmp_path / "v.npy", "--dimensions", "8")
    assert result.code == 0
    assert np.load(tmp_path / "v.npy").tobytes() == engine.embed(TEXTS, dimensions=8).tobytes()
    assert "is there already" in command("embed", bundle, "x", "-o", tmp_path / "v.npy").err
    ranked = command("embed", bundle, *TEXTS, "--query", "a king", "--top", "2").out.splitlines()
    assert [int(line.split()[1]) for line in ranked] == [one.index for one in engine.rerank("a king", TEXTS, top=2)]


def test_an_export_says_what_comes_next(command: Command, folder: Path, tmp_path: Path) -> None:
    """The cosine of an encoder, the error of a cross-encoder, and how to use either."""
    result = command("export", folder / "bert", "-o", tmp_path / "bert", "--threads", "1")
    assert result.code == 0
    assert "mean embeddings, cosine 0.99" in result.out
    assert f"next: edgespec embed {tmp_path / 'bert'} '...'" in result.out
    result = command("export", folder / "cross", "-o", tmp_path / "cross", "--threads", "1")
    assert "scores pairs of texts, at most" in result.out
    assert "--query '...'" in result.out
    info = command("info", tmp_path / "cross")
    assert info.code == 0
    assert "scores" in info.out
    assert "cosine" in command("info", tmp_path / "bert").out
    assert "an encoder" in command("export", folder / "bert", "-o", tmp_path / "other", "--dry-run").out
    found = command("embed", tmp_path / "cross", *TEXTS, "--query", "a king", "--json").json
    assert sorted(one["index"] for one in found["results"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["embed", "{edge}"], 2, "no texts"),
        (["embed", "{edge}", "x", "--top", "2"], 2, "--top goes with --query"),
        (["embed", "{edge}", "x", "--query", "y", "--dimensions", "2"], 2, "--dimensions does not go with --query"),
        (["embed", "{edge}", "--file", "nowhere"], 1, "cannot be read"),
        (["embed", "{edge}", "x", "--prompt", "query"], 1, "has no prompts"),
        (["embed", "{edge}", "king " * 300], 1, "tokens"),
        (["embed", "nowhere", "x"], 1, "nowhere"),
        (["run", "{edge}", "--prompt", "x"], 1, "is an encoder"),
        (["run", "{edge}", "--chat"], 1, "is an encoder"),
        (["bench", "{edge}"], 1, "is an encoder"),
        (["verify", "{edge}"], 1, "is an encoder"),
        (["calibrate", "{edge}"], 1, "is an encoder"),
        (["train", "draft", "{bert}", "-o", "x"], 1, "encoder"),
        (["plan", "{bert}", "--budget", "1GiB"], 1, "encoder"),
    ],
)
def test_errors(command: Command, engine: Engine, folder: Path, words: list[str], code: int, message: str) -> None:
    result = command(*(word.format(edge=folder / "edge", bert=folder / "bert") for word in words))
    assert result.code == code
    assert message in result.err


def test_a_decoder_embeds_too(command: Command, demo: Path) -> None:
    with edgespec.load(demo, threads=1) as loaded:
        wanted = loaded.embed(["Good night", "Speak!"])
    lines = command("embed", demo, "Good night", "Speak!", "--threads", "1").out.splitlines()
    assert np.array([json.loads(line) for line in lines], np.float32).tobytes() == wanted.tobytes()
