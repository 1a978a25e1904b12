"""EAGLE-3's drafter (arXiv 2503.01840): a decoder layer or a few, conditioned on hidden states of a target.

Entry i is made of token i + 1 and of what was tapped of the target at token i, both normed and side by side::

    g = fc [taps]                          or, for its own guesses, its own hidden state of the step before
    q, k, v of [norm(embedding) ; norm(g)], u = g + attention, y = u + MLP(norm(u)), logits = LM head(norm(y))

What published checkpoints differ in is configuration: ``norm_before_residual`` (u = norm(g) + attention),
``norm_output`` (y is normed before it is the next step's hidden state), ``norm_before_fc`` (the taps are normed).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import ATTENTION, HEAD, LAYERS, Architecture
from edgespec.export.architectures.ops import AttentionRule, Linear, Ops, Value
from edgespec.export.drafters.drafter import with_head_norms
from edgespec.export.drafters.heads import FUSE
from edgespec.export.source.derived import Extra, original
from edgespec.export.source.source import Checkpoint

EMBEDDED, FUSED = "input_layernorm", "hidden_norm"  # norms of layer 0, of the embedding and of the hidden state


class Eagle3(Architecture):
    """See the module.

    Args:
        source: the checkpoint; tensors by Llama's names, but for ``fc`` and ``input_norm``.

    Raises:
        ExportError: sizes that are not there; an option that is not known.
    """

    model_type = "eagle3"
    drafts = "eagle"
    refused = (("fc_norm", "a norm of each tap", "norm_before_fc"),)

    def __init__(self, source: Checkpoint, tapped: int, context: int) -> None:
        super().__init__(source)
        self.facts = self.facts.model_copy(update={"context": context, "tied": False})
        self.input_width = (1 + tapped) * self.facts.hidden

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor; the LM head has a row for each token that can be guessed."""
        rows = self.settings.integer("draft_vocab_size", self.facts.vocab)
        return super().tensors | {f"{HEAD}.weight": (rows, self.facts.hidden)}

    @property
    def size(self) -> int:
        """Parameters."""
        return sum(prod(shape) for shape in self.tensors.values())

    def build(self, ops: Ops) -> Value:
        """Build the decoder with ``ops``, from a pass's inputs to its logits."""
        hidden = self.facts.hidden
        before = self.settings.flag("norm_before_residual")

        def stream(g: Value) -> Value:
            return ops.norm(g, self.norm(f"{LAYERS}.0.{FUSED}")) if before else g

        def fused() -> Value:
            taps = ops.input_slice(hidden, self.input_width - hidden)
            if self.settings.flag("norm_before_fc"):
                taps = ops.norm(taps, self.norm("input_norm"))
            (g,) = ops.linear(taps, Linear(FUSE))
            return stream(g)

        def recycled() -> Value:
            g = ops.input_slice(hidden, hidden)
            return stream(ops.norm(g, self.final_norm) if self.settings.flag("norm_output") else g)

        def first(x: Value) -> Value:
            token = ops.norm(ops.input_slice(0, hidden), self.norm(f"{LAYERS}.0.{EMBEDDED}"))
            return self.attend(ops, ops.join(token, x if before else stream_norm(x)), 0)

        def stream_norm(x: Value) -> Value:
            return ops.norm(x, self.norm(f"{LAYERS}.0.{FUSED}"))

        x = ops.select_input(fused, recycled)
        x = ops.sublayer("attention", 0, x, first)
        x = ops.sublayer("mlp", 0, x, lambda x: self.mlp(ops, x, 0))
        for layer in range(1, self.facts.layers):
            x = self.layer(ops, x, layer)
        return ops.head(x, self.final_norm, self.head)

    def rule(self, layer: int) -> AttentionRule:
        return with_head_norms(self, super().rule(layer), layer)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        """Return the names of the published layouts: ``midlayer`` or ``layers``, without a prefix."""
        found: dict[str, Extra] = {}
        for name in source.index:
            ours = name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
            if ours.startswith(("layers.", "norm.")):
                found[f"model.{ours}"] = original(source, name)
        return found


def head_dim_of(source: Checkpoint, heads: object) -> int:
    """Read off a projection of so many heads: some configurations leave it out, and it is not hidden / heads."""
    part = ATTENTION.format("q") + ".weight"
    name = next((name for name in source.index if name.endswith(f"midlayer.{part}") or name == f"layers.0.{part}"), "")
    if not name or not isinstance(heads, int) or heads < 1 or source.shape(name)[0] % heads:
        raise UnsupportedModel(f"{source.path}: expected midlayer.{part} or layers.0.{part} of an EAGLE-3 drafter")
    return source.shape(name)[0] // heads
