"""Encoders of texts: rows see each other, and what they end in becomes a vector or a score.

::

    BERT:        x = norm(embed(ids) + positions + types);  x = norm(x + attention(x));  x = norm(x + mlp(x))
    ModernBERT:  x = norm(embed(ids));  x = x + attention(norm(x));  x = x + mlp(norm(x))

Sources: BERT (arXiv 1810.04805); RoBERTa (arXiv 1907.11692); XLM-R (arXiv 1911.02116); MPNet (arXiv 2004.09297);
DistilBERT (arXiv 1910.01108); ModernBERT (arXiv 2412.13663); mGTE (arXiv 2407.19669); Nomic Embed (arXiv 2402.01613);
EuroBERT (arXiv 2503.05500); EmbeddingGemma (arXiv 2509.20354).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from edgespec.errors import UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.architectures.formula import ATTENTION, EMBEDDING, FINAL_NORM, LAYERS, MLP, QKV
from edgespec.export.architectures.gemma import Gemma3
from edgespec.export.architectures.llama import Llama
from edgespec.export.architectures.ops import Ops, Value
from edgespec.export.architectures.residual import EMBEDDING_NORM, FIRST_NORM, LAST_NORM, ResidualLayers
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.rows import stacked
from edgespec.export.architectures.rules import AttentionRule, Norm, RelativeRule
from edgespec.export.architectures.t5 import bucket_of
from edgespec.export.source.derived import Extra, Floats, made_of, original, rows_of
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.files.embedding import VectorActivation

POSITIONS, TYPES = "model.embed_positions.weight", "embeddings.token_type_embeddings.weight"
DISTANCES = "model.relative_positions"  # biases of scores by distance
OUTPUT = ATTENTION.format("o")
UP, GATE, DOWN = (MLP.format(name) for name in ("up", "gate", "down"))


class Classifier(NamedTuple):
    """Modules of a classification head, in order, each with its activation; "norm": a layer norm."""

    modules: tuple[tuple[str, VectorActivation | str], ...]
    pooling: str = "cls"


ENCODERS: dict[str, type[Architecture]] = {}
"""Encoders of texts that can be exported, by the ``model_type`` of config.json."""
Kind = TypeVar("Kind", bound=Architecture)


def encoder(model_type: str, example: str, features: str) -> Callable[[type[Kind]], type[Kind]]:
    """Register an encoder; see ``base.known``."""

    def register(kind: type[Kind]) -> type[Kind]:
        kind.model_type, kind.example, kind.features = model_type, example, features
        ENCODERS[model_type] = kind
        return kind

    return register


class TextEncoder(ResidualLayers):
    """BERT's layers; names are those of BERT."""

    prefixes: ClassVar[tuple[str, ...]] = ("bert.",)  # of tensors in a model with a head
    head_modules: ClassVar[Classifier] = Classifier((("pooler.dense", "tanh"), ("classifier", "none")))
    aliases = {"rope_theta": "rotary_emb_base"}
    layers_at = "encoder.layer"
    outer_names: Mapping[str, str] = {
        EMBEDDING: "embeddings.word_embeddings",
        EMBEDDING_NORM: "embeddings.LayerNorm",
    }
    layer_names: Mapping[str, str] = {
        **{ATTENTION.format(name[0]): f"attention.self.{name}" for name in ("query", "key", "value")},
        OUTPUT: "attention.output.dense",
        FIRST_NORM: "attention.output.LayerNorm",
        UP: "intermediate.dense",
        DOWN: "output.dense",
        LAST_NORM: "output.LayerNorm",
    }
    epsilon = ("layer_norm_eps", 1e-12)
    activation_default = "gelu"
    layer_norms = True
    gated_mlp = False
    biases = {"": True}
    windows = "none"
    rope_share: ClassVar[float] = 0.0
    both_ways = True
    late_norms = True
    embedding_norm = True
    refused: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("is_decoder", "attention to earlier tokens alone", "encoders"),
    )

    @property
    def classifier(self) -> Classifier | None:
        """The head of a model that scores texts; None = this kind has none that is known here."""
        return self.head_modules


