"""A page that shows a measurement to somebody else: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from edgespec import __version__
from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine, Prompt, given_tokens
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import medians, time_turns
from edgespec.planning.footprint import Memory
from edgespec.planning.plan import Plan
from edgespec.planning.plan import label as plan_label
from edgespec.planning.profiles import this_machine
from edgespec.reports.advice import label
from edgespec.reports.bench import BASELINE, MethodFigures
from edgespec.reports.measuring import pass_over
from edgespec.runtimes.files.staged import write_staged

MOST_BYTES = 16 << 20


class Foreign(NamedTuple):
    """One test of llama-bench; ``test`` in its words, as in ``tg128 @ d512``, ``speed`` in tokens per second."""

    model: str
    test: str
    threads: int
    speed: float
    deviation: float
    build: str


def read_llama_bench(file: Path) -> list[Foreign]:
    """Read the file.

    Raises:
        InvalidRequest: not there, or not what llama-bench writes.
    """
    hint = "write it with `llama-bench -m MODEL -o json > llama-bench.json`"
    try:
        if file.stat().st_size > MOST_BYTES:
            raise InvalidRequest(f"{file}: larger than any output of llama-bench", hint)
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file}: cannot be read as JSON: {error}", hint) from error
    if not isinstance(found, list) or not found:
        raise InvalidRequest(f"{file}: expected a list of tests, got {type(found).__name__}", hint)
    try:
        return [_test(one) for one in found]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{file}: not an output of llama-bench: {error!r}", hint) from error


def _test(one: dict[str, Any]) -> Foreign:
    prompt, written, depth = (int(one.get(name, 0)) for name in ("n_prompt", "n_gen", "n_depth"))
    test = "+".join(part for part in (f"pp{prompt}" if prompt else "", f"tg{written}" if written else "") if part)
    return Foreign(
        model=f"{Path(str(one['model_filename'])).name} ({one['model_type']})",
        test=test + (f" @ d{depth}" if depth else ""),
        threads=int(one["n_threads"]),
        speed=float(one["avg_ts"]),
        deviation=float(one.get("stddev_ts", 0)),
        build=str(one.get("build_commit", "")),
    )


ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
DEPTHS = (64, 256, 1024, 4096, 16384)
SECONDS = 6.0  # of all timed passes together

Kind = Literal["accepted", "rejected", "own", "prompt"]


class Passes(NamedTuple):
    """Milliseconds of passes of the target: by rows, at the first depth; of one row, by the tokens before it."""

    by_rows: dict[int, float]
    by_depth: dict[int, float]
    depth: int


def time_passes(engine: Engine, seconds: float = SECONDS) -> Passes:
    """Time passes of several rows, and of one row at several depths; keys and values are made up, times are not."""
    slot = engine.open_slot()
    rows = [n for n in ROWS if n + 1 < engine.context]
    depths = [depth for depth in DEPTHS if depth + max(rows) < engine.context] or [1]
    slot.stand_in(depths[0])
    by_rows = time_turns({n: pass_over(slot, n) for n in rows}, seconds / 2)
    one = pass_over(slot, 1)
    by_depth = time_turns(dict.fromkeys(depths, one), seconds / 2, prepare=slot.stand_in)
    return Passes(medians(by_rows), medians(by_depth), depths[0])


def coloured_text(engine: Engine, prompt: Prompt, settings: Settings) -> list[tuple[Kind, str]]:
    """Cut a text into pieces: accepted guesses, those that the target refused, and its own tokens."""
    stream = engine.stream(prompt, settings)
    shown = prompt if isinstance(prompt, str) else engine.codec.decode(given_tokens(prompt))
    pieces: list[tuple[Kind, str]] = [("prompt", shown)]
    for chunk in stream:
        made = chunk.round
        if made is None:
            pieces.append(("own", chunk.text))
            continue
        pieces.append(("accepted", "".join(chunk.pieces[: made.accepted])))
        if made.rejected and len(chunk.pieces) == len(made.tokens):  # a stop string may have cut the round
            before = stream.tokens[: -len(made.tokens) + made.accepted or None]
            pieces.append(("rejected", engine.codec.continuation(before, made.rejected)))
        pieces.append(("own", "".join(chunk.pieces[made.accepted :])))
    return [(kind, text) for kind, text in pieces if text]


PLAIN, FAST, INK = "#9aa5b1", "#3b7dd8", "#24292f"
WIDTH = 6.4  # inches
MOST = 16  # candidates in a picture of a plan


def _picture(height: float, title: str, across: str, up: str = "") -> tuple[Any, Any]:
    """Make a figure and its axes."""
    from matplotlib.figure import Figure  # without pyplot: nothing global

    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots()
    axes.set_title(title, parse_math=False, fontsize=10, loc="left")
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Any) -> str:
    """Return the picture without a prologue, ready for a page."""
    import matplotlib

    figure.tight_layout()
    out = io.StringIO()
    # text stays text; the same picture is the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "edgespec"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _bars(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]], colours: Sequence[Any] = ()) -> float:
    """Draw a stacked bar of MiB for each name; ``parts``: of all names, by part.  Returns where the longest ends."""
    left = [0.0] * len(names)
    for number, (name, sizes) in enumerate(parts.items()):
        widths = [size / 2**20 for size in sizes]
        colour = {"color": colours[number % len(colours)]} if colours else {}
        axes.barh(range(len(names)), widths, left=left, label=name, **colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.invert_yaxis()
    return max(left)


def speeds(rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str = "Speed") -> Any:
    """Draw bars of the speed-ups with their intervals."""
    figure, axes = _picture(0.42 * len(rows) + 0.9, title, "speed over plain decoding: median, 95 % interval")
    values = [row["speedup"] for row in rows]
    low = [max(0.0, row["speedup"] - row["speedup_low"]) for row in rows]
    high = [max(0.0, row["speedup_high"] - row["speedup"]) for row in rows]
    colours = [PLAIN if row["method"] == "plain" else FAST for row in rows]
    axes.barh(range(len(rows)), values, xerr=[low, high], color=colours, ecolor=INK)
    axes.set_yticks(range(len(rows)), names, parse_math=False)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.invert_yaxis()
    return figure


def plot(figures: Sequence[MethodFigures], path: Path, title: str) -> None:
    """Draw the speed-ups into a PNG."""
    rows = [figure.as_dict() for figure in figures]
    figure = speeds(rows, [row["method"] for row in rows], title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def plot_plan(plan: Plan, path: Path) -> None:
    """Stacked bars of the parts, a candidate each, with the budget as a line; a PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shown = dict(list({plan_label(one): one for one in plan.candidates}.items())[:MOST])  # labels must differ
    names = dict.fromkeys(part.name for one in shown.values() for part in one.memory.parts)
    parts = {name: [one.memory.part(name).all for one in shown.values()] for name in names}
    figure = Figure(figsize=(10, max(4.5, 0.4 * len(shown) + 1.8)))
    axes = figure.subplots()
    longest = _bars(axes, list(shown), parts, [colormaps["tab20"](number) for number in range(20)])
    peaks, budget = [one.memory.peak / 2**20 for one in shown.values()], plan.request.budget / 2**20
    axes.plot(peaks, range(len(shown)), "k|", markersize=12, label="peak")
    axes.axvline(budget, color="#c0392b", linewidth=1.2, label="budget")
    axes.set_xlim(0, 1.05 * max(*peaks, longest, min(budget, 2 * max(peaks))))
    axes.set_xlabel("MiB resident: private and mapped, context full")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def lines(points: Mapping[str, Mapping[int, float]], title: str, across: str, up: str, log: bool = False) -> str:
    """Draw one line a name, through its points, which are at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _picture(2.6, title, across, up)
    for name, found in points.items():
        axes.plot(list(found), list(found.values()), marker="o", markersize=3, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places := sorted({at for found in points.values() for at in found}), map(str, places))
    axes.set_ylim(bottom=0)
    if len(points) > 1:
        axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def stacks(memories: Mapping[str, Memory], title: str) -> str:
    """Draw stacked bars, a method each, of the six largest parts and the rest."""
    figure, axes = _picture(0.42 * len(memories) + 1.3, title, "MiB, the context full")
    largest = {name: 0 for memory in memories.values() for name in (part.name for part in memory.parts)}
    for name in largest:
        largest[name] = max(memory.part(name).all for memory in memories.values())
    shown = sorted(largest, key=lambda name: -largest[name])[:6]
    parts = {name: [memory.part(name).all for memory in memories.values()] for name in shown}
    parts["the rest"] = [sum(part.all for part in one.parts if part.name not in shown) for one in memories.values()]
    _bars(axes, list(memories), parts)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure)


def write_page(
    path: Path,
    engines: Mapping[str, Engine],
    figures: Sequence[MethodFigures],
    prompt: Prompt,
    settings: Settings,
    command: str,
    foreign: Sequence[Foreign] = (),
    busy: str = "",
) -> None:
    """Write it, whole or not at all.

    Args:
        path: of the page.
        engines: by bundle, as the figures name them.
        figures: what ``bench_all`` found.
        prompt: whose text is shown with its guesses.
        settings: of the measurement.
        command: how to repeat it.
        foreign: figures of llama.cpp to show beside them.
        busy: what else ran while they were measured, in words.
    """
    from jinja2 import Environment, StrictUndefined

    rows = [figure.as_dict() for figure in figures]
    names = [label(row, rows) if len(engines) > 1 else row["method"] for row in rows]
    bundle, engine = next(iter(engines.items()))
    own = [row for row in rows if row["bundle"] == bundle]
    best = max((row for row in own if row["method"] != BASELINE), key=lambda row: row["speedup"], default=None)
    passes = time_passes(engine)
    curve = {rows: ms / passes.by_rows[1] for rows, ms in passes.by_rows.items()}
    methods = [AR, *(row["method"] for row in own if row["method"] in engine.methods and row["method"] != AR)]
    shown = {
        "title": path.stem,
        "machine": this_machine(engine.device),
        "bundles": [(Path(name).resolve().name, one) for name, one in engines.items()],
        "rows": [row | {"name": name} for row, name in zip(rows, names, strict=True)],
        "best": best,
        "synthetic": [note for one in engines.values() for note in _synthetic(one)],
        "speeds": _svg(speeds(rows, names)),
        "curve": lines(
            {"passes": curve}, f"Verify curve, depth {passes.depth}", "rows of a pass", "times a pass of one row"
        ),
        "depth": lines({"one row": passes.by_depth}, "Time by depth", "tokens before", "ms", log=True),
        "acceptance": _acceptance(figures, names),
        "memory": stacks({name: engine.allowance.memory(name) for name in methods}, "Memory by part, predicted"),
        "text": coloured_text(engine, prompt, settings.changed(method=best["method"] if best else AR)),
        "text_method": best["method"] if best else AR,
        "settings": settings,
        "threads": engine.model.threads,
        "busy": busy,
        "command": command,
        "foreign": foreign,
        "version": __version__,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = (resources.files("edgespec.reports") / "page.html.jinja").read_text("utf-8")
    write_staged(path, environment.from_string(source).render(shown))


def _synthetic(engine: Engine) -> list[str]:
    """Find what the bundle says of a size that is not real: at most one note."""
    notes = engine.bundle.manifest.provenance.get("notes") or []
    return [str(note) for note in notes if "synthetic" in str(note)][:1]


def _acceptance(figures: Sequence[MethodFigures], names: Sequence[str]) -> str | None:
    """Draw how often a guess was accepted, by its place, of every method that guessed."""
    found: dict[str, Mapping[int, float]] = {}
    for name, figure in zip(names, figures, strict=True):
        offered, accepted = Counter[int](), Counter[int]()
        for result in figure.results:
            offered.update(dict(enumerate(result.stats.offered, 1)))
            accepted.update(dict(enumerate(result.stats.accepted_at, 1)))
        if offered:
            found[name] = {place: accepted[place] / tried for place, tried in offered.items() if tried}
    across = "place of the guess in its round"
    return lines(found, "Acceptance by place", across, "share that was accepted") if found else None
