"""A page that shows a measurement to somebody else: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from edgespec import __version__
from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine, Prompt
from edgespec.errors import InvalidRequest
from edgespec.planning.profiles import this_machine
from edgespec.reports.advice import label
from edgespec.reports.bench import BASELINE, MethodFigures
from edgespec.reports.measuring import pass_over, take_turns
from edgespec.runtimes.opening import open_slot

MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Foreign:
    """One test of llama-bench.

    Attributes:
        model: its file and type.
        test: what was done, in llama-bench's words, as in ``tg128 @ d512``.
        threads: of the run.
        speed: tokens per second, the mean.
        deviation: their standard deviation.
        build: which llama.cpp.
    """

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


@dataclass(frozen=True)
class Passes:
    """Times of passes of the target.

    Attributes:
        by_rows: milliseconds by rows, at the first depth.
        by_depth: milliseconds of one row by the tokens before it.
        depth: the first depth.
    """

    by_rows: dict[int, float]
    by_depth: dict[int, float]
    depth: int

    @property
    def curve(self) -> dict[int, float]:
        """The verify curve: v(n), the time of n rows over that of one."""
        return {rows: ms / self.by_rows[1] for rows, ms in self.by_rows.items()}


def time_passes(engine: Engine, seconds: float = SECONDS) -> Passes:
    """Time passes of several rows, and of one row at several depths; keys and values are made up, times are not."""
    slot = open_slot(engine.model, context=engine.context)
    rows = [n for n in ROWS if n + 1 < engine.context]
    depths = [depth for depth in DEPTHS if depth + max(rows) < engine.context] or [1]
    slot.stand_in(depths[0])
    by_rows = take_turns({n: pass_over(slot, n) for n in rows}, seconds / 2)
    one = pass_over(slot, 1)
    by_depth = take_turns(dict.fromkeys(depths, one), seconds / 2, prepare=slot.stand_in)
    return Passes(by_rows, by_depth, depths[0])


def coloured_text(engine: Engine, prompt: Prompt, settings: Settings) -> list[tuple[Kind, str]]:
    """Cut a text into pieces: accepted guesses, those that the target refused, and its own tokens."""
    stream = engine.stream(prompt, settings)
    shown = prompt if isinstance(prompt, str) else engine.codec.decode(list(prompt))
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


def memory_parts(engine: Engine, methods: Sequence[str]) -> dict[str, dict[str, int]]:
    """Predicted bytes by part of every method, the context full."""
    return {
        method: {part.name: part.private + part.file for part in engine.allowance.memory(method).parts}
        for method in methods
    }


PLAIN, FAST, INK = "#9aa5b1", "#3b7dd8", "#24292f"
WIDTH = 6.4  # inches


class _Picture:
    """Axes to draw on; ``svg`` is the picture without a prologue, ready to stand in a page."""

    def __init__(self, height: float, title: str, across: str, up: str = "") -> None:
        from matplotlib.figure import Figure  # without pyplot: nothing global

        self.figure = Figure(figsize=(WIDTH, height))
        self.axes = self.figure.subplots()
        self.axes.set_title(title, parse_math=False, fontsize=10, loc="left")
        self.axes.set_xlabel(across, fontsize=9)
        self.axes.set_ylabel(up, fontsize=9)
        self.axes.tick_params(labelsize=8)
        self.axes.spines[["top", "right"]].set_visible(False)

    def svg(self) -> str:
        import matplotlib

        self.figure.tight_layout()
        out = io.StringIO()
        # text stays text; the same picture is the same file
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "edgespec"}):
            self.figure.savefig(out, format="svg", metadata={"Date": None})
        text = out.getvalue()
        return text[text.index("<svg") :]


def speeds(rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str = "Speed") -> _Picture:
    """Draw bars of the speed-ups with their intervals."""
    picture = _Picture(0.42 * len(rows) + 0.9, title, "speed over plain decoding: median, 95 % interval")
    values = [row["speedup"] for row in rows]
    low = [max(0.0, row["speedup"] - row["speedup_low"]) for row in rows]
    high = [max(0.0, row["speedup_high"] - row["speedup"]) for row in rows]
    colours = [PLAIN if row["method"] == "plain" else FAST for row in rows]
    picture.axes.barh(range(len(rows)), values, xerr=[low, high], color=colours, ecolor=INK)
    picture.axes.set_yticks(range(len(rows)), names, parse_math=False)
    picture.axes.axvline(1, color=INK, linewidth=0.8)
    picture.axes.invert_yaxis()
    return picture


def plot(figures: Sequence[MethodFigures], path: Path, title: str) -> None:
    """Draw the speed-ups into a PNG."""
    rows = [figure.as_dict() for figure in figures]
    figure = speeds(rows, [row["method"] for row in rows], title).figure
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def lines(points: Mapping[str, Mapping[int, float]], title: str, across: str, up: str, log: bool = False) -> str:
    """One line a name, through its points, which stand at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    picture = _Picture(2.6, title, across, up)
    for name, found in points.items():
        picture.axes.plot(list(found), list(found.values()), marker="o", markersize=3, label=name)
    picture.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        picture.axes.set_xscale("log", base=2)
        picture.axes.set_xticks(places := sorted({at for found in points.values() for at in found}), map(str, places))
    picture.axes.set_ylim(bottom=0)
    if len(points) > 1:
        picture.axes.legend(fontsize=8, frameon=False)
    return picture.svg()


