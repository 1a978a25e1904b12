"""DFlash's drafter (arXiv 2602.06036): a few decoder layers that draft a block of tokens in one pass.

The target's taps at token i give entry i of every layer.  The rows of a block, the pending token and masks, see all
entries and each other::

    c = norm(fc [taps]);  keys and values of layer l: of c, and of norm_l(x) of the block's rows
    logits of rows 1 and later = the target's LM head(norm(x)): a row predicts the token at its own position

The embedding is the target's.  So is the LM head, unless the checkpoint has one (speculators').  A window w of a layer
hides entries more than w before a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.formula import ATTENTION
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import Linear
from edgespec.export.drafters.drafter import (
    AuxHiddenDrafter,
    Drafter,
    Published,
    check_size,
    flat,
    kind_of,
    layers_like,
)
from edgespec.export.drafters.heads import FUSE
from edgespec.export.drafters.vocabulary import HEAD_WEIGHT, check_embedding, scored_tokens
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, original
from edgespec.export.source.source import Checkpoint, ConfigOnly
from edgespec.runtimes.files.manifest import DrafterKind

NORM = "hidden_norm"
AUXILIARY = "aux_hidden_state_layer_ids"  # speculators' key
OTHER_NAMES = {FUSE: "encoder.fc.weight", f"{NORM}.weight": "encoder.output_norm_enc.weight"}  # transformers'


class DFlash(AuxHiddenDrafter):
    """See the module.

    Args:
        source: the checkpoint, with what config.json says of blocks at its top.

    Attributes:
        masks: every token that its config.json calls a mask, or padding.
    """

    model_type = "dflash"
    method: ClassVar[DrafterKind] = "dflash"
    refused = (("conv_kernel_size", "convolutions of DFlash 2", "DFlash without"),)

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source, tapped, context)
        mask = self.settings.integer("mask_token_id")
        self.drafter.block, self.drafter.mask = self.settings.integer("block_size"), mask
        self.masks = {mask}

    def correct(self, source: Checkpoint) -> None:
        """Load the heads of its checkpoint that correct draft tokens."""

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

    def window(self, layer: int) -> int:
        size = super().window(layer)
        return size + 1 if size else 0

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {
            f"model.{name}": original(source, name) for name in source.index if name.startswith(("layers.", "norm."))
        }
        return found | {ours: original(source, theirs) for ours, theirs in OTHER_NAMES.items() if source.has(theirs)}


def is_dflash(source: Checkpoint) -> bool:
    """Whether a checkpoint is of such a drafter: its authors', SpecForge's, transformers' or speculators'."""
    config = source.config
    return (
        "dflash_config" in config or config.get("model_type") == "muse_glimmer_assistant" or kind_of(config) == "dflash"
    )


def read_blocks(kind: type[DFlash], source: Checkpoint, target: Architecture) -> Drafter:
    """Read a drafter of blocks and check it against its target; ``kind`` is what computes it."""
    config = _to_llama_config(source)
    tapped = _tapped(source, config, target.facts.layers)
    own, vocab = source.has(HEAD_WEIGHT), target.facts.vocab
    config |= {"vocab_size": vocab, "tie_word_embeddings": False}
    config["draft_vocab_size"] = source.shape(HEAD_WEIGHT)[0] if own else vocab
    config.setdefault("max_position_embeddings", target.facts.context)
    extra: dict[str, Extra] = {} if own else {HEAD_WEIGHT: original(target.source, target.head.weight)}
    given = ExtendedCheckpoint(Checkpoint(source.path, config, source.tensors, source.notes), extra)
    arch = kind(given, len(tapped), target.facts.context)
    check_size(arch, target)
    spec = arch.drafter
    if not 2 <= (spec.block or 0) <= 64 or not 0 <= (spec.mask if spec.mask is not None else -1) < vocab:
        raise ExportError(f"{source.path}: blocks of {spec.block} with mask {spec.mask}: expected 2 to 64 rows, and a "
                          f"token below {vocab}")  # fmt: skip
    check_tensors(arch, given)
    check_embedding(source, target)
    spec.target, spec.own_head = target, own
    given_to = config, source.config, target.config
    named = [each.get(key) for each in given_to for key in ("mask_token_id", "pad_token_id")]
    arch.masks |= {each for each in named if isinstance(each, int) and 0 <= each < vocab}
    arch.correct(source)
    return Drafter(arch, tapped, scored_tokens(source, arch) if own else None)


def _to_llama_config(source: Checkpoint) -> dict[str, Any]:
    """Return a drafter's configuration in Llama's words; a size that it leaves out is read off its matrices."""
    config = flat(source.config, "dflash_config", "transformer_layer_config")
    name = "layers.0.self_attn.{}.weight".format
    if source.has(name("q_norm")) and source.has(name("k_proj")):
        dim = source.shape(name("q_norm"))[0]
        count = sum(source.has(f"layers.{at}.self_attn.q_norm.weight") for at in range(64))
        sizes = {"head_dim": dim, "num_attention_heads": source.shape(name("q_proj"))[0] // dim,
                 "num_key_value_heads": source.shape(name("k_proj"))[0] // dim,
                 "intermediate_size": source.shape("layers.0.mlp.up_proj.weight")[0],
                 "hidden_size": source.shape(name("q_proj"))[1],
                 "num_hidden_layers": count}  # fmt: skip
        config = sizes | config
    if AUXILIARY in config and "sliding_attention" in (config.get("layer_types") or ()):
        raise UnsupportedModel(
            f"{source.path}: speculators' layers with a window see no later row of a block, or begin the window at its "
            "first row: edgespec does neither",
            "take a drafter without sliding_attention in layer_types",
        )
    return config


def _tapped(source: Checkpoint, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the tapped boundaries: speculators lists them, other checkpoints count layer outputs from -1."""
    key, shift = (AUXILIARY, 0) if config.get(AUXILIARY) is not None else ("target_layer_ids", 1)
    ids = config.get(key)
    if not isinstance(ids, list) or not ids or not all(isinstance(at, int) and 0 <= at + shift <= layers for at in ids):
        raise ExportError(f"{source.path}: expected {key} to be layers of {-shift} to {layers - shift}, got {ids!r}",
                          "take the drafter that was made for this model")  # fmt: skip
    return tuple(at + shift for at in ids)


def assumed_blocks(
    kind: type[DFlash], target: Architecture, known: Mapping[str, Any]
) -> tuple[DFlash, tuple[int, ...]]:
    """Assume a drafter of 5 layers like the target's, which looks at 5 boundaries."""
    config = {**layers_like(target, 5), "mask_token_id": 1, "tie_word_embeddings": False, **known}
    tapped = tuple(np.linspace(1, target.facts.layers, 5).astype(int).tolist())
    return kind(ConfigOnly(target.source.path, config), len(tapped), target.facts.context), tapped


PUBLISHED = Published(
    is_dflash,
    partial(read_blocks, DFlash),
    lambda target: assumed_blocks(DFlash, target, {"block_size": 16}),
    "a drafter of 5 layers like the model's, as published ones have",
)
