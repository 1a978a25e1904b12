"""Options and output that the commands share; help in groups: common options first."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgespec.cli.method_settings import HELP, NAMES, apply, read_settings
from edgespec.declared import METHOD_NAMES
from edgespec.runtimes.files.formats import ATTENTIONS, DRAFT_ATTENTIONS, EXPORT_FORMATS

if TYPE_CHECKING:
    from rich.console import Console

    from edgespec.decoding.settings import Grammar, Settings
    from edgespec.decoding.verify import Accept
    from edgespec.engine.engine import Engine
    from edgespec.export.bundle.progress import Progress
    from edgespec.runtimes.files.manifest import AttentionPart, Manifest
    from edgespec.runtimes.options import LoadOptions


F = TypeVar("F", bound=Callable[..., Any])
COMMON, OUTPUT = "Common options", "Output"
PATH = click.Path(path_type=Path)
COUNT = click.IntRange(min=1)
THREADS = click.IntRange(1, 512)
PROJECTORS = (
    "multimodal projectors in GGUF are not read; for pictures and sound export the model's Hugging Face checkpoint "
    "(folder or hub id), which brings its own; for text alone give the model's .gguf without this option"
)


def option(
    names: str, text: str, kind: Any = None, default: Any = None, *, dest: str | None = None, **more: Any
) -> Callable[[F], F]:
    """Make an option whose help shows its default.

    Args:
        names: as they are typed, with spaces between.
        text: of its help.
        kind: a type; names to choose from; ``bool`` = a flag.
        default: None = none.
        dest: the parameter of the function; None = as the option is called.
        more: for ``click.option``.
    """
    if kind is bool:
        more["is_flag"] = True
    elif kind is not None:
        more["type"] = click.Choice(kind) if isinstance(kind, (list, tuple)) else kind
    if default is not None:
        more = {"default": default, "show_default": True} | more
    return click.option(*names.split(), *([dest] if dest else []), help=text, **more)


def setting_option(
    name: str, kind: Any = None, default: Any = None, *, default_words: str = "", alias: str = "", **more: Any
) -> Callable[[F], F]:
    """Make the option of a setting, whose help is that of its declaration; see ``option``.

    Args:
        name: as it is typed.
        kind: same as in ``option``.
        default: same as in ``option``.
        default_words: text of the default, where ``default`` is none.
        alias: another name of the option.
        **more: same as in ``option``.
    """
    if name not in HELP:
        raise LookupError(f"no setting declares {name}: declare it, then run python -m tools.generate_settings")
    words = f"  [default: {default_words}]" if default_words else ""
    return option(f"{name} {alias}", HELP[name] + words, kind, default, **more)


def group(name: str, *options: Callable[[F], F]) -> Callable[[F], F]:
    """Options of a command under one heading, in this order; headings are in the order of the decorators."""

    def add(function: F) -> F:
        before = len(getattr(function, "__click_params__", []))
        for option in reversed(options):
            function = option(function)
        for param in function.__click_params__[before:]:  # type: ignore[attr-defined]
            param.heading = name
        return function

    return add


class GroupedCommand(click.Command):
    """A command whose help has a section for each group; options of no group are common ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections: common options first, output last."""
        for heading, params in self.sections(ctx).items():
            found = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            records = [(re.sub(r" (INTEGER|FLOAT)( RANGE)?$", " N", names), text) for names, text in found]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and say what to do instead of settings of one method as options, and of llama.cpp's projectors."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-")
            if name in NAMES and any(param.name == "method_settings" for param in self.params):
                text = f"{error.option_name} is a rare setting: --set {name}=VALUE"
                raise click.UsageError(text, ctx) from None
            if "mmproj" in name:
                raise click.UsageError(f"{error.option_name}: {PROJECTORS}", ctx) from None
            raise

    def sections(self, ctx: click.Context) -> dict[str, list[click.Parameter]]:
        """Parameters by heading, in the order of the help."""
        found: dict[str, list[click.Parameter]] = {COMMON: []}
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for param in params:
            heading = OUTPUT if "--help" in param.opts else getattr(param, "heading", COMMON)
            found.setdefault(heading, []).append(param)
        return found | {OUTPUT: found.pop(OUTPUT)}  # last


set_option = option(
    "--set",
    f"A rare setting; may be repeated.  Names: {', '.join(NAMES)}.  `--set list` explains them.",
    dest="method_settings",
    multiple=True,
    metavar="NAME=VALUE",
    callback=read_settings,
    is_eager=True,
)


def _rule(ctx: click.Context, param: click.Parameter, value: str) -> Accept:
    """Read an acceptance rule."""
    from edgespec.decoding.verify import Accept
    from edgespec.errors import InvalidRequest

    try:
        return Accept.parse(value)
    except InvalidRequest as error:
        raise click.BadParameter(str(error), ctx, param) from error


def method_names(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Read names of methods, of which `plain` is one: plain decoding."""
    if isinstance(value, tuple):
        return tuple(METHOD_NAMES.get(name, name) for name in value)
    return METHOD_NAMES.get(value, value)


