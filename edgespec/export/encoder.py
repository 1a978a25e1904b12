"""Export an encoder of texts: its weights, how its rows become vectors or scores, and how far they are from the source.

There is nothing to draft and nothing to search, so it has its own export (``pipeline.export_model`` calls it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ExportError, UnsupportedModel, first_line
from edgespec.export.architectures import Architecture, encoder_kind, open_text_encoder
from edgespec.export.bundle.model_part import ModelSpec, encoder_part, limited
from edgespec.export.bundle.progress import Progress
from edgespec.export.bundle.writer import (
    copy_tokenizer,
    refuse_existing,
    refuse_short_disk,
    staged_folder,
    write_manifest,
)
from edgespec.export.emit.fill import fill
from edgespec.export.emit.plans import storage_plans
from edgespec.export.emit.program import NativePlan, native_graph
from edgespec.export.measuring.parity import relative_error
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.calibration_text import CalibrationText, read_calibration
from edgespec.export.quantization.native_packing import lacks_packing
from edgespec.export.quantization.quantizer import QUANTIZERS, DirectLevels
from edgespec.export.quantization.reference import reference_rows
from edgespec.export.sentences import Sentences, is_classifier, read_classifier, read_sentences
from edgespec.export.source.source import Checkpoint, ConfigOnly, resolve
from edgespec.export.source.stored import NONSENSE, read_object
from edgespec.export.tokenizers.facts import check_vocabulary
from edgespec.export.tokenizers.files import open_codec
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.embedding import EmbeddingQuality, StepWeights
from edgespec.runtimes.files.formats import BLOCK_FORMATS, FILE, FOUR_BITS, MIXED, Format, listed
from edgespec.runtimes.files.manifest import SCHEMA, Manifest, ModelPart, Pooling, TokenizerFacts
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.slots.encoder import encoder_attention
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.text_encoder import TextEncoder
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.pooling import Doubles, Pool, finish, shortened
from edgespec.version import __version__

DEFAULT: Format = "int8"
"""The format of an encoder without ``--format``: its vectors are nearly those of float32, at a quarter of the bytes."""
NAME = "model"  # of its files
TEXTS, WORDS = 6, (4, 12, 24, 40, 64, 96)  # that are compared with the source
MIB = 1 << 20


@dataclass(frozen=True)
class OpenedEncoder:
    """An encoder before its export."""

    arch: Architecture
    sentences: Sentences
    codec: TextCodec | None  # None: only planned

    @property
    def pooling(self) -> Pooling:
        """Return how rows are pooled, the mean where nothing says it."""
        return self.sentences.pooling or "mean"

    def plan(self, options: ExportOptions) -> tuple[NativePlan, ModelPart]:
        """Plan the weight file, and make the manifest's entry."""
        form = form_of(options)
        fine = frozenset({self.arch.embedding} if form in FOUR_BITS else ())  # few tokens' rows are read of many
        plan = storage_plans(self.arch, form, None, None, fine)["native"]
        plan.file = f"{NAME}.data"
        part = encoder_part(self.arch, ModelSpec(form), _quantizer(options), plan.low_nibble_bytes, NAME)
        return plan, part.model_copy(update={"embedding_format": "int8" if fine else None})


def open_encoder(options: ExportOptions, plans: bool = False) -> OpenedEncoder | None:
    """Open the model of an export, if it is an encoder of texts; None = it is another model.

    Args:
        plans: only sizes are needed: a folder without weights will do.

    Raises:
        ExportError: it is damaged or not supported, or options that encoders do not have.
    """
    path = resolve(options.model, options.revision, weights=not plans)
    if path.is_file() or not (path / "config.json").is_file():
        return None
    config = read_object(path / "config.json", "give a Hugging Face model folder or a .gguf file")
    if encoder_kind(config) is None:
        return None
    _refuse_options(options)
    source = ConfigOnly.open(path) if plans and ConfigOnly.suits(path) else Checkpoint.open(path)
    with _sense(path):
        arch, sentences = opened(source)
    context = options.context or (min(sentences.longest, arch.facts.context) if sentences.longest else None)
    return OpenedEncoder(limited(arch, context), sentences, None if plans else open_codec(path))


