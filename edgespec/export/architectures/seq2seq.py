"""Encoder-decoders: an encoder whose rows see each other, and a decoder that attends over its output.

Both sides are an ``Architecture`` each, of one class: what a family has, its class says once.  The decoder's trace
begins with the memory, keys and values of all layers over the encoder's rows, which is filled once a request::

    memory of layer l = K_l rows, V_l rows
    decoder layer: attention over the tokens before, attention over the memory, MLP

Sources: Attention Is All You Need (arXiv 1706.03762); BART (arXiv 1910.13461); Marian (arXiv 1804.00344).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from edgespec.export.architectures.base import known
from edgespec.export.architectures.formula import EMBEDDING, FINAL_NORM, HEAD, QKV, Switch
from edgespec.export.architectures.ops import Kind, Ops, Value
from edgespec.export.architectures.residual import EMBEDDING_NORM, Build, ResidualLayers
from edgespec.export.architectures.rules import MemoryRule, Norms
from edgespec.export.source.derived import Extra, flat, held, original, rows_of
from edgespec.export.source.sinusoids import sinusoids
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import FeaturePart, SourcePart

CROSS, POSITIONS = "cross_attn.{}_proj", "model.embed_positions"


class EncoderDecoder(ResidualLayers):
    """The decoder of an encoder-decoder, or its encoder; names are those of BART.

    Args:
        source: the checkpoint of both.
        encodes: it is the encoder.
    """

    aliases = {"hidden_size": "d_model", "num_hidden_layers": "{}_layers", "num_attention_heads": "{}_attention_heads",
               "intermediate_size": "{}_ffn_dim"}  # fmt: skip
    layers_at = "model.decoder.layers"
    outer_names = {EMBEDDING: "model.{}.embed_tokens", FINAL_NORM: "model.{}.layer_norm",
                   EMBEDDING_NORM: "model.{}.layernorm_embedding"}  # fmt: skip
    layer_names = {
        "input_layernorm": "self_attn_layer_norm",
        "memory_layernorm": "encoder_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        **dict(zip(QKV, QKV, strict=True)),
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
        "cross_attn.o_proj": "encoder_attn.out_proj",
        **{CROSS.format(part): f"encoder_attn.{part}_proj" for part in "qkv"},
    }
    norms = Norms("input_layernorm", "post_attention_layernorm")
    epsilon = ("layer_norm_eps", 1e-5)
    activation_key = "activation_function"
    activation_default = "gelu"
    layer_norms = True
    gated_mlp = False
    biases = {"": True}
    windows = "none"
    rope_share = 0
    tied_by_default = True
    # differences in the family
    placed: ClassVar[Literal["learnt", "sinusoids", "far sinusoids", "relative"]] = "learnt"
    first_position: int = 0  # row of the first token's position
    scaled: ClassVar[Switch] = ("scale_embedding", False)  # embeddings are times the root of their width
    logits_bias: ClassVar[bool] = True  # logits may have a bias

    def __init__(self, source: Checkpoint, encodes: bool = False) -> None:
        self.both_ways, side = encodes, "encoder" if encodes else "decoder"
        self.aliases = {common: own.format(side) for common, own in self.aliases.items()}
        self.outer_names = {ours: theirs.format(side) for ours, theirs in self.outer_names.items()}
        self.layers_at = self.layers_at.replace("decoder", side)
        self.positions = None if self.placed == "relative" else f"{POSITIONS}.weight"
        self.head_bias = not encodes and self.logits_bias and source.has("final_logits_bias")
        super().__init__(source)
        if not encodes:
            self.encoder = type(self)(source, encodes=True)

    @property
    def source_part(self) -> SourcePart:
        """Return the manifest entry of the memory that a decoder attends over."""
        assert self.encoder is not None
        facts = self.encoder.facts
        kind: Literal["text", "features"] = "text" if self.sound is None else "features"
        return SourcePart(kind=kind, max_rows=facts.context, width=facts.hidden, features=self.sound)

    @property
    def sound(self) -> FeaturePart | None:
        """Return the features of sound that the encoder reads; None = it reads text."""
        return None

    # -- both stacks ---------------------------------------------------------------------------------------------------

    def build(self, ops: Ops) -> Value:
        if not self.both_ways:
            ops.fill_memory(lambda: self.remember(ops))
        return super().build(ops)

    def embed(self, ops: Ops) -> Value:
        scale = self.facts.hidden**0.5 if self.on(self.scaled) else 1.0
        return ops.embed(self.embedding, scale, self.positions)

    def remember(self, ops: Ops) -> None:
        """Make keys and values of every layer from the encoder's rows."""
        rows = ops.input_slice(0, self.facts.hidden)
        for layer in range(self.facts.layers):
            k, v = ops.linear(rows, *(self.linear(layer, CROSS.format(part)) for part in "kv"), joined=True)
            ops.append_memory(k, v, self.memory_rule(layer))

    def recall(self, ops: Ops, h: Value, layer: int) -> Value:
        """Build attention over the memory, without norms."""
        (q,) = ops.linear(h, self.linear(layer, CROSS.format("q")))
        return ops.linear(ops.attend_memory(q, self.memory_rule(layer)), self.linear(layer, CROSS.format("o")))[0]

    @property
    def sublayers(self) -> list[tuple[Kind, str, Build]]:
        """The sub-layers of a layer in their order, with the modules of their norms."""
        memory: list[tuple[Kind, str, Build]] = [("memory", "memory_layernorm", self.recall)]
        attention, mlp = super().sublayers
        return [attention, *([] if self.both_ways else memory), mlp]

    def memory_rule(self, layer: int) -> MemoryRule:
        return MemoryRule(layer, self.score_scale)

    # -- names and positions -------------------------------------------------------------------------------------------

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found: dict[str, Extra] = {f"{EMBEDDING}.weight": original(source, self.embedding_at(source))}
        if self.head_bias:
            found[f"{HEAD}.bias"] = flat(original(source, "final_logits_bias"))
        if self.positions is not None:
            found[self.positions] = self.places(source)
        return found

    def embedding_at(self, source: Checkpoint) -> str:
        """Name the embedding in the checkpoint: of this side or of both."""
        names = self.outer_names[EMBEDDING], "model.shared", self.outer_names[EMBEDDING].replace("encoder", "decoder")
        return next((f"{name}.weight" for name in names if source.has(f"{name}.weight")), f"{names[1]}.weight")

    def places(self, source: Checkpoint) -> Extra:
        """Positions of this side, [context or more, hidden], from the first token's on."""
        count, first = self.facts.context, self.first_position
        if self.placed == "learnt":
            return rows_of(original(source, f"{self.layers_at.removesuffix('layers')}embed_positions.weight"),
                           np.arange(first, first + count))  # fmt: skip
        return held(sinusoids(np.arange(first, first + count), self.facts.hidden, far=self.placed == "far sinusoids"))


