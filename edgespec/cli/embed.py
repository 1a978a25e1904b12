"""``edgespec embed``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import (
    COUNT,
    PATH,
    GroupedCommand,
    emit_json,
    group,
    json_option,
    make_load_options,
    make_ready,
    option,
    threads_option,
)
from edgespec.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgespec.engine.engine import Engine

POOLINGS = ("mean", "last", "cls", "weighted", "max")


@click.command("embed", cls=GroupedCommand)
@click.argument("bundle")
@click.argument("texts", nargs=-1)
@option("--file", "Texts, a line each; - is stdin.", dest="source", metavar="FILE")
@option("--query", "Rank the texts by how well they answer this.")
@option("--top", "Show only the N best of a ranking.", COUNT)
@option("-o --output", "Write the vectors as a .npy file, float32 [texts, numbers].", PATH)
@group(
    "Embeddings",
    option("--prompt", "Name of the model's prompt, such as query.  [default: the model's]"),
    option("--dimensions", "First numbers of a vector to keep.  [default: all]", COUNT),
    option("--pooling", "How rows become a vector.  [default: the model's, else mean]", POOLINGS),
    option("--truncate", "Cut texts that are too long, instead of an error.", bool),
)
@threads_option
@option("--budget", "Memory that the process may take.  1.5GiB  [default: the free memory]")
@json_option
def command(
    bundle: str,
    texts: tuple[str, ...],
    source: str | None,
    query: str | None,
    output: Path | None,
    as_json: bool,
    **rest: Any,
) -> None:
    """Embed texts, or rank them for a query.

    BUNDLE may also be a model: a folder or a hub id, of which a bundle is made first, as `edgespec run` does.
    Prints a vector a line, as JSON.  A reranker (cross-encoder) ranks only.

    \b
    edgespec embed minilm "a text" "another text"
    edgespec embed minilm --file texts.txt -o vectors.npy
    edgespec embed minilm --file texts.txt --query "what is it about?" --top 5
    """
    load = {name: rest.pop(name) for name in ("threads", "budget")}
    top, options = rest.pop("top"), rest
    wrong = [name for name, value in options.items() if value]
    if query is None and top is not None:
        raise click.UsageError("--top goes with --query")
    if query is not None and (wrong or output):
        raise click.UsageError(f"--{wrong[0] if wrong else 'output'} does not go with --query")
    lines = [*texts, *_lines(source)]
    if not lines:
        raise click.UsageError("no texts: give some, or --file")
    if output is not None and output.exists():
        raise InvalidRequest(f"{output}: is there already", "name another file, or remove it")
    from edgespec.engine.loading import load as open_bundle

    with open_bundle(make_ready(bundle, load, takes_format=False), make_load_options(load)) as engine:
        if query is not None:
            _rank(engine, query, lines, top, as_json)
        else:
            _embed(engine, lines, options, output, as_json)


def _lines(source: str | None) -> list[str]:
    """Read the texts of a file, without blank lines."""
    if source is None:
        return []
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source}: cannot be read: {error}", "give a UTF-8 text file") from error
    return [line for line in text.splitlines() if line.strip()]


def _embed(engine: Engine, texts: Sequence[str], options: dict[str, Any], output: Path | None, as_json: bool) -> None:
    import numpy as np

    vectors = engine.embed(texts, **options)
    if output is not None:
        try:
            with output.open("xb") as file:
                np.save(file, vectors)
        except OSError as error:
            raise InvalidRequest(f"{output}: cannot be written: {error.strerror}", "name another file") from error
    found = {"texts": len(texts), "dimensions": vectors.shape[1]}
    if as_json:
        own = {"output": str(output)} if output else {"embeddings": vectors.tolist()}
        emit_json(found | own)
    elif output is not None:
        click.echo(f"{output}: {len(texts)} vectors of {vectors.shape[1]} numbers", err=True)
    else:
        for row in vectors:
            click.echo(json.dumps(row.tolist()))


def _rank(engine: Engine, query: str, texts: Sequence[str], top: int | None, as_json: bool) -> None:
    found = engine.rerank(query, texts, top=top)
    if as_json:
        emit_json({"query": query, "results": [{"index": one.index, "score": one.score} for one in found]})
        return
    for one in found:
        click.echo(f"{one.score:.4f}  {one.index}  {texts[one.index]}")