json_option = group(OUTPUT, option("--json", "Print one JSON object on stdout.", bool, dest="as_json"))


def _bundle(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    """Find the folder of a bundle, also of one that `edgespec run` has made."""
    from edgespec.library import found

    return found(value)


def _bundles(ctx: click.Context, param: click.Parameter, values: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(_bundle(ctx, param, value) for value in values)


bundles_argument = click.argument("bundles", type=PATH, nargs=-1, required=True, callback=_bundles)
bundle_argument = click.argument("bundle", type=PATH, callback=_bundle)
threads_option = option("--threads", "Threads to compute with.  [default: all]", THREADS)
operators_option = option(
    "--operators", "native: edgespec's own; stock: ONNX Runtime's.", ["auto", "native", "stock"], "auto"
)
GRAMMARS = ("json_schema", "regex", "grammar")
WORDS = {"template": "template-option", "images": "image"}  # of options whose parameters are called otherwise
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # which a model may have settings for
attention_option = option(
    "--attention", "Format of keys in the KV cache of native operators.  [default: the bundle's]", ATTENTIONS
)
precision_option = option(
    "--precision", "int8 weights: full, or high: only their upper 4 bits, half the memory.", ["full", "high"], "full"
)
check_option = option("--no-check", "Do not compare the files' SHA-256.", bool)
prompts_option = option("--prompts", "File of prompts: one per line, or .jsonl.  [default: the bundle's]", PATH)

memory_options = group(
    COMMON,
    option(
        "--context",
        "Maximum context length in tokens, with the prompt.  [default: the bundle's]",
        click.IntRange(min=2),
    ),
    option("--budget", "Memory limit, such as 1.5GiB; off: no limit.  [default: the free memory]"),
)
loading_options = group(
    "Devices and loading",
    threads_option,
    option("--device", "Device to run on; `edgespec devices` says which are usable.", ["cpu", "webgpu"], "cpu"),
    option(
        "--device-precision",
        "Precision of activations on that device.  [default: fp16 where bundle and device have it]",
        ["fp32", "fp16"],
    ),
    operators_option,
    precision_option,
    attention_option,
    option(
        "--draft-attention", "Coarser keys that only self-drafting reads; the text does not change.", DRAFT_ATTENTIONS
    ),
    option("--draft-adapter", "Folder of the LoRA adapter that method uno drafts with.", PATH),
    option(
        "--strict/--no-strict", "Give rows the same bits in every pass: exactly plain decoding's text.", default=True
    ),
    check_option,
)


def _adapters(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path] | None:
    """Read NAME=FOLDER, several times."""
    found: dict[str, Path] = {}
    for value in values:
        name, _, folder = value.partition("=")
        if not name or not folder or ":" in name or name in found:
            raise click.BadParameter(f"{value!r}: expected NAME=FOLDER, each name once and without a colon", ctx, param)
        found[name] = Path(folder)
    return found or None


adapters_option = group(
    "Adapters",
    option(
        "--adapter",
        "Folder of a LoRA adapter (PEFT) to load with the model.",
        dest="adapters",
        multiple=True,
        metavar="NAME=FOLDER",
        callback=_adapters,
    ),
)
prompt_cache_option = group(COMMON, option("--no-prompt-cache", "Do not use the prompt cache on disk.", bool))
sampling_default_options = group(
    "Sampling",
    setting_option("--temperature", float, default_words="the model's own, else 0"),
    setting_option("--top-k", int, default_words="the model's own, else 0"),
    setting_option("--top-p", float, default_words="the model's own, else 1"),
    setting_option("--min-p", float, default_words="the model's own, else 0"),
    setting_option("--repetition-penalty", float, default_words="the model's own, else 1"),
)
length_option = group(COMMON, setting_option("--max-new-tokens", COUNT, 128))
sampling_options = group(
    "Sampling",
    sampling_default_options,
    setting_option("--seed", int),
    setting_option("--stop", multiple=True),
)
language_options = group(
    "Translation (encoder-decoders)",
    setting_option("--from", dest="source_language"),
    setting_option("--to", dest="target_language"),
)
drafting_options = group(
    "Drafting",
    setting_option("--num-draft-tokens", int, default_words="the method's", alias="--gamma", dest="gamma"),
    option("--no-fallback", "Keep drafting even if it does not help.", bool),
    setting_option("--acceptance", ["rejection", "coupled"], "rejection"),
    setting_option("--accept", default="exact", metavar="RULE", callback=_rule),
    option("--ngram-store", "File made by `edgespec ngram build`, that method ngram also searches.", PATH),
    set_option,
)


def _grammar(ctx: click.Context, param: click.Parameter, value: str | None) -> Grammar | None:
    """Read a grammar from a file, or take a regular expression as it is."""
    from edgespec.decoding.settings import Grammar

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
    option("--json-schema", "Write JSON that matches this schema.", metavar="FILE", callback=_grammar),
    option("--regex", "Write a text that matches this expression.", metavar="EXPR", callback=_grammar),
    option("--grammar", "Write a text of this grammar (Lark's notation).", metavar="FILE", callback=_grammar),
)


def request_options(function: F) -> F:
    """Add all options of loading a bundle and of a request, except the length."""
    for options in (
        loading_options, grammar_options, drafting_options, sampling_options, language_options, memory_options,
    ):  # fmt: skip
        function = options(function)
    return function


def open_engine(bundle: Path, options: dict[str, Any]) -> Engine:
    """Load a bundle with the options of ``memory_options``, ``loading_options`` and ``drafting_options``."""
    from edgespec.engine.encoders import require_writer
    from edgespec.engine.loading import load
    from edgespec.planning.streaming import disk_of, streaming_of
    from edgespec.runtimes.files.manifest import read_manifest

    require_writer(read_manifest(bundle))
    engine = load(bundle, make_load_options(options))
    if engine.experts is not None and engine.experts.layers:
        found = streaming_of(engine.bundle.manifest, engine.memory_budget.use, disk_of(bundle, engine.bundle.manifest))
        assert found is not None
        seconds = "" if found.seconds is None else f", {found.seconds:.2g} s"
        click.echo(f"slow: {found.words()}{seconds}", err=True)
    return engine


def make_load_options(options: dict[str, Any]) -> LoadOptions:
    """How a bundle is loaded, of all options of a command."""
    from edgespec.runtimes.options import LoadOptions

    known = {field.name for field in fields(LoadOptions)} & options.keys()
    check, prompts = not options.get("no_check", False), not options.get("no_prompt_cache", True)
    return LoadOptions(check=check, prompt_cache=prompts, **{name: options[name] for name in known})


def make_settings(method: str | None, options: dict[str, Any], defaults: Settings | None = None) -> Settings:
    """Make settings from the options of ``length_option``, ``sampling_options`` and ``drafting_options``.

    Args:
        method: of a request.
        options: all options of the command.
        defaults: an engine's, for what no option says of sampling; None = greedy.
    """
    if options["method_settings"].get("proposers") and method not in (None, "chain"):
        raise click.UsageError("--set proposers belongs to --method chain")
    from edgespec.decoding.settings import Settings, every_setting

    grammars = [found for name in GRAMMARS if (found := options.get(name))]
    if len(grammars) > 1:
        raise click.UsageError("give one of --json-schema, --regex and --grammar")
    given = {one.name: options.get(one.name) for one, found in every_setting() if found.option}
    given = {name: value for name, value in given.items() if value is not None}
    given["adapter"] = next(iter(options.get("adapters") or ()), None)
    given |= {"method": method, "fallback": not options["no_fallback"], "grammar": next(iter(grammars), None)}
    settings = (defaults or Settings()).changed(**given)
    return apply(settings, options["method_settings"])


def refuse_beside(what: str, names: Iterable[str], options: Mapping[str, Any]) -> None:
    """Refuse options that do not go with another one.

    Raises:
        click.UsageError: the first that was given is named.
    """
    for name in names:
        if options.get(name):
            raise click.UsageError(f"--{WORDS.get(name, name.replace('_', '-'))} does not go with {what}")


def ask_words(manifest: Manifest) -> str:
    """Write the options of `edgespec run` that ask this model something."""
    if manifest.hears:
        return "--audio talk.wav"
    if manifest.codes is not None:
        from edgespec.engine.outputs import OUTPUTS

        fitting = (one.file for one in OUTPUTS.values() if one.fits(manifest))
        return f"--prompt '...' -o {next(fitting, 'FILE')}"
    return "--chat" if manifest.tokenizer.chat_template else "--prompt '...'"


def emit_json(value: dict[str, Any]) -> None:
    """Print the one JSON object of a command; ASCII, so that no terminal's encoding can damage it."""
    click.echo(json.dumps(value, allow_nan=False))


def table_console() -> Console:
    """Make a console for tables: names of models and folders are not markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; without titles its rows are facts, each after its name."""
    from rich.table import Table

    table = Table(*titles, box=None, show_header=bool(titles), pad_edge=not titles)
    for row in rows:
        table.add_row(*row)
    table_console().print(table)


def progress() -> AbstractContextManager[Progress]:
    """Show a progress bar on stderr; plain lines where that is not a terminal."""
    from edgespec.export.bundle.progress import shown

    return shown(lines=True)


@contextmanager
def accepting(command: str) -> Iterator[None]:
    """Say how to take a format that loses much of the quality, where only that fits the memory.

    Args:
        command: what was typed, without a format.
    """
    from edgespec.errors import QualityError

    try:
        yield
    except QualityError as error:
        if error.format:
            error.hint = f"to take it all the same: {command} --format {error.format}"
        raise


def make_ready(source: str, options: Mapping[str, Any], takes_format: bool = True) -> Path:
    """Find a bundle, or make it of a model with the options ``form`` and ``budget`` -> its folder.

    Args:
        source: a bundle or a model.
        options: of the command.
        takes_format: whether the command is ``run``, which has an option for a format; else an export is suggested.
    """
    from edgespec.library import ready

    form, budget = options.get("form"), options.get("budget")
    command = f"edgespec {'run' if takes_format else 'export'} {shlex.quote(source)}"
    if takes_format and budget:
        command += f" --budget {shlex.quote(budget)}"
    with accepting(command), progress() as report:
        return ready(source, report, form if form in EXPORT_FORMATS else None, budget)


def attention_lines(part: AttentionPart | None) -> list[str]:
    """List what was measured of a bundle's attentions, a line each."""
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
