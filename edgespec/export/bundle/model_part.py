"""Entry of a model in the manifest, both for written and for planned graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from edgespec.drafters.registry import searching
from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures import Architecture, architecture
from edgespec.export.architectures.base import AudioEncoderSpec, VisionEncoderSpec
from edgespec.export.architectures.sights import limit_images
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.pieces import min_length
from edgespec.export.emit.plan import HEADROOM, WEIGHTS, converted_name
from edgespec.export.emit.stock import native_only
from edgespec.export.source.source import Checkpoint, ConfigOnly
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import FILE, FOUR_BITS, LEARNT, Attention, Format
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.manifest import (
    AudioPart,
    BytesPerWeight,
    DecoderPart,
    FinalNorm,
    Graph,
    HeadVocab,
    ImagePart,
    Layout,
    ModelFacts,
    ModelPart,
    SelectorPart,
    SoundPart,
    SourcePart,
)
from edgespec.runtimes.files.operators import WantedOperators
from edgespec.runtimes.files.sound import read_alike

MAIN, STRICT, PLAIN, NATIVE = "model.onnx", "model.strict.onnx", "model.plain.onnx", "model.native.onnx"
ENCODER, TOWER, PROJECTOR, CONVOLUTION = "encoder", "tower", "projector", "convolution"  # names of files
AUDIO = "audio_"  # what those of sound begin with in a model that also reads images
INDEX = "model.weights.json"
STANDARD = "standard"  # name of a graph
FINAL_NORM, CONFIDENCE, MASKED = "final_norm.bin", "confidence.bin", "masked.bin"
SELECTOR = "selector.bin"


@dataclass(frozen=True)
class ModelSpec:
    """How a model is stored in a bundle."""

    format: Format  # weight format of every matrix
    head: Format | None = None  # weight format of the LM head and of the embedding tied to it; None = ``format``
    fine: frozenset[str] = frozenset()  # names of matrices that are int8, in any ``format``
    gated: bool = False  # sub-layers can be left out of the strict graph
    draft: bool = False  # only the plain graph
    prefix: str = ""  # path of its folder inside the bundle, with a trailing slash
    layout: Layout = "native"  # which operators' weights are stored
    # heads in addition to the LM head; the checkpoint has their tensors.  None = hidden states are not needed either
    # (native graphs return them anyway)
    plan: HeadPlan | None = None
    head_vocab: HeadVocab | None = None  # the tokens of the plan's cut LM head
    shares_encoder: bool = False  # a draft reads what the target's encoder gives

    @property
    def stays_stock(self) -> bool:
        """Whether weights are a file's own in the layout of stock operators, which is never converted."""
        return self.format == FILE and self.layout == "stock"

    @property
    def front_format(self) -> Format:
        """Weight format of vision and audio encoders: int8 in a 4-bit model, because they are comparatively small."""
        return "int8" if self.format in (*FOUR_BITS, FILE) else self.format


def open_model(path: Path, context: int | None, adapter: Path | None = None, text_only: bool = False) -> Architecture:
    """Open a checkpoint as one of the supported architectures, limited to ``context`` tokens.

    Args:
        path: a model's folder or .gguf file.
        context: None = as far as the model was made for.
        adapter: folder of a LoRA adapter to merge into it.

    Raises:
        ExportError: unreadable, unsupported, or a context beyond what the model was made for.
    """
    return limited(architecture(Checkpoint.open(path, adapter), text_only), context)


def open_draft(
    path: Path, target: Architecture | None, image_rows: int | None, opener: Callable[..., Architecture] = open_model
) -> Architecture:
    """Open a draft model, with its vision or audio encoder if the target has one too; otherwise only its text part.

    Args:
        target: None = a foreign graph.
        image_rows: maximum rows of an image; None = the model's own maximum.
        opener: ``open_model``, or ``open_described``.
    """
    if target is not None and modality_specs(target):
        with suppress(UnsupportedModel):
            arch = opener(path, None)
            if arch.sight is not None:
                limit_images(arch, image_rows)
            if read_alike(modality_specs(target), modality_specs(arch)):
                return arch
    return opener(path, None, text_only=True)


def modality_specs(arch: Architecture) -> list[ImagePart | SoundPart]:
    """Return how images and sounds become embeddings of a model; empty if it reads only text."""
    found = arch.sight and arch.sight.image, arch.hearing and arch.hearing.sound
    return [one for one in found if one is not None]


def open_described(path: Path, context: int | None, text_only: bool = False) -> Architecture:
    """As ``open_model``; of a folder without weights what its config.json describes, which cannot be exported."""
    return limited(architecture(described_source(path), text_only), context)


def described_source(path: Path) -> Checkpoint:
    """Open a model's description, without its tokenizer; for a folder without weights only its config.json."""
    return ConfigOnly.open(path) if ConfigOnly.suits(path) else Checkpoint.open(path, tokenizer=False)