class LearnedPositions(TextEncoder):
    """An encoder with a learned vector of each position, and of each of the two texts of a pair."""

    positions = POSITIONS

    @property
    def first_position(self) -> int:
        """Row of the first token's position in the checkpoint."""
        return 0

    @property
    def longest(self) -> int:
        """Positions that there are for a text."""
        return self.settings.integer("max_position_embeddings", 512) - self.first_position

    @property
    def kinds(self) -> int:
        """Number of types of texts, 1 or 2."""
        return min(2, max(1, int(self.settings.number("type_vocab_size", 2))))

    @property
    def second_text(self) -> int | None:
        """Row of the first position of a pair's second text; None = it has those of the first text."""
        return self.longest if self.kinds > 1 else None

    @property
    def most_context(self) -> int:
        return self.longest

    @property
    def position_rows(self) -> int:
        return self.longest * self.kinds

    def configure(self) -> dict[str, Any]:
        if (kind := self.settings.get("position_embedding_type", "absolute")) != "absolute":
            raise UnsupportedModel(f"{self.settings.file}: position_embedding_type {kind!r}: expected absolute")
        return super().configure() | {"context": self.longest}

    def embed(self, ops: Ops) -> Value:
        return ops.embed(self.embedding, positions=self.positions)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        """Add the vectors of both texts to those of positions: a row has one position, and one text."""
        types = [original(source, TYPES)] if source.has(TYPES) else []
        first, count, kinds = self.first_position, self.longest, self.kinds

        def rows(learned: Floats) -> Floats:
            places = learned[first : first + count]
            each = types[0].read(slice(0, kinds), None) if types else np.zeros((kinds, 1), np.float32)
            return np.concatenate([places + one for one in each])

        table = original(source, "embeddings.position_embeddings.weight")
        shape = (count * kinds, self.facts.hidden)
        return {**super().derived(source), POSITIONS: made_of(table, shape, rows, *types)}


@encoder("bert", "bge-small-en-v1.5, all-MiniLM-L6-v2, ms-marco-MiniLM-L6-v2", "BERT")
class Bert(LearnedPositions):
    """BERT."""


@encoder("roberta", "all-roberta-large-v1, all-distilroberta-v1", "BERT with positions after that of padding")
class Roberta(LearnedPositions):
    """RoBERTa: positions start after that of padding."""

    prefixes = ("roberta.",)
    head_modules = Classifier((("classifier.dense", "tanh"), ("classifier.out_proj", "none")))
    epsilon = ("layer_norm_eps", 1e-12)

    @property
    def first_position(self) -> int:
        padding = self.settings.get("pad_token_id", 1)
        return (padding if isinstance(padding, int) else 1) + 1


@encoder("xlm-roberta", "bge-m3, multilingual-e5-small, bge-reranker-v2-m3", "as roberta, of 100 languages")
class XlmRoberta(Roberta):
    """XLM-R."""


@encoder("camembert", "sentence-camembert-base", "as roberta, French")
class Camembert(Roberta):
    """CamemBERT."""


@encoder("distilbert", "multi-qa-distilbert-cos-v1, distiluse-base-multilingual", "BERT with half of the layers")
class DistilBert(LearnedPositions):
    """DistilBERT: as BERT with other names, and without types of texts."""

    prefixes = ("distilbert.",)
    head_modules = Classifier((("pre_classifier", "relu"), ("classifier", "none")))
    aliases = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
               "intermediate_size": "hidden_dim"}  # fmt: skip
    layers_at = "transformer.layer"
    layer_names = {
        **{ATTENTION.format(part): f"attention.{part}_lin" for part in "qkv"},
        OUTPUT: "attention.out_lin",
        FIRST_NORM: "sa_layer_norm",
        UP: "ffn.lin1",
        DOWN: "ffn.lin2",
        LAST_NORM: "output_layer_norm",
    }
    activation_key = "activation"

    @property
    def kinds(self) -> int:
        return 1


@encoder("mpnet", "all-mpnet-base-v2, multi-qa-mpnet-base-dot-v1", "BERT with biases by distance")
class MpNet(Roberta):
    """MPNet: positions as RoBERTa, and biases by distance as T5, which all layers share."""

    prefixes = ("mpnet.",)
    layer_names = {
        **TextEncoder.layer_names,
        **{ATTENTION.format(part): f"attention.attn.{part}" for part in "qkvo"},
        FIRST_NORM: "attention.LayerNorm",
    }
    buckets: ClassVar[int] = 16  # to either side
    distance: ClassVar[int] = 128

    @property
    def kinds(self) -> int:
        return 1

    def rule(self, layer: int) -> AttentionRule:
        return replace(super().rule(layer), relative=RelativeRule(DISTANCES, self.distance, True))

    def configure(self) -> dict[str, Any]:
        if (count := self.settings.integer("relative_attention_num_buckets", 2 * self.buckets)) != 2 * self.buckets:
            raise UnsupportedModel(f"{self.settings.file}: relative_attention_num_buckets {count}: expected 32")
        return super().configure()

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        places = np.arange(-self.distance, self.distance + 1)

        def spread(table: Floats) -> Floats:  # [buckets, heads] -> [heads * distances]
            return table[bucket_of(places, self.buckets, self.distance)].T.ravel()

        theirs = original(source, "encoder.relative_attention_bias.weight")
        biases = made_of(theirs, (self.facts.heads * len(places),), spread)
        return {**super().derived(source), DISTANCES: biases}


