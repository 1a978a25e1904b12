"""The public function of an export: a model in, a whole bundle out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.declared import copy_with
from edgespec.errors import InvalidRequest
from edgespec.export.bundle.progress import Progress, shown
from edgespec.export.options import ExportChanges, ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.planning.budget import parse_bytes
from edgespec.runtimes.files.formats import EXPORT_FORMATS
from edgespec.signatures import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(ExportChanges, ExportOptions)
def export(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Unpack[ExportChanges],
) -> Path:
    """Export a model into a bundle, as ``edgespec export`` does; ``edgespec.load`` opens what it returns.

    Without ``options`` and without a ``format`` the fastest format is chosen that loses at most 1 % of perplexity.

    Args:
        model: folder, .gguf file, hub id or ``builtin:NAME``.
        output: the bundle's folder.
        options: how; None = ``ExportOptions`` with its defaults.
        progress: receives the stage, steps done, all steps, and what is done; None = a bar at a terminal.
        **changes: fields of ``ExportOptions`` (methods, format, draft, context, overwrite, ...); they override
            ``options``.

    Returns:
        the bundle's folder.

    Raises:
        ExportError: anything about the source, the options or the disk; no files remain.
        InvalidRequest: an unknown option, or one of another type.
        QualityError: no format was named, and only one that loses much of the quality fits the memory.
    """
    for name, value in (("model", model), ("output", output)):
        if not isinstance(value, (str, os.PathLike)):
            raise InvalidRequest(f"{name} is {value!r}: expected a name or a folder")
    given: dict[str, Any] = dict(changes)
    for name in ("methods", "heads", "attention", "devices", "device_precisions"):
        if isinstance(given.get(name), str):
            given[name] = (given[name],)
    for name in ("calibration", "skip_set", "keep_search", "codes"):
        if isinstance(given.get(name), str):
            given[name] = Path(given[name])
    for name in ("target_size", "budget"):
        if isinstance(given.get(name), str):
            given[name] = parse_bytes(given[name])
    if (form := given.get("format", "int4")) not in EXPORT_FORMATS:
        raise InvalidRequest(f"format {form!r}: expected one of {', '.join(EXPORT_FORMATS)}")
    folder = Path(output)
    base = options or ExportOptions(os.fspath(model), folder)
    named = replace(base, model=os.fspath(model), output=folder)
    wanted = copy_with(named, "export option", given, omit=frozenset({"model", "output"}))
    if options is None and not {"format", "choose"} & given.keys():
        wanted = replace(wanted, choose=not wanted.names_format)
    with shown(progress) as report:
        export_model(wanted, report)
    return folder
