"""EAGLE-3's drafter (arXiv 2503.01840): one or a few decoder layers, conditioned on hidden states of a target.

Entry i combines token i + 1 with the target's taps at token i, both normed and concatenated::

    g = fc [taps]                          or, for draft tokens, the drafter's hidden state of the previous step
    q, k, v of [norm(embedding) ; norm(g)], u = g + attention, y = u + MLP(norm(u)), logits = LM head(norm(y))

Published checkpoints differ in their configuration: ``norm_before_residual`` (u = norm(g) + attention), ``norm_output``
(y is normed before it is the next step's hidden state), ``norm_before_fc`` (the taps are normed together) or
``fc_norm`` (each tap is normed separately).  With the latter and ``norm_output`` it is EAGLE-3.1 (arXiv 2605.09992).

P-EAGLE (arXiv 2602.01469) drafts all tokens in one pass: rows after the pending token's have a mask token and, in place
of taps, a learned ``mask_hidden``.  Its embedding is also trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.formula import ATTENTION, LAYERS
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
from edgespec.export.drafters.heads import EMBEDDED as EMBEDDED_BY
from edgespec.export.drafters.heads import FUSE
from edgespec.export.drafters.vocabulary import EMBEDDING, HEAD_WEIGHT, check_embedding, scored_tokens
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, extended, original
from edgespec.export.source.source import Checkpoint, ConfigOnly
from edgespec.runtimes.files.manifest import EMBEDDING as OWN
from edgespec.runtimes.files.manifest import DrafterKind, HeadGroup

EMBEDDED, FUSED = "input_layernorm", "hidden_norm"  # norms of layer 0, of the embedding and of the hidden state
MASK = "mask_hidden"  # of P-EAGLE


class Eagle3(AuxHiddenDrafter):
    """EAGLE-3's drafter, as the module describes it.

    Args:
        source: the checkpoint; tensors have Llama's names, except ``fc`` and ``input_norm``.

    Raises:
        ExportError: sizes that are missing; an unknown option.
    """

    model_type = "eagle3"
    method: ClassVar[DrafterKind] = "eagle"
    hidden_first = False  # which no known layout says

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source, tapped, context)
        self.drafter.own_head = True
        self.norm_first = self.settings.flag("norm_before_residual")

    def build(self, ops: Ops) -> Value:
        """Build the decoder with ``ops``, from a pass's inputs to its logits."""
        hidden, before = self.facts.hidden, self.norm_first

        def normed(g: Value) -> Value:
            return ops.norm(g, self.norm(f"{LAYERS}.0.{FUSED}"))

        def stream(g: Value) -> Value:
            return normed(g) if before else g

        def fused() -> Value:
            taps = ops.input_slice(hidden, self.input_width - hidden)
            if self.settings.flag("fc_norm"):
                count = self.input_width // hidden - 1
                each = (ops.input_slice((1 + at) * hidden, hidden) for at in range(count))
                taps = ops.join(*(ops.norm(x, self.norm(f"fc_norm.{at}")) for at, x in enumerate(each)))
            if self.settings.flag("norm_before_fc"):
                taps = ops.norm(taps, self.norm("input_norm"))
            (g,) = ops.linear(taps, Linear(FUSE))
            return stream(g)

        def recycled() -> Value:
            g = ops.input_slice(hidden, hidden)
            return stream(ops.norm(g, self.final_norm) if self.settings.flag("norm_output") else g)

        def first(x: Value) -> Value:
            token = ops.norm(ops.input_slice(0, hidden), self.norm(f"{LAYERS}.0.{EMBEDDED}"))
            state = x if before else normed(x)
            return self.attend(ops, ops.join(*((state, token) if self.hidden_first else (token, state))), 0)

        x = ops.select_input(fused, recycled)
        x = ops.sublayer("attention", 0, x, first)
        x = ops.sublayer("mlp", 0, x, lambda x: self.mlp(ops, x, 0))
        for layer in range(1, self.facts.layers):
            x = self.layer(ops, x, layer)
        return ops.head(x, self.final_norm, self.head)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        """Return the names of the published layouts: ``midlayer`` or ``layers``, without a prefix."""
        found: dict[str, Extra] = {}
        for name in source.index:
            ours = name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
            if ours.startswith(("layers.", "norm.")):
                found[f"model.{ours}"] = original(source, name)
        return found


def head_dim_of(source: Checkpoint, heads: object) -> int:
    """Derive the head size from a projection: some configurations omit it, and it is not hidden / heads."""
    part = ATTENTION.format("q") + ".weight"
    name = next((name for name in source.index if name.endswith(f"midlayer.{part}") or name == f"layers.0.{part}"), "")
    if not name or not isinstance(heads, int) or heads < 1 or source.shape(name)[0] % heads:
        raise UnsupportedModel(f"{source.path}: expected midlayer.{part} or layers.0.{part} of an EAGLE-3 drafter")
    return source.shape(name)[0] // heads


TAPS = "eagle_aux_hidden_state_layer_ids"