def limited(arch: Architecture, context: int | None) -> Architecture:
    """Return the architecture with its context limited."""
    if context is not None:
        if not 1 < context <= arch.most_context:
            raise ExportError(f"--context {context}: expected 2 to {arch.most_context}, the model's own limit")
        for side in (arch, arch.encoder if arch.positions is None else None):  # learnt positions are each side's own
            if side is not None:
                side.facts = side.facts.model_copy(update={"context": context})
    return arch


def check_devices(arch: Architecture, devices: Sequence[DeviceName]) -> None:
    """Refuse models that a device's operators compute wrongly, or not at all."""
    if devices and (what := native_only(arch)):
        raise UnsupportedModel(
            f"--device {devices[0]}: this model has {what}, which only native operators compute", "use it on the CPU"
        )
    if devices and any(arch.rule(layer).cap for layer in range(arch.facts.layers)):
        raise UnsupportedModel(
            f"--device {devices[0]}: this model's attention caps its scores, which the provider's attention does not",
            "use it on the CPU",
        )


def check_layers(methods: Sequence[str], facts: ModelFacts) -> None:
    if facts.layers < 3 and (found := [name for name in methods if name in searching()]):
        raise ExportError(
            f"{found[0]} leaves out layers between first and last, but the model has {facts.layers} layers",
            "use another method",
        )


def check_operators(arch: Architecture, operators: WantedOperators) -> None:
    """Refuse stock operators for a model that they cannot run."""
    if operators == "stock" and (what := native_only(arch)):
        raise UnsupportedModel(
            f"--operators stock: this model has {what}, which only native operators compute", "leave --operators out"
        )


def check_coded_keys(facts: ModelFacts, names: Sequence[Attention]) -> None:
    """Refuse keys in learnt codes for a model with heads of several sizes: their tables are for one."""
    coded = [name for name in names if ATTENTION[name].keys in LEARNT]
    if coded and facts.head_dims:
        raise ExportError(f"--attention {coded[0]}: this model has heads of several sizes", "use f32, f16 or int8")


def stock_graphs(arch: Architecture, spec: ModelSpec) -> dict[str, Graph]:
    """Return the graphs of stock operators.

    A target has two: the strict one (its sub-layers gated if asked for), whose rows have the same bits in every pass,
    and the plain one, the fastest plain decoding.  A draft needs only the latter.  In the layout of stock operators a
    target has a standard one as well, which other programs open (``emit_standard``).
    """
    if native_only(arch) or (spec.format == FILE and not spec.stays_stock):  # see check_operators
        return {}
    hidden, prefix = bool(arch.input_width or (spec.plan and not spec.draft)), spec.prefix
    if spec.draft:
        return {"plain": Graph(file=prefix + PLAIN, hidden=hidden)}
    least = min_length(arch.facts.head_dim) or None
    strict = Graph(file=prefix + STRICT, gated=spec.gated, padded=True, min_length=least, hidden=hidden)
    found = {"gated" if spec.gated else "strict": strict, "plain": Graph(file=prefix + PLAIN)}
    return found | ({STANDARD: Graph(file=prefix + MAIN)} if spec.layout == "stock" and not arch.input_width else {})


def counted(arch: Architecture) -> ModelFacts:
    """Return the facts of a model with its parameters."""
    return arch.facts.model_copy(update={"parameters": sum(prod(shape) for shape in arch.tensors.values())})


def _final_norm(arch: Architecture) -> FinalNorm:
    norm = arch.final_norm
    return FinalNorm(file=FINAL_NORM, eps=arch.eps, centered=norm.centered, biased=norm.bias is not None)


def source_of(arch: Architecture) -> SourcePart | None:
    """Return the source that a decoder attends over; None = only its own text."""
    return arch.source_part if arch.encoder is not None else None


