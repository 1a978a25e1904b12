"""EAGLE-1's drafter (arXiv 2401.15077), which EAGLE-2 (arXiv 2406.16858) and HASS (arXiv 2408.15766) share.

Entry i combines token i + 1 with the target's hidden state at token i, after the target's final norm.  For draft tokens
it uses the drafter's hidden state of the previous step instead::

    x = fc [embedding ; hidden state] + b, y = layers(x), logits = the target's LM head(y)

The first layer has no norm before its attention, and y has no norm.  Embedding and LM head are the target's.  Its
config.json does not identify it, but its tensors do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.export.architectures.base import Architecture, DrafterSpec
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.formula import FINAL_NORM
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import BEFORE, Linear, Norms
from edgespec.export.drafters.drafter import Drafter, Published, check_size, layers_like
from edgespec.export.drafters.heads import FUSE
from edgespec.export.drafters.vocabulary import HEAD_WEIGHT, check_embedding
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, held, original
from edgespec.export.source.source import Checkpoint, ConfigOnly

FUSE_BIAS, TARGET_NORM = "fc.bias", "target_norm"


class Eagle1(Architecture):
    """See the module.

    Its graph norms y by weights of one, which a draft takes back (``DecoderPart``).

    Args:
        source: tensors by Llama's names, and ``fc`` and ``target_norm``.
    """

    model_type = "eagle1"

    def __init__(self, source: Checkpoint, context: int) -> None:
        super().__init__(source)
        self.facts = self.facts.model_copy(update={"context": context, "tied": False})
        self.input_width = 2 * self.facts.hidden
        self.drafter = DrafterSpec("eagle1")

    def build(self, ops: Ops) -> Value:
        """Build the decoder with ``ops``, from a pass's inputs to its logits."""
        hidden = self.facts.hidden

        def state() -> Value:
            return ops.input_slice(hidden, hidden)

        given = ops.select_input(lambda: ops.norm(state(), self.norm(TARGET_NORM)), state)
        bias = FUSE_BIAS if self.settings.flag("bias", True) else None
        (x,) = ops.linear(ops.join(ops.input_slice(0, hidden), given), Linear(FUSE, bias))
        for layer in range(self.facts.layers):
            x = self.layer(ops, x, layer)
        return ops.head(x, self.final_norm, self.head)

    def norms_of(self, layer: int) -> Norms:
        return BEFORE if layer else BEFORE._replace(attention=None)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        return {f"model.{name}": original(source, name) for name in source.index if name.startswith("layers.")}


def is_eagle1(source: Checkpoint) -> bool:
    """Whether a checkpoint holds one: a matrix over two hidden states, and a first layer without its norm."""
    if not source.has(FUSE) or len(shape := source.shape(FUSE)) != 2 or shape[1] != 2 * shape[0]:
        return False
    return source.has("layers.0.self_attn.q_proj.weight") and not source.has("layers.0.input_layernorm.weight")


def read_eagle1(source: Checkpoint, target: Architecture) -> Drafter:
    """Read a drafter and check it against its target."""
    hidden = target.facts.hidden
    config: dict[str, Any] = {**source.config, "vocab_size": target.facts.vocab, "tie_word_embeddings": False}
    config["bias"] = source.has(FUSE_BIAS)
    config.setdefault("max_position_embeddings", target.facts.context)
    extra = {
        HEAD_WEIGHT: original(target.source, target.head.weight),
        f"{TARGET_NORM}.weight": original(target.source, f"{FINAL_NORM}.weight"),
        f"{FINAL_NORM}.weight": held(np.ones(hidden, np.float32)),
    }
    given = ExtendedCheckpoint(Checkpoint(source.path, config, source.tensors, source.notes), extra)
    arch = Eagle1(given, target.facts.context)
    check_size(arch, target)
    check_tensors(arch, given)
    check_embedding(source, target)
    return Drafter(arch, (target.facts.layers,), None)


def assumed_eagle1(target: Architecture) -> tuple[Architecture, tuple[int, ...]]:
    """Assume one as they are published: a layer of the target's size."""
    config = layers_like(target, 1) | {"tie_word_embeddings": False}
    return Eagle1(ConfigOnly(target.source.path, config), target.facts.context), (target.facts.layers,)


PUBLISHED = Published(is_eagle1, read_eagle1, assumed_eagle1, "a layer like the model's, as published ones have")
