"""``edgespec ngram``: stores of n-grams, for drafting without a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.common import PATH, emit_json, json_option, option, print_table, progress
from edgespec.planning.budget import parse_bytes, show_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgespec.drafters.ngram_stores import StoreFacts

_PIECE = 1 << 16  # characters that are tokenized at once, up to the end of a line


@click.group("ngram")
def command() -> None:
    """Build, show and remove stores of n-grams: more text for the guesses of method ngram.

    A store keeps, in a form that can be read back, what your texts say: treat it like them.  edgespec keeps nothing
    unless you call build, and never adds to a store while it decodes.  Every subcommand has --json.

    \b
    edgespec ngram build notes.txt old-chats.jsonl --tokenizer demo -o my-texts.store
    edgespec run demo --prompt "ROMEO:" --method ngram --ngram-store my-texts.store
    edgespec ngram info my-texts.store
    edgespec ngram clear my-texts.store
    """


@command.command("build")
@click.argument("texts", type=click.Path(path_type=Path), nargs=-1, required=True)
@option("--tokenizer", "The bundle, or model folder, to guess for.", PATH, required=True)
@option("-o --output", "The store to write.", PATH, required=True)
@option(
    "--max-size",
    "Maximum size of the store; the rarest n-grams are left out.",
    parse_bytes,
    "64MiB",  # also in drafters/ngram_stores.py, which --help does not import
    metavar="SIZE",
)
@option("--overwrite", "Replace an older store of that name.", bool)
@json_option
def build(
    texts: tuple[Path, ...], tokenizer: Path, output: Path, max_size: int, overwrite: bool, as_json: bool
) -> None:
    """Build a store from texts; it keeps what they say, so treat it like them.

    A text file is one text; a .jsonl file has objects with `prompt` or `turns`, as for bench.

    \b
    edgespec ngram build notes.txt old-chats.jsonl --tokenizer demo -o my-texts.store
    edgespec ngram build *.txt --tokenizer demo -o my-texts.store --max-size 8MiB --overwrite --json
    """
    import numpy as np

    from edgespec.cli.prompts import read_texts
    from edgespec.drafters.ngram_stores import build_store, refuse_existing
    from edgespec.export.tokenizers.files import open_codec

    refuse_existing(output, overwrite)  # before minutes of reading
    codec = open_codec(tokenizer)
    found: list[NDArray[np.int32]] = []
    with progress() as report:
        parts = [text for file in texts for text in read_texts(file)]
        of, done = sum(len(text) for text in parts), 0
        for text in parts:
            pieces: list[NDArray[np.int32]] = []
            for piece in _pieces(text):
                pieces.append(np.array(codec.encode(piece, special=False), np.int32))
                done += len(piece)
                report("read", done, of, f"characters of {len(texts)} files")
            found.append(np.concatenate(pieces))
        facts = build_store(
            output,
            found,
            codec.vocab_size,
            codec.vocabulary_sha256(),
            max_size,
            overwrite,
            lambda done, of: report("count", done, of, "n-grams of 1 to 4 tokens"),
        )
    if as_json:
        emit_json({"store": str(output)} | facts.as_dict())
        return
    size = show_bytes(facts.file_bytes)
    click.echo(f"{output}: {facts.entries} n-grams of {facts.tokens} tokens in {_texts(facts)}, {size}")
    if facts.left_out:
        click.echo(f"no room for {facts.left_out} n-grams that occurred least often; --max-size allows more")


@command.command("info")
@click.argument("store", type=click.Path(path_type=Path))
@json_option
def info(store: Path, as_json: bool) -> None:
    """Show what a store holds, and check all of it.

    \b
    edgespec ngram info my-texts.store
    """
    from edgespec.drafters.ngram_stores import NGramStore

    facts = NGramStore(store).facts
    if as_json:
        emit_json({"store": str(store)} | facts.as_dict())
        return
    lengths = ", ".join(f"{count} of {n + 1}" for n, count in enumerate(facts.by_length))
    rows = {
        "n-grams": f"{facts.entries}; by tokens: {lengths}",
        "left out": f"{facts.left_out} for want of room",
        "read": f"{facts.tokens} tokens in {_texts(facts)}",
        "size": show_bytes(facts.file_bytes),
        "vocabulary": f"{facts.vocab} tokens, SHA-256 {facts.vocabulary[:12]}...",
    }
    print_table((), rows.items())


@command.command("clear")
@click.argument("stores", type=click.Path(path_type=Path), nargs=-1, required=True)
@json_option
def clear(stores: tuple[Path, ...], as_json: bool) -> None:
    """Remove stores, damaged ones too; if any of the files is not a store, none is removed.

    \b
    edgespec ngram clear my-texts.store
    """
    from edgespec.drafters.ngram_stores import is_store
    from edgespec.errors import StoreError

    files = list(dict.fromkeys(stores))
    for file in files:
        if file.is_symlink():
            raise StoreError(f"{file}: is a link, so removing it would keep the store", "name the store itself")
        if not is_store(file):
            raise StoreError(f"{file}: not an n-gram store, so nothing was removed")
    freed = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink()
    if as_json:
        emit_json({"removed": [str(file) for file in files], "bytes": freed})
    else:
        click.echo(f"removed {len(files)} store{'s' if len(files) > 1 else ''}, {show_bytes(freed)}")


def _pieces(text: str) -> Iterable[str]:
    """Cut the text into pieces that end with a line, or, where a line is longer than a piece, anywhere."""
    start = 0
    while start < len(text):
        end = start + _PIECE
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _texts(facts: StoreFacts) -> str:
    return f"{facts.texts} text{'s' if facts.texts != 1 else ''}"
