"""``edgespec bench``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.common import (
    COUNT,
    OUTPUT,
    PATH,
    GroupedCommand,
    ask_words,
    bundles_argument,
    emit_json,
    group,
    json_option,
    length_option,
    make_settings,
    method_names,
    open_engine,
    option,
    progress,
    prompts_option,
    request_options,
    table_console,
)
from edgespec.drafters.registry import AR, UNO
from edgespec.engine.exactness import NEAR_TIES
from edgespec.planning.budget import show_bytes
from edgespec.reports.advice import label, row_names

if TYPE_CHECKING:
    from edgespec.decoding.settings import Settings
    from edgespec.engine.engine import Engine
    from edgespec.reports.advice import Advice
    from edgespec.reports.bench import MethodFigures

EVERY = 10  # seconds between two lines with the state of all methods


def show_profiles(bundles: tuple[Path, ...], options: dict[str, Any], as_json: bool) -> None:
    """Profile the passes of every bundle and print them."""
    from edgespec.reports.measuring import profile_passes

    found = []
    for bundle in dict.fromkeys(bundles):
        with open_engine(bundle, options) as engine:
            found.append({"bundle": str(bundle)} | profile_passes(engine))
    if as_json:
        emit_json({"profiles": found})
        return
    for profile in found:
        _show_profile(profile)


def _show_profile(profile: dict[str, Any]) -> None:
    from rich.table import Table

    click.echo(
        f"{profile['bundle']}: {profile['isa']} kernels, {profile['threads']} threads, "
        f"{profile['depth']} tokens before a pass\n"
        f"this machine: {profile['bandwidth_gb_s']:.1f} GB/s read, {profile['dot_gmac_s']:.0f} GMAC/s multiplied; "
        f"a row reads {profile['planned_mb']:.0f} MB by the plan"
    )
    names = list(profile["passes"][0]["parts"])
    table = Table("rows", "ms", "v", "MB", "GMAC", *names, "Python", "of roof", box=None, pad_edge=False)
    for row in profile["passes"]:
        parts = row["parts"]
        cells = [f"{parts[name]['ms'] / row['ms']:.0%}{_of_roof(parts[name]['roof_share'])}" for name in names]
        table.add_row(
            str(row["rows"]),
            f"{row['ms']:.2f}",
            f"{row['v']:.2f}",
            f"{sum(part['mb'] for part in parts.values()):.0f}",
            f"{sum(part['gmac'] for part in parts.values()):.2f}",
            *cells,
            f"{row['python_ms'] / row['ms']:.0%}",
            f"{row['least_ms'] / row['ms']:.0%}",
        )
    console = table_console()
    console.width = max(console.width, 100)
    console.print(table)
    click.echo("a part: its share of the time (and its share of the higher of its two limits)")


def _of_roof(share: float | None) -> str:
    return "" if share is None else f" ({share:.0%})"


@click.command("bench", cls=GroupedCommand)
@bundles_argument
@option(
    "--method",
    "Method to measure, or auto; may be repeated.  [default: all]",
    dest="methods",
    multiple=True,
    callback=method_names,
)
@prompts_option
@option("--max-prompts", "Maximum number of prompts.", COUNT, 8, dest="limit")
@option("--repeats", "Timed rounds over the prompts.", COUNT, 3)
@option(
    "--batch",
    "Also time N sequences together.  [default: no]",
    click.IntRange(min=0),
    0,
    dest="sequences",
    show_default=False,
)
@length_option
@request_options
@group(
    OUTPUT,
    option("--profile", "Show where the time of a pass goes, instead of comparing methods.", bool),
    option("--verbose", "Also print advice, and why methods did not help.", bool),
    option("--report", "Write a page to show to others, an .html file.", PATH),
    option("--compare", "Output of `llama-bench -o json` for that page.", PATH),
    option("--plot", "Draw the speed-ups into this PNG.", PATH),
)
@json_option
def command(bundles: tuple[Path, ...], methods: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compare every method of every bundle with plain decoding, and say which is fastest.

    One interleaved run.  The baseline is the fastest plain decoding of the same bundle: no gates, no padding.  A
    speed-up is the median of ratios between neighbours in time, with its 95 % interval.

    \b
    edgespec bench demo
    edgespec bench demo-int4 demo-int8 --batch 4
    edgespec bench demo --max-new-tokens 64 --repeats 5 --json
    edgespec bench demo --method ngram --prompts my-prompts.txt --plot speed.png
    edgespec bench demo --report demo.html
    edgespec bench demo --profile
    """
    from edgespec.cli.prompts import read_prompts
    from edgespec.planning.profiles import Watch, busy_words
    from edgespec.reports.advice import advise
    from edgespec.reports.bench import bench_all, check_output
    from edgespec.reports.pages import plot as draw
    from edgespec.reports.pages import read_llama_bench, write_page

    if options["profile"]:
        show_profiles(bundles, options, as_json)
        return
    settings = _settings(options)
    report, compare, plot, batch = (options[name] for name in ("report", "compare", "plot", "sequences"))
    if compare and not report:
        raise click.UsageError("--compare belongs to --report")
    if plot:
        check_output(plot, ".png")  # before minutes of measuring
    if report:
        check_output(report, ".html", ".htm")
    foreign = read_llama_bench(compare) if compare else []
    bundles, entries = tuple(dict.fromkeys(bundles)), []
    for bundle in bundles:
        engine = open_engine(bundle, options)
        entries.append((engine, _wanted(engine, methods, settings, len(bundles) > 1)))
    engine = entries[0][0]
    # a text about a source ends: tokens after its end are meaningless
    settings = settings.changed(
        ignore_eos=settings.ignore_eos and all(one.inputs.sources is None for one, _ in entries)
    )
    texts = read_prompts(engine, options["prompts"], options["limit"])
    stopped, watch = Event(), Watch()
    with progress() as told:
        tell, rows_of = partial(told, "bench"), _Rows()
        figures = bench_all(entries, texts, settings, options["repeats"], batch, tell, stopped.set, rows_of.show)
    others = watch.others()
    busy = busy_words(1.0, others)
    if stopped.is_set():
        click.echo(f"stopped: {_measured(figures[0], options['repeats'] * len(texts))}", err=True)
    rows = [figure.as_dict() for figure in figures]
    engines = {str(one.bundle.path): one for one, _ in entries}
    advice = advise(rows, {name: one.bundle.manifest.parity for name, one in engines.items()})
    if as_json:
        conditions = {
            "threads": engine.model.threads,
            "prompts": len(texts),
            "max_new_tokens": settings.max_new_tokens,
            "batch": batch,
            "others": others,
            "busy": busy,
        }
        about = {"bundle": str(bundles[0]), "bundles": list(map(str, bundles)), "baseline": rows[0]["method"]}
        found = {"conditions": conditions, "methods": rows, "advice": [asdict(item) for item in advice]}
        emit_json(about | found)
    else:
        ask = {name: ask_words(one.bundle.manifest) for name, one in engines.items()}
        exact = all(one.exact_rows for one in engines.values())
        said = _Said(exact, settings.accept.approximations, not settings.sampling.greedy)
        _show(rows, _padded(engine), said, busy, ask, options["draft_adapter"])
        if options["verbose"]:
            _explain(rows, engine.strict, advice)
    if report:
        again = shlex.join(["edgespec", *sys.argv[1:]])
        write_page(report, engines, figures, texts[0], settings, again, foreign, busy)
    if plot:  # last: an error here loses no figures
        what = f"{bundles[0].resolve().name}: {engine.bundle.manifest.target.format}"
        what = what if len(bundles) == 1 else f"{len(bundles)} bundles"
        draw(rows, plot, f"{what}, {engine.model.threads} threads")
    if stopped.is_set():
        sys.exit(130)