class RotatedEncoder(TextEncoder):
    """BERT's layers with rotations instead of positions and a gated MLP; names are those of transformers.

    The vector of the first type of texts is a part of the embedding: all texts have it.
    """

    layers_at = "layers"
    layer_names: Mapping[str, str] = {
        **{name: name for name in (*QKV, OUTPUT, UP, GATE, DOWN, FIRST_NORM)},
        FIRST_NORM: "post_attention_layernorm",
        LAST_NORM: "post_mlp_layernorm",
    }
    hub_layers: ClassVar[str] = ""  # where the layers are in the checkpoints of the authors
    hub_names: ClassVar[Mapping[str, str]] = {}  # their modules
    hub_stacked: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    hub_norm: ClassVar[str] = "embeddings.LayerNorm"
    gated_mlp = True
    rope_share = 1.0

    def __init__(self, source: Checkpoint) -> None:
        self._stacked: Mapping[str, tuple[str, ...]] = {}
        if source.has(f"{self.hub_layers}.0.{next(iter(self.hub_stacked))}.weight"):
            self.layers_at, self.layer_names, self._stacked = self.hub_layers, self.hub_names, self.hub_stacked
            self.outer_names = {**self.outer_names, EMBEDDING_NORM: self.hub_norm}
        super().__init__(source)

    def derived(self, source: Checkpoint) -> Mapping[str, Extra]:
        found = dict(super().derived(source))
        for layer in range(self.facts.layers):
            for name, modules in self._stacked.items():
                theirs, ours = f"{self.layers_at}.{layer}.{name}", f"{LAYERS}.{layer}"
                found |= stacked(original(source, f"{theirs}.weight"), ours, modules, self.facts)
                start = 0
                for module in modules if self.bias(modules[0]) else ():
                    size = found[f"{ours}.{module}.weight"].shape[0]
                    ids = np.arange(start, start + size)
                    found[f"{ours}.{module}.bias"] = rows_of(original(source, f"{theirs}.bias"), ids)
                    start += size
        if source.has(TYPES) and self.settings.number("type_vocab_size", 1):
            words, types = original(source, self.embedding_at(source)), original(source, TYPES)
            found[self.embedding] = _plus_row(words, types)
        return found


def _plus_row(matrix: Extra, other: Extra) -> Extra:
    """Add the first row of another matrix to every row."""

    def read(rows: slice, columns: slice | None) -> Floats:
        found: Floats = matrix.read(rows, columns) + other.read(slice(0, 1), columns)
        return found

    return Extra(matrix.size, read, matrix.origins | other.origins)


@encoder("gte", "gte-multilingual-base, gte-large-en-v1.5, snowflake-arctic-embed-m-v2.0", "BERT with rotations, gated")
class Gte(RotatedEncoder):
    """GTE's NewModel, as its authors or transformers save it."""

    prefixes = ("new.", "gte.")
    hub_layers = "encoder.layer"
    hub_names = {OUTPUT: "attention.o_proj", DOWN: "mlp.down_proj", FIRST_NORM: "attn_ln", LAST_NORM: "mlp_ln"}
    hub_stacked = {"attention.qkv_proj": QKV, "mlp.up_gate_proj": (UP, GATE)}
    biases = {"": True, UP: False, GATE: False}
    rope_theta = 160_000.0
    refused = (("logn_attention_scale", "scores scaled by the length", "gte without it"),)

    def configure(self) -> dict[str, Any]:
        for key, wanted in (("layer_norm_type", "layer_norm"), ("position_embedding_type", "rope")):
            if (got := self.settings.get(key, wanted)) not in (wanted, "absolute"):
                raise UnsupportedModel(f"{self.settings.file}: {key} {got!r}: expected {wanted}")
        return super().configure()

    def rotations(self) -> dict[str, Rotary]:
        scaling = self.settings.get("rope_scaling") or {}
        if not isinstance(scaling, dict) or scaling.get("type") != "ntk" or scaling.get("mixed_b"):
            return super().rotations()
        # https://kexue.fm/archives/9706, (6): the base grows, and every step shrinks a little
        factor, size = float(scaling.get("factor", 1.0)), self.facts.head_dim
        theta = self.settings.positive("rope_theta", self.rope_theta) * factor
        parameters = {"rope_type": "linear", "rope_theta": theta, "factor": factor ** (2 / size)}
        return {"rope": Rotary(parameters, size)}


