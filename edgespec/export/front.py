"""The front door of an export: a model in, a whole bundle out, golden vectors included."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from edgespec.declared import copy_with
from edgespec.errors import ExportError, InvalidRequest
from edgespec.export.bundle.progress import Progress, shown
from edgespec.export.bundle.writer import refuse_existing, save_manifest, staged_folder
from edgespec.export.options import ExportChanges, ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.planning.budget import parse_bytes
from edgespec.reports.proof import make_golden
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Manifest
from edgespec.signatures import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


def write_bundle(options: ExportOptions, progress: Progress) -> Manifest:
    """Write the bundle that the options ask for; its name appears when all of it is there.

    Raises:
        ExportError: anything about the source, the options or the disk; nothing is left behind.
    """
    if options.output.resolve() == Path.cwd():
        raise ExportError("the bundle cannot take the place of the current folder", "name another one")
    if options.choose:  # which takes seconds
        options.wanted()
        refuse_existing(options.output, options.overwrite)
    # kept when interrupted: the next try goes on from there
    search = options.keep_search or options.output.parent / f".{options.output.name}.search"
    exporter = Exporter(replace(options, keep_search=search), progress)
    with staged_folder(options.output, options.overwrite) as folder:
        exporter.options = replace(exporter.options, output=folder)
        manifest = exporter.run()
        progress("golden", 0, 1, "plain decoding of the test prompts")
        vectors, seen, made_by = make_golden(folder, exporter.text.text, options.threads, exporter.copies)
        target, provenance = manifest.target, manifest.provenance | {"golden": made_by}
        if target.image is not None:
            image = target.image.model_copy(update={"proof": seen})
            target = target.model_copy(update={"image": image})
        changes = {"golden": vectors, "target": target, "provenance": provenance}
        manifest = manifest.model_copy(update=changes)
        save_manifest(folder, manifest)
        progress("golden", 1, 1, "done")
    with suppress(OSError):  # another search is in there
        search.rmdir()
    return manifest


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
        options: how; None = ``ExportOptions`` with its defaults.  What follows is set on top.
        progress: is told stage, steps done, all steps, and what is done; None = a bar at a terminal.
        **changes: fields of ``ExportOptions`` (methods, format, draft, context, overwrite, ...), set on top.

    Returns:
        the bundle's folder.

    Raises:
        ExportError: anything about the source, the options or the disk; nothing is left behind.
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
    if (form := given.get("format", "int4")) not in get_args(Format):
        raise InvalidRequest(f"format {form!r}: expected one of {', '.join(get_args(Format))}")
    folder = Path(output)
    base = options or ExportOptions(os.fspath(model), folder)
    named = replace(base, model=os.fspath(model), output=folder)
    wanted = copy_with(named, "export option", given, omit=frozenset({"model", "output"}))
    if options is None and not {"format", "choose"} & given.keys():
        wanted = replace(wanted, choose=not wanted.names_format)
    with shown(progress) as report:
        write_bundle(wanted, report)
    return folder
