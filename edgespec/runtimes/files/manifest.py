"""The manifest of a bundle (``edgespec.json``): its schema, and reading it with errors a person can act on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, PrivateAttr, model_validator

from edgespec.errors import BundleError
from edgespec.runtimes.files.bounds import (
    MOST_GUESSES,
    Count,
    Guesses,
    Layers,
    Memory,
    Parity,
    Provenance,
    Ratio,
    Share,
    Shares,
    Times,
    Token,
    Tokens,
)
from edgespec.runtimes.files.codes import CodesPart as CodesPart
from edgespec.runtimes.files.embedding import EmbeddingPart as EmbeddingPart
from edgespec.runtimes.files.embedding import Pooling as Pooling
from edgespec.runtimes.files.facts import ModelFacts as ModelFacts
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.formats import FORMER, Format
from edgespec.runtimes.files.images import ImagePart as ImagePart
from edgespec.runtimes.files.json_file import read_json, validated
from edgespec.runtimes.files.manifest_parts import EMBEDDING as EMBEDDING
from edgespec.runtimes.files.manifest_parts import MARKOV as MARKOV
from edgespec.runtimes.files.manifest_parts import AttentionGate as AttentionGate
from edgespec.runtimes.files.manifest_parts import AttentionPart as AttentionPart
from edgespec.runtimes.files.manifest_parts import DecoderPart as DecoderPart
from edgespec.runtimes.files.manifest_parts import DrafterKind as DrafterKind
from edgespec.runtimes.files.manifest_parts import FeaturePart as FeaturePart
from edgespec.runtimes.files.manifest_parts import FileName, InsidePath
from edgespec.runtimes.files.manifest_parts import FinalNorm as FinalNorm
from edgespec.runtimes.files.manifest_parts import HeadGroup as HeadGroup
from edgespec.runtimes.files.manifest_parts import HeadVocab as HeadVocab
from edgespec.runtimes.files.manifest_parts import Matching as Matching
from edgespec.runtimes.files.manifest_parts import SamplingPart as SamplingPart
from edgespec.runtimes.files.manifest_parts import SelectorPart as SelectorPart
from edgespec.runtimes.files.manifest_parts import SourcePart as SourcePart
from edgespec.runtimes.files.manifest_parts import TranslationPart as TranslationPart
from edgespec.runtimes.files.migration import OLDEST, migrated
from edgespec.runtimes.files.migration import SCHEMA as SCHEMA
from edgespec.runtimes.files.seq2seq_format import TextForm as TextForm
from edgespec.runtimes.files.seq2seq_format import WritingRules as WritingRules
from edgespec.runtimes.files.sound import SoundPart as SoundPart
from edgespec.runtimes.files.sound import read_alike
from edgespec.runtimes.files.speech import SpeechPart

if TYPE_CHECKING:
    from edgespec.decoding.target import SkipSet

MANIFEST = "edgespec.json"

Layout = Literal["stock", "native"]
Operators = Literal["stock", "native"]
Precision = Literal["fp32", "fp16"]
Origin = Literal["edgespec", "optimum", "transformers"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")  # of activations, in graphs for devices
MODELS = "target", "draft", "drafter"
MAIN_GRAPHS = ("gated", "strict", "plain", "native")


class SkipSetPart(Part):
    """Layers whose attention / MLP a self-draft skips, and layers of which it reads only the high planes."""

    attention: Layers = Field(default_factory=list)
    mlp: Layers = Field(default_factory=list)
    high_attention: Layers = Field(default_factory=list)
    high_mlp: Layers = Field(default_factory=list)
    high_head: bool = Field(default=False, description="the same of the LM head")
    head_rows: Count = Field(default=0, description="tokens, the first ones, that the LM head scores; 0 = all")

    @classmethod
    def of(cls, skip: SkipSet) -> SkipSetPart:
        """Convert a self-draft's set."""
        return cls(**asdict(skip))

    @property
    def whole(self) -> bool:
        """Whether only low planes are left out: without planes it is the whole model."""
        return not self.attention and not self.mlp

    @property
    def words(self) -> str:
        """Describe the skipped layers and planes."""
        found = f"skips {len(self.attention)} attentions and {len(self.mlp)} MLPs"
        if self.high_attention or self.high_mlp or self.high_head:
            rows = f" for the first {self.head_rows} tokens" if self.head_rows else ""
            head = f" and the LM head{rows}" if self.high_head else ""
            found += f", reads high planes of {len(self.high_attention)} attentions, {len(self.high_mlp)} MLPs{head}"
        return found