@encoder("nomic_bert", "nomic-embed-text-v1.5, nomic-embed-text-v1", "BERT with rotations, gated, without biases")
class NomicBert(RotatedEncoder):
    """Nomic Embed, as its authors or transformers save it."""

    prefixes = ("nomic_bert.",)
    aliases = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
               "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
               "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"}  # fmt: skip
    hub_layers = "encoder.layers"
    hub_names = {OUTPUT: "attn.out_proj", UP: "mlp.fc11", GATE: "mlp.fc12", DOWN: "mlp.fc2", FIRST_NORM: "norm1",
                 LAST_NORM: "norm2"}  # fmt: skip
    hub_stacked = {"attn.Wqkv": QKV}
    hub_norm = "emb_ln"
    biases = {}
    activation_default = "silu"
    refused = (
        ("qkv_proj_bias", "biases of projections", "nomic_bert without them"),
        ("mlp_fc1_bias", "biases of the MLP", "nomic_bert without them"),
        ("prenorm", "norms before sub-layers", "nomic_bert without them"),
        ("num_experts", "mixtures of experts", "nomic-embed-text-v1 and v1.5"),
    )

    @property
    def classifier(self) -> Classifier | None:
        return None


@encoder("modernbert", "modernbert-embed-base, gte-modernbert-base, gte-reranker-modernbert-base", "ModernBERT")
class ModernBert(ResidualLayers):
    """ModernBERT: windows in two of three layers, which see as far ahead as back."""

    prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    layers_at = "layers"
    outer_names = {EMBEDDING: "embeddings.tok_embeddings", EMBEDDING_NORM: "embeddings.norm", FINAL_NORM: "final_norm"}
    layer_names = {FIRST_NORM: "attn_norm", OUTPUT: "attn.Wo", LAST_NORM: "mlp_norm", DOWN: "mlp.Wo"}
    stacked = {"attn.Wqkv": QKV, "mlp.Wi": (GATE, UP)}
    epsilon = ("norm_eps", 1e-5)
    activation_key = "hidden_activation"
    activation_default = "gelu"
    layer_norms = True
    biases = {}
    both_ways = True
    embedding_norm = True
    refused = (
        ("attention_bias", "biases of attention", "modernbert without them"),
        ("mlp_bias", "biases of the MLP", "modernbert without them"),
    )

    @property
    def classifier(self) -> Classifier | None:
        """The head of a model that scores texts."""
        activation = self.settings.get("classifier_activation", "gelu")
        modules = (("head.dense", str(activation)), ("head.norm", "norm"), ("classifier", "none"))
        return Classifier(modules, str(self.settings.get("classifier_pooling", "cls")))

    def norm(self, name: str) -> Norm:
        found = super().norm(name)
        return found if self.settings.flag("norm_bias") else replace(found, bias=None)

    def has_norm(self, layer: int, module: str) -> bool:
        return layer > 0 or module != FIRST_NORM

    def slides(self, layer: int) -> bool:
        if (kinds := self.layer_types) is not None:
            return bool(kinds[layer] == "sliding_attention")
        return layer % self.settings.integer("global_attn_every_n_layers", 3) != 0

    def window(self, layer: int) -> int:
        size = self.settings.integer("local_attention", 128) // 2 + 1
        return size if self.slides(layer) and size < self.facts.context else 0

    def rotations(self) -> dict[str, Rotary]:
        full, local = (self.settings.number(f"{kind}_rope_theta", theta) for kind, theta in
                       (("global", 160_000.0), ("local", 10_000.0)))  # fmt: skip
        return {"rope": self.rotation("full_attention", full, scaled=True),
                "rope_local": self.rotation("sliding_attention", local, scaled=True)}  # fmt: skip


@encoder("eurobert", "EuroBERT-210m", "a Llama whose tokens see each other")
class EuroBert(Llama):
    """EuroBERT."""

    both_ways = True
    epsilon = ("rms_norm_eps", 1e-5)


@encoder("gemma3_text", "embeddinggemma-300m", "a Gemma 3 whose tokens see each other")
class EmbeddingGemma(Gemma3):
    """EmbeddingGemma: windows see as far ahead as back."""

    both_ways = True

    def window(self, layer: int) -> int:
        size = (self.settings.optional("sliding_window") or 0) // 2 + 1
        return size if size > 1 and self.slides(layer) and size < self.facts.context else 0
