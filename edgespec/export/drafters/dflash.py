"""DFlash's drafter (arXiv 2602.06036): a few decoder layers that draft a block of tokens in one pass.

The target's taps at token i give entry i of every layer.  The rows of a block, the pending token and masks, see all
entries and each other::

    c = norm(fc [taps]);  keys and values of layer l: of c, and of norm_l(x) of the block's rows
    logits of rows 1 and later = the target's LM head(norm(x)): a row predicts the token at its own position

The embedding is the target's.  So is the LM head, unless the checkpoint has one (speculators').  A window w of a layer
hides entries more than w before a row.

DFlash 2 (z-lab/dflash, and speculators 0.9) adds two things.  What attention and MLP read and give is convolved over
the rows of the block, with taps that are learned plus summands that each row has for groups of channels::

    h = norm_l(x);  d = D h;  y = conv(o attend(conv(h; base_0 + d_0)); base_1 + d_1)

and a selector chooses each draft token among the likeliest of its row by the one before (``SelectorPart``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture, SelectorSpec
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.formula import ATTENTION, LAYERS
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.rules import DepthwiseRule, Linear
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
TAPS, SUMMANDS = "base_kernel", "kernel_projection"  # of DFlash 2's convolutions
GROUP, MOST_TAPS = 16, 16  # channels that share summands, by default; rows that a convolution sees
PROJECTION = "candidate_selector.hidden_projection.weight"
BEFORE, AFTER = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
CANDIDATES = 16  # of a selector, by default
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

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source, tapped, context)
        mask = self.settings.integer("mask_token_id")
        self.drafter.block, self.drafter.mask = self.settings.integer("block_size"), mask
        self.masks = {mask}
        self.taps = int(self.settings.number("conv_kernel_size", 0))
        self.groups = self._count_groups() if self.taps else 0

    def _count_groups(self) -> int:
        size = self.settings.integer("conv_group_size", GROUP)
        if self.facts.hidden % size or self.taps > MOST_TAPS:
            raise ExportError(
                f"{self.settings.file}: convolutions of {self.taps} taps for groups of {size} channels: expected at "
                f"most {MOST_TAPS} taps, and groups that divide {self.facts.hidden} channels"
            )
        return self.facts.hidden // size

    def correct(self, source: Checkpoint) -> None:
        """Load the parts of its checkpoint that choose or correct draft tokens."""
        rank = int(self.settings.number("selector_rank", 0))
        if not rank:
            return
        hidden, vocab = self.facts.hidden, self.facts.vocab
        shapes = {PROJECTION: (rank, hidden), BEFORE: (vocab, rank), AFTER: (vocab, rank)}
        check_shapes(source, shapes)

        def numbers() -> NDArray[np.float16]:  # [hidden + 2 * vocab, rank]
            projection = source.read(PROJECTION) * self.source.read(self.final_norm.weight)
            parts = projection.T, source.read(BEFORE), source.read(AFTER)
            if max(float(np.abs(part).max()) for part in parts) > np.finfo(np.float16).max:
                raise ExportError(f"{source.path}: candidate_selector: expected numbers of 16 bits, got larger ones")
            return np.concatenate([part.astype(np.float16) for part in parts])

        self.drafter.selector = SelectorSpec(rank, self.settings.integer("selector_top_k", CANDIDATES), numbers)

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
        def body(h: Value) -> Value:
            y = ops.attention(*self._projected(ops, h, layer), self.rule(layer))
            return ops.linear(y, self.linear(layer, ATTENTION.format("o")))[0]

        return self._convolved(ops, h, layer, "attention_conv", body)

    def transform(self, ops: Ops, h: Value, layer: int) -> Value:
        return self._convolved(ops, h, layer, "mlp_conv", lambda h: super(DFlash, self).transform(ops, h, layer))

    def _convolved(self, ops: Ops, h: Value, layer: int, name: str, body: Callable[[Value], Value]) -> Value:
        """Convolve what a part reads and gives over the rows of a block, in DFlash 2."""
        if not self.taps:
            return body(h)
        at = f"{LAYERS}.{layer}.{name}"
        (own,) = ops.linear(h, Linear(f"{at}.{SUMMANDS}.weight"))

        def convolve(x: Value, second: bool) -> Value:
            taps = f"{at}.taps.{int(second)}"
            return ops.depthwise(x, DepthwiseRule(taps, self.taps, groups=self.groups, second=second), own)

        return convolve(body(convolve(h, False)), True)

    def width(self, weight: str) -> int | None:
        return 2 * self.taps * self.groups if weight.endswith(f".{SUMMANDS}.weight") else super().width(weight)

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
        for name in [name for name in source.index if name.endswith(f".{TAPS}")]:
            for side in range(2):
                found[f"model.{name.removesuffix(TAPS)}taps.{side}"] = _taps(source, name, side)
        return found | {ours: original(source, theirs) for ours, theirs in OTHER_NAMES.items() if source.has(theirs)}


def _taps(source: Checkpoint, name: str, side: int) -> Extra:
    """Take the taps [taps * hidden] of one of two convolutions, the oldest row's first, of [2, taps, hidden]."""

    def read(rows: slice, columns: slice | None) -> NDArray[np.float32]:
        return np.ascontiguousarray(source.read(name)[side, ::-1]).reshape(-1)[rows]

    return Extra(lambda: (prod(source.shape(name)[1:]),), read, frozenset({name}))


def check_shapes(source: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors of other shapes than config.json says."""
    for name, shape in shapes.items():
        if source.shape(name) != shape:
            raise ExportError(f"{source.path}: {name} has shape {list(source.shape(name))}, expected {list(shape)}",
                              "config.json and the weights belong to different drafters")  # fmt: skip


def is_dflash(source: Checkpoint) -> bool:
    """Whether a checkpoint is of such a drafter: its authors', SpecForge's, transformers' or speculators'."""
    config = source.config
    known = config.get("model_type") == "muse_glimmer_assistant" or kind_of(config) in ("dflash", "dflash2")
    return "dflash_config" in config or known


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