def _check_skip(skip: SkipSetPart | None, facts: ModelFacts) -> None:
    """Check that the model has all of these layers."""
    if skip is None:
        return
    if max((*skip.attention, *skip.mlp, *skip.high_attention, *skip.high_mlp), default=-1) >= facts.layers:
        raise ValueError(f"skip: names a layer that a model of {facts.layers} does not have")
    if skip.head_rows > facts.vocab:
        raise ValueError(f"skip: the first {skip.head_rows} tokens of a vocabulary of {facts.vocab}")


def _check_facts(facts: ModelFacts, borrows: bool) -> None:
    """Check that sizes fit together; ``borrows``: every layer reads the target's keys and values."""
    if facts.heads % facts.kv_heads or (not facts.kv_layers and not borrows):
        raise ValueError(f"facts: {facts.heads} heads do not share {facts.kv_heads} KV heads evenly")
    if (short := facts.convolutions) and (short != sorted({*short} & {*range(facts.layers)}) or facts.taps < 2):
        raise ValueError(f"facts: convolutions {short} of {facts.taps} tokens in {facts.layers} layers")
    if facts.delta and not facts.convolutions:
        raise ValueError("facts: delta without convolutions")
    if facts.shared >= facts.layers + borrows or (facts.head_dims and len(facts.head_dims) != facts.kv_layers):
        raise ValueError(f"facts: head_dims of {len(facts.head_dims)} layers, {facts.shared} of {facts.layers} shared")
    if (mixed := facts.experts) and (
        not mixed.always < mixed.chosen <= mixed.count or max(mixed.layers, default=0) >= facts.layers
    ):
        raise ValueError(f"facts: {mixed.chosen} of {mixed.count} experts in layers {mixed.layers}")


def _check_encoder(source: SourcePart | None, encoder: ModelPart | None) -> None:
    """Check that an encoder gives the rows that its decoder attends over."""
    if (encoder is None) != (source is None or source.shares_encoder):
        raise ValueError("source: expected an encoder beside it, unless it shares the target's")
    if source is not None and (source.kind == "features") != (source.features is not None):
        raise ValueError(f"source: of the kind {source.kind!r}, with features {source.features}")
    if source is None or encoder is None:
        return
    if encoder.source or encoder.decoder or "native" not in encoder.graphs:
        raise ValueError("encoder: expected one without a source, for native operators")
    if (encoder.facts.hidden, encoder.facts.context) != (source.width, source.max_rows):
        raise ValueError(f"encoder: gives {encoder.facts.context} rows of {encoder.facts.hidden}, but source is "
                         f"{source.max_rows} of {source.width}")  # fmt: skip


def _check_tower(part: ModelPart) -> None:
    """Check that a tower and projectors give the rows that the decoder reads."""
    if part.audio is not None:
        audio = part.audio
        if part.image is None:
            raise ValueError("audio: expected images too; a model of sound alone has sound, tower and projectors")
        _check_side(part, None, audio.sound, audio.tower, audio.projectors, audio.convolutions or [])
    _check_side(part, part.image, part.sound, part.tower, part.projectors or [], part.convolutions or [])


