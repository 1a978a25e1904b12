"""What every architecture shares: reading the configuration, names of tensors, and the order of a decoder's parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.architectures.ops import AttentionRule, Linear, LogitsRule, Norm, Ops, Value
from edgespec.export.architectures.rope import Rotary, rope_facts, rope_parameters
from edgespec.export.architectures.settings import Settings, model_facts, part_of
from edgespec.export.architectures.shapes import ShapeOps
from edgespec.export.source.derived import Affine, DerivedCheckpoint, Own, Rows
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.manifest import DrafterKind, ModelFacts

EMBEDDING, FINAL_NORM, HEAD, LAYERS = "model.embed_tokens", "model.norm", "lm_head", "model.layers"
ATTENTION, MLP = "self_attn.{}_proj", "mlp.{}_proj"


class Architecture:
    """A decoder with rotary attention and a gated MLP, both behind a norm; subclasses state only what differs.

    Whatever a checkpoint calls its tensors, the decoder below and everything behind it use Llama's names.

    Attributes:
        model_type: as in config.json.
        example, features: well-known models of this kind, and what is special, for people.
        aliases: keys of config.json that mean a common one, by the common one.
        layers_at, outer_names, layer_names: where the checkpoint has the layers, and the modules it calls otherwise:
            by Llama's name, below a layer in ``layer_names``.
        epsilon: the key of the norms' epsilon, and its value if config.json does not say.
        norm_weight_is_offset: norms multiply by 1 + weight.
        layer_norms: norms are layer norms.
        norm_bias: layer norms have biases.
        attention_norm, mlp_norm, after_attention, after_mlp: modules of a layer; None = there is no such norm.
        gated_mlp: activation(gate) * up, not only activation(up).
        positions: the matrix of learnt positions.
        tied_by_default: the LM head is the embedding if config.json does not say.
        context_default: the longest text, if config.json does not say.
        rope_theta: the base of angles if config.json does not say.
        rope_share: the share of a head that is rotated if config.json does not say.
        pairs: which channels of a head turn together: each with the one half the turned channels further on
            ("halves"), with its neighbour ("neighbours"), or as halves, but the other way round ("reversed").
            Everything behind the architecture sees halves: rows of q and k are read in another order.
        head_bias: the LM head has a bias.
        drafts: the method that it is a drafter of; None = it is a model.
        block, mask: of a drafter of blocks: rows that it was trained with, and the token that stands for a guess.
        input_width: width of the float rows that a drafter's passes read; 0 = they read token ids.
        borrowed_kv_dims: sizes of heads of the target's layers, for a drafter that reads their keys and values.
        reads: which of them each layer reads.
        target: the model that a drafter is for, where it is given embeddings that it does not norm.
        text_half_of: what the whole model reads beside text, as in "images"; "" = it is a model of text.
    """

    model_type: ClassVar[str]
    example: ClassVar[str] = ""
    features: ClassVar[str] = ""
    aliases: ClassVar[dict[str, str]] = {}
    layers_at: ClassVar[str] = LAYERS
    outer_names: ClassVar[dict[str, str]] = {}
    layer_names: ClassVar[dict[str, str]] = {}
    epsilon: ClassVar[tuple[str, float]] = ("rms_norm_eps", 1e-6)
    activation_key: ClassVar[str] = "hidden_act"
    activation_default: ClassVar[str] = "silu"
    norm_weight_is_offset: ClassVar[bool] = False
    layer_norms: ClassVar[bool] = False
    norm_bias: ClassVar[bool] = True
    attention_norm: ClassVar[str | None] = "input_layernorm"
    mlp_norm: ClassVar[str | None] = "post_attention_layernorm"
    after_attention: ClassVar[str | None] = None
    after_mlp: ClassVar[str | None] = None
    gated_mlp: ClassVar[bool] = True
    positions: ClassVar[str | None] = None
    tied_by_default: ClassVar[bool] = False
    context_default: ClassVar[int | None] = None
    rope_theta: ClassVar[float] = 10000.0
    rope_share: ClassVar[float] = 1.0
    pairs: ClassVar[Literal["halves", "neighbours", "reversed"]] = "halves"
    head_bias: ClassVar[bool] = False
    drafts: ClassVar[DrafterKind | None] = None
    block: int | None = None
    mask: int | None = None
    input_width: int = 0
    borrowed_kv_dims: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    target: Architecture | None = None
    text_half_of: str = ""

    def __init__(self, source: Checkpoint) -> None:
        self.settings = settings = Settings(source.path, source.config, self.aliases)
        self.config = settings.values
        self.eps = settings.number(*self.epsilon)
        self.activation = settings.activation(self.activation_key, self.activation_default)
        heads, hidden = settings.integer("num_attention_heads"), settings.integer("hidden_size")
        self.facts = model_facts(
            source.path,
            architecture=self.model_type,
            layers=settings.integer("num_hidden_layers"),
            hidden=hidden,
            intermediate=self.inner_size(hidden),
            heads=heads,
            kv_heads=self.key_heads(heads),
            head_dim=settings.integer("head_dim", hidden // heads),
            vocab=settings.integer("vocab_size"),
            context=settings.integer("max_position_embeddings", self.context_default),
            tied=settings.flag("tie_word_embeddings", self.tied_by_default)
            # some checkpoints say untied and yet hold no head: transformers ties those as well
            or not any(source.has(f"{name}.weight") for name in (HEAD, self.outer_names.get(HEAD, HEAD))),
        )
        self.check()
        self.rotaries = self.rotations()
        self.facts = part_of(ModelFacts, settings.file, dict(self.facts) | {"rope": rope_facts(self.rotaries)})
        self.source: Checkpoint = DerivedCheckpoint(source, self._named(source))

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the decoder reads, in its order, with the shape that config.json implies."""
        ops = ShapeOps(self.facts, self.width)
        self.build(ops)
        return ops.found

    @property
    def native_only(self) -> str:
        """What only native operators compute; "" = stock ones compute it all."""
        return "drafts of whole blocks" if self.block else self.facts.native_only

    @property
    def most_context(self) -> int:
        """The longest context that an export may be asked for: dynamic scaling reaches beyond the model's own limit."""
        scaling = [rotary.parameters for rotary in self.rotaries.values()]
        factors = [float(found["factor"]) for found in scaling if found["rope_type"] == "dynamic"]
        return int(self.settings.integer("max_position_embeddings", self.context_default) * min(factors, default=1.0))

    # -- the decoder -----------------------------------------------------------------------------------------------

    def build(self, ops: Ops) -> Value:
        """The whole decoder, embedding to logits."""
        x = self.embed(ops)
        for layer in range(self.facts.layers):
            x = self.layer(ops, x, layer)
        return ops.head(x, self.final_norm, self.head)

    def embed(self, ops: Ops) -> Value:
        """The residual stream before the first layer."""
        return ops.embed(self.embedding)

    def layer(self, ops: Ops, x: Value, layer: int) -> Value:
        """One layer: attention, then MLP."""
        x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        return ops.sublayer("mlp", layer, x, lambda x: self.mlp(ops, x, layer))

    def parallel_layer(self, ops: Ops, x: Value, layer: int, mlp_norm: str | None) -> Value:
        """A layer whose MLP reads what its attention read; normed by ``mlp_norm``, or with the attention's norm."""
        if mlp_norm is None:
            h = self.normed(ops, x, layer, self.attention_norm)
            x = ops.sublayer("attention", layer, x, lambda x: self.attend(ops, h, layer))
        else:
            h = self.normed(ops, x, layer, mlp_norm)
            x = ops.sublayer("attention", layer, x, lambda x: self.attention(ops, x, layer))
        return ops.sublayer("mlp", layer, x, lambda x: self.transform(ops, h, layer))

    def attention(self, ops: Ops, x: Value, layer: int) -> Value:
        """One attention sub-layer without its residual."""
        y = self.attend(ops, self.normed(ops, x, layer, self.attention_norm), layer)
        return self.normed(ops, y, layer, self.after_attention)

    def attend(self, ops: Ops, h: Value, layer: int) -> Value:
        """Attention without norms."""
        q, k, v = ops.linear(h, *(self.linear(layer, ATTENTION.format(name)) for name in "qkv"), joined=True)
        (y,) = ops.linear(ops.attention(q, k, v, self.rule(layer)), self.linear(layer, ATTENTION.format("o")))
        return y

    def mlp(self, ops: Ops, x: Value, layer: int) -> Value:
        """One MLP sub-layer without its residual."""
        y = self.transform(ops, self.normed(ops, x, layer, self.mlp_norm), layer)
        return self.normed(ops, y, layer, self.after_mlp)

    def transform(self, ops: Ops, h: Value, layer: int) -> Value:
        """The MLP without norms."""
        if self.gated_mlp:
            gate, up = ops.linear(h, *(self.linear(layer, MLP.format(name)) for name in ("gate", "up")))
            inner = ops.gated(gate, up, self.activation)
        else:
            (up,) = ops.linear(h, self.linear(layer, MLP.format("up")))
            inner = ops.activate(up, self.activation, self.numbers(layer))
        (y,) = ops.linear(inner, self.linear(layer, MLP.format("down")))
        return y

    def normed(self, ops: Ops, x: Value, layer: int, module: str | None) -> Value:
        """x behind a norm of a layer; x itself if there is no such norm."""
        return x if module is None else ops.norm(x, self.norm(f"{LAYERS}.{layer}.{module}"))

    # -- what subclasses decide --------------------------------------------------------------------------------------

    def numbers(self, layer: int) -> str | None:
        """Learnt numbers of a layer's activation."""
        return None

    def width(self, weight: str) -> int | None:
        """Rows of a matrix that are not as many as its name says elsewhere; None = they are."""
        return None

    def ignores(self, name: str) -> bool:
        """Whether a tensor of a layer in the checkpoint is of no use to any version of the model."""
        return False

    def inner_size(self, hidden: int) -> int:
        """Width of the MLP."""
        return self.settings.integer("intermediate_size")

    def key_heads(self, heads: int) -> int:
        """Heads of keys and values."""
        return self.settings.integer("num_key_value_heads", heads)

    def check(self) -> None:
        """Refuse options that are not supported.

        Raises:
            UnsupportedModel: config.json asks for one.
        """

    def bias(self, module: str) -> bool:
        """Whether a projection of a layer, such as ``self_attn.q_proj``, has a bias."""
        return self.settings.flag("mlp_bias" if module.startswith("mlp") else "attention_bias")

    def rotations(self) -> dict[str, Rotary]:
        """The rotary tables by name; ``rope`` is the main one."""
        parameters = rope_parameters(self.config, self.rope_theta)
        share = parameters.get("partial_rotary_factor", self.settings.number("partial_rotary_factor", self.rope_share))
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ExportError(f"{self.settings.file}: expected partial_rotary_factor in (0, 1], got {share!r}")
        return {"rope": Rotary(parameters, int(self.facts.head_dim * share))}

    def rotation(self, kind: str, theta: float, scaled: bool) -> Rotary:
        """The rotation of one kind of layers, as in ``layer_types``.

        Args:
            kind: the new form of config.json has parameters for each.
            theta: the base, if they do not say it.
            scaled: whether an old ``rope_scaling`` is meant for this kind.
        """
        every = self.settings.get("rope_parameters", {})
        given = every.get(kind) if isinstance(every, dict) else every
        config = {"rope_theta": theta, "max_position_embeddings": self.facts.context, "rope_parameters": given,
                  "rope_scaling": self.settings.get("rope_scaling") if scaled else None}  # fmt: skip
        return Rotary(rope_parameters(config), self.facts.head_dim)

    def rule(self, layer: int) -> AttentionRule:
        """How a layer attends."""
        return AttentionRule(layer, self.facts.head_dim**-0.5, "rope", self.window(layer))

    def window(self, layer: int) -> int:
        """Positions that a layer's rows see; 0 = all of the context."""
        size = self.settings.optional("sliding_window")
        return size if size and self.slides(layer) and size < self.facts.context else 0

    def slides(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        kinds = self.layer_types
        return kinds is not None and kinds[layer] == "sliding_attention"

    @property
    def layer_types(self) -> list[str] | None:
        """What config.json says of each layer, if it does."""
        return self.settings.each("layer_types", self.facts.layers, ("full_attention", "sliding_attention"))

    @property
    def logits(self) -> LogitsRule:
        """What becomes of the LM head's products."""
        return LogitsRule()

    @property
    def names(self) -> dict[str, str]:
        """``layer_names`` of this configuration."""
        return self.layer_names

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        """Tensors that are made of others, by Llama's name; what names alone cannot say."""
        return {}

    # -- names -------------------------------------------------------------------------------------------------------

    @property
    def embedding(self) -> str:
        """Name of the embedding matrix [vocab, hidden]."""
        return f"{EMBEDDING}.weight"

    @property
    def final_norm(self) -> Norm:
        """The last norm, [hidden]."""
        return self.norm(FINAL_NORM)

    @property
    def head(self) -> Linear:
        """The LM head; with tied embeddings the embedding matrix itself."""
        weight = self.embedding if self.facts.tied else f"{HEAD}.weight"
        return Linear(weight, f"{HEAD}.bias" if self.head_bias else None)

    def norm(self, name: str) -> Norm:
        """A norm of the kind that this architecture has."""
        return Norm(f"{name}.weight", f"{name}.bias" if self.layer_norms and self.norm_bias else None, self.layer_norms)

    def linear(self, layer: int, module: str) -> Linear:
        """A projection of a layer."""
        name = f"{LAYERS}.{layer}.{module}"
        return Linear(f"{name}.weight", f"{name}.bias" if self.bias(module) else None)

    def _named(self, source: Checkpoint) -> dict[str, Extra]:
        """The checkpoint's tensors by Llama's names, where those differ."""
        found: dict[str, Extra] = {}

        def name(ours: str, theirs: str) -> None:
            for kind in ("weight", "bias"):
                # asked for in vain, the checkpoint's own name is the one to complain about
                if source.has(f"{theirs}.{kind}") or (kind == "weight" and not source.has(f"{ours}.{kind}")):
                    found[f"{ours}.{kind}"] = Own(source, f"{theirs}.{kind}")

        for ours, theirs in self.outer_names.items():
            name(ours, theirs)
        for layer in range(self.facts.layers):
            for ours, theirs in self.names.items():
                name(f"{LAYERS}.{layer}.{ours}", f"{self.layers_at}.{layer}.{theirs}")
        found |= self.derived(source)
        if self.pairs != "halves":
            self._pair_halves(source, found)
        if self.norm_weight_is_offset:
            for weight, shape in self.tensors.items():
                if len(shape) == 1 and weight.endswith("norm.weight"):
                    found[weight] = Affine(found.get(weight, Own(source, weight)), shift=1.0)
        return found

    def _pair_halves(self, source: Checkpoint, found: dict[str, Extra]) -> None:
        """Rows of q and k so that channels that turn together lie half the turned channels apart."""
        size, turned = self.facts.head_dim, self.rotaries["rope"].dims
        order = np.arange(size)
        pairs = order[:turned].reshape(-1, 2).T if self.pairs == "neighbours" else np.roll(order[:turned], turned // 2)
        order[:turned] = pairs.flatten()
        for layer in range(self.facts.layers):
            for part, heads in (("q", self.facts.heads), ("k", self.facts.kv_heads)):
                rows: NDArray[np.int64] = (np.arange(heads)[:, None] * size + order).ravel()
                for name in (given for given in vars(self.linear(layer, ATTENTION.format(part))).values() if given):
                    found[name] = Rows(found.get(name, Own(source, name)), rows)
