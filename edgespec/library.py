"""Bundles by the names of their models: made when a model is first run, found again, listed and removed.

They lie in the user's cache, ``bundles/NAME``, with ``bundles/NAME.json`` beside each: of which model it was made.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import BudgetError, ExportError, InvalidRequest, UnsupportedModel, unknown_name
from edgespec.export.bundle.progress import Progress, shown
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.files.staged import write_staged

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgespec.engine.engine import Engine
    from edgespec.runtimes.options import LoadChanges, LoadOptions

BUILTIN = "builtin:"
EMBEDDED = Path(__file__).parent / "builtin"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_READ = ("*.json", "*.safetensors", "*.gguf", "*.model", "*.jinja")  # files whose change makes another bundle


@dataclass(frozen=True)
class Made:
    """A bundle that was made of a model when that was first run."""

    name: str  # which commands take in place of a folder
    model: str  # the folder, .gguf file, hub id or builtin:NAME that it was made of
    files: str  # a digest of a local model's files (names, sizes, times) or of an embedded one's; "" of others
    path: Path  # the bundle's folder

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    @property
    def used(self) -> float:
        """When it was last asked for; seconds since 1970."""
        return _facts(self.path).stat().st_mtime

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        found = asdict(self) | {"path": str(self.path), "bytes": self.bytes, "used": self.used}
        del found["files"]
        return found


def made() -> Iterator[Made]:
    """All bundles that were made of models, by name."""
    for facts in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            found = Made(**json.loads(facts.read_text("utf-8")), name=facts.stem, path=facts.with_suffix(""))
            if (found.path / MANIFEST).is_file():
                yield found


def remove(name: str) -> dict[str, Any]:
    """Remove a bundle that was made of a model, which stays -> what it was (``Made.as_dict``).

    Raises:
        InvalidRequest: none of that name, and none of that model.
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


def located(source: str | os.PathLike[str]) -> Path | None:
    """Find a bundle: a folder that is one, a name or the model of one that was made; None = neither."""
    path = Path(source).expanduser()
    if (path / MANIFEST).is_file():
        return path
    model = str(path.resolve()) if _files(path) else os.fspath(source)
    of = model, _files(path) or embedded(model)
    for one in made():
        if (one.model, one.files) == of or (one.name == os.fspath(source) and not path.exists()):
            with suppress(OSError):
                os.utime(_facts(one.path))
            return one.path
    return None


def named(name: str) -> Path | None:
    """Find a bundle that was made of a model by its name alone; a path of that name comes first."""
    if Path(name).expanduser().exists():
        return None
    return next((one.path for one in made() if one.name == name), None)


def found(source: str | os.PathLike[str]) -> Path:
    """Find a bundle; a folder that is none is given as it is, for the error of what is wrong in it.

    Raises:
        InvalidRequest: nothing of that name, or a model of which no bundle was made; the hint says what to do.
    """
    path = Path(source).expanduser()
    if (bundle := located(source)) is not None:
        return bundle
    if _files(path):
        run = f"`edgespec run {shlex.quote(os.fspath(source))}`"
        raise InvalidRequest(
            f"{source}: a model, not a bundle, or changed since one was made of it", f"{run} makes one"
        )
    if path.exists():
        return path
    raise _nothing(os.fspath(source))


def is_model(source: str | os.PathLike[str]) -> bool:
    """Whether this is, or may be, the name of a model: a folder or file of one, builtin:NAME, or OWNER/NAME."""
    text, path = os.fspath(source), Path(source).expanduser()
    if text.startswith(BUILTIN) or _files(path):
        return True
    if path.suffix == ".gguf":  # a file, and it is not there
        return False
    # a folder that was misspelled is nobody's hub id
    return bool(_HUB_ID.fullmatch(text)) and not path.exists() and not path.parent.is_dir()