def _check_side(
    part: ModelPart,
    image: ImagePart | None,
    sound: SoundPart | None,
    tower: ModelPart | None,
    projectors: list[ModelPart],
    convolutions: list[ModelPart],
) -> None:
    if not any((image, sound, tower, projectors, convolutions)):
        return
    taps, wanted = image.deepstack_layers if image else [], getattr(sound.front, "convolutions", 0) if sound else 0
    if (image and sound) or tower is None or len(projectors) != 1 + len(taps):
        raise ValueError("image or sound: expected a tower and a projector beside it, and one for each of its taps")
    if len(convolutions) != wanted:
        raise ValueError(f"convolutions: expected {wanted}")
    sides = tower, *projectors, *convolutions
    if any("native" not in one.graphs or one.source or one.senses for one in sides):
        raise ValueError("tower: expected it and its projectors for native operators, with nothing beside them")
    if lost := [one.facts.hidden for one in projectors if one.facts.hidden != part.facts.hidden]:
        raise ValueError(f"projectors: give rows of {lost[0]}, and the decoder has {part.facts.hidden}")
    if any(tap > tower.facts.layers for tap in taps):
        raise ValueError(f"image: deepstack_layers: after more than {tower.facts.layers} layers")


class Sense(NamedTuple):
    """How images, or sounds, become rows of a decoder.

    Attributes:
        part: the description.
        front: the models that do it: tower, projectors, convolutions.
    """

    part: ImagePart | SoundPart
    front: list[ModelPart]

    @property
    def kind(self) -> str:
        """The type of parts of messages that it reads."""
        return "image" if isinstance(self.part, ImagePart) else "audio"


class Graph(Part):
    """One ONNX file of a model.

    ``gated``: each pass can skip sub-layers.  ``padded``: attention gets a dummy row, so ``position_ids`` and
    ``bias`` have one row more than ``input_ids``, and further rows until attention sees ``min_length`` tokens, these
    included (where heads are wider than 128: docs/dev/runtime.md).  ``hidden``: each pass can return and accept hidden
    states, and compute heads.
    ``device``: the device that it was written for (docs/devices.md), and ``precision``: of its activations, keys and
    values.
    """

    file: InsidePath
    device: Literal["cpu", "webgpu"] = "cpu"
    precision: Precision = "fp32"
    gated: bool = False
    padded: bool = False
    min_length: int | None = Field(default=None, ge=1, le=1 << 10)
    hidden: bool = False
    operators: Operators = "stock"
    skip: SkipSetPart | None = Field(default=None, description="sub-layers that it leaves out")


def graph_name(device: str, precision: Precision, which: str = "") -> str:
    """Name the graph of a ``device`` in ``ModelPart.graphs``; see ``DeviceModel.open`` for ``which``."""
    name = device if precision == "fp32" else f"{device}-{precision}"
    return f"{name}/{which}" if which else name


class BytesPerWeight(Part):
    """Mean bytes of a weight that is stored as its file has it: matrices differ."""

    layers: float = Field(gt=0, le=4)
    head: float = Field(gt=0, le=4, description="of the LM head")
    embedding: float = Field(gt=0, le=4)
    planes: bool = Field(default=False, description="most weights of layers are in two planes")