def _settings(options: dict[str, Any]) -> Settings:
    settings = make_settings(None, options)
    settings = settings.changed(ignore_eos=settings.grammar is None)  # one ends where it is complete
    if not settings.sampling.greedy and settings.sampling.seed is None:
        settings = settings.changed(seed=0)  # texts are compared: every round draws the same
    return settings


def _wanted(engine: Engine, methods: tuple[str, ...], settings: Settings, several: bool) -> list[str]:
    """List the methods to measure of a bundle: those asked for, which one of several bundles need not have."""
    wanted = list(dict.fromkeys(methods)) or [name for name in engine.methods if name != AR or _padded(engine)]
    if settings.drafts.proposers and not methods:
        wanted.append("chain")
    if several:
        wanted = [name for name in wanted if name in engine.methods or name in ("chain", "auto")]
    for name in wanted:
        engine.choose_for(settings.changed(method=name))
    return wanted


class _Rows:
    """Progress on stderr: the first result of each method, then the state of all from time to time."""

    def __init__(self) -> None:
        self._told, self._at = 0, 0.0

    def show(self, figures: Sequence[MethodFigures]) -> None:
        """Print new methods, or the state of all if the last line is ``EVERY`` seconds old."""
        if len(figures) > self._told:
            self._told, self._at = len(figures), monotonic()
            _, name, speed, ratio = _so_far(figures[-1])
            click.echo(f"  {name:<12}{speed:>8.1f} tokens/s  {ratio:.2f}x", err=True)
        elif monotonic() - self._at >= EVERY:
            self._at = monotonic()
            pairs = "first round" if figures[0].warm_up else f"{len(figures[0].ratios)} pairs"
            each = ", ".join(f"{name} {ratio:.2f}x" for _, name, _, ratio in map(_so_far, figures[1:]))
            click.echo(f"  {pairs}: {figures[0].method} {_so_far(figures[0])[2]:.1f} tokens/s, {each}", err=True)