def opened(source: Checkpoint) -> tuple[Architecture, Sentences]:
    """Open an encoder, and read how its rows become vectors or scores."""
    arch, whole = open_text_encoder(source)
    width = arch.facts.hidden
    if isinstance(source, ConfigOnly):
        return arch, Sentences()
    sentences = read_sentences(source.path, width)
    if is_classifier(arch.config) and sentences.pooling is None:
        head = getattr(arch, "classifier", None)
        if head is None:
            raise UnsupportedModel(f"{source.path}: classifiers of the kind {arch.model_type} are not supported")
        longest = sentences.longest
        sentences = read_classifier(whole, head.modules, head.pooling, width, arch.eps)
        sentences.longest = longest
    return arch, sentences


@contextmanager
def _sense(path: Path) -> Iterator[None]:
    try:
        yield
    except NONSENSE as error:
        raise ExportError(f"{path}: config.json cannot be understood: {first_line(error)}", "repair it") from error


def form_of(options: ExportOptions) -> Format:
    """Return the format of an encoder's weights."""
    return DEFAULT if options.choose or options.format == MIXED else options.format


def _quantizer(options: ExportOptions) -> str | None:
    return (options.quantizer or "mse") if form_of(options) in BLOCK_FORMATS else None


def _refuse_options(options: ExportOptions) -> None:
    """Refuse options that encoders do not have."""
    given = {
        "--method": bool(options.methods), "--draft": options.draft, "--drafter": options.drafter,
        "--heads": options.heads, "--head-format": options.head_format, "--head-vocab": options.head_vocab,
        "--draft-vocab": options.draft_vocab, "--draft-format": options.draft_format, "--skip-set": options.skip_set,
        "--attention": options.attention, "--device": options.devices, "--target-size": options.target_size,
        "--target-kl": options.target_kl, "--adapter": options.adapter, "--codec": options.codes,
        "--operators stock": options.operators == "stock", "--format file": options.format == FILE,
        f"--format {MIXED}": options.format == MIXED,
        "--text-only": options.text_only, "--max-image-tokens": options.image_rows,
    }  # fmt: skip
    for option, value in given.items():
        if value:
            raise ExportError(f"{option}: this model is an encoder, which has no such thing", f"leave out {option}")
    if (name := options.quantizer) is not None and (name not in QUANTIZERS or QUANTIZERS[name].calibrated):
        raise ExportError(f"--quantizer {name}: expected rtn or mse for an encoder", "leave it out")
    if options.quantizer is not None and form_of(options) not in BLOCK_FORMATS:
        raise ExportError(f"--quantizer {options.quantizer} and --format {options.format}: expected "
                          f"{listed(BLOCK_FORMATS)}")  # fmt: skip
    if why := lacks_packing():
        raise ExportError(f"an encoder needs native operators: {why}")


def encoder_plan(found: OpenedEncoder, options: ExportOptions) -> dict[str, Any]:
    """Return what an export would write, as ``pipeline.dry_run`` does."""
    plan, part = found.plan(options)
    return {
        "model": options.model,
        "architecture": found.arch.facts.architecture,
        "format": part.format,
        "head_format": part.format,
        "quantizer": _quantizer(options),
        "methods": [],
        "context": found.arch.facts.context,
        "weight_bytes": {"target": plan.end},
        "kv_bytes_per_token": 0,
        "notes": [*found.arch.source.notes],
    }


