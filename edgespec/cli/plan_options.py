"""What there is to plan for: a bundle, or the bundles that an export could make of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.planning.plan import Option
from edgespec.runtimes.manifest import FORMATS, MANIFEST, Format, read_manifest

WITHOUT_TRAINING = ("ar", "ngram", "self-spec", "swift")
HEADS = ("medusa", "blockwise", "paradecode")


def is_bundle(source: str) -> bool:
    """Whether this is a bundle's folder rather than a model."""
    return (Path(source) / MANIFEST).is_file()


def bundle_option(source: str) -> Option:
    """A bundle that is there; only its manifest is read.

    Raises:
        BundleError: it cannot be read.
    """
    return Option(read_manifest(Path(source)), source)


def model_options(
    source: str,
    *,
    formats: Sequence[Format] = (),
    methods: Sequence[str] = (),
    draft: str | None = None,
    context: int | None = None,
    revision: str | None = None,
) -> list[Option]:
    """The bundles that an export of a model could make, one for each format; from its config.json.

    Args:
        source: the model's folder, hub id, .gguf file or builtin:NAME.
        formats: which; none = all.
        methods: which; none = all that are possible, those with heads marked as needing them.
        draft: a draft model, for speculative.
        context: most tokens of a sequence; None = the model's own limit.
        revision: of a hub model.

    Raises:
        ExportError: unreadable or unsupported.
    """
    from edgespec.export.planned import planned_bundle

    wanted = tuple(methods) or (*WITHOUT_TRAINING, *HEADS, *(("speculative",) if draft else ()))
    found = []
    for form in formats or FORMATS:
        planned = planned_bundle(source, form=form, methods=wanted, draft=draft, context=context, revision=revision)
        needs = {
            name: f"needs trained heads: edgespec train {name} {source} -o {name}-heads"
            for name in planned.methods
            if name in HEADS
        }
        command = ["--format", form, *(("--context", str(context)) if context else ())]
        found.append(Option(planned, source, tuple(command), needs))
    return found


def export_command(option: Option, method: str) -> str | None:
    """What to type to get a bundle with that method; None = it is there."""
    if option.export is None:
        return None
    words = ["edgespec", "export", option.name, *option.export]
    if method not in ("ar", "ngram"):
        words += ["--method", method]
    if method in HEADS:
        words += ["--heads", f"{method}-heads"]
    return " ".join(words)
