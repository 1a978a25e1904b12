"""Run an encoder-decoder over whole texts: line by line, and long ones by sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.batch import InOrder
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
    source, texts = engine.bundle.manifest.target.source, engine.inputs.sources
    assert source is not None
    assert texts is not None
    languages = settings.source_language, settings.target_language
    texts.begin(*languages)  # an unknown language is reported once
    most = source.max_rows
    return [part.strip() or part for part in pieces(text, lambda part: len(texts.encode(part, *languages)) <= most)]


def joined(results: Sequence[Result]) -> Result:
    """Make one result of those of the parts of a text; counters are the last part's, except tokens."""
    last = results[-1]
    tokens = [token for result in results for token in result.tokens]
    text = " ".join(result.text.strip() for result in results) if len(results) > 1 else last.text
    return replace(last, text=text, tokens=tokens)


def write_lines(engine: Engine, source: Path, output: Path, settings: Settings, as_json: bool) -> None:
    """Run a model over each line of a file and write the outputs; blank lines stay blank.

    Args:
        engine: of an encoder-decoder.
        source: text, UTF-8.
        output: a new file, a line for each; lines are there as soon as they and those before them are made.
        settings: of all lines.
        as_json: print the sum as JSON.

    Raises:
        InvalidRequest: a file that cannot be read or written, or an output that exists.
    """
    try:
        lines = source.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source}: cannot be read: {error}") from error
    cut = [parts_of(engine, line, settings) if line.strip() else [] for line in lines]
    parts = [part for each in cut for part in each]
    tokens = 0
    try:
        with output.open("x", encoding="utf-8") as file, progress() as report:

            def write(results: Sequence[Result]) -> None:
                texts = (one.text.strip().replace("\n", " ") for one in results)
                file.write(f"{' '.join(filter(None, texts))}\n")
                file.flush()

            order: InOrder[Result] = InOrder([len(each) for each in cut], write)

            def take(number: int, result: Result) -> None:
                nonlocal tokens
                tokens += len(result.tokens)
                order.take(number, result)
                report("lines", order.taken, len(parts), "")

            engine.generate_batch(parts, settings, on_result=take)
    except FileExistsError as error:
        raise InvalidRequest(f"{output}: is there already", "name another file, or remove it") from error
    except OSError as error:
        raise InvalidRequest(f"{output}: cannot be written: {error.strerror}", "name another file") from error
    long = sum(len(each) > 1 for each in cut)
    if as_json:
        count = {"lines": len(lines), "parts": len(parts), "tokens": tokens}
        emit_json({"input": str(source), "output": str(output), "cut": long} | count)
        return
    click.echo(f"{output}: {len(lines)} lines, {tokens} tokens", err=True)
    if long:
        click.echo(f"{long} lines were longer than this model reads and went by sentences", err=True)