@known(
    "marian",
    "opus-mt-en-de, opus-mt-ko-en",
    "encoder-decoder; norms after the residuals, sinusoids, logits with a bias",
)
class Marian(EncoderDecoder):
    """Marian's translators (OPUS-MT): some have a separate vocabulary for each language."""

    late_norms = True
    placed = "sinusoids"

    def configure(self) -> dict[str, Any]:
        vocab = None if self.both_ways else self.settings.optional("decoder_vocab_size")
        return super().configure() | ({"vocab": vocab} if vocab else {})


@known("bart", "bart-large-cnn, distilbart-cnn-12-6", "encoder-decoder; norms after the residuals, learned positions")
class Bart(EncoderDecoder):
    """BART: positions begin two rows into their matrix."""

    late_norms = True
    embedding_norm = True
    first_position = 2


@known("mbart", "mbart-large-50-many-to-many-mmt", "as bart, with norms in front of sub-layers")
class MBart(EncoderDecoder):
    """mBART (arXiv 2001.08210)."""

    embedding_norm = True
    first_position = 2


@known("pegasus", "pegasus-xsum, pegasus-cnn_dailymail", "encoder-decoder; norms in front of sub-layers, sinusoids")
class Pegasus(EncoderDecoder):
    """PEGASUS (arXiv 1912.08777)."""

    placed = "sinusoids"


@known(
    "m2m_100", "nllb-200-distilled-600M, m2m100_418M", "encoder-decoder; norms in front of sub-layers, sinusoids, relu"
)
class M2M100(EncoderDecoder):
    """M2M-100 (arXiv 2010.11125) and NLLB-200 (arXiv 2207.04672): positions start after that of padding."""

    activation_default = "relu"
    placed = "far sinusoids"
    scaled = ("scale_embedding", True)
    logits_bias = False

    def configure(self) -> dict[str, Any]:
        padding = self.settings.get("pad_token_id", 1)
        self.first_position = (padding if isinstance(padding, int) else 1) + 1
        return super().configure()
