"""Bundles by the names of their models: created when a model first runs, found again, listed and removed.

They are in the user's cache, ``bundles/NAME``.  ``bundles/NAME.json`` names the model of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import ExportError, InvalidRequest, unknown_name
from edgespec.export.bundle.progress import Progress, shown
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest
from edgespec.runtimes.files.staged import write_staged
from edgespec.runtimes.options import LoadChanges, LoadOptions
from edgespec.signatures import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgespec.engine.engine import Engine
    from edgespec.runtimes.files.formats import ExportFormat

BUILTIN = "builtin:"
EMBEDDED = Path(__file__).parent / "builtin"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_READ = (
    "*.json",
    "*.safetensors",
    "*.gguf",
    "*.model",
    "*.jinja",
    "model.bin",
    "*.spm",
    "*vocabulary.txt",
)  # files whose change makes another bundle


@dataclass(frozen=True)
class CachedBundle:
    """A bundle that was created when a model first ran."""

    name: str  # commands accept it instead of a folder
    model: str  # its source: a folder, .gguf file, hub id or builtin:NAME
    files: str  # a digest of a local model's files (names, sizes, times) or of an embedded one; "" for others
    path: Path  # the bundle's folder
    format: str | None = None  # the requested one; "" = chosen by quality, None = from before that choice existed

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    @property
    def used(self) -> float:
        """Time of the last use, in seconds since 1970."""
        return _facts(self.path).stat().st_mtime

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        found = asdict(self) | {"path": str(self.path), "bytes": self.bytes, "used": self.used}
        del found["files"], found["format"]
        return found


def made() -> Iterator[CachedBundle]:
    """All bundles that were created from models, by name."""
    for facts in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            found = CachedBundle(**json.loads(facts.read_text("utf-8")), name=facts.stem, path=facts.with_suffix(""))
            if (found.path / MANIFEST).is_file():
                yield found


def remove(name: str) -> dict[str, Any]:
    """Remove a bundle that was created from a model; the model stays -> its data (``CachedBundle.as_dict``).

    Raises:
        InvalidRequest: no bundle with that name or model.
    """
    known = list(made())
    found = next((one for one in known if name in (one.name, one.model)), None)
    if not known:
        raise InvalidRequest(f"unknown bundle {name!r}", "`edgespec run MODEL` has made none yet")
    if found is None:
        raise unknown_name("bundle", name, {one.name for one in known})
    what = found.as_dict()
    _facts(found.path).unlink()
    shutil.rmtree(found.path)
    return what


def located(source: str | os.PathLike[str], form: ExportFormat | None = None) -> Path | None:
    """Find a bundle by its folder, its name or its model; None = there is none.

    Args:
        source: a folder, a name, or a model.
        form: the format of a bundle of a model; None = the one that was chosen.
    """
    path = Path(source).expanduser()
    if (path / MANIFEST).is_file():
        return path
    model = str(path.resolve()) if _files(path) else os.fspath(source)
    of = model, _files(path) or embedded(model), form or ""
    for one in made():
        named = one.name == os.fspath(source) and not path.exists() and form in (None, one.format)
        if (one.model, one.files, one.format) == of or named:
            with suppress(OSError):
                os.utime(_facts(one.path))
            return one.path
    return None


def named(name: str) -> Path | None:
    """Find a bundle of a model by its name only; a path with that name takes precedence."""
    if Path(name).expanduser().exists():
        return None
    return next((one.path for one in made() if one.name == name), None)


def found(source: str | os.PathLike[str]) -> Path:
    """Find a bundle; another folder is returned unchanged, so that loading it reports the error.

    Raises:
        InvalidRequest: nothing with that name, or a model without a bundle; the hint says what to do.
    """
    path = Path(source).expanduser()
    if (bundle := located(source)) is not None:
        return bundle
    if _files(path):
        run = f"`edgespec run {shlex.quote(os.fspath(source))}`"
        raise InvalidRequest(f"{source}: a model without a bundle, or changed since its export", f"{run} creates one")
    if path.exists():
        return path
    raise _nothing(os.fspath(source))


def check_source(source: str | os.PathLike[str]) -> None:
    """Refuse a name that is neither a bundle nor a model.

    Raises:
        InvalidRequest: the nearest name is suggested.
    """
    if located(source) is None and not is_model(source):
        raise _nothing(os.fspath(source))


def is_model(source: str | os.PathLike[str]) -> bool:
    """Whether this is, or may be, the name of a model: a folder or file of one, builtin:NAME, or OWNER/NAME."""
    text, path = os.fspath(source), Path(source).expanduser()
    if text.startswith(BUILTIN) or _files(path):
        return True
    if path.suffix == ".gguf":  # a missing file
        return False
    # a misspelled folder is not a hub id
    return bool(_HUB_ID.fullmatch(text)) and not path.exists() and not path.parent.is_dir()


def require_known(source: str | os.PathLike[str]) -> None:
    """Raise ``InvalidRequest`` with the nearest name for a name that is neither a bundle nor a model."""
    if not is_model(source) and located(source) is None:
        raise _nothing(os.fspath(source))


def ready(
    source: str | os.PathLike[str],
    progress: Progress | None = None,
    form: ExportFormat | None = None,
    budget: str | int | None = None,
) -> Path:
    """Find a bundle, or create it: pull the model, choose a format that keeps its quality, export into the cache.

    Args:
        source: a bundle's folder or name, or a model: folder, .gguf file, hub id, builtin:NAME.
        progress: called with the stage, steps done, all steps, and a description; None = a bar in a terminal.
        form: the format of a new bundle; None = the fastest that loses at most 1 % of perplexity.
        budget: the maximum memory of a new bundle, as in ``LoadOptions``; None = the free memory.

    Returns:
        the bundle's folder.

    Raises:
        QualityError: no format fits in memory, or only one with a high quality loss.
        ExportError: anything about the model or the disk.
        InvalidRequest: neither a bundle nor a model; the nearest name is suggested.  Or a format for a bundle.
    """
    found, most = located(source, form), most_bytes(budget)
    made_of_it = found is not None and found != Path(source).expanduser() and is_model(source)
    if found is not None and made_of_it and form is None and most is not None and not _fits(found, most):
        found = None  # chosen for more memory
    if found is not None:
        if form is not None and found == Path(source).expanduser() and read_manifest(found).target.format != form:
            raise InvalidRequest(
                f"{source}: is a bundle in {read_manifest(found).target.format}, and --format {form} was given",
                "a format is for a model, which is exported to a new bundle",
            )
        return found
    require_known(source)
    with shown(progress) as report:
        return _make(os.fspath(source), report, form, most)


def most_bytes(budget: str | int | None) -> int | None:
    """Return a memory limit in bytes; None = the free memory."""
    if budget is None or budget == "off":
        return None
    from edgespec.planning.budget import parse_bytes

    return parse_bytes(budget) if isinstance(budget, str) else budget


@takes(LoadChanges, LoadOptions)
def load(
    bundle: str | os.PathLike[str],
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Unpack[LoadChanges],
) -> Engine:
    """Load a bundle, or a model, which is exported first.

    Args:
        bundle: a bundle's folder or name, or a model: folder, .gguf file, hub id, builtin:NAME.
        options: load options; None = the defaults of ``LoadOptions``.
        progress: called during an export with the stage, steps done, all steps, and a description; None = a bar in
            a terminal.
        **changes: fields of ``LoadOptions`` (threads, context, strict, device, ...); they override ``options``.

    Returns:
        an engine; ``with`` closes it at the end.

    Raises:
        BudgetError: the bundle or the requested context does not fit.
        QualityError: no format that keeps the quality fits; ``edgespec.export`` takes a ``format``.
        BundleError: something is missing, short, altered or newer than this version, or cannot run here.
        DeviceError: the device is missing, or gives wrong numbers.
        ExportError: a model that cannot be exported.
        InvalidRequest: neither a bundle nor a model (the nearest name is suggested), a context or an attention format
            that this bundle lacks, an unknown option, or one of another type.
        StoreError: the n-gram store is damaged, newer than this version, or of another tokenizer.
    """
    from edgespec.engine import loading

    if isinstance(bundle, (str, os.PathLike)):
        there = not is_model(bundle) and Path(bundle).expanduser().exists()
        budget = changes.get("budget", options.budget if options else None)
        bundle = located(bundle) or (bundle if there else ready(bundle, progress, budget=budget))
    return loading.load(bundle, options, **changes)


def _make(model: str, progress: Progress, form: ExportFormat | None, budget: int | None) -> Path:
    from edgespec.export.options import ExportOptions
    from edgespec.export.pipeline import export_model
    from edgespec.export.source.source import resolve

    progress("model", 0, 1, f"{model}: looked for")
    source = resolve(model)
    progress("model", 1, 1, str(source))
    path = Path(model).expanduser()
    files = _files(path)
    of = str(path.resolve()) if files else model
    folder = _free(of, form)
    options = ExportOptions(str(path) if files else model, folder, overwrite=True, quick=True, budget=budget)
    options = replace(options, choose=True) if form is None else replace(options, format=form)
    try:
        export_model(options, progress)
    except ExportError as error:
        if error.hint:  # without -o
            error.hint = error.hint.replace("with -o", "with the environment variable EDGESPEC_CACHE")
        raise
    write_staged(_facts(folder), json.dumps({"model": of, "files": files or embedded(of), "format": form or ""}))
    return folder


def _fits(bundle: Path, budget: int) -> bool:
    """Whether a bundle of a model fits in this many bytes."""
    from edgespec.drafters.registry import complete
    from edgespec.planning.plan import Option, PlanRequest, make_plan

    return make_plan([Option(complete(read_manifest(bundle)), str(bundle))], PlanRequest(budget)).pick is not None


def _nothing(source: str) -> InvalidRequest:
    from difflib import get_close_matches

    path = Path(source).expanduser()
    hint = "give a bundle's folder, a name of `edgespec list`, a model's folder or .gguf file, a hub id or builtin:NAME"
    if path.exists():
        return InvalidRequest(f"{source}: neither a bundle nor a model: no {MANIFEST}, no config.json", hint)
    beside = path.parent
    with suppress(OSError):
        names = [str(path) for path in beside.iterdir() if (path / MANIFEST).is_file()]
        near = get_close_matches(source, [*names, *(one.name for one in made())], 1)
        if near:
            return InvalidRequest(f"{source}: no such bundle or model", f"did you mean {near[0]}?")
    return InvalidRequest(f"{source}: no such bundle or model", hint)


def _files(path: Path) -> str:
    """Digest the files of a local model; "" if there are none."""
    if path.suffix == ".gguf" and path.is_file():
        files = [path]
    elif (path / "config.json").is_file() or _named_by_weights(path):
        files = sorted({file for pattern in _READ for file in path.glob(pattern)})
    else:
        return ""
    facts = [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _named_by_weights(path: Path) -> bool:
    """Whether a folder without a config.json is a model: one of CTranslate2 2, or .gguf files."""
    if (path / MANIFEST).is_file() or not path.is_dir():
        return False
    if any(path.glob("*.gguf")):
        return True
    from edgespec.export.source.ct2_files import spec_of

    return spec_of(path) is not None


def embedded(model: str) -> str:
    """Digest an embedded model, and that which it is the widening of; "" = it is none."""
    folder = EMBEDDED / model.removeprefix(BUILTIN)
    if not model.startswith(BUILTIN) or not folder.is_dir():
        return ""
    made, wide = hashlib.sha256(), folder / "edgespec_widened.json"
    small = [folder / json.loads(wide.read_text("utf-8"))["source"]] if wide.is_file() else []
    for file in (file for one in (folder, *small) for pattern in _READ for file in sorted(one.glob(pattern))):
        made.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return made.hexdigest()


def _free(model: str, form: ExportFormat | None = None) -> Path:
    """Choose a folder for the bundle of a model, with the format that was asked for: its own, or one that is free."""
    name = re.sub(r"[^\w.-]", "-", model.rstrip("/").rsplit("/", 1)[-1].removeprefix(BUILTIN).removesuffix(".gguf"))
    name += f"-{form}" if form else ""
    owner = {one.name: one.model for one in made()}
    if owner.get(name, model) != model:
        name += f"-{hashlib.sha256(model.encode()).hexdigest()[:6]}"
    return _folder() / name


def _facts(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _folder() -> Path:
    return cache_folder() / "bundles"
