"""``edgespec run --show-drafts``."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from edgespec.cli.answer import coloured as round_text
from edgespec.decoding.loop import Round
from edgespec.engine.engine import Engine
from edgespec.engine.request import Stream
from edgespec.engine.result import Chunk
from edgespec.runtimes.text.codec import TextCodec
from tests.cli.conftest import ROOT, Command

PROMPT = "ROMEO:"


GREEN, RED = {"32"}, {"31", "9"}
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


def coloured(text: str) -> Iterator[tuple[frozenset[str], str]]:
    """(codes, text) of everything between escape sequences."""
    style: frozenset[str] = frozenset()
    for at, part in enumerate(ESCAPE.split(text)):
        if at % 2:
            style = frozenset(part.split(";")) - {"0", ""}
        elif part:
            yield style, part


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that asks for colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return monkeypatch


DRAFTING = ("--prompt", PROMPT, "--max-new-tokens", 80, "--method", "self-spec", "--no-fallback")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Chunk, Round]]:
    """Every chunk that is made, with its round."""
    seen: list[tuple[Chunk, Round]] = []
    take = Stream._take

    def noted(self: Stream, item: Round) -> Chunk:
        chunk = take(self, item)
        seen.append((chunk, item))
        return chunk

    monkeypatch.setattr(Stream, "_take", noted)
    return seen


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every refused draft that is asked for."""
    seen: list[str] = []
    continuation = TextCodec.continuation

    def noted(self: TextCodec, before: Sequence[int], tokens: Sequence[int]) -> str:
        seen.append(continuation(self, before, tokens))
        return seen[-1]

    monkeypatch.setattr(TextCodec, "continuation", noted)
    return seen


def in_style(text: str, style: set[str]) -> str:
    return "".join(part for codes, part in coloured(text) if codes == style)


def test_drafts_in_colour(
    command: Command, demo: Path, colours: pytest.MonkeyPatch, rounds: list[tuple[Chunk, Round]], refused: list[str]
) -> None:
    shown = command("run", demo, *DRAFTING, "--show-drafts").out
    assert {frozenset(), frozenset(GREEN), frozenset(RED)} == {style for style, _ in coloured(shown)}
    accepted = "".join("".join(chunk.pieces[: item.accepted]) for chunk, item in rounds)
    assert in_style(shown, GREEN) == accepted.replace("\n", "")  # the end of a line has no colour
    assert in_style(shown, RED) == "".join(refused).replace("\n", "")
    assert len(refused) == sum(bool(item.rejected) for _, item in rounds)
    broken = sum(text.count("\n") for text in refused)
    kept = "".join(text for style, text in coloured(shown) if style != RED)
    plain = command("run", demo, *DRAFTING).out
    assert kept == plain if not broken else kept.replace("\n", "") == plain.replace("\n", "")


@pytest.mark.parametrize("change", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": ""}])
def test_without_colours_refused_drafts_are_left_out(
    command: Command, demo: Path, colours: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    for name, value in change.items():
        colours.setenv(name, value) if value else colours.delenv(name)
    assert command("run", demo, *DRAFTING, "--show-drafts").out == command("run", demo, *DRAFTING).out


def test_a_stop_string_ends_coloured_text_too(
    command: Command, demo: Path, colours: pytest.MonkeyPatch, rounds: list[tuple[Chunk, Round]], refused: list[str]
) -> None:
    whole = command("run", demo, "--prompt", PROMPT, "--json", "--max-new-tokens", 40).json["text"]
    for stop in sorted({whole[at : at + 2] for at in range(5, 60)} - {""}):
        rounds.clear()
        refused.clear()
        shown = command("run", demo, *DRAFTING, "--show-drafts", "--stop", stop).out
        kept = "".join(text for style, text in coloured(shown) if style != RED)
        assert kept.replace("\n", "") == whole[: whole.index(stop)].replace("\n", "")
        # what came after the stop string in its round is nobody's business
        whole_rounds = [item for chunk, item in rounds if len(chunk.pieces) == len(item.tokens)]
        assert len(refused) == sum(bool(item.rejected) for item in whole_rounds)


@pytest.mark.parametrize("pieces, text", [(("a", "b", "c"), "abXc"), (("a",), "a")])
def test_nothing_is_shown_of_a_round_after_its_stop_string(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, pieces: tuple[str, ...], text: str
) -> None:
    monkeypatch.setattr(TextCodec, "continuation", lambda *_: "X")
    item = Round([1, 2, 3], [1, 2, 4], 2, range(2), [4], None, None)
    console = Console(file=io.StringIO(), soft_wrap=True)
    with closing(engine().stream("The")) as stream:
        console.print(round_text(engine(), stream, Chunk("".join(pieces), item, pieces)), end="")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == text


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_colours(demo: Path, tmp_path: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    running = subprocess.Popen(
        [sys.executable, "-m", "edgespec", "run", str(demo), *map(str, DRAFTING), "--show-drafts"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass  # Linux: the other end was closed
    finally:
        os.close(ours)
    assert running.wait(300) == 0
    assert {frozenset(GREEN), frozenset(RED)} <= {style for style, _ in coloured(shown.decode("utf-8"))}
