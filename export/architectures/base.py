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
        self.eps = self._epsilon()
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
            kv_heads=self._need("num_key_value_heads", heads),
            head_dim=self._need("head_dim", hidden // heads),
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
        q, k, v = ops.linear(h, *(self._linear(f"{at}.self_attn.{name}_proj", bias) for name in "qkv"), joined=True)
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

    def _need(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ExportError(f"{self.source.path / 'config.json'}: expected a positive integer {key}, got {value!r}")
        return value

    def _epsilon(self) -> float:
        value = self.config.get("rms_norm_eps", 1e-6)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise ExportError(f"{self.source.path / 'config.json'}: expected a number rms_norm_eps, got {value!r}")
        return float(value)

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

    def _check_shapes(self) -> None:
        """Every tensor the decoder asks for is there and has the shape that config.json implies."""
        facts = self.facts
        if facts.heads % facts.kv_heads or facts.head_dim % 2:
            raise ExportError(
                f"{self.source.path / 'config.json'}: {facts.heads} heads of {facts.head_dim} on {facts.kv_heads} key "
                "heads: expected a whole number of heads for each key head, and an even size"
            )
        expected: dict[str, tuple[int, ...]] = {}

        def linear(part: Linear, n: int, k: int) -> None:
            expected[part.weight] = n, k
            if part.bias is not None:
                expected[part.bias] = (n,)

        expected[self.embedding] = facts.vocab, facts.hidden
        query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        bias, out = self._bias("attention_bias", self.attention_bias), self._bias("attention_bias", self.output_bias)
        inner = self._bias("mlp_bias", None)
        for layer in range(facts.layers):
            at = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                expected[f"{at}.{norm}.weight"] = (facts.hidden,)
            for name, n in (("q", query), ("k", key), ("v", key)):
                linear(self._linear(f"{at}.self_attn.{name}_proj", bias), n, facts.hidden)
            linear(self._linear(f"{at}.self_attn.o_proj", out), facts.hidden, query)
            for name in ("gate", "up"):
                linear(self._linear(f"{at}.mlp.{name}_proj", inner), facts.intermediate, facts.hidden)
            linear(self._linear(f"{at}.mlp.down_proj", inner), facts.hidden, facts.intermediate)
        expected[self.final_norm] = (facts.hidden,)
        linear(self.head, facts.vocab, facts.hidden)
        for name, shape in expected.items():
            if (got := self.source.shape(name)) != shape:
                raise ExportError(
                    f"{self.source.path}: {name} has shape {list(got)}, but config.json implies {list(shape)}",
                    "config.json and the weights belong to different models",
                )


def describe(config: dict[str, Any]) -> str:
    """How a configuration names itself, for messages."""
    if kind := config.get("model_type"):
        return str(kind)
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "unknown"