def stacks(parts: Mapping[str, Mapping[str, int]], title: str) -> str:
    """Stacked bars in MiB, a method each."""
    picture = _Picture(0.42 * len(parts) + 1.3, title, "MiB, the context full")
    largest: dict[str, int] = {}
    for of_it in parts.values():
        for name, size in of_it.items():
            largest[name] = max(size, largest.get(name, 0))
    shown = sorted(largest, key=lambda name: -largest[name])[:6]
    left = [0.0] * len(parts)
    for name in [*shown, "the rest"]:
        wanted = shown if name == "the rest" else []
        widths = [
            sum(size for part, size in of_it.items() if (part not in wanted if wanted else part == name)) / 2**20
            for of_it in parts.values()
        ]
        picture.axes.barh(range(len(parts)), widths, left=left, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    picture.axes.set_yticks(range(len(parts)), list(parts), parse_math=False)
    picture.axes.invert_yaxis()
    picture.axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture.svg()


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
    rows = [figure.as_dict() for figure in figures]
    names = [label(row, rows) if len(engines) > 1 else row["method"] for row in rows]
    bundle, engine = next(iter(engines.items()))
    own = [row for row in rows if row["bundle"] == bundle]
    best = max((row for row in own if row["method"] != BASELINE), key=lambda row: row["speedup"], default=None)
    passes = time_passes(engine)
    methods = [AR, *(row["method"] for row in own if row["method"] in engine.methods and row["method"] != AR)]
    shown = {
        "title": path.stem,
        "machine": this_machine(engine.device),
        "bundles": [_described(name, one) for name, one in engines.items()],
        "rows": [row | {"name": name} for row, name in zip(rows, names, strict=True)],
        "best": best,
        "synthetic": [note for one in engines.values() if (note := _synthetic(one))],
        "speeds": speeds(rows, names).svg(),
        "curve": lines(
            {"passes": passes.curve}, f"Verify curve, depth {passes.depth}", "rows of a pass", "times a pass of one row"
        ),
        "depth": lines({"one row": passes.by_depth}, "Time by depth", "tokens before", "ms", log=True),
        "acceptance": _acceptance(figures, names),
        "memory": stacks(memory_parts(engine, methods), "Memory by part, predicted"),
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
    text = _template().render(shown)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = (resources.files("edgespec.reports") / "page.html.jinja").read_text("utf-8")
    return environment.from_string(source)


def _described(name: str, engine: Engine) -> dict[str, Any]:
    """Describe a bundle in a few words."""
    manifest = engine.bundle.manifest
    facts = manifest.target.facts
    return {
        "name": Path(name).resolve().name,
        "architecture": facts.architecture,
        "layers": facts.layers,
        "hidden": facts.hidden,
        "vocab": facts.vocab,
        "format": manifest.target.format,
        "weights": manifest.files[manifest.target.weights].size,
        "operators": engine.operators.kind,
        "attention": engine.attention.name,
        "context": engine.context,
        "device": engine.device,
        "strict": engine.strict,
    }


def _synthetic(engine: Engine) -> str | None:
    """Find what the bundle says of a size that is not real."""
    notes = engine.bundle.manifest.provenance.get("notes") or []
    return next((str(note) for note in notes if "synthetic" in str(note)), None)


def _acceptance(figures: Sequence[MethodFigures], names: Sequence[str]) -> str | None:
    """How often a guess stood, by its place, of every method that guessed."""
    found: dict[str, Mapping[int, float]] = {}
    for name, figure in zip(names, figures, strict=True):
        offered: dict[int, int] = {}
        accepted: dict[int, int] = {}
        for result in figure.results:
            for place, (tried, stood) in enumerate(zip(result.stats.offered, result.stats.accepted_at, strict=True), 1):
                offered[place] = offered.get(place, 0) + tried
                accepted[place] = accepted.get(place, 0) + stood
        if offered:
            found[name] = {place: accepted[place] / tried for place, tried in offered.items() if tried}
    across = "place of the guess in its round"
    return lines(found, "Acceptance by place", across, "share that stood") if found else None
