"""Write a measurement as a page to share: one file, without scripts or external resources."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel

from edgespec.decoding.settings import Settings
from edgespec.decoding.text import INSERTED
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine
from edgespec.engine.inputs import Prompt
from edgespec.errors import InvalidRequest
from edgespec.formulas.cost import medians, time_turns
from edgespec.planning.footprint import Memory
from edgespec.planning.plan import Plan
from edgespec.planning.plan import label as plan_label
from edgespec.planning.profiles import this_machine
from edgespec.reports.advice import row_names
from edgespec.reports.bench import BASELINE, MethodFigures
from edgespec.reports.measuring import pass_over
from edgespec.runtimes.files.json_file import read_json, validated
from edgespec.runtimes.files.staged import write_staged
from edgespec.version import __version__


class Foreign(BaseModel):
    """One test of llama-bench, under its names."""

    model_config = ConfigDict(protected_namespaces=())

    model_filename: str
    model_type: str
    n_threads: int
    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    avg_ts: float
    stddev_ts: float = 0.0
    build_commit: str = ""

    @property
    def model(self) -> str:
        """File and type."""
        return f"{Path(self.model_filename).name} ({self.model_type})"

    @property
    def test(self) -> str:
        """As llama-bench prints it, such as ``tg128 @ d512``."""
        parts = (f"pp{self.n_prompt}" if self.n_prompt else "", f"tg{self.n_gen}" if self.n_gen else "")
        return "+".join(filter(None, parts)) + (f" @ d{self.n_depth}" if self.n_depth else "")


class _Bench(RootModel[Annotated[list[Foreign], Field(min_length=1)]]):
    """The output of llama-bench."""


def read_llama_bench(file: Path) -> list[Foreign]:
    """Read the file.

    Raises:
        InvalidRequest: not there, or not what llama-bench writes.
    """
    hint = "write it with `llama-bench -m MODEL -o json > llama-bench.json`"
    where = f"{file}: not an output of llama-bench"
    return validated(_Bench, read_json(file, InvalidRequest, hint), where, InvalidRequest, hint).root


ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
DEPTHS = (64, 256, 1024, 4096, 16384)
SECONDS = 6.0  # of all timed passes together

Kind = Literal["accepted", "rejected", "own", "prompt"]


def time_passes(engine: Engine, seconds: float = SECONDS) -> tuple[dict[int, float], dict[int, float]]:
    """Time passes of the target: by rows, at the first depth; of one row, by depth (tokens before it).

    Keys and values are made up, times are not.
    """
    slot = engine.open_slot()
    rows = [n for n in ROWS if n + 1 < engine.context]
    depths = [depth for depth in DEPTHS if depth + max(rows) < engine.context] or [1]
    slot.stand_in(depths[0])
    by_rows = time_turns({n: pass_over(slot, n) for n in rows}, seconds / 2)
    by_depth = time_turns(dict.fromkeys(depths, pass_over(slot, 1)), seconds / 2, prepare=slot.stand_in)
    return medians(by_rows), medians(by_depth)


def colored_text(engine: Engine, prompt: Prompt, settings: Settings) -> list[tuple[Kind, str]]:
    """Cut a text into pieces: accepted draft tokens, rejected ones, and the target's own tokens."""
    given = engine.encode(prompt, settings)
    stream, read = engine.stream(given, settings), given.tokens or [token for token in given if token < INSERTED]
    shown = prompt if isinstance(prompt, str) else engine.codec.decode(read)
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


def _bars(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]], colors: Sequence[Any] = ()) -> float:
    """Draw a stacked bar of MiB for each name; ``parts``: of all names, by part.  Returns the end of the longest."""
    left = [0.0] * len(names)
    for number, (name, sizes) in enumerate(parts.items()):
        widths = [size / 2**20 for size in sizes]
        color = {"color": colors[number % len(colors)]} if colors else {}
        axes.barh(range(len(names)), widths, left=left, label=name, **color)
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
    colors = [PLAIN if row["method"] == "plain" else FAST for row in rows]
    axes.barh(range(len(rows)), values, xerr=[low, high], color=colors, ecolor=INK)
    axes.set_yticks(range(len(rows)), names, parse_math=False)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.invert_yaxis()
    return figure


def plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the measured speed-ups into a PNG."""
    _save(speeds(rows, row_names(rows), title), path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def plot_plan(plan: Plan, path: Path) -> None:
    """Draw stacked bars of the parts, one per candidate, with the budget as a line; a PNG."""
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
    _save(figure, path)


def lines(points: Mapping[str, Mapping[int, float]], title: str, across: str, up: str, log: bool = False) -> str:
    """Draw one line per name, through its points, which are at whole numbers."""
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
    """Draw stacked bars, one per method, of the six largest parts and the rest."""
    figure, axes = _picture(0.42 * len(memories) + 1.3, title, "MiB, the context full")
    largest = Counter[str]()
    for part in (part for memory in memories.values() for part in memory.parts):
        largest[part.name] = max(largest[part.name], part.all)
    shown = [name for name, _ in largest.most_common(6)]
    parts = {name: [memory.part(name).all for memory in memories.values()] for name in shown}
    parts["the rest"] = [sum(part.all for part in one.parts if part.name not in shown) for one in memories.values()]
    _bars(axes, list(memories), parts)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure)


def write_page(
    path: Path,  # of the page
    engines: Mapping[str, Engine],  # by bundle, as the figures name them
    figures: Sequence[MethodFigures],  # what ``bench_all`` found
    prompt: Prompt,  # whose text is shown with its guesses
    settings: Settings,  # of the measurement
    command: str,  # how to repeat it
    foreign: Sequence[Foreign] = (),  # figures of llama.cpp to compare with
    busy: str = "",  # other programs that ran during the measurement
) -> None:
    """Write the page atomically."""
    from jinja2 import Environment, StrictUndefined

    rows = [figure.as_dict() for figure in figures]
    names = row_names(rows)
    bundle, engine = next(iter(engines.items()))
    own = [row for row in rows if row["bundle"] == bundle]
    best = max((row for row in own if row["method"] != BASELINE), key=lambda row: row["speedup"], default=None)
    by_rows, by_depth = time_passes(engine)
    curve = {"passes": {rows: ms / by_rows[1] for rows, ms in by_rows.items()}}
    methods = [AR, *(row["method"] for row in own if row["method"] in engine.methods and row["method"] != AR)]
    shown = {
        "title": path.stem,
        "machine": this_machine(engine.device),
        "bundles": [(Path(name).resolve().name, one) for name, one in engines.items()],
        "rows": [row | {"name": name} for row, name in zip(rows, names, strict=True)],
        "best": best,
        "synthetic": list(filter(None, map(_synthetic, engines.values()))),
        "speeds": _svg(speeds(rows, names)),
        "curve": lines(curve, f"Verify curve, depth {min(by_depth)}", "rows of a pass", "times a pass of one row"),
        "depth": lines({"one row": by_depth}, "Time by depth", "tokens before", "ms", log=True),
        "acceptance": _acceptance(figures, names),
        "memory": stacks({name: engine.memory_budget.memory(name) for name in methods}, "Memory by part, predicted"),
        "text": colored_text(engine, prompt, settings.changed(method=best["method"] if best else AR)),
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


def _synthetic(engine: Engine) -> str:
    """Find the bundle's note that its size is synthetic; empty = none."""
    notes = engine.bundle.manifest.provenance.get("notes") or []
    return next((str(note) for note in notes if "synthetic" in str(note)), "")


def _acceptance(figures: Sequence[MethodFigures], names: Sequence[str]) -> str | None:
    """Draw the acceptance of draft tokens by position, for every method that drafted."""
    found: dict[str, Mapping[int, float]] = {}
    for name, figure in zip(names, figures, strict=True):
        offered, accepted = Counter[int](), Counter[int]()
        for result in figure.results:
            offered.update(dict(enumerate(result.stats.drafted_at, 1)))
            accepted.update(dict(enumerate(result.stats.accepted_at, 1)))
        if offered:
            found[name] = {place: accepted[place] / tried for place, tried in offered.items() if tried}
    across = "place of the guess in its round"
    return lines(found, "Acceptance by place", across, "share that was accepted") if found else None