def ready(source: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Find a bundle, or make it: pull the model, choose a format that fits the memory, export it into the cache.

    Args:
        source: a bundle's folder or name, or a model: folder, .gguf file, hub id, builtin:NAME.
        progress: is told stage, steps done, all steps, and what is done; None = a bar at a terminal.

    Returns:
        the bundle's folder.

    Raises:
        BudgetError: no format fits the memory.
        ExportError: anything about the model or the disk.
        InvalidRequest: neither a bundle nor a model; the nearest name is suggested.
    """
    if (found := located(source)) is not None:
        return found
    if not is_model(source):
        raise _nothing(os.fspath(source))
    with shown(progress) as report:
        return _make(os.fspath(source), report)


def load(
    bundle: str | os.PathLike[str],
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Unpack[LoadChanges],
) -> Engine:
    """Load a bundle, or a model, of which a bundle is made first (``ready``).

    Args:
        bundle: a bundle's folder or name, or a model: folder, .gguf file, hub id, builtin:NAME.
        options: how.
        progress: of the export, if there is one: is told stage, steps done, all steps, and what is done; None = a bar
            at a terminal.
        **changes: fields of ``LoadOptions`` (threads, context, strict, device, budget, ...), set on top.

    Raises:
        BudgetError: the bundle, or the context asked for, does not fit.
        BundleError: something is missing, short, altered or newer than this version, or cannot run here.
        DeviceError: the device is not there, or gives wrong numbers.
        ExportError: a model that cannot be exported.
        InvalidRequest: neither a bundle nor a model, where the nearest name is suggested; a context or an attention
            that this bundle does not have, an unknown option, or one of another type.
        StoreError: the n-gram store is damaged, newer than this version, or of another tokenizer.
    """
    from edgespec.engine import loading

    if isinstance(bundle, (str, os.PathLike)):
        there = not is_model(bundle) and Path(bundle).expanduser().exists()
        bundle = located(bundle) or (bundle if there else ready(bundle, progress))
    return loading.load(bundle, options, **changes)


def _make(model: str, progress: Progress) -> Path:
    from edgespec.export.front import write_bundle
    from edgespec.export.options import ExportOptions
    from edgespec.export.source.source import resolve

    progress("model", 0, 1, f"{model}: looked for")
    source = resolve(model)
    progress("model", 1, 1, str(source))
    path = Path(model).expanduser()
    files = _files(path)
    of = str(path.resolve()) if files else model
    folder = _free(of)
    form, why = _chosen(model)
    progress("plan", 1, 1, f"{form}, {why}")
    options = ExportOptions(str(path) if files else model, folder, format=form, overwrite=True, quick=True)
    try:
        write_bundle(options, progress)
    except ExportError as error:
        if error.hint:  # nobody has given -o
            error.hint = error.hint.replace("with -o", "with the environment variable EDGESPEC_CACHE")
        raise
    write_staged(_facts(folder), json.dumps({"model": of, "files": files or embedded(of)}))
    return folder


def _chosen(model: str) -> tuple[Any, str]:
    """Choose (format, reason): the fastest that fits this machine's memory; a ``BudgetError``: none does."""
    from edgespec.export.options import ExportOptions
    from edgespec.export.planned import PlannedSource, planned_bundle
    from edgespec.planning.budget import available_memory, show_bytes
    from edgespec.planning.plan import Option, PlanRequest, make_plan
    from edgespec.planning.profiles import latest_profile
    from edgespec.runtimes.files.formats import FORMATS

    profile = latest_profile()
    try:
        source = PlannedSource(model)
        found = [
            Option(
                planned_bundle(ExportOptions(model, format=form), source), model, ("--format", form), profile=profile
            )
            for form in FORMATS
            if form != "w8a8"  # its text differs from the model's by more than rounding weights
        ]
    except UnsupportedModel:
        return "int4", "the default"  # it goes through optimum, or the export says what can be done
    plan = make_plan(found, PlanRequest(available_memory().reachable))
    if plan.pick is None:
        raise BudgetError(plan.reason, "; ".join(plan.hints))
    return plan.pick.format, f"predicted peak {show_bytes(plan.pick.memory.peak)}"


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
    """Digest what a local model consists of; "" where there is none."""
    if path.suffix == ".gguf" and path.is_file():
        files = [path]
    elif (path / "config.json").is_file():
        files = sorted({file for pattern in _READ for file in path.glob(pattern)})
    else:
        return ""
    facts = [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


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


def _free(model: str) -> Path:
    """Choose a folder for the bundle of a model: its own, or one whose name nobody has."""
    name = re.sub(r"[^\w.-]", "-", model.rstrip("/").rsplit("/", 1)[-1].removeprefix(BUILTIN).removesuffix(".gguf"))
    owner = {one.name: one.model for one in made()}
    if owner.get(name, model) != model:
        name += f"-{hashlib.sha256(model.encode()).hexdigest()[:6]}"
    return _folder() / name


def _facts(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _folder() -> Path:
    return cache_folder() / "bundles"
