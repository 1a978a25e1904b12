"""DFlash's drafter (arXiv 2602.06036): a few decoder layers that guess a block of tokens in one pass.

What was tapped of the target at token i gives entry i of every layer; the rows of a block, the pending token and masks,
see all entries and each other::

    c = norm(fc [taps]);  keys and values of layer l: of c, and of norm_l(x) of the block's own rows
    logits of rows 1 on = the target's LM head(norm(x)): a row guesses the token at its own position

Embedding and LM head are the target's.  A window w of a layer hides what lies more than w before a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import ATTENTION, HEAD, Architecture
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.ops import AttentionRule, Linear, Ops, Value
from edgespec.export.drafters.drafter import Drafter, Published, check_size, layers_like, with_head_norms
from edgespec.export.drafters.heads import FUSE
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, original
from edgespec.export.source.source import Checkpoint, ConfigOnly

NORM = "hidden_norm"
OTHER_NAMES = {FUSE: "encoder.fc.weight", f"{NORM}.weight": "encoder.output_norm_enc.weight"}  # transformers'


class DFlash(Architecture):
    """See the module.

    Args:
        source: the checkpoint, with what config.json says of blocks at its top.

    Attributes:
        masks: every token that its config.json calls a mask, or padding.
    """

    model_type = "dflash"
    drafts = "dflash"
    refused = (
        ("conv_kernel_size", "convolutions of DFlash 2", "DFlash without"),
        ("sample_from_anchor", "a guess of the first row", "guesses of masks alone"),
    )

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source)
        self.facts = self.facts.model_copy(update={"context": context})
        self.input_width = (1 + tapped) * self.facts.hidden
        self.block, self.mask = self.settings.integer("block_size"), self.settings.integer("mask_token_id")
        self.masks = {self.mask} if self.mask is not None else set()

    def build(self, ops: Ops) -> Value:
        """Build the decoder with ``ops``, from a pass's inputs to its logits."""
        hidden = self.facts.hidden

        def context() -> None:
            c = ops.norm(
                ops.linear(ops.input_slice(hidden, self.input_width - hidden), Linear(FUSE))[0], self.norm(NORM)
            )
            for layer in range(self.facts.layers):
                ops.append(*self._projected(ops, c, layer), self.rule(layer))

        ops.prefill_context(context)
        x = ops.input_slice(0, hidden)
        for layer in range(self.facts.layers):
            x = self.layer(ops, x, layer)
        return ops.head(x, self.final_norm, self.head)

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        y = ops.attention(*self._projected(ops, h, layer), self.rule(layer))
        return ops.linear(y, self.linear(layer, ATTENTION.format("o")))[0]

    def _projected(self, ops: Ops, h: Value, layer: int) -> tuple[Value, Value, Value]:
        q, k, v = ops.linear(h, *(self.linear(layer, ATTENTION.format(name)) for name in "qkv"), joined=True)
        return q, k, v

    def rule(self, layer: int) -> AttentionRule:
        return with_head_norms(self, super().rule(layer), layer)

    def window(self, layer: int) -> int:
        size = super().window(layer)
        return size + 1 if size else 0

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {
            f"model.{name}": original(source, name) for name in source.index if name.startswith(("layers.", "norm."))
        }
        return found | {ours: original(source, theirs) for ours, theirs in OTHER_NAMES.items() if source.has(theirs)}


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is of such a drafter, as its authors or transformers write it."""
    return "dflash_config" in config or config.get("model_type") == "muse_glimmer_assistant"


def read_dflash(source: Checkpoint, target: Architecture) -> Drafter:
    """Read a drafter and check it against its target."""
    own = source.config.get("dflash_config")
    config: dict[str, Any] = {**source.config, **(own if isinstance(own, dict) else {})}
    ids, layers, vocab = config.get("target_layer_ids"), target.facts.layers, target.facts.vocab
    if not isinstance(ids, list) or not ids or not all(isinstance(at, int) and 0 <= at < layers for at in ids):
        raise ExportError(f"{source.path}: expected target_layer_ids to be layers of 0 to {layers - 1}, got {ids!r}",
                          "take the drafter that was made for this model")  # fmt: skip
    if source.has(f"{HEAD}.weight"):
        raise UnsupportedModel(f"{source.path}: a DFlash drafter with an LM head of its own: expected the target's")
    config |= {"vocab_size": vocab, "tie_word_embeddings": False}
    config.setdefault("max_position_embeddings", target.facts.context)
    extra: dict[str, Extra] = {f"{HEAD}.weight": original(target.source, target.head.weight)}
    given = ExtendedCheckpoint(Checkpoint(source.path, config, source.tensors, source.notes), extra)
    arch = DFlash(given, len(ids), target.facts.context)
    check_size(arch, target)
    if not 2 <= (arch.block or 0) <= 64 or not 0 <= (arch.mask if arch.mask is not None else -1) < vocab:
        raise ExportError(f"{source.path}: blocks of {arch.block} with mask {arch.mask}: expected 2 to 64 rows, and a "
                          f"token below {vocab}")  # fmt: skip
    check_tensors(arch, given)
    arch.target = target
    named = source.config.get("mask_token_id"), source.config.get("pad_token_id"), target.config.get("pad_token_id")
    arch.masks |= {each for each in named if isinstance(each, int) and 0 <= each < vocab}
    return Drafter(arch, tuple(at + 1 for at in ids), None)  # of a list that counts outputs of layers


def assumed_dflash(target: Architecture) -> tuple[DFlash, tuple[int, ...]]:
    """Assume one as they are published: 5 layers, blocks of 16 rows, 5 boundaries."""
    config = layers_like(target, 5) | {"block_size": 16, "mask_token_id": 1, "tie_word_embeddings": False}
    tapped = tuple(np.linspace(1, target.facts.layers, 5).astype(int).tolist())
    return DFlash(ConfigOnly(target.source.path, config), len(tapped), target.facts.context), tapped


PUBLISHED = Published(
    is_dflash, read_dflash, assumed_dflash, "a drafter of 5 layers like the model's, as published ones have"
)
