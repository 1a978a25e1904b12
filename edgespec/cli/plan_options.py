"""What there is to plan for: a bundle, or the bundles that an export could make of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.drafters.registry import EAGLE, METHODS, SPECULATIVE, complete, needing
from edgespec.errors import BundleError, InvalidRequest
from edgespec.planning.plan import Option
from edgespec.planning.profiles import Profile
from edgespec.runtimes.files.bundle import check_sizes
from edgespec.runtimes.files.formats import FORMATS, Format
from edgespec.runtimes.files.manifest import MANIFEST, read_manifest
from edgespec.runtimes.options import LoadOptions

DRAFT, DRAFTER = "draft", "drafter"  # folders of what is still to be trained


def is_bundle(source: str) -> bool:
    """Whether this is a bundle's folder rather than a model."""
    return (Path(source) / MANIFEST).is_file()


def bundle_option(source: str, methods: Sequence[str] = (), load: LoadOptions | None = None) -> Option:
    """A bundle that is there; only its manifest is read, and what was measured with it.

    Args:
        source: its folder.
        methods: which of its methods; none = all.
        load: how it is to be loaded on this machine; None = on another one.

    Raises:
        BundleError: it cannot be read, or has nothing for the device.
        InvalidRequest: a method or an attention that it does not have.
    """
    from edgespec.planning.profiles import find_profile

    manifest = complete(read_manifest(Path(source)))
    check_sizes(Path(source), manifest)
    profile = None
    if load is not None:
        if load.device != "cpu" and load.device not in manifest.target.graphs:
            why = f"export it again with `--device {load.device}`"
            raise BundleError(f"{source}: has no graphs for {load.device}", why)
        load.resolve(manifest)  # what loading would refuse
        profile = find_profile(manifest, load)
    if unknown := [name for name in methods if name not in manifest.methods]:
        raise InvalidRequest(
            f"method {unknown[0]!r} is not in {source}; it has: {', '.join(manifest.methods)}",
            f"export it with `--method {unknown[0]}`",
        )
    if methods:
        kept = {name: part for name, part in manifest.methods.items() if name in methods}
        manifest = manifest.model_copy(update={"methods": kept})
    return Option(manifest, source, profile=profile)


def model_options(
    source: str,
    *,
    formats: Sequence[Format] = (),
    methods: Sequence[str] = (),
    draft: str | None = None,
    context: int | None = None,
    revision: str | None = None,
    text_only: bool = False,
    profile: Profile | None = None,
) -> list[Option]:
    """The bundles that an export of a model could make, one for each format; from its config.json.

    Args:
        source: the model's folder, hub id, .gguf file or builtin:NAME.
        formats: which; none = all.
        methods: which; none = all that are possible, those with heads marked as needing them.
        draft: a draft model, for speculative.
        context: most tokens of a sequence; None = the model's own limit.
        revision: of a hub model.
        text_only: of a model that reads images or sound, its text half.
        profile: what was measured of the device with another bundle.

    Raises:
        ExportError: unreadable or unsupported.
    """
    from edgespec.export.planned import planned_bundle, possible_drafter

    wanted = tuple(methods) or (
        *needing("text", "layers", "heads", *(("draft",) if draft else ())),
        possible_drafter(source, revision, text_only),
    )
    found = []
    for form in formats or FORMATS:
        how: dict[str, Any] = {"draft": draft, "context": context, "revision": revision, "text_only": text_only}
        planned = planned_bundle(source, form=form, methods=wanted, **how)
        needs = {
            name: f"needs trained heads: edgespec train {name} {source} -o {name}-heads"
            for name in planned.methods
            if METHODS[name].needs == "heads"
        }
        needs |= {
            name: f"needs a drafter: edgespec train {name} {source} -o {DRAFTER}"
            for name in planned.methods
            if name == EAGLE
        }
        published = [name for name in planned.methods if METHODS[name].apart and name != EAGLE]
        needs |= dict.fromkeys(published, "needs a drafter that was published for this model")
        if SPECULATIVE in planned.methods and draft is None:
            needs[SPECULATIVE] = f"needs a draft: edgespec train draft {source} -o {DRAFT}"
        command = ["--format", form, *(("--context", str(context)) if context else ())]
        command += ["--text-only"] if text_only else []
        found.append(Option(planned, source, tuple(command), needs, profile))
    return found


def export_command(option: Option, method: str) -> str | None:
    """What to type to get a bundle with that method; None = it is there."""
    if option.export is None:
        return None
    words = ["edgespec", "export", option.name, *option.export]
    if METHODS[method].needs != "text":
        words += ["--method", method]
    if METHODS[method].needs == "heads":
        words += ["--heads", f"{method}-heads"]
    if METHODS[method].apart:
        words += ["--drafter", DRAFTER]
    if METHODS[method].needs == "draft":
        words += ["--draft", option.manifest.provenance.get("draft", DRAFT)]
    return " ".join(words)