class PEagle(Eagle3):
    """EAGLE-3 whose guesses are made in one pass; see the module."""

    model_type = "peagle"
    method: ClassVar[DrafterKind] = "peagle"

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source, tapped, context)
        mask = self.settings.get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < self.facts.vocab:
            raise ExportError(f"{source.path}: mask_token_id {mask!r}: expected a token below {self.facts.vocab}")
        expected = (1, 1, tapped * self.facts.hidden)
        if not isinstance(source, ConfigOnly) and source.shape(MASK) != expected:
            raise ExportError(f"{source.path}: {MASK} has shape {list(source.shape(MASK))}, expected {list(expected)}")
        self.drafter.mask, self.drafter.masked = mask, lambda: source.read(MASK).reshape(-1)

    def embeds(self, source: Checkpoint) -> None:
        """Load its own embedding."""
        expected = self.facts.vocab, self.facts.hidden
        if source.shape(EMBEDDING) != expected:
            raise ExportError(
                f"{source.path}: {EMBEDDING} has shape {list(source.shape(EMBEDDING))}, expected {list(expected)}",
                "take the drafter that was made for this model",
            )
        self.drafter.heads = (HeadGroup(name=OWN, kind="embedding", count=1),)
        self.source = extended(self.source, {EMBEDDED_BY: original(source, EMBEDDING)})


def is_peagle(source: Checkpoint) -> bool:
    """Whether a checkpoint is of P-EAGLE, which speculators writes."""
    return kind_of(source.config) == "peagle"


def read_eagle3(source: Checkpoint, target: Architecture) -> Drafter:
    """Read a drafter and check it against its target."""
    said = flat(source.config, "eagle_config")
    config = _to_llama_config(source, target)
    source = ExtendedCheckpoint(Checkpoint(source.path, config, source.tensors, source.notes), {})
    tapped, note = _tapped(source, said, target.facts.layers)
    arch = (PEagle if is_peagle(source) else Eagle3)(source, len(tapped), target.facts.context)
    check_size(arch, target)
    check_tensors(arch, arch.source)
    tokens = scored_tokens(source, arch)
    if isinstance(arch, PEagle) and source.has(EMBEDDING):
        arch.embeds(source)
    else:
        check_embedding(source, target)
    return Drafter(arch, tapped, tokens, [note] if note else [])


def _to_llama_config(source: Checkpoint, target: Architecture) -> dict[str, Any]:
    """Return the drafter's configuration in Llama's words."""
    config = flat(source.config, "transformer_layer_config")
    config["head_dim"] = head_dim_of(source, config.get("num_attention_heads"))
    config["vocab_size"] = target.facts.vocab
    config["draft_vocab_size"] = source.shape(HEAD_WEIGHT)[0] if source.has(HEAD_WEIGHT) else target.facts.vocab
    config.setdefault("max_position_embeddings", target.facts.context)
    config["num_hidden_layers"] = sum(source.has(f"layers.{at}.mlp.up_proj.weight") for at in range(8)) or 1
    return config


def _tapped(source: Checkpoint, said: dict[str, Any], layers: int) -> tuple[tuple[int, ...], str]:
    """Return the tapped boundaries, and what was assumed about them."""
    own, note = source.config.get(TAPS), ""
    ids = said.get(TAPS) if own is None else own  # outside eagle_config it has the same meaning
    if ids is None:
        ids = [2, layers // 2, layers - 3]
        note = f"the drafter does not say which layers it looks at: taken to be after {ids}, as its authors do"
    if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
        raise ExportError(f"{source.path}: expected {TAPS} to be a list of layers, got {ids!r}")
    if own is None and ids[0] == 1 and "eagle_config" in said and layers >= 8:
        note = f"{TAPS} {ids} are taken to be the layers whose outputs are looked at, as SGLang counts them"
        ids = [each + 1 for each in ids]
    if not all(0 <= each <= layers for each in ids):
        raise ExportError(
            f"{source.path}: looks at the target after layers {ids}, but this model has {layers}",
            "take the drafter that was made for this model",
        )
    fused = source.shape(FUSE) if source.has(FUSE) else (0, 0)
    if fused[1] != len(ids) * fused[0] or not fused[0]:
        raise ExportError(
            f"{source.path}: {FUSE} has shape {list(fused)}: expected [hidden, {len(ids)} * hidden], for layers {ids}",
            "this may be another kind of drafter than EAGLE-3",
        )
    return tuple(ids), note


def assumed_peagle(target: Architecture) -> tuple[Architecture, tuple[int, ...]]:
    """Assume one of 4 layers, as in the paper, with an LM head for 32,000 tokens."""
    config = layers_like(target, 4) | {"mask_token_id": 1, "draft_vocab_size": min(32000, target.facts.vocab)}
    layers = target.facts.layers
    tapped = (2, layers // 2, layers - 3) if layers > 5 else (1, layers // 2, layers)
    return PEagle(ConfigOnly(target.source.path, config), len(tapped), target.facts.context), tapped


PUBLISHED = Published(lambda source: "eagle3" in kind_of(source.config).lower(), read_eagle3)
PARALLEL = Published(is_peagle, read_eagle3, assumed_peagle, "a P-EAGLE drafter of 4 layers like the model's")