def _so_far(figures: MethodFigures) -> tuple[str, str, float, float]:
    return figures.bundle, figures.method, 1000 / median(figures.ms_per_token), median(figures.ratios)


def _measured(plain: MethodFigures, pairs: int) -> str:
    if plain.warm_up:
        return "the first round alone was measured, whose times are less certain"
    return f"{len(plain.ratios)} of {pairs} pairs were measured"


@dataclass(frozen=True)
class _Said:
    """The request, which decides the statements about texts."""

    strict: bool
    lost: list[str]  # properties that another acceptance rule lacks
    sampled: bool

    def comparable(self, row: dict[str, Any]) -> bool:
        """Whether a row's texts are meant to be those of plain decoding; else their distribution is."""
        return not self.sampled or bool(row["exact"]) or row["method"] in ("plain", AR)


def _show(
    rows: list[dict[str, Any]], padded: bool, said: _Said, busy: str, ask: dict[str, str], adapter: Path | None
) -> None:
    """Print a headline for each bundle, whether the machine was quiet, the table, and the next command."""
    names = list(dict.fromkeys(row["bundle"] for row in rows))
    for name in names:
        of_it = [row for row in rows if row["bundle"] == name]
        if len(of_it) > 1:
            where = f"{label(of_it[0], rows).rsplit(' ', 1)[0]}: " if len(names) > 1 else ""
            click.echo(f"{where}{_headline(of_it)}; {_same_text(of_it, said)}")
    if busy:
        click.echo(f"{busy}: times are too long, and ratios less certain")
    click.echo()
    short = len(names) == 1 and not any(row["batch_tokens_per_second"] for row in rows)
    _table(rows, padded, short, said)
    base = {row["bundle"]: row["tokens_per_second"] for row in rows if row["method"] == "plain"}
    best = max(rows, key=lambda row: base[row["bundle"]] * (row["speedup"] if _helps(row) else 1))
    how = f" --method {best['method']}" if _helps(best) else ""
    how += f" --draft-adapter {shlex.quote(str(adapter))}" if adapter and best["method"] == UNO else ""
    words = ask[best["bundle"]]
    shown = "" if words.startswith("--audio") else " --show-drafts"  # transcripts come by segments
    click.echo(f"\nnext: edgespec run {shlex.quote(best['bundle'])}{how} {words}{shown}")


def _helps(row: dict[str, Any]) -> bool:
    """Whether a method is surely faster than plain decoding; one pair has no interval, and shows nothing."""
    return bool(row["pairs"] > 1 and row["speedup_low"] > 1 and row["method"] != "plain")


