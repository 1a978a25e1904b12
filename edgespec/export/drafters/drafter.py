"""A drafter conditioned on hidden states on its way into a bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture, DrafterSpec
from edgespec.export.architectures.formula import HEAD, LAYERS
from edgespec.export.architectures.rules import AttentionRule
from edgespec.export.drafters.head_choice import cut_draft
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, extended, rows_of
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import DrafterKind


@dataclass(frozen=True)
class Drafter:
    """A drafter on its way into a bundle."""

    arch: Architecture  # the drafter, over its checkpoint
    tapped: tuple[int, ...]  # which boundaries of the target it looks at, in its order
    # int64 [size], what its LM head scores, ascending; None = all tokens of the target, in order
    tokens: NDArray[np.int64] | None
    notes: list[str] = field(default_factory=list)  # messages for the user about how it is read

    @property
    def plan(self) -> HeadPlan:
        """Heads of its graphs."""
        cut = self.tokens is not None
        return HeadPlan(self.spec.heads, cut=cut, only=cut)

    @property
    def method(self) -> DrafterKind:
        """The method that drafts by it."""
        return self.spec.method

    @property
    def spec(self) -> DrafterSpec:
        """Return the facts that only a drafter has."""
        assert self.arch.drafter is not None
        return self.arch.drafter


class Published(NamedTuple):
    """A kind of drafter that is published as separate checkpoints; ``read.PUBLISHED`` lists them.

    Attributes:
        matches: whether a checkpoint is of such a drafter.
        read: (its checkpoint, the target) -> the drafter, checked.
        assumed: target -> a typical published one without weights, and the boundaries that it taps; None = plans assume
            one as training here makes it.
        says: describes that assumption, for plans.
        usual_for: whether a model of this architecture usually has one.
    """

    matches: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint, Architecture], Drafter]
    assumed: Callable[[Architecture], tuple[Architecture, tuple[int, ...]]] | None = None
    says: str = ""
    usual_for: Callable[[Architecture], bool] = lambda _: False


def kind_of(config: Mapping[str, Any]) -> str:
    """Name what a config.json says that it is: speculators' word, else the class that its authors load it by."""
    return str(config.get("speculators_model_type") or next(iter(config.get("architectures") or []), "unknown"))


def flat(config: Mapping[str, Any], *inner: str) -> dict[str, Any]:
    """Put the parts ``inner`` of a config.json at its top, where layouts nest what others do not."""
    found = dict(config)
    for key in inner:
        if isinstance(part := config.get(key), dict):
            found |= part
    return found


def layers_like(target: Architecture, count: int) -> dict[str, Any]:
    """Make a configuration of ``count`` layers of the target's sizes."""
    facts = target.facts
    return {
        "vocab_size": facts.vocab,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.intermediate,
        "num_hidden_layers": count,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.context,
    }


class AuxHiddenDrafter(Architecture):
    """Llama-like layers over the taps of a target, with norms of heads if their checkpoint has them.

    If the drafter has an LM head, that has a row for each token that can be drafted.

    Args:
        source: the checkpoint.
        tapped: number of tapped boundaries.
        context: the target's.

    Attributes:
        method: the method that drafts with it.
    """

    method: ClassVar[DrafterKind]
    drafter: DrafterSpec

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source)
        self.facts = self.facts.model_copy(update={"context": context, "tied": False})
        self.input_width = (1 + tapped) * self.facts.hidden
        self.drafter = DrafterSpec(self.method)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        rows = self.settings.integer("draft_vocab_size", self.facts.vocab)
        return super().tensors | {f"{HEAD}.weight": (rows, self.facts.hidden)}

    def rule(self, layer: int) -> AttentionRule:
        rule, names = super().rule(layer), [f"{LAYERS}.{layer}.self_attn.{part}_norm" for part in "qk"]
        if not self.source.has(f"{names[0]}.weight"):
            return rule
        return replace(rule, q_norm=self.norm(names[0]), k_norm=self.norm(names[1]))


def check_size(arch: Architecture, target: Architecture) -> None:
    """Refuse a drafter for a model of another hidden size."""
    ours, theirs = arch.facts.hidden, target.facts.hidden
    if ours != theirs:
        raise ExportError(
            f"{arch.source.path}: a drafter for a model of hidden size {ours}, but this model's is {theirs}",
            "take the drafter that was made for this model",
        )


def extra_of(arch: Architecture, name: str) -> Extra:
    """Return a drafter's tensor outside its layers."""
    assert isinstance(arch.source, ExtendedCheckpoint)
    return arch.source.extra[name]


def cut_drafter(drafter: Drafter, tokens: NDArray[np.int64]) -> Drafter:
    """Let one that has the target's LM head score only some tokens, int64 [size], ascending."""
    arch = drafter.arch
    beside = {name: rows_of(extra_of(arch, name), tokens) for name in drafter.spec.scored}
    cut_draft(arch, tokens)
    arch.source = extended(arch.source, beside)
    return Drafter(arch, drafter.tapped, tokens, drafter.notes)
