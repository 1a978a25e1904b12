"""Options and output that the commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.groups import COMMON, COUNT, OUTPUT, PATH, THREADS, group, option
from edgespec.cli.method_settings import apply, set_option
from edgespec.runtimes.files.formats import ATTENTIONS, DRAFT_ATTENTIONS

if TYPE_CHECKING:
    from rich.console import Console

    from edgespec.decoding.accept import Accept
    from edgespec.decoding.constraint import Grammar
    from edgespec.decoding.settings import Settings
    from edgespec.engine.engine import Engine
    from edgespec.runtimes.files.manifest import AttentionPart, Manifest
    from edgespec.runtimes.options import LoadOptions


def _rule(ctx: click.Context, param: click.Parameter, value: str) -> Accept:
    """An acceptance rule."""
    from edgespec.decoding.accept import Accept
    from edgespec.errors import InvalidRequest

    try:
        return Accept.parse(value)
    except InvalidRequest as error:
        raise click.BadParameter(str(error), ctx, param) from error


json_option = group(OUTPUT, option("--json", "Print one JSON object on stdout.", bool, dest="as_json"))
bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
threads_option = option("--threads", "Threads of ONNX Runtime.  [default: all]", THREADS)
operators_option = option("--operators", "edgespec's own, or ONNX Runtime's.", ["auto", "native", "stock"], "auto")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # which a model may have settings for
attention_option = option(
    "--attention", "How native operators keep keys.  [default: what the bundle was exported for]", ATTENTIONS
)
check_option = option("--no-check", "Do not compare the files' SHA-256.", bool)
prompts_option = option("--prompts", "A prompt a line, or .jsonl.  [default: the bundle's]", PATH)

memory_options = group(
    COMMON,
    option("--context", "Most tokens, with the prompt.  [default: the bundle's]", click.IntRange(min=2)),
    option("--budget", "Most memory, as in 1.5GiB; off counts nothing.  [default: what is free here]"),
)
loading_options = group(
    "Devices and loading",
    threads_option,
    option("--device", "Where passes run; `edgespec devices` says what is usable here.", ["cpu", "webgpu"], "cpu"),
    option(
        "--device-precision", "Of activations there.  [default: fp16 where bundle and device have it]", ["fp32", "fp16"]
    ),
    operators_option,
    attention_option,
    option("--draft-attention", "Coarser keys that only self-drafts read; the text does not change.", DRAFT_ATTENTIONS),
    option(
        "--strict/--no-strict", "Rows with the same bits in every pass: the exact text of plain decoding.", default=True
    ),
    check_option,
)
length_option = group(COMMON, option("--max-new-tokens", "Most tokens to write.", COUNT, 128))
sampling_options = group(
    "Sampling",
    option("--temperature", "0 is greedy.  [default: the model's own, else 0]", float),
    option("--top-k", "Draw from the k likeliest; 0 is off.  [default: the model's own, else 0]", int),
    option("--top-p", "Draw from this much mass; 1 is off.  [default: the model's own, else 1]", float),
    option(
        "--min-p",
        "Leave out what is less likely than this share of the best; 0 is off.  [default: the model's own, else 0]",
        float,
    ),
    option(
        "--repetition-penalty",
        "Divides the logits of tokens already there; 1 is off.  [default: the model's own, else 1]",
        float,
    ),
    option("--seed", "Same seed, same text.", int),
    option("--stop", "Text that ends the output; may be repeated.", multiple=True),
)
drafting_options = group(
    "Drafting",
    option("--gamma", "Most guesses a round.  [default: the method's]", int),
    option("--no-fallback", "Keep drafting where it does not pay.", bool),
    option(
        "--acceptance",
        "Sampling: accept the most guesses, or write exactly what plain decoding with the seed writes.",
        ["rejection", "coupled"],
        "rejection",
    ),
    option(
        "--accept",
        "Which guesses stand.  Lossy: typical, top-k:K, distance:D, all.",
        default="exact",
        metavar="RULE",
        callback=_rule,
    ),
    option("--ngram-store", "A file of `edgespec ngram build`, where method ngram looks too; it is only read.", PATH),
    set_option,
)


def _grammar(ctx: click.Context, param: click.Parameter, value: str | None) -> Grammar | None:
    """A grammar: of a file, or a regular expression as it is."""
    from edgespec.decoding.constraint import Grammar

    if value is None:
        return None
    if param.name == "regex":
        return Grammar.regex(value)
    try:
        text = Path(value).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(str(error), ctx, param) from error
    return Grammar.json_schema(text) if param.name == "json_schema" else Grammar.lark(text)


grammar_options = group(
    "Structured output (needs the extra guidance)",
    option("--json-schema", "The text is JSON of this schema.", metavar="FILE", callback=_grammar),
    option("--regex", "The whole text matches this expression.", metavar="EXPR", callback=_grammar),
    option("--grammar", "The text follows this grammar (Lark's notation).", metavar="FILE", callback=_grammar),
)


def open_engine(bundle: Path, options: dict[str, Any]) -> Engine:
    """Load a bundle with the options of ``memory_options``, ``loading_options`` and ``drafting_options``."""
    from edgespec.engine.loading import load

    return load(bundle, make_load_options(options))


def make_load_options(options: dict[str, Any]) -> LoadOptions:
    """How a bundle is loaded, of all options of a command."""
    from edgespec.runtimes.options import LoadOptions

    known = {field.name for field in fields(LoadOptions)} & options.keys()
    return LoadOptions(check=not options.get("no_check", False), **{name: options[name] for name in known})


def make_settings(method: str | None, options: dict[str, Any], defaults: Settings | None = None) -> Settings:
    """Settings from the options of ``length_option``, ``sampling_options`` and ``drafting_options``.

    Args:
        method: of a request.
        options: all options of the command.
        defaults: an engine's, for what no option says of sampling; None = greedy.
    """
    if options["method_settings"].get("proposers") and method not in (None, "chain"):
        raise click.UsageError("--set proposers belongs to --method chain")
    from edgespec.decoding.settings import Settings

    drawn = {name: options[name] for name in SAMPLING if options[name] is not None}
    same = {name: options[name] for name in ("seed", "acceptance", "max_new_tokens", "gamma", "accept", "stop")}
    fallback = not options["no_fallback"]
    settings = (defaults or Settings()).changed(method=method, fallback=fallback, **drawn, **same)
    grammars = [found for name in ("json_schema", "regex", "grammar") if (found := options.get(name))]
    if len(grammars) > 1:
        raise click.UsageError("give one of --json-schema, --regex and --grammar")
    return apply(settings.changed(grammar=next(iter(grammars), None)), options["method_settings"])


def ask_words(manifest: Manifest) -> str:
    """The options of `edgespec run` that ask this model something."""
    return "--chat" if manifest.tokenizer.chat_template else "--prompt '...'"


def emit_json(value: dict[str, Any]) -> None:
    """The one JSON object of a command; ASCII, so that no terminal's encoding can damage it."""
    click.echo(json.dumps(value, allow_nan=False))


def table_console() -> Console:
    """A console for tables: names of models and folders are not markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int, str], None]]:
    """A progress bar on stderr; plain lines where that is not a terminal."""
    if not sys.stderr.isatty():
        seen: list[str] = []

        def line(stage: str, done: int, of: int, detail: str) -> None:
            if stage not in seen:
                seen.append(stage)
                click.echo(f"{stage}: {detail}", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.fields[stage]:<12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, of: int, detail: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(detail, total=of, stage=stage)
            bar.update(tasks[stage], completed=done, total=of, description=detail)

        yield update


def attention_lines(part: AttentionPart | None) -> list[str]:
    """What was measured of a bundle's attentions, a line each."""
    if part is None:
        return []
    lines = [f"{part.default} is the default"]
    for name, gate in part.gates.items():
        verdict = "passed its quality gate" if gate.passed else "FAILED its quality gate"
        if not gate.passed:
            verdict += ", so only drafts may read it" if name == "nomad2" else ", so it is not the default"
        lines.append(
            f"{name} {verdict}: perplexity {gate.perplexity_change:+.2%}, top-1 agreement {gate.agreement:.1%} "
            f"with float16 keys on {part.positions} positions"
        )
    return lines