class ModelPart(Part):
    """A model of the bundle: its facts, its format and its graphs over one weight file.

    ``layout``: the operators whose layout the weights have.  For other operators the weights are repacked, by
    ``index``, into a file called ``converted``, which is never in the bundle: without repacking, such a graph finds
    no weights. ``origin``: the writer of the graphs; others than edgespec's concatenate keys and values
    (docs/bundle.md) and run only chains.
    """

    facts: ModelFacts
    format: Format
    quantizer: str = Field(default="rtn", description="how int4 and int8 levels were chosen")
    int8_fraction: float | None = Field(default=None, ge=0, le=1, description="share of layers' weights in int8")
    head_format: Format | None = Field(default=None, description="of LM head and tied embedding, if not ``format``")
    embedding_format: Format | None = Field(default=None, description="of one that is not tied, if not ``format``")
    bytes_per_weight: BytesPerWeight | None = Field(default=None, description="of format ``file``")
    graphs: dict[str, Graph]
    weights: InsidePath
    index: InsidePath | None = None
    layout: Layout = "stock"
    low_nibble_bytes: Count = Field(
        default=0, description="low planes of int8 matrices, last in native operators' weights"
    )
    converted: FileName | None = Field(default=None, description="what graphs of the other layout call the weights")
    extra_rows: int = Field(gt=0, le=1 << 12, description="rows beyond the context that the position tables cover")
    min_rows: int = Field(ge=0, le=1, description="fewest rows that may reach the LM head")
    attention: AttentionPart | None = None
    heads: list[HeadGroup] = Field(default_factory=list)
    head_vocab: HeadVocab | None = Field(default=None, description="of heads; of a draft: of its only LM head")
    cut: bool = Field(default=False, description="the only LM head is the cut one: a draft")
    final_norm: FinalNorm | None = Field(default=None, description="of a target")
    origin: Origin = "edgespec"
    aux_hidden_layers: Layers = Field(
        default_factory=list, description="of a target: layers whose outputs drafters read"
    )
    decoder: DecoderPart | None = Field(default=None, description="of a drafter conditioned on the target")
    source: SourcePart | None = Field(default=None, description="of a decoder that attends over what an encoder gave")
    encoder: ModelPart | None = Field(default=None, description="that encoder, which has no source of its own")
    image: ImagePart | None = Field(default=None, description="of a target that reads images")
    sound: SoundPart | None = Field(default=None, description="of a target that hears")
    tower: ModelPart | None = Field(default=None, description="the encoder of what images, or sounds, are cut into")
    projectors: list[ModelPart] | None = Field(
        default=None, description="encoders without layers, which make the decoder's rows of merged ones of the tower"
    )
    convolutions: list[ModelPart] | None = Field(default=None, description="likewise, over features before the tower")
    audio: AudioPart | None = Field(default=None, description="audio encoder of a target that reads images and sound")
    _high_alone: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _fits(self) -> ModelPart:
        facts = self.facts
        if not any(name in self.graphs for name in MAIN_GRAPHS):
            raise ValueError(f"graphs: expected one of {', '.join(MAIN_GRAPHS)}")
        _check_facts(facts, borrows=bool(self.decoder and self.decoder.reads))
        for graph in self.graphs.values():
            _check_skip(graph.skip, facts)
        if len({group.name for group in self.heads}) < len(self.heads) or len(self.heads) > MOST_GUESSES:
            raise ValueError(f"heads: expected at most {MOST_GUESSES} groups, each with a name of its own")
        if max((group.layer for group in self.heads), default=0) > facts.layers:
            raise ValueError(f"heads: an exit after more than {facts.layers} layers")
        if self.head_vocab and self.head_vocab.size > facts.vocab:
            raise ValueError(f"head_vocab: {self.head_vocab.size} tokens of a vocabulary of {facts.vocab}")
        if self.cut and not self.head_vocab:
            raise ValueError("cut: without head_vocab")
        if max(self.aux_hidden_layers, default=0) > facts.layers:
            raise ValueError(f"aux_hidden_layers: after more than {facts.layers} layers")
        if self.decoder and self.decoder.reads and (len(self.decoder.reads), facts.shared) != (facts.layers,) * 2:
            raise ValueError(f"decoder: reads of {len(self.decoder.reads)} of {facts.layers} layers")
        if self.decoder and self.decoder.columns <= facts.hidden:
            raise ValueError(f"decoder: {self.decoder.columns} columns, of which the embedding has {facts.hidden}")
        _check_encoder(self.source, self.encoder)
        _check_tower(self)
        return self

    @property
    def foreign(self) -> bool:
        """Whether its graphs come from another exporter."""
        return self.origin != "edgespec"

    @property
    def sides(self) -> list[ModelPart]:
        """The encoders that belong to it: of a source, of images, of sound."""
        return [part for part in (self.encoder, *self.front) if part]

    @property
    def front(self) -> list[ModelPart]:
        """Models that turn images or sound into rows: tower, projectors, convolutions; empty for a text model."""
        return [*self._own_front, *(self.audio.front if self.audio else ())]

    @property
    def _own_front(self) -> list[ModelPart]:
        return [] if self.tower is None else [self.tower, *(self.projectors or ()), *(self.convolutions or ())]

    @property
    def hearing(self) -> SoundPart | None:
        """How sounds become rows; None = it reads none."""
        return self.audio.sound if self.audio else self.sound

    @property
    def senses(self) -> list[Sense]:
        """How images and sounds become rows; empty for a text model."""
        own = self.image or self.sound
        found = [] if own is None else [Sense(own, self._own_front)]
        return found + ([Sense(self.audio.sound, self.audio.front)] if self.audio else [])

    @property
    def planes(self) -> bool:
        """Whether int8 matrices of native operators are in two planes of 4 bits."""
        return self.low_nibble_bytes > 0

    @property
    def layers_have_planes(self) -> bool:
        """Whether matrices of layers are in two planes, and not only those of the LM head."""
        as_file = self.bytes_per_weight is not None and self.bytes_per_weight.planes
        return self.planes and (self.format == "int8" or self.int8_fraction is not None or as_file)

    @property
    def high_alone(self) -> bool:
        """Whether only the high planes are read (``at_high_precision``)."""
        return self._high_alone

    def at_high_precision(self) -> ModelPart:
        """Describe the same files as run with only the high planes: a model of 4 bits."""
        if not self.planes:
            return self
        update: dict[str, Any] = {"int8_fraction": None}
        for name in ("format", "head_format", "embedding_format"):
            if getattr(self, name) == "int8":
                update[name] = "int4"
        for name in ("encoder", "tower", "projectors", "convolutions"):
            if beside := getattr(self, name):
                listed = isinstance(beside, list)
                update[name] = [one.at_high_precision() for one in beside] if listed else beside.at_high_precision()
        found = self.model_copy(update=update)
        found._high_alone = True
        return found

    @property
    def main(self) -> str:
        """The graph that can run every method: gated if there is one, else strict, else plain."""
        return next(name for name in MAIN_GRAPHS if name in self.graphs)


