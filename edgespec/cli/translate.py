"""What an encoder-decoder makes of whole texts: line by line, and longer ones than it reads by sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.common import emit_json, progress
from edgespec.engine.sentences import pieces
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgespec.decoding.settings import Settings
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result


def parts_of(engine: Engine, text: str, settings: Settings) -> list[str]:
    """Cut a text into parts that the model reads, at ends of sentences; one that fits stays whole.

    Raises:
        InvalidRequest: a language that the model lacks.
    """
    source, texts = engine.bundle.manifest.target.source, engine.sources
    assert source is not None
    assert texts is not None
    languages = settings.source_language, settings.target_language
    texts.begin(*languages)  # a language that is not there is told once
    most = source.most
    return [part.strip() or part for part in pieces(text, lambda part: len(texts.encode(part, *languages)) <= most)]


def joined(results: Sequence[Result]) -> Result:
    """Make one result of those of the parts of a text; counters are the last part's but for tokens."""
    last = results[-1]
    tokens = [token for result in results for token in result.tokens]
    text = " ".join(result.text.strip() for result in results) if len(results) > 1 else last.text
    return replace(last, text=text, tokens=tokens)


def write_lines(engine: Engine, source: Path, output: Path, settings: Settings, as_json: bool) -> None:
    """Let a model read a file line by line and write what it makes of each; blank lines stay blank.

    Args:
        engine: of an encoder-decoder.
        source: text, UTF-8.
        output: a new file, a line for each.
        settings: of all lines.
        as_json: print the sum as JSON.

    Raises:
        InvalidRequest: a file that cannot be read or written, or an output that is there.
    """
    if output.exists():
        raise InvalidRequest(f"{output}: is there already", "name another file, or remove it")
    try:
        lines = source.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source}: cannot be read: {error}") from error
    cut = {at: parts_of(engine, line, settings) for at, line in enumerate(lines) if line.strip()}
    owners = [at for at, parts in cut.items() for _ in parts]
    made: dict[int, Result] = {}
    with progress() as report:

        def take(number: int, result: Result) -> None:
            made[number] = result
            report("lines", len(made), len(owners), "")

        engine.generate_batch([part for parts in cut.values() for part in parts], settings, on_result=take)
    written = [""] * len(lines)
    for number, at in enumerate(owners):
        text = made[number].text.strip().replace("\n", " ")
        written[at] = f"{written[at]} {text}" if written[at] else text
    try:
        output.write_text("".join(f"{line}\n" for line in written), "utf-8")
    except OSError as error:
        raise InvalidRequest(f"{output}: cannot be written: {error.strerror}", "name another file") from error
    long = sum(len(parts) > 1 for parts in cut.values())
    count = {"lines": len(lines), "parts": len(owners), "tokens": sum(len(one.tokens) for one in made.values())}
    if as_json:
        emit_json({"input": str(source), "output": str(output), "cut": long} | count)
        return
    click.echo(f"{output}: {count['lines']} lines, {count['tokens']} tokens", err=True)
    if long:
        click.echo(f"{long} lines were longer than this model reads and went by sentences", err=True)
