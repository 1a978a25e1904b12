"""What every architecture shares: reading the configuration, and the order of a decoder's parts."""

from __future__ import annotations

from typing import Any, ClassVar

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.ops import Linear, Ops, X
from edgespec.export.rope import rope_parameters
from edgespec.export.source import Checkpoint
from edgespec.runtimes.manifest import ModelFacts


class Architecture:
    """A pre-norm decoder with rotary attention and a gated MLP; subclasses state only what differs.

    Attributes:
        model_type: as in config.json.
        attention_bias: whether q, k and v have biases; None = as the configuration says.
        output_bias: the same for the attention's output.
    """

    model_type: ClassVar[str]
    attention_bias: ClassVar[bool | None] = None
    output_bias: ClassVar[bool | None] = None

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.config = config = source.config
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.rope = rope_parameters(config)
        self._refuse_unknown()
        heads = self._need("num_attention_heads")
        hidden = self._need("hidden_size")
        self.facts = ModelFacts(
            architecture=self.model_type,
            layers=self._need("num_hidden_layers"),
            hidden=hidden,
            intermediate=self._need("intermediate_size"),
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab=self._need("vocab_size"),
            context=self._need("max_position_embeddings"),
            rope={key: value for key, value in self.rope.items() if isinstance(value, int | float | str)},
            tied=self._tied(),
        )
        self._check_shapes()

    # -- the decoder -----------------------------------------------------------------------------------------------

    def build(self, ops: Ops[X]) -> X:
        """The whole decoder, embedding to logits."""
        x = ops.embed(self.embedding)
        for layer in range(self.facts.layers):
            x = ops.sublayer("attention", layer, x, lambda x, layer=layer: self.attention(ops, x, layer))  # type: ignore[misc]
            x = ops.sublayer("mlp", layer, x, lambda x, layer=layer: self.mlp(ops, x, layer))  # type: ignore[misc]
        return ops.head(x, self.final_norm, self.head)

    def attention(self, ops: Ops[X], x: X, layer: int) -> X:
        """One attention sub-layer without its residual."""
        at = f"model.layers.{layer}"
        h = ops.norm(x, f"{at}.input_layernorm.weight")
        bias, out = self._bias("attention_bias", self.attention_bias), self._bias("attention_bias", self.output_bias)
        q, k, v = ops.linear(h, *(self._linear(f"{at}.self_attn.{name}_proj", bias) for name in "qkv"))
        (y,) = ops.linear(ops.attention(q, k, v, layer), self._linear(f"{at}.self_attn.o_proj", out))
        return y

    def mlp(self, ops: Ops[X], x: X, layer: int) -> X:
        """One MLP sub-layer without its residual."""
        at = f"model.layers.{layer}"
        bias = self._bias("mlp_bias", None)
        h = ops.norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = ops.linear(h, *(self._linear(f"{at}.mlp.{name}_proj", bias) for name in ("gate", "up")))
        (y,) = ops.linear(ops.gated(gate, up), self._linear(f"{at}.mlp.down_proj", bias))
        return y

    @property
    def embedding(self) -> str:
        """Name of the embedding matrix [vocab, hidden]."""
        return "model.embed_tokens.weight"

    @property
    def final_norm(self) -> str:
        """Name of the last norm's weight [hidden]."""
        return "model.norm.weight"

    @property
    def head(self) -> Linear:
        """The LM head; with tied embeddings the embedding matrix itself."""
        return Linear(self.embedding if self.facts.tied else "lm_head.weight")

    # -- reading the configuration ---------------------------------------------------------------------------------

    def _need(self, key: str) -> int:
        value = self.config.get(key)
        if not isinstance(value, int) or value <= 0:
            raise ExportError(f"{self.source.path / 'config.json'}: expected a positive integer {key}, got {value!r}")
        return value

    def _tied(self) -> bool:
        tied = bool(self.config.get("tie_word_embeddings", False))
        # some checkpoints say untied and yet hold no head: transformers ties those as well
        return tied or not self.source.has("lm_head.weight")

    def _bias(self, key: str, fixed: bool | None) -> bool:
        return bool(self.config.get(key, False)) if fixed is None else fixed

    @staticmethod
    def _linear(name: str, bias: bool) -> Linear:
        return Linear(f"{name}.weight", f"{name}.bias" if bias else None)

    def _refuse_unknown(self) -> None:
        activation = self.config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModel(f"activation {activation!r} is not supported for {self.model_type}; supported: silu")
        if quantization := self.config.get("quantization_config"):
            kind = quantization.get("quant_method", "unknown")
            raise UnsupportedModel(
                f"{self.source.path}: the checkpoint is already quantized ({kind}); expected float weights",
                "export from the unquantized checkpoint",
            )

    def _check_shapes(self) -> None:
        facts = self.facts
        expected: dict[str, tuple[int, ...]] = {
            self.embedding: (facts.vocab, facts.hidden),
            self.head.weight: (facts.vocab, facts.hidden),
            "model.layers.0.self_attn.q_proj.weight": (facts.heads * facts.head_dim, facts.hidden),
            "model.layers.0.self_attn.k_proj.weight": (facts.kv_heads * facts.head_dim, facts.hidden),
            "model.layers.0.mlp.gate_proj.weight": (facts.intermediate, facts.hidden),
        }
        for name, shape in expected.items():
            if (got := self.source.shape(name)) != shape:
                raise ExportError(
                    f"{self.source.path}: {name} has shape {list(got)}, but config.json implies {list(shape)}",
                    "config.json and the weights belong to different models",
                )


def describe(config: dict[str, Any]) -> str:
    """How a configuration names itself, for messages."""
    return str(config.get("model_type") or (config.get("architectures") or ["unknown"])[0])