def _check_sources(target: ModelPart, draft: ModelPart | None) -> None:
    """Check that a draft attends over the same sources as its target."""
    if draft and (draft.source is None) != (target.source is None):
        raise ValueError("draft: expected an encoder-decoder beside an encoder-decoder, and else a decoder alone")
    own, other = target.source, draft.source if draft else None
    if own and (own.shares_encoder or (other and other.kind != own.kind)):
        raise ValueError("source: expected the target to have an encoder, and its draft one of the same kind")
    if own and other and other.shares_encoder and other.width != own.width:
        raise ValueError(f"draft: attends over rows of {other.width}, and the target's encoder gives {own.width}")


class Measured(Part):
    """A measured acceptance: P(accepted | offered) by draft position, and on what it was measured."""

    acceptance: Shares = Field(min_length=1)
    confidence: Shares = Field(
        default_factory=list,
        max_length=8,
        description="self-spec: acceptance by its own probability of a guess: below .2, .35, .5, .65, .8, .9, .97",
    )
    positions: Count
    text: str
    text_sha256: str


class MethodPart(Part):
    """Parameters of one decoding method."""

    gamma: Guesses = 4
    skip: SkipSetPart | None = None
    heads: list[str] = Field(default_factory=list, description="names of the model's head groups it uses")
    ranks: list[Shares] = Field(
        default_factory=list,
        max_length=MOST_GUESSES,
        description="[head][rank]: share of held-out positions where the head's guess of that rank is right",
    )
    threshold: Share | None = Field(default=None, description="early exits: confidence from which an exit is taken")
    branch: list[Guesses] = Field(
        default_factory=list,
        max_length=MOST_GUESSES,
        description="speculative: guesses per node, by depth; one number: along the chain",
    )
    head_rows: Count | None = Field(
        default=None, description="speculative: tokens, the first ones, that the draft's head scores in usual texts"
    )
    measured: list[Measured] = Field(default_factory=list)
    draft_cost: Ratio | None = Field(default=None, description="c: draft step over target step, measured at export")
    first_cost: Ratio | None = Field(default=None, description="of a round's first step, where it takes another time")
    predicted_speedup: Ratio | None = None
    notes: str | None = None