def export_encoder(found: OpenedEncoder, options: ExportOptions, progress: Progress) -> Manifest:
    """Write the bundle of an encoder; see ``pipeline.export_model``."""
    refuse_existing(options.output, options.overwrite)
    arch, codec, sentences = found.arch, found.codec, found.sentences
    assert codec is not None
    folder_of = arch.source.path
    check_vocabulary(folder_of, arch.facts.vocab, codec)
    text = read_calibration(options.calibration, folder_of, codec)
    plan, part = found.plan(options)
    refuse_short_disk(options.output, plan.end)
    with staged_folder(options.output, options.overwrite) as folder:

        def written(done: int, end: int) -> None:
            progress("weights", -(-done // MIB), -(-end // MIB), "encoder, MiB")

        name = _quantizer(options)
        native_graph(plan).save(folder / f"{NAME}.onnx")
        errors = fill(folder / plan.file, plan, DirectLevels(QUANTIZERS[name]) if name else None, written)
        sentences.write(folder)
        copy_tokenizer(folder_of, folder, codec)
        manifest = Manifest(
            schema_version=SCHEMA,
            edgespec_version=__version__,
            target=part,
            methods={},
            tokenizer=TokenizerFacts(),
            pooling=found.pooling,
            embedding=sentences.part(True, getattr(arch, "second_text", None)),
            memory={"weight_bytes": {"target": plan.end}, "kv_bytes_per_token": 0},
            provenance=_provenance(options, found),
        )
        progress("parity", 0, TEXTS, "source in fp32")
        assert manifest.embedding is not None
        quality = _compare(found, Bundle(folder, manifest), text, options, progress)
        quality = quality.model_copy(update={"weight_error": min(1.0, relative_error(errors.values()))})
        embedding = manifest.embedding.model_copy(update={"quality": quality})
        return write_manifest(folder, manifest.model_copy(update={"embedding": embedding}))


def _provenance(options: ExportOptions, found: OpenedEncoder) -> dict[str, Any]:
    local, path = Path(options.model), found.arch.source.path
    notes = [*found.arch.source.notes]
    if found.sentences.pooling is None:
        notes.append("no file says how rows are pooled: it is their mean")
    given = {
        "model": local.resolve().name if local.exists() else options.model,
        "config_sha256": hashlib.sha256((path / "config.json").read_bytes()).hexdigest(),
        "revision": options.revision,
        "notes": notes or None,
    }
    return {key: value for key, value in given.items() if value is not None}


def _compare(
    found: OpenedEncoder, bundle: Bundle, text: CalibrationText, options: ExportOptions, progress: Progress
) -> EmbeddingQuality:
    """Compare vectors, or scores, of some texts with those of the source in float32."""
    codec, part = found.codec, bundle.manifest.target
    assert codec is not None
    words, given, at = text.text.split(), list[list[int]](), 0
    for count in WORDS:
        given.append(codec.encode_short(" ".join(words[at : at + count]) or "a", min(256, found.arch.facts.context)))
        at += count
    steps = [StepWeights(one.step, one.tensors[0].reshape(one.step.outputs, -1) if one.step.kind == "dense" else
                         one.tensors[0], one.tensors[1] if one.step.bias else None)
             for one in found.sentences.steps]  # fmt: skip
    model = Model(bundle.path, part, NATIVE, options.threads, encoder_attention(part))
    encoder = TextEncoder(bundle, model)
    ours = dict(encoder.vectors(given))
    encoder.close()
    exact = list[Doubles]()
    for number, tokens in enumerate(given):
        rows = reference_rows(found.arch, tokens)[0]
        pool = Pool(found.pooling, rows.shape[1])
        pool.add(rows.astype(np.float64))
        exact.append(finish(pool.vector, steps))
        progress("parity", number + 1, TEXTS, "source in fp32")
    if found.sentences.scores:
        away = [abs(float(ours[number][0] - one[0])) for number, one in enumerate(exact)]
        return EmbeddingQuality(texts=len(given), weight_error=0, score_max_error=max(away))
    cosines = [float(shortened(ours[number], None, True) @ shortened(one, None, True))
               for number, one in enumerate(exact)]  # fmt: skip
    mean, least = float(np.mean(cosines)), min(cosines)
    return EmbeddingQuality(texts=len(given), weight_error=0, cosine=mean, cosine_min=least)