def _headline(rows: list[dict[str, Any]]) -> str:
    best = max(rows, key=lambda row: row["speedup"])
    if _helps(best):
        return f"{best['method']} is {best['speedup']:.1f} times as fast as plain decoding"
    if best["pairs"] == 1:
        return "one pair of runs: too few to find the fastest"
    if best["speedup"] >= 1.02:
        return f"{best['method']} may be faster, but 1.00x is in its interval"
    return "no method is faster than plain decoding here"


def _same_text(rows: list[dict[str, Any]], said: _Said) -> str:
    strict, meant = said.strict, [row for row in rows[1:] if said.comparable(row)]
    same, runs = (sum(row[key] for row in meant) for key in ("same_text", "runs"))
    if said.lost:
        return f"lossy, as was asked for: {', '.join(said.lost)}"
    if unverified := list(dict.fromkeys(reason for row in rows for reason in row["unverified"])):
        return f"UNVERIFIED: {'; '.join(unverified)}"
    if strict and not all(row["lossless"] and (row["exact"] <= (row["same_text"] == row["runs"])) for row in rows[1:]):
        return "ANOTHER TEXT: see `edgespec verify`"
    near = "" if strict else f"; {NEAR_TIES}"
    told = [f"same text in {'all' if same == runs else f'{same} of'} {runs} runs{near}"] if meant else []
    if others := [row["method"] for row in rows[1:] if not said.comparable(row)]:
        told.append(f"same distribution, other texts: {', '.join(others)}")
    return "; ".join(told)


def _padded(engine: Engine) -> bool:
    """Whether strict plain decoding is another graph than the baseline's."""
    return engine.strict and engine.operators.kind == "stock" and engine.device == "cpu"


def _explain(rows: list[dict[str, Any]], strict: bool, advice: list[Advice]) -> None:
    """Print why methods did not help, the cost of strict mode, and advice."""
    click.echo()
    for row, where in zip(rows, row_names(rows), strict=True):
        if row["method"] == AR and strict and row["speedup"] < 0.97:
            click.echo(f"{where}: rows with the same bits cost {1 / row['speedup'] - 1:.0%} of a plain step here")
        if "did not pay" in row["reason"]:
            click.echo(f"{where}: {row['reason'].removeprefix('asked for; ')}")
    click.echo("advice:")
    for item in advice:
        taken = {"bundle": item.bundle, "format": item.format, "method": item.method}
        click.echo(f"  {item.situation:<8} {row_names([taken, *rows])[0]}: {item.why}")


def _table(rows: list[dict[str, Any]], padded: bool, short: bool, said: _Said) -> None:
    """Print the methods of a bundle in 80 columns; more of several bundles, and where there are figures of batches."""
    from rich.table import Table

    def cells(row: dict[str, Any]) -> dict[str, str]:
        plain = row["method"] in ("plain", AR)
        return {
            "bundle": label(row, rows).rsplit(" ", 1)[0],
            "method": "ar (strict)" if row["method"] == AR and padded else row["method"],
            "tokens/s": f"{row['tokens_per_second']:.1f}",
            "speed-up": f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})",
            "tok/round": f"{row['tokens_per_round']:.2f}",
            "accepted": "-" if plain else f"{100 * row['acceptance_rate']:.0f} %",
            "lossless": {True: "yes", False: "no", None: "?"}[row["lossless"]],
            "same text" if short else "same": f"{row['same_text']}/{row['runs']}" if said.comparable(row) else "-",
            "extra": show_bytes(row["extra_bytes"]),
            "together": f"{row['batch_tokens_per_second'] or 0:.1f}",
        }

    together = any(row["batch_tokens_per_second"] for row in rows)
    out = ("bundle", "lossless", "together") if short else ("accepted", *(() if together else ("together",)))
    shown = [name for name in cells(rows[0]) if name not in out]
    table = Table(*shown, box=None, pad_edge=False, collapse_padding=True)
    for row in rows:
        table.add_row(*(cells(row)[name] for name in shown))
    console = table_console()
    if not short:
        console.width = max(console.width, 100)  # a narrower terminal breaks lines, which cuts no figure
    console.print(table)
