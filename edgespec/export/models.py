"""Open the models of a bundle with one function: with their values for an export, or only as shapes for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import EAGLE, SPECULATIVE, needing
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.sights import limit_images
from edgespec.export.bundle.model_part import check_devices, check_layers, check_operators
from edgespec.export.bundle.sizes import ADDED, MODEL, best_vocab_rows
from edgespec.export.drafters.drafter import Drafter
from edgespec.export.drafters.head_choice import HeadChoice
from edgespec.export.drafters.heads import TrainedHeads
from edgespec.export.onnx_model import EmittedModel
from edgespec.export.options import ExportOptions
from edgespec.runtimes.files.manifest import SCHEMA, Manifest, MethodPart, ModelPart, TokenizerFacts
from edgespec.version import __version__

if TYPE_CHECKING:
    from edgespec.export.foreign.model import ForeignModel
    from edgespec.runtimes.text.translation import Translation

    SourceModel: TypeAlias = EmittedModel | ForeignModel
    """A target or a draft, whose graphs edgespec or another exporter makes."""

M = TypeVar("M", bound="SourceModel", covariant=True)


class Known(Protocol[M]):
    """Models that options name: ``Values`` (loading.py) or ``Shapes`` (plan_manifest.py)."""

    @property
    def target(self) -> M:
        """The target, checked against the options."""

    def draft(self) -> M:
        """Open the draft of ``speculative``, and check it against the target."""

    def heads(self, methods: Sequence[str]) -> dict[str, TrainedHeads]:
        """Open the heads of methods, by method."""

    def drafter(self, methods: Sequence[str]) -> Drafter | None:
        """Open the drafter of methods; None = no method needs one."""

    def tokens(
        self, size: int, vocab: int, option: str, translation: Translation | None = None
    ) -> NDArray[np.int64]:  # [size], ascending
        """Choose the tokens of ``vocab`` that a cut LM head scores.

        ``option``: for messages; ``translation``: of a draft with another tokenizer, whose tokens are chosen.
        """

    def coverage(self, size: int, translation: Translation | None = None) -> float:
        """Return the share of a text's tokens among the ``size`` first ids."""

    def cut(self, drafter: Drafter, tokens: NDArray[np.int64]) -> Drafter:  # [size]
        """Let a drafter score only some tokens."""


@dataclass(frozen=True)
class Models(Generic[M]):
    """The models of a bundle."""

    target: M
    draft: M | None
    drafter: Drafter | None
    heads: HeadChoice  # of the target
    notes: list[str] = field(default_factory=list)  # what to tell of draft and drafter

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of a token, of all models together."""
        facts = [self.target.facts]
        facts += [] if self.draft is None else [self.draft.facts]
        facts += [] if self.drafter is None else [self.drafter.arch.facts]
        return sum(each.kv_bytes_per_token for each in facts)


class Parts(NamedTuple):
    """Entries of a manifest."""

    target: ModelPart
    draft: ModelPart | None
    drafter: ModelPart | None


def open_models(options: ExportOptions, methods: Sequence[str], known: Known[M]) -> Models[M]:
    """Open the models that ``methods`` of a bundle need, with the heads and the cut LM heads that the options ask for.

    Raises:
        ExportError: models, heads or drafters that are missing or do not fit together.
    """
    target, notes = known.target, list[str]()
    check_layers(methods, target.facts)
    draft = known.draft() if SPECULATIVE in methods else None
    if draft is not None:
        draft.limit(target.facts.context)
        notes += [f"draft: {note}" for note in draft.source.notes]
    trained, drafter = known.heads(methods), known.drafter(methods)
    tokens = (
        None if options.head_vocab is None else known.tokens(options.head_vocab, target.facts.vocab, "--head-vocab")
    )
    heads = HeadChoice(trained, tokens, drafter.tapped if drafter else ())
    target.equip(heads)
    if draft is not None and (size := _draft_rows(options, target, draft, known)):
        draft.cut(known.tokens(size, draft.facts.vocab, "--draft-vocab", draft.translation))
    if drafter is not None:
        if size := _drafter_rows(options, target, drafter, known):
            drafter = known.cut(drafter, known.tokens(size, target.facts.vocab, "--draft-vocab"))
        notes += [f"drafter: {note}" for note in drafter.notes]
    return Models(target, draft, drafter, heads, notes)


def check_target(arch: Architecture, options: ExportOptions) -> None:
    """Refuse a target that the options' devices and operators cannot run; limits the rows of its images."""
    check_devices(arch, options.devices)
    limit_images(arch, options.image_rows)
    check_operators(arch, options.operators)


def is_gated(methods: Sequence[str]) -> bool:
    """Whether sub-layers of the target can be left out of a pass."""
    return bool(set(needing("layers", "heads", "drafter")) & set(methods))


def weight_bytes(target: Mapping[str, int], draft: Mapping[str, int] | None, drafter: int | None) -> dict[str, int]:
    """Name the bytes of all weight files of a bundle; target and draft: as ``model_bytes`` has them."""
    found, models = {}, {"target": dict(target)} | ({} if draft is None else {"draft": dict(draft)})
    heads = sum(sizes.pop(ADDED, 0) for sizes in models.values())
    for name, sizes in models.items():
        found[name] = sizes.pop(MODEL)
    for name, sizes in models.items():
        found |= {side if name == "target" else f"{name}_{side}": size for side, size in sizes.items()}
    return found | ({"heads": heads} if heads else {}) | ({} if drafter is None else {"drafter": drafter})


def make_manifest(
    models: Models[M],
    parts: Parts,
    methods: dict[str, MethodPart],
    tokenizer: TokenizerFacts,
    weights: dict[str, int],
    provenance: dict[str, Any],
    **measured: Any,
) -> Manifest:
    """Assemble the manifest of a bundle that is written or planned.

    Args:
        weights: see ``weight_bytes``.
        measured: what only an export knows: fields of ``Manifest``.
    """
    return Manifest(
        schema_version=SCHEMA,
        edgespec_version=__version__,
        target=parts.target,
        draft=parts.draft,
        drafter=parts.drafter,
        methods=methods,
        tokenizer=tokenizer,
        memory={"weight_bytes": weights, "kv_bytes_per_token": models.kv_bytes_per_token},
        provenance=provenance,
        **measured,
    )


def _draft_rows(options: ExportOptions, target: SourceModel, draft: SourceModel, known: Known[M]) -> int | None:
    if options.draft_vocab is not None or target.arch is None or draft.arch is None:
        return options.draft_vocab
    return best_vocab_rows(target.arch, draft.arch, partial(known.coverage, translation=draft.translation))


def _drafter_rows(options: ExportOptions, target: SourceModel, drafter: Drafter, known: Known[M]) -> int | None:
    """Return how many tokens a drafter is to score: as asked for; with the target's LM head, the fastest number."""
    size = options.draft_vocab
    assert target.arch is not None
    if size is None and drafter.tokens is None and drafter.method != EAGLE:
        return best_vocab_rows(target.arch, drafter.arch, known.coverage)
    if size == 0 and drafter.spec.own_head and drafter.tokens is not None:
        return target.facts.vocab
    return size