def model_part(
    arch: Architecture,
    spec: ModelSpec,
    quantizer: str | None,  # name of the quantizer; None = rounded
    low_nibble_bytes: int,  # of the low planes of its int8 matrices
    int8_fraction: float
    | None = None,  # share of the weights of layers that are int8, if ``spec.fine`` names any matrix
    encoder_low_nibble_bytes: int = 0,  # as ``low_nibble_bytes``, of the encoder
    bytes_per_weight: BytesPerWeight | None = None,  # of weights that are as their file has them
) -> ModelPart:
    """Return the entry of a model, with those of its encoders."""
    encoder = None if spec.shares_encoder else arch.encoder
    facts, decoder, plan, prefix = counted(arch), None, spec.plan or HeadPlan(), spec.prefix
    if (drafter := arch.drafter) is not None:
        # a drafter's size counts the tokens that it scores here, not those of its checkpoint
        if spec.head_vocab is not None:
            less = prod(arch.tensors[arch.head.weight]) - spec.head_vocab.size * facts.hidden
            facts = facts.model_copy(update={"parameters": facts.parameters - less})
        sure = f"{prefix}{CONFIDENCE}" if drafter.confidence else None
        masked = f"{prefix}{MASKED}" if drafter.masked else None
        chosen, selector = drafter.selector, None
        if chosen is not None:
            selector = SelectorPart(
                file=f"{prefix}{SELECTOR}", rank=chosen.rank, candidates=chosen.candidates, eps=arch.eps
            )
        decoder = DecoderPart(
            kind=drafter.method,
            columns=arch.input_width,
            block=drafter.block,
            mask=drafter.mask,
            anchor=drafter.anchor,
            confidence=sure,
            masked=masked,
            selector=selector,
            reads=list(drafter.reads),
        )
    native = Graph(file=prefix + NATIVE, gated=True, hidden=True, operators="native")
    source = source_of(arch)
    return ModelPart(
        facts=facts,
        format=spec.format,
        quantizer=quantizer or "rtn",
        head_format=spec.head,
        embedding_format="int8" if arch.embedding in spec.fine else None,
        int8_fraction=int8_fraction,
        bytes_per_weight=bytes_per_weight,
        graphs=stock_graphs(arch, spec) | ({} if spec.stays_stock else {"native": native}),
        weights=prefix + WEIGHTS,
        index=None if spec.format == FILE else prefix + INDEX,
        layout=spec.layout,
        low_nibble_bytes=low_nibble_bytes,
        converted=None if spec.format == FILE else converted_name("stock" if spec.layout == "native" else "native"),
        extra_rows=HEADROOM,
        min_rows=int(spec.format == "w8a8"),  # ONNX Runtime's ReduceMax over zero rows is wrong
        heads=list(plan.groups),
        head_vocab=spec.head_vocab,
        final_norm=None if spec.draft or drafter else _final_norm(arch),
        cut=plan.only,
        aux_hidden_layers=list(plan.tapped),
        decoder=decoder,
        source=source and source.model_copy(update={"shares_encoder": spec.shares_encoder}),
        encoder=None if encoder is None else encoder_part(encoder, spec, quantizer, encoder_low_nibble_bytes),
        **_front(arch, spec),
    )


def front_of(arch: Architecture) -> dict[str, Architecture]:
    """Name the files of what makes rows of images or sound: a tower, projectors, convolutions."""
    found: dict[str, Architecture] = {}
    sides: list[VisionEncoderSpec | AudioEncoderSpec | None] = [arch.sight, arch.hearing]
    for side in sides:
        if side is None:
            continue
        lead = AUDIO if found else ""
        convolutions = [] if isinstance(side, VisionEncoderSpec) else side.convolutions
        found[f"{lead}{TOWER}"] = side.tower
        found |= {numbered(f"{lead}{PROJECTOR}", at): one for at, one in enumerate(side.projectors)}
        found |= {numbered(f"{lead}{CONVOLUTION}", at): one for at, one in enumerate(convolutions)}
    return found


def taps_of(arch: Architecture, name: str) -> tuple[int, ...]:
    """List the layers whose rows a vision encoder also returns."""
    return tuple(arch.sight.image.deepstack_layers) if arch.sight and name == TOWER else ()


def numbered(name: str, number: int) -> str:
    """Name the files of the first of several sides, or of another one."""
    return f"{name}.{number}" if number else name


def _front(arch: Architecture, spec: ModelSpec) -> dict[str, Any]:
    own, sides = replace(spec, format=spec.front_format), front_of(arch)
    parts = {name: encoder_part(one, own, None, 0, name, taps_of(arch, name)) for name, one in sides.items()}
    if not parts:
        return {}
    image = arch.sight.image if arch.sight else None
    if image is not None and image.position_embedding is not None:
        places = image.position_embedding.model_copy(update={"file": f"{spec.prefix}{image.position_embedding.file}"})
        image = image.model_copy(update={"position_embedding": places})
    sound = arch.hearing.sound if arch.hearing else None
    audio = None
    if image is not None and sound is not None:
        audio = AudioPart(sound=sound, **_sides(parts, AUDIO))
    return {
        "image": image,
        "sound": None if audio else sound,
        "audio": audio,
        **_sides(parts),
    }


def _sides(parts: dict[str, ModelPart], lead: str = "") -> dict[str, Any]:
    """Give tower, projectors and convolutions, as the fields of a part, of what has files whose names begin so."""
    return {
        "tower": parts[f"{lead}{TOWER}"],
        "projectors": [one for name, one in parts.items() if name.startswith(f"{lead}{PROJECTOR}")],
        "convolutions": [one for name, one in parts.items() if name.startswith(f"{lead}{CONVOLUTION}")] or None,
    }


def encoder_part(
    arch: Architecture,
    spec: ModelSpec,
    quantizer: str | None,
    low_nibble_bytes: int,
    name: str = ENCODER,  # of its files
    tapped: Sequence[int] = (),  # layers whose rows it also returns
) -> ModelPart:
    """Return the entry of an encoder, which only native operators run; ``model_part`` describes the arguments."""
    graph = Graph(file=f"{spec.prefix}{name}.onnx", gated=True, hidden=True, operators="native")
    return ModelPart(
        facts=counted(arch),
        format=spec.format,
        quantizer=quantizer or "rtn",
        graphs={"native": graph},
        weights=f"{spec.prefix}{name}.data",
        layout="native",
        low_nibble_bytes=low_nibble_bytes,
        extra_rows=HEADROOM,
        min_rows=0,
        aux_hidden_layers=list(tapped),
    )