class TokenizerFacts(Part):
    """Token ids the runtime needs without opening the tokenizer."""

    bos: Token | None = None
    eos: Tokens = Field(default_factory=list)
    chat_template: bool = False


class FileEntry(Part):
    """Size in bytes and SHA-256 of one file."""

    size: Count
    sha256: str


class GoldenVector(Part):
    """A prompt, and this bundle's own plain decoding of it, which every other runtime must reproduce.

    ``prefix_tokens``: of an encoder-decoder, whose ``prompt`` is the encoder's input: the first tokens of the output.
    """

    prompt: Tokens
    prefix_tokens: Tokens | None = None
    method: str
    tokens: Tokens


class AudioPart(Part):
    """Audio encoder of a model that also reads images; the fields are those of ``ModelPart``."""

    sound: SoundPart
    tower: ModelPart
    projectors: list[ModelPart]
    convolutions: list[ModelPart] | None = None

    @property
    def front(self) -> list[ModelPart]:
        """Tower, projectors, convolutions."""
        return [self.tower, *self.projectors, *(self.convolutions or ())]


ModelPart.model_rebuild()


class Manifest(Part):
    """The whole manifest."""

    schema_version: int
    edgespec_version: str
    target: ModelPart
    draft: ModelPart | None = None
    drafter: ModelPart | None = None
    translation: TranslationPart | None = Field(default=None, description="of a draft with another tokenizer")
    methods: dict[str, MethodPart]
    tokenizer: TokenizerFacts
    sampling: SamplingPart | None = Field(default=None, description="the model's own; None = it has none")
    rules: WritingRules | None = Field(default=None, description="of a decoder: which tokens may come; None = any")
    text: TextForm | None = Field(default=None, description="of an encoder-decoder: what stands around its texts")
    speech: SpeechPart | None = Field(default=None, description="of a model that hears: what transcripts begin with")
    codes: CodesPart | None = Field(default=None, description="of a model that draws or speaks: what its tokens become")
    pooling: Pooling | None = Field(default=None, description="how embeddings of texts are made; None = not said")
    embedding: EmbeddingPart | None = Field(default=None, description="what else embeddings, or scores, need")
    parity: Parity = Field(default_factory=dict)
    cost: Times = Field(default_factory=dict)
    memory: Memory = Field(default_factory=dict)
    provenance: Provenance = Field(default_factory=dict)
    golden: list[GoldenVector] = Field(default_factory=list)
    files: dict[InsidePath, FileEntry] = Field(default_factory=dict)
    _stored_schema: int = PrivateAttr(default=SCHEMA)

    @property
    def stored_schema(self) -> int:
        """Schema of the file it was read from."""
        return self._stored_schema

    @property
    def is_encoder(self) -> bool:
        """Whether the target is an encoder, which writes no text."""
        return self.embedding is not None and self.embedding.encoder

    @property
    def hears(self) -> bool:
        """Whether it transcribes recordings."""
        return self.speech is not None or self.target.hearing is not None

    @property
    def models(self) -> list[ModelPart]:
        """Return every model of the bundle: the target first, encoders last."""
        found = [part for part in (self.target, self.draft, self.drafter) if part]
        return found + [side for part in found for side in part.sides]

    def at_high_precision(self) -> Manifest:
        """Describe the same files as run with only the high planes, with the quality that export measured for those."""
        parts = {name: part.at_high_precision() for name in MODELS if (part := getattr(self, name))}
        files = dict(self.files)
        for part in self.models:
            if part.weights in files and part.layout == "native":
                entry = files[part.weights]
                files[part.weights] = entry.model_copy(update={"size": entry.size - part.low_nibble_bytes})
        parity = self.parity | self.parity.get("high_precision", {})
        return self.model_copy(update={**parts, "files": files, "golden": [], "cost": {}, "parity": parity})

    def beside(self, needs: str) -> ModelPart | None:
        """Return the model that guesses for a method which ``needs`` a "draft" or a "drafter"; None = there is none."""
        return {"draft": self.draft, "drafter": self.drafter}.get(needs)

    @model_validator(mode="after")
    def _fits(self) -> Manifest:
        facts, groups = self.target.facts, {group.name: group for group in self.target.heads}
        for name, method in self.methods.items():
            _check_skip(method.skip, facts)
            if lost := [head for head in method.heads if head not in groups]:
                raise ValueError(f"methods: {name} uses heads {lost[0]!r}, which the model does not have")
        if drafter := self.drafter:
            own, columns = drafter.facts, (1 + len(self.target.aux_hidden_layers)) * facts.hidden
            reads, given = (drafter.decoder.reads, drafter.decoder.columns) if drafter.decoder else ([], 0)
            if (own.hidden if not reads else facts.hidden, own.vocab, given) != (facts.hidden, facts.vocab, columns):
                raise ValueError("drafter: of another hidden size, vocabulary or number of auxiliary hidden states "
                                 "than the target")  # fmt: skip
            if reads and (max(reads) >= facts.kv_layers or own.kv_heads != facts.kv_heads):
                raise ValueError(f"drafter: reads {own.kv_heads} key heads of layers {reads} of the target")
        _check_sources(self.target, self.draft)
        if self.translation and (self.draft is None or self.draft.source):
            raise ValueError("translation: expected a draft without a source")
        if self.codes and (end := self.codes.first + self.codes.size) > facts.vocab:
            raise ValueError(f"codes: up to token {end} of a vocabulary of {facts.vocab}")
        wanted = [sense.part for sense in self.target.senses]
        others = [[sense.part for sense in part.senses] for part in (self.draft, self.drafter) if part and part.senses]
        if not all(read_alike(wanted, other) for other in others):
            raise ValueError("draft: expected one that reads text alone, or images and sound as its target does")
        if any(max([0, *(one.prefix_tokens or one.prompt), *one.tokens]) >= facts.vocab for one in self.golden):
            raise ValueError(f"golden: a token outside the vocabulary of {facts.vocab}")
        return self


