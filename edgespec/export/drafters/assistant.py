"""Gemma 4's assistants: a few small layers that read the keys and values of the model that they draft for.

A step reads a token's embedding and a hidden state, the target's after its final norm or the previous step's::

    x = pre_projection [embedding ; hidden state]
    layers: only queries, over the target's last layer of the same kind that computes its keys and values
    y = norm(x), logits = LM head(y), the next step's hidden state = post_projection y

All steps of a round have the pending token's position, and see the tokens before it: draft tokens write no keys.  The
clusters of an ordered LM head, which only save reading it, are not used: it is cut to frequent tokens instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import ExportError
from edgespec.export.architectures.base import Architecture, DrafterSpec
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.formula import FINAL_NORM, HEAD, LAYERS
from edgespec.export.architectures.gemma4 import ROTATIONS, Gemma4
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rope import rotations_by_kind
from edgespec.export.architectures.rules import Linear
from edgespec.export.drafters.drafter import Drafter, Published, layers_like
from edgespec.export.drafters.heads import FUSE
from edgespec.export.source.derived import Extra, original
from edgespec.export.source.source import Checkpoint, ConfigOnly

MODEL_TYPE = "gemma4_assistant"
PROJECTED, NEXT, TARGET_NORM = "pre_projection.weight", "post_projection.weight", "target_norm"


class Assistant(Gemma4):
    """See the module.

    Args:
        source: its checkpoint, with the text model's configuration at its top.
    """

    model_type = MODEL_TYPE
    logits_cap = ("", 0.0)
    raw = False  # the target's hidden state is taken before its final norm, which no known checkpoint says
    target: Gemma4

    def __init__(self, source: Checkpoint, target: Gemma4) -> None:
        self.target = target
        super().__init__(source)
        self.input_width = 2 * target.facts.hidden
        reads = tuple(map(self.source_of, range(self.facts.layers)))
        self.drafter = DrafterSpec("assistant", kv_dims=tuple(target.facts.dims), reads=reads)
        for name, rotary in self.rotaries.items():  # queries meet keys that the target has turned
            own, its = (each.tables(2, self.facts.context) for each in (rotary, target.rotaries[name]))
            if not np.array_equal(own, its):
                raise self._other("other rope_parameters than this model's")

    def configure(self) -> dict[str, Any]:
        settings, facts, target = self.settings, self.facts, self.target
        settings.refuse("enable_moe_block", "a mixture of experts", "assistants without")
        settings.values["rope_parameters"] = rotations_by_kind(settings, ROTATIONS)
        self.owners, self.kinds = 0, self._kinds()
        self.wide, self.full_heads = self._wide(), facts.kv_heads
        backbone = settings.integer("backbone_hidden_size")
        for what, own, needed in (
            ("hidden size", backbone, target.facts.hidden),
            ("vocabulary", facts.vocab, target.facts.vocab),
            ("key heads", facts.kv_heads, target.facts.kv_heads),
            ("head sizes", (facts.head_dim, self.wide), (target.facts.head_dim, target.wide)),
            ("window", settings.get("sliding_window"), target.settings.get("sliding_window")),
        ):
            if own != needed:
                raise self._other(f"{what} {own}, but this model's is {needed}")
        if facts.hidden > backbone:
            raise ExportError(f"{settings.file}: hidden_size {facts.hidden}: expected at most {backbone}")
        return {"shared": facts.layers, "context": target.facts.context, "tied": False}

    def _other(self, what: str) -> ExportError:
        return ExportError(f"{self.settings.file}: an assistant for a model of {what}",
                           "take the assistant that was made for this model")  # fmt: skip

    def source_of(self, layer: int) -> int:
        """Return the target's layer whose keys and values a layer reads."""
        return max(at for at in range(self.target.owners) if self.target.kinds[at] == self.kinds[layer])

    def build(self, ops: Ops) -> Value:
        """Build the decoder with ``ops``, from a pass's inputs to its logits."""
        size = self.target.facts.hidden

        def entered(state: Value) -> Value:
            return ops.linear(ops.join(ops.input_slice(0, size), state), Linear(FUSE))[0]

        def recycled() -> Value:
            y = ops.norm(ops.input_slice(size, self.facts.hidden), self.final_norm)
            return entered(ops.linear(y, Linear(NEXT))[0])

        def first() -> Value:
            state = ops.input_slice(size, size)
            return entered(state if self.raw else ops.norm(state, self.norm(TARGET_NORM)))

        x = ops.select_input(first, recycled)
        for layer in range(self.facts.layers):
            x = self.layer(ops, x, layer)
        return ops.head(x, self.final_norm, self.head)

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        scale = f"{LAYERS}.{layer}.layer_scalar"
        return ops.sublayer("mlp", layer, x, lambda x: self.mlp(ops, x, layer), scale=scale)

    def width(self, weight: str) -> int | None:
        if weight == NEXT:
            return self.target.facts.hidden
        return self.facts.heads * self.dim(int(weight.split(".")[2])) if weight.endswith("q_proj.weight") else None

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        own = {FUSE: original(source, PROJECTED), f"{HEAD}.weight": original(source, self.embedding)}
        theirs = {f"{TARGET_NORM}.weight": original(self.target.source, f"{FINAL_NORM}.weight")}
        return own | theirs | self._reordered(source)


def read_assistant(source: Checkpoint, target: Architecture) -> Drafter:
    """Read an assistant and check it against its target."""
    if not isinstance(target, Gemma4):
        raise ExportError(
            f"{source.path}: an assistant of Gemma 4, but this model is {target.model_type}",
            "take a drafter that was made for this model",
        )
    text = source.config.get("text_config")
    config: dict[str, Any] = {**source.config, **(text if isinstance(text, dict) else {})}
    given = Checkpoint(source.path, config, source.tensors, source.notes)
    arch = Assistant(given, target)
    check_tensors(arch, given)
    return Drafter(arch, (target.facts.layers,), None)


def assumed_assistant(target: Architecture) -> tuple[Assistant, tuple[int, ...]]:
    """Assume one as they are published for Gemma 4's E2B and E4B."""
    if not isinstance(target, Gemma4):
        raise ExportError(f"--method assistant: assistants are for Gemma 4, but this model is {target.model_type}")
    same = ("head_dim", "num_key_value_heads", "sliding_window", "rope_parameters", "rms_norm_eps", "hidden_activation")
    config = layers_like(target, 4) | {key: value for key in same if (value := target.settings.get(key)) is not None}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    hidden, kv = target.facts.hidden, target.facts.kv_heads
    config |= {"hidden_size": min(256, hidden), "intermediate_size": 2048, "num_attention_heads": -(-4 // kv) * kv,
               "layer_types": kinds, "backbone_hidden_size": hidden, "global_head_dim": target.wide}  # fmt: skip
    return Assistant(ConfigOnly(target.source.path, config), target), (target.facts.layers,)


PUBLISHED = Published(
    lambda source: source.config.get("model_type") == MODEL_TYPE,
    read_assistant,
    assumed_assistant,
    "an assistant of 4 layers of width 256, as published ones have",
    lambda target: isinstance(target, Gemma4),
)
