"""Shared code of architectures: configuration, tensor names, and the order of a decoder's parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec import extensions
from edgespec.errors import ExportError
from edgespec.export.architectures.formula import EMBEDDING, FINAL_NORM, HEAD, LAYERS, QKV, Decoder, Switch
from edgespec.export.architectures.ops import Block, Ops
from edgespec.export.architectures.rope import Rotary, check_heads, rope_facts, rope_parameters
from edgespec.export.architectures.rows import grouped, head_rows, paired, stacked
from edgespec.export.architectures.rules import AttentionRule, Linear, LogitsRule, Norm
from edgespec.export.architectures.settings import Settings, part_of
from edgespec.export.architectures.shapes import Shapes
from edgespec.export.source.derived import DerivedCheckpoint, Extra, affine, original, rows_of, taken
from edgespec.export.source.source import Checkpoint
from edgespec.extensions import Table
from edgespec.runtimes.files.manifest import DrafterKind, HeadGroup, ImagePart, ModelFacts, SoundPart, SourcePart


class VisionEncoderSpec(NamedTuple):
    """Vision encoder of a decoder.

    Attributes:
        image: its entry in the manifest.
        tower: the encoder.
        projectors: the first makes the decoder's rows, each other one rows that are added after one of its first
            layers.
        places: learned positions [side * side, width] that the runtime resamples; None = the encoder has them.
    """

    image: ImagePart
    tower: Architecture
    projectors: list[Architecture]
    places: Extra | None = None


class AudioEncoderSpec(NamedTuple):
    """Audio encoder of a decoder.

    Attributes:
        sound: its entry in the manifest; None = it reads captions.
        tower: the encoder.
        projectors: make the decoder's rows.
        convolutions: over chunks of features, in sequence, before the encoder.
    """

    sound: SoundPart | None
    tower: Architecture
    projectors: list[Architecture]
    convolutions: list[Architecture]


class SelectorSpec(NamedTuple):
    """Scores of draft tokens by the token before them (``SelectorPart`` of the manifest).

    Attributes:
        rank, candidates: sizes.
        numbers: gives float16 [hidden + 2 * vocab, rank].
    """

    rank: int
    candidates: int
    numbers: Callable[[], NDArray[np.float16]]


@dataclass
class DrafterSpec:
    """Facts that only a drafter has; ``DecoderPart`` of the manifest says more.

    Attributes:
        method: the method that drafts by it.
        own_head: its LM head is not the target's.
        block: rows that a drafter of blocks was trained with.
        mask: the placeholder token of a guess there.
        anchor: the pending token's row also guesses.
        heads: groups of heads in its graph next to its LM head.
        scored: their matrices whose rows are tokens that can be guessed.
        confidence, masked: give these numbers.
        selector: chooses each draft token of a block by the one before.
        kv_dims: sizes of heads of the target's layers whose keys and values it reads.
        reads: which of them each layer reads.
        target: the model it is for, where it is given embeddings that it does not norm.
    """

    method: DrafterKind
    own_head: bool = False
    block: int | None = None
    mask: int | None = None
    anchor: bool | None = None
    heads: tuple[HeadGroup, ...] = ()
    scored: tuple[str, ...] = ()
    confidence: Callable[[], NDArray[np.float32]] | None = None
    masked: Callable[[], NDArray[np.float32]] | None = None
    selector: SelectorSpec | None = None
    kv_dims: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    target: Architecture | None = None


def _is_architecture(made: object) -> bool:
    return isinstance(made, type) and issubclass(made, Architecture)


ARCHITECTURES: Table[type[Architecture]] = Table(extensions.ARCHITECTURES, {}, _is_architecture)
"""The architectures that can be exported, by the ``model_type`` of config.json: those of this folder, then those of
plug-ins (group ``edgespec.architectures``)."""
Kind = TypeVar("Kind", bound="Architecture")


def known(model_type: str, example: str, features: str) -> Callable[[type[Kind]], type[Kind]]:
    """Name an architecture, and register it if it is edgespec's own; those of plug-ins have an entry point.

    Args:
        features: human-readable special features.
    """

    def register(kind: type[Kind]) -> type[Kind]:
        kind.model_type, kind.example, kind.features = model_type, example, features
        if kind.__module__.startswith(__name__.rpartition(".")[0]):
            ARCHITECTURES.own[model_type] = kind
        return kind

    return register


class Architecture(Decoder):
    """A decoder with rotary attention and a gated MLP, both after a norm; subclasses state only the differences.

    The decoder below and everything after it use Llama's names, for any checkpoint.
    """

    # its names: see ``known``
    model_type: str
    example: str = ""
    features: str = ""
    # config.json and its sizes
    aliases: Mapping[str, str] = {}  # keys that mean a common one, by the common one
    refused: ClassVar[tuple[tuple[str, str, str], ...]] = ()  # unsupported keys, their meaning, the supported value
    tied_by_default: ClassVar[bool] = False  # the LM head is the embedding
    context_default: ClassVar[int | None] = None  # the longest text
    # names in the checkpoint
    layers_at: str = LAYERS
    outer_names: Mapping[str, str] = {}  # of modules, by Llama's name
    layer_names: Mapping[str, str] = {}  # the same below a layer
    stacked: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # matrices that hold several modules in sequence
    grouped_qkv: ClassVar[str] = ""  # a matrix that holds q, k and v, group by group of heads; "" = there is none
    # which projections of a layer have a bias: by how the module's name begins, the longest beginning counts
    biases: ClassVar[Mapping[str, Switch]] = {"": ("attention_bias", False), "mlp": ("mlp_bias", False)}
    head_bias: bool = False  # of the LM head
    # norms
    epsilon: ClassVar[tuple[str, float]] = ("rms_norm_eps", 1e-6)  # its key, and its default
    norm_weight_is_offset: ClassVar[bool] = False  # they multiply by 1 + weight
    layer_norms: ClassVar[bool] = False  # not root-mean-square norms
    norm_bias: ClassVar[bool] = True  # of layer norms
    head_norms: ClassVar[tuple[str, str] | None] = None  # modules of the norms of each head of q and k
    late_head_norms: ClassVar[bool] = False  # these norms come after the rotation
    # sub-layers
    activation_key: ClassVar[str] = "hidden_act"
    activation_default: str = "silu"
    score_size: ClassVar[str] = ""  # the key of the size whose root divides scores; "" = that of heads
    score_cap: ClassVar[str] = ""  # the key of the cap of scores; "" = no cap
    logits_cap: ClassVar[tuple[str, float]] = ("", 0.0)  # the same of logits, and its default
    # positions
    positions: str | None = None  # the matrix of learnt ones
    # layers with a window: those of ``layer_types``, all, none
    windows: ClassVar[Literal["typed", "all", "none"]] = "typed"
    # without ``layer_types`` every n-th layer has none: a key ("" = none) and its default (0: no layer has one)
    window_pattern: ClassVar[tuple[str, int]] = ("", 0)
    rope_theta: ClassVar[float] = 10000.0  # the base of angles if config.json does not say
    rope_share: ClassVar[float] = 1.0  # the share of a head that is rotated if config.json does not say; 0 = never any
    # which channels of a head turn together: each with the one half the turned channels further on, with its neighbour,
    # or as halves, but the other way round; everything after the architecture sees halves, in rows of q and k read in
    # another order
    pairs: ClassVar[Literal["halves", "neighbours", "reversed"]] = "halves"
    # inputs, and related models
    input_width: int = 0  # width of the float rows that passes read; 0 = they read token ids
    encoder: Architecture | None = None  # of a decoder that attends over its output
    sight: VisionEncoderSpec | None = None
    hearing: AudioEncoderSpec | None = None
    drafter: DrafterSpec | None = None  # set for a drafter; None = a model
    text_half_of: str = ""  # other inputs of the whole model, as in "images"; "" = a text model
    codes: tuple[dict[str, Any], dict[str, str]] | None = None  # its own decoder of codes: config.json, names by ours

    def __init__(self, source: Checkpoint) -> None:
        self.settings = settings = Settings(source.path, source.config, self.aliases)
        self.config = settings.values
        self.eps = settings.number(*self.epsilon)
        self.activation = settings.activation(self.activation_key, self.activation_default)
        heads, hidden = settings.integer("num_attention_heads"), settings.integer("hidden_size")
        # some checkpoints say untied and yet hold no head: transformers ties those as well
        has_head = any(source.has(f"{name}.weight") for name in (HEAD, self.outer_names.get(HEAD, HEAD)))
        tied = settings.flag("tie_word_embeddings", self.tied_by_default) or not has_head
        own_head = tied and not self.both_ways and self._another_head(source)
        self.facts = part_of(
            ModelFacts,
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
            tied=tied and not self.both_ways and not own_head,
        )
        self.facts = self.facts.model_copy(update=self.configure())
        self.rotaries = self.rotations()
        check_heads(settings.file, self.facts, self.rotaries)
        self.facts = part_of(ModelFacts, settings.file, **dict(self.facts) | {"rope": rope_facts(self.rotaries)})
        self.source: Checkpoint = DerivedCheckpoint(source, self._named(source))
        if own_head:
            self.source.notes.append(
                "config.json says tie_word_embeddings, but the checkpoint holds an LM head (lm_head.weight) other than "
                "the embedding: it is used, as in transformers"
            )

    @property
    def source_part(self) -> SourcePart | None:
        """Return the source that it attends over, the output of ``encoder``; None = only its own text."""
        return None

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the decoder reads, in its order, with the shape that config.json implies."""
        shapes = Shapes(self.facts, self.width)
        shapes.run(self.trace())
        return shapes.found

    @property
    def most_context(self) -> int:
        """The longest context that an export may be asked for: dynamic scaling reaches beyond the model's own limit."""
        scaling = [rotary.parameters for rotary in self.rotaries.values()]
        factors = [float(found["factor"]) for found in scaling if found["rope_type"] == "dynamic"]
        return int(self.settings.integer("max_position_embeddings", self.context_default) * min(factors, default=1.0))

    @property
    def position_rows(self) -> int:
        """Return the rows of the matrix of learned positions that are stored."""
        return self.facts.context

    def trace(self) -> Block:
        """Record the whole decoder as a list of operations."""
        ops = Ops()
        return ops.block(lambda: self.build(ops))

    # -- decisions of subclasses --------------------------------------------------------------------------------------

    def width(self, weight: str) -> int | None:
        """Rows of a matrix, if they differ from the usual number for its name; None = they do not."""
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

    def configure(self) -> dict[str, Any]:
        """Return the facts that config.json implies, without sizes; subclasses may keep other keys."""
        for key, what, supported in self.refused:
            self.settings.refuse(key, what, supported)
        found: dict[str, Any] = {}
        for part in (self.states, self.experts):
            if part is not None:
                found |= part.configure(self)
        return found

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts, in an architecture that has some."""
        return True

    def on(self, switch: Switch) -> bool:
        """Whether a switch is on in this configuration."""
        return switch if isinstance(switch, bool) else self.settings.flag(*switch)

    def bias(self, module: str) -> bool:
        """Whether a projection of a layer, such as ``self_attn.q_proj``, has a bias."""
        found = [begin for begin in self.biases if module.startswith(begin)]
        return bool(found) and self.on(self.biases[max(found, key=len)])

    def rotations(self) -> dict[str, Rotary]:
        """Return the rotary tables by name; ``rope`` is the main one."""
        if not self.rope_share:
            return {}
        parameters = rope_parameters(self.config, self.rope_theta)
        share = parameters.get("partial_rotary_factor", self.settings.number("partial_rotary_factor", self.rope_share))
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ExportError(f"{self.settings.file}: expected partial_rotary_factor in (0, 1], got {share!r}")
        return {"rope": Rotary(parameters, int(self.facts.head_dim * share))}

    def rotation(self, kind: str, theta: float, scaled: bool) -> Rotary:
        """Return the rotation of one kind of layers, as in ``layer_types``.

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
        number = layer - sum(other < layer for other in self.facts.convolutions)
        cap = self.settings.number(self.score_cap, 0.0) if self.score_cap else 0.0
        window = self.window(layer)
        after = window - 1 if window and self.both_ways else None
        rule = AttentionRule(number, self.score_scale, self.rotary(layer), window, cap, after=after)
        if self.head_norms is None:
            return rule
        q, k = (self.norm(f"{LAYERS}.{layer}.self_attn.{name}") for name in self.head_norms)
        return replace(rule, q_norm=q, k_norm=k, late_norms=self.late_head_norms)

    @property
    def score_scale(self) -> float:
        """Return the factor of attention scores."""
        size = self.facts.head_dim
        return (self.settings.positive(self.score_size, size) if self.score_size else size) ** -0.5

    def rotary(self, layer: int) -> str | None:
        """Return the rotation of a layer, by its name in ``rotations``; None = the layer is not told positions."""
        if self.rotaries.keys() > {"rope"}:
            own = "rope_local" if self.slides(layer) else "rope_full"
            return own if own in self.rotaries else "rope"
        return "rope" if self.rotaries else None

    def window(self, layer: int) -> int:
        """Positions that a layer's rows see; 0 = all of the context."""
        if not self.slides(layer) or not self.settings.get("sliding_window"):  # Qwen2's mixtures say 0 for none
            return 0
        size = self.settings.integer("sliding_window")
        return size if size < self.facts.context else 0

    def slides(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        if self.windows != "typed":
            return self.windows == "all"
        if (kinds := self.layer_types) is not None:
            return kinds[layer] == "sliding_attention"
        key, every = self.window_pattern
        every = self.settings.integer(key, every) if key else every
        return every > 0 and (layer + 1) % every != 0

    @property
    def layer_types(self) -> list[str] | None:
        """Return config.json's entry of each layer, if there is one."""
        return self.settings.each("layer_types", self.facts.layers, ("full_attention", "sliding_attention"))

    @property
    def logits(self) -> LogitsRule:
        """Post-process the LM head's products."""
        key, default = self.logits_cap
        return LogitsRule(cap=self.settings.number(key, default)) if key else LogitsRule()

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        """Return tensors that are computed from other ones, by Llama's names."""
        found: dict[str, Extra] = {}
        for layer in range(self.facts.layers):
            at, theirs = f"{LAYERS}.{layer}", f"{self.layers_at}.{layer}"
            for name, modules in self.stacked.items():
                if source.has(f"{at}.{modules[0]}.weight"):  # one by one, as in GGUF
                    continue
                found |= stacked(original(source, f"{theirs}.{name}.weight"), at, modules, self.facts)
            if self.grouped_qkv:
                whole = f"{theirs}.{self.grouped_qkv}"
                found |= grouped(source, whole, f"{at}.self_attn", self.facts, self.bias(QKV[0]))
        for part in (self.states, self.experts):
            if part is not None:
                found |= part.derived(self, source)
        return found

    # -- names -------------------------------------------------------------------------------------------------------

    def embedding_at(self, source: Checkpoint) -> str:
        """Name the embedding in the checkpoint."""
        return f"{self.outer_names.get(EMBEDDING, EMBEDDING)}.weight"

    def _another_head(self, source: Checkpoint) -> bool:
        """Whether the checkpoint holds both an LM head and the embedding, and they differ."""
        names = [f"{name}.weight" for name in (HEAD, self.outer_names.get(HEAD, HEAD))]
        head, embedding = next(filter(source.has, names), None), self.embedding_at(source)
        if head is None or head not in source.index or not source.has(embedding):
            return False
        if source.shape(head) != source.shape(embedding):
            return True
        pieces = zip(source.pieces(head), source.pieces(embedding), strict=True)
        return any(not np.array_equal(mine, other) for mine, other in pieces)

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
        """Return a norm of the kind that this architecture has."""
        return Norm(f"{name}.weight", f"{name}.bias" if self.layer_norms and self.norm_bias else None, self.layer_norms)

    def linear(self, layer: int, module: str) -> Linear:
        """Return a projection of a layer."""
        name = f"{LAYERS}.{layer}.{module}"
        return Linear(f"{name}.weight", f"{name}.bias" if self.bias(module) else None)

    def _named(self, source: Checkpoint) -> dict[str, Extra]:
        """Return the checkpoint's tensors by Llama's names, where those differ."""
        names = dict(self.outer_names)
        for layer in range(self.facts.layers):
            at, there = f"{LAYERS}.{layer}", f"{self.layers_at}.{layer}"
            names |= {f"{at}.{ours}": f"{there}.{theirs}" for ours, theirs in self.layer_names.items()}
        found = {**taken(source, names), **self.derived(source)}
        self._reorder(source, found)
        return found

    def _reorder(self, source: Checkpoint, found: dict[str, Extra]) -> None:
        """Bring channels that turn together and norms that are offsets into Llama's form."""
        if self.pairs != "halves":
            order = paired(self.facts.head_dim, self.rotaries["rope"].dims, self.pairs)
            for layer in range(self.facts.layers):
                for module, heads in zip(QKV, (self.facts.heads, self.facts.kv_heads), strict=False):
                    for own in filter(None, vars(self.linear(layer, module)).values()):
                        found[own] = rows_of(found.get(own, original(source, own)), head_rows(heads, order))
        if self.norm_weight_is_offset:
            for weight, shape in self.tensors.items():
                if len(shape) == 1 and weight.endswith("norm.weight"):
                    found[weight] = affine(found.get(weight, original(source, weight)), shift=1.0)