def read_manifest(folder: Path) -> Manifest:
    """Read and validate ``folder/edgespec.json``.

    Raises:
        BundleError: no folder or manifest, unreadable JSON, a newer schema, a path that leaves the folder, a wrong key.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = f"has no {MANIFEST}" if folder.is_dir() else "is not a folder"
        raise BundleError(f"{folder}: expected a bundle, but it {what}", "make one with `edgespec export MODEL`")
    data = read_json(path, BundleError, "export the bundle again")
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int):
        raise BundleError(f"{path}: expected an object with an integer schema_version, got {version!r}")
    if version < OLDEST:
        raise BundleError(
            f"{path}: schema {version} is older than this edgespec, which reads from schema {OLDEST} on",
            "export the bundle again with this version",
        )
    if version > SCHEMA:
        raise BundleError(
            f"{path}: schema {version} is newer than this edgespec, which reads up to schema {SCHEMA}",
            "upgrade edgespec, or export the bundle with this version",
        )
    now = migrated(data, version)
    models = [now[name] for name in ("target", "draft", "drafter") if isinstance(now.get(name), dict)]
    named = [part.get(key) for part in models for key in ("format", "head_format", "embedding_format")]
    if former := [form for form in FORMER if form in named]:
        raise BundleError(
            f"{path}: weights in {former[0]}, a format that this edgespec no longer has",
            "export the model again, without --format or in int4",
        )
    found = validated(Manifest, now, path, BundleError, "export the bundle again")
    found._stored_schema = version
    return found
