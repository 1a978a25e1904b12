"""Writing the page of a measurement."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from edgespec import __version__
from edgespec.decoding.settings import Settings
from edgespec.drafters.registry import AR
from edgespec.engine.engine import Engine, Prompt
from edgespec.errors import InvalidRequest
from edgespec.planning.profile.machine import this_machine
from edgespec.reports.advice import label
from edgespec.reports.bench import BASELINE, MethodFigures
from edgespec.reports.page import pictures
from edgespec.reports.page.compare import Foreign
from edgespec.reports.page.content import coloured_text, memory_parts, time_passes


def check_page(path: Path) -> None:
    """Refuse early what ``write_page`` could not write.

    Raises:
        InvalidRequest: not a .html file, or a folder that is not there.
    """
    import matplotlib  # noqa: F401  missing: better now than after the measurement

    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidRequest(f"{path}: expected a name that ends in .html")
    if not path.parent.is_dir():
        raise InvalidRequest(f"{path}: there is no folder {path.parent}", "create it first")


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
        "speeds": pictures.speeds(rows, names),
        "curve": pictures.lines(
            {"passes": passes.curve},
            f"Verify curve, depth {passes.depth}",
            "rows of a pass",
            "times a pass of one row",
        ),
        "depth": pictures.lines({"one row": passes.by_depth}, "Time by depth", "tokens before", "ms", log=True),
        "acceptance": _acceptance(figures, names),
        "memory": pictures.stacks(memory_parts(engine, methods), "Memory by part, predicted"),
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
    source = (resources.files("edgespec.reports.page") / "page.html.jinja").read_text("utf-8")
    return environment.from_string(source)


def _described(name: str, engine: Engine) -> dict[str, Any]:
    """A bundle in a few words."""
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
    """What the bundle says of a size that is not real."""
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
    return pictures.lines(found, "Acceptance by place", across, "share that stood") if found else None
