"""An export from beginning to end: open, write, compare, measure, and prove by golden vectors."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import SELF_SPEC, SPECULATIVE
from edgespec.errors import ExportError
from edgespec.export.architectures.llamagen import CAPTIONS
from edgespec.export.bundle.drafter import plan_drafter, write_drafter
from edgespec.export.bundle.model import encoder_plans
from edgespec.export.bundle.model_part import ModelSpec
from edgespec.export.bundle.progress import Progress, silent
from edgespec.export.bundle.source_model import DRAFT, Writing, WrittenModel
from edgespec.export.bundle.writer import (
    GENAI,
    copy_tokenizer,
    genai_config,
    refuse_existing,
    refuse_short_disk,
    save_manifest,
    staged_folder,
    write_manifest,
)
from edgespec.export.calibrated import CALIBRATED, note
from edgespec.export.codes import CodeTensors, ended, read_codes, write_codes
from edgespec.export.codes.write import FOLDER
from edgespec.export.encoder import encoder_plan, export_encoder, open_encoder
from edgespec.export.foreign.write import WORK
from edgespec.export.loaded_source import LoadedSource
from edgespec.export.loading import load_source
from edgespec.export.measuring.drafters import measure_drafter
from edgespec.export.measuring.method_parts import MethodMeasurer, WrittenDraft
from edgespec.export.measuring.mixer import BitAllocation, Mixer
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.export.measuring.vision_parity import tower_note
from edgespec.export.models import Parts, is_gated, make_manifest, weight_bytes
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.calibration_text import MEASURED_TOKENS, MIN_TOKENS, quantizer_texts, unmeasured
from edgespec.export.quantization.coded_keys import prepare_attention
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.tokenizers.files import open_codec
from edgespec.export.tokenizers.translated import write_translation
from edgespec.reports.proof import make_golden
from edgespec.runtimes.files.checked import Checked
from edgespec.runtimes.files.formats import FILE
from edgespec.runtimes.files.manifest import (
    CodesPart,
    Manifest,
    Matching,
    MethodPart,
    ModelPart,
    SkipSetPart,
    TranslationPart,
)
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec

_SMALL = 0.2  # of the target's bytes: a larger draft has the target's format
_LARGE, _SHORT = 1 << 16, 3  # tokens of a vocabulary of which a draft scores only this part, in usual texts


def export_model(options: ExportOptions, progress: Progress = silent, golden: bool = True) -> Manifest:
    """Write the bundle that the options ask for; its name appears when it is complete.

    ``plan_manifest.plan_bundle`` is the same over shapes.

    Args:
        golden: whether golden vectors are made: plain decoding's output for the test prompts.

    Raises:
        ExportError: anything about the source, the options or the disk; no files remain.
    """
    if options.output.resolve() == Path.cwd():
        raise ExportError("the bundle cannot take the place of the current folder", "name another one")
    if (encoder := open_encoder(options)) is not None:
        return export_encoder(encoder, options, progress)
    if options.choose:  # which takes seconds
        options.wanted()
        refuse_existing(options.output, options.overwrite)
    # kept when interrupted: the next try continues from there
    search = options.keep_search or options.output.parent / f".{options.output.name}.search"
    source = load_source(replace(options, keep_search=search), progress)
    refuse_short_disk(options.output, sum(_sizes(source, source.options.choice, source.options.draft_choice).values()))
    with staged_folder(options.output, options.overwrite) as folder:
        manifest = write_bundle(folder, source)
        if golden:
            manifest = _prove(folder, source, manifest)
    with suppress(OSError):  # another search is in there
        search.rmdir()
    return manifest


def write_bundle(folder: Path, source: LoadedSource) -> Manifest:
    """Write and measure the bundle of an opened source in an empty folder; no golden vectors are made."""
    bits = _choose_bits(source)
    choice = bits.choice if bits else source.options.choice
    written = write_models(folder, source, choice)
    slot, tokens = open_target(source, written)
    parity = {**written.calibrated, **_compare(source, written, slot, tokens)}
    measured = _measure(source, written, slot, tokens)
    parts = _with_attention_and_devices(source, measured.written, choice, measured.skip)
    notes = [
        *source.notes,
        *([bits.note] if bits else []),
        *written.notes,
        *_compare_tower(source, written),
        *measured.notes,
    ]
    weights = _sizes(source, choice, measured.written.draft_choice)
    costs = measured.costs.as_dict() if measured.costs else None
    words = source.tokenizers
    manifest = make_manifest(
        source.models,
        parts,
        _with_short_head(source, measured),
        ended(words.facts, written.codes),
        weights,
        _provenance(source, notes, bits),
        sampling=words.sampling,
        pooling=words.sentences.pooling,
        embedding=words.sentences.part(),
        rules=words.rules,
        text=None if words.speech else words.form,
        speech=words.speech,
        codes=written.codes,
        translation=_translation(folder, source, measured),
        parity=parity,
        cost=costs | {"threads": slot.model.threads, "depth": len(tokens)} if costs else {},
    )
    if (config := genai_config(manifest.target, words.facts, words.sampling)) is not None:
        (folder / GENAI).write_text(config, "utf-8")
    shutil.rmtree(folder / WORK, ignore_errors=True)
    return write_manifest(folder, manifest, written.checked)


def dry_run(options: ExportOptions, progress: Progress = silent) -> dict[str, Any]:
    """Return what ``export_model`` would write, as a JSON object.

    Raises:
        ExportError: as ``export_model``; nothing is written.
    """
    refuse_existing(options.output, options.overwrite)
    if (encoder := open_encoder(options)) is not None:
        return encoder_plan(encoder, options)
    source = load_source(options, progress)
    options, models, notes = source.options, source.models, list(source.notes)
    if (mixer := _mixer(source)) is not None:
        notes.append(mixer.estimate_text(options.target_size))
    if source.calibration is not None:
        notes.append(f"calibrates {source.calibration.describe()}")
    choice = options.choice
    quantizer = CALIBRATED if source.calibration and options.calibrates else choice.quantizer
    return {
        "model": str(source.path),
        "architecture": models.target.facts.architecture,
        "format": choice.format,
        "head_format": choice.head or choice.format,
        "quantizer": quantizer.name if quantizer else None,
        "methods": source.methods,
        "context": models.target.facts.context,
        "weight_bytes": _sizes(source, choice, options.draft_choice),
        "kv_bytes_per_token": models.kv_bytes_per_token,
        "notes": notes,
        **({"choice": source.format_choice.as_dict()} if source.format_choice else {}),
    }


# -- write -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """The models of a bundle on the disk, before anything is measured."""

    folder: Path
    target: WrittenModel
    draft: ModelPart | None
    drafter: ModelPart | None
    draft_choice: WeightChoice  # how the draft's matrices are stored
    codes: CodesPart | None
    checked: Checked  # which computes the digest of the target's weights during other work
    calibrated: dict[str, Any] = field(default_factory=dict)  # what calibration did, for ``parity``
    notes: list[str] = field(default_factory=list)


def write_models(folder: Path, source: LoadedSource, choice: WeightChoice) -> Written:
    """Write weights, graphs and tokenizers into an empty folder; ``choice``: how the target's matrices are stored."""
    options, models, facts, notes = source.options, source.models, dict[str, Any](), list[str]()
    writing = _writing(source, folder, choice)
    if source.calibration is not None:
        target, facts = source.calibration.write(writing)
        notes += [line] if (line := note(facts)) else []
    else:
        target = models.target.write(writing)
    checked = Checked()
    checked.begin(folder / target.part.weights)
    draft, draft_choice = None, options.draft_choice
    if models.draft is not None:
        (folder / "draft").mkdir()
        draft = models.draft.write(_writing(source, folder, draft_choice, draft=True)).part
    drafter = None
    if models.drafter is not None:
        source.progress("weights", 0, 1, "drafter")
        drafter = write_drafter(folder, models.drafter, options.choice, target.part.layout)
    words = source.tokenizers
    words.sentences.write(folder)
    copy_tokenizer(models.target.source.path, folder, words.codec, words.source_codec or _caption_codec(source))
    codes = _write_codes(source, folder)
    return Written(folder, target, draft, drafter, draft_choice, codes, checked, facts, notes)


def _writing(source: LoadedSource, folder: Path, choice: WeightChoice, draft: bool = False) -> Writing:
    options, codec, text = source.options, source.tokenizers.codec, source.sample.text.text

    def texts(context: int) -> NDArray[np.int64]:  # [S, T]
        return quantizer_texts(codec, text, context)

    gated = not draft and is_gated(source.methods)
    return Writing(folder, draft, gated, choice, options.operators, texts, options.threads, source.progress)


def _caption_codec(source: LoadedSource) -> TextCodec | None:
    hearing = source.arch.hearing if source.arch else None
    reads = hearing is not None and hearing.sound is None
    return open_codec(source.models.target.source.path / CAPTIONS) if reads else None


def _write_codes(source: LoadedSource, folder: Path) -> CodesPart | None:
    """Write the decoder of codes that was named, that of the model itself, or the one in its folder."""
    path, arch, codec = source.models.target.source.path, source.arch, source.tokenizers.codec
    if (own := source.options.codes or path / FOLDER).is_dir():
        return write_codes(*read_codes(own), folder, codec)
    if arch is None or arch.codes is None:
        return None
    config, names = arch.codes
    tensors = CodeTensors(lambda name: arch.source.read(names[name]), names)
    return write_codes(path, config, tensors, folder, codec)


def _choose_bits(source: LoadedSource) -> BitAllocation | None:
    """Choose which parts of a model in 4 bits become int8; None = no size and no divergence was asked for."""
    if (mixer := _mixer(source)) is None:
        return None
    kl, size = source.options.target_kl, source.options.target_size or 0
    return mixer.allocate_for_kl(kl) if kl is not None else mixer.allocate_for_size(size)


def _mixer(source: LoadedSource) -> Mixer | None:
    options, arch, words = source.options, source.arch, source.tokenizers
    if options.target_size is options.target_kl is None or arch is None:
        return None
    tokens, given, encoded = unmeasured(source.sample.tokens), source.sample.read, None
    if given is not None and arch.encoder is not None:
        content, encoded = given.content, given.reference(arch.encoder)
        if isinstance(content, list):  # the source itself: what is written about it is not known yet
            text = (words.source_codec or words.codec).decode(content)
            tokens = words.codec.encode(text, special=False)
        tokens = [*given.begin, *tokens]
    choice = options.choice
    sides = encoder_plans(arch, ModelSpec(choice.stored, choice.head))
    return Mixer(arch, choice, options.layout, source.models.heads.plan, tokens[: arch.facts.context],
                 lambda done, of: source.progress("mix", done, of, "each part in int4"), encoded,
                 sum(side.end for side in sides.values()))  # fmt: skip


# -- measure -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredMethods:
    """Measured methods of a manifest, and the draft that was chosen by them."""

    written: Written
    methods: dict[str, MethodPart]
    costs: StepCosts | None = None  # None = nothing was measured
    notes: list[str] = field(default_factory=list)
    matching: Matching = "strings"  # how a draft with another tokenizer guesses

    @property
    def skip(self) -> SkipSetPart | None:
        """The skip set of self-speculation."""
        return self.methods[SELF_SPEC].skip if SELF_SPEC in self.methods else None


def open_target(source: LoadedSource, written: Written) -> tuple[Slot, list[int]]:
    """Open the written target, and the tokens that it is measured on."""
    part, options, read = written.target.part, source.options, source.sample.read
    graph = choose_operators(options.operators, part).graph(part, strict=True)
    slot = open_slot(Model(written.folder, part, graph, options.threads))
    most = max(MIN_TOKENS, min(MEASURED_TOKENS, source.models.target.facts.context // 2))
    if read is None:
        return slot, source.sample.tokens[:most]
    read.attend(written.folder, part, slot, options.threads)
    return slot, read.written(slot, most, source.tokenizers.facts.eos)


def _compare(source: LoadedSource, written: Written, slot: Slot, tokens: list[int]) -> dict[str, Any]:
    """Compare the target with the source model -> ``parity`` of the manifest."""
    options = source.options
    if options.format == FILE and (options.layout == "native" or source.copies):  # the same numbers, or quick
        return {}
    found = source.models.target.parity(written.target, slot, tokens, source.progress, source.sample.read)
    return found | source.sample.text.facts


def _compare_tower(source: LoadedSource, written: Written) -> list[str]:
    sight, options = source.arch.sight if source.arch else None, source.options
    if sight is None or options.quick:
        return []
    line = tower_note(sight, written.folder, written.target.part, options.threads)
    return [line] if line else []


def _measure(source: LoadedSource, written: Written, slot: Slot, tokens: list[int]) -> MeasuredMethods:
    """Measure acceptance and costs of methods on the written graphs; keeps the draft that is predicted to be faster."""
    options, choice, models, text = source.options, source.options.choice, source.models, source.sample.text
    if source.copies:
        return MeasuredMethods(written, {name: MethodPart() for name in source.methods})
    target, notes = written.target.part, list[str]()
    weights = target.quantizer if choice.quantizer else None, choice.head
    adapted = () if options.adapter is None else (options.adapter,)
    facts = models.target.config, options.format, *weights, options.seed, options.context, *adapted
    measurer = MethodMeasurer(source.methods, options.operators, options.threads, options.trials, not options.devices,
                              options.seed, options.keep_search, models.heads, source.given_skip, text, str(facts),
                              source.progress)  # fmt: skip
    drafts = _drafts(source, written)
    translation = models.draft.translation if models.draft else None
    methods, costs, best = measurer.measure(written.folder, slot, tokens, drafts, source.sample.read, translation)
    if best.at:
        written = _take_draft(written, *drafts[best.at])
        hint = f"--draft-format {options.draft_choice.format} changes it"
        notes.append(f"the draft is in int8, where its guesses gain more: {hint}")
    if (part := methods.get(SPECULATIVE)) and part.notes:
        notes.append(part.notes)
    if models.drafter is not None and written.drafter is not None:
        source.progress("acceptance", 0, 1, "the drafter against the target")
        found = measure_drafter(models.drafter, written.folder, written.drafter, slot, tokens, choice.for_drafter)
        methods[models.drafter.method] = found.method(costs, text.facts)
        notes += found.notes
        source.progress("acceptance", 1, 1, "the drafter against the target")
    if costs.busy:  # choices by these times remain; what they predict would mislead
        methods = {name: _unpredicted(part) for name, part in methods.items()}
        notes.append(
            f"{costs.busy} while passes were timed, so no speed is predicted: calibrate the bundle with "
            "`edgespec calibrate` when nothing else runs"
        )
    return MeasuredMethods(written, methods, costs, notes, best.matching)


def _with_short_head(source: LoadedSource, measured: MeasuredMethods) -> dict[str, MethodPart]:
    """Let a draft with a large vocabulary score frequent tokens: its LM head is a large part of what a step reads."""
    opened, draft, part = source.models.draft, measured.written.draft, measured.methods.get(SPECULATIVE)
    if opened is None or draft is None or part is None or opened.translation is not None:
        return measured.methods
    if draft.cut or draft.foreign or draft.facts.vocab < _LARGE:
        return measured.methods
    rows = draft.facts.vocab // _SHORT // 16 * 16  # whole tiles of the kernels
    return measured.methods | {SPECULATIVE: part.model_copy(update={"head_rows": rows})}


def _drafts(source: LoadedSource, written: Written) -> Sequence[WrittenDraft]:
    """List the draft as it is written, and a small one of 4 bits in int8 as well, in another folder.

    Rounding may lose more guesses than it saves time.
    """
    options, draft = source.options, source.models.draft
    if draft is None or written.draft is None:
        return []
    usual = (written.folder, written.draft)
    if options.quick or options.draft_format or not options.draft_choice.four or not draft.reformats:
        return [usual]
    known = _sizes(source, options.choice, options.draft_choice)
    if known["draft"] > _SMALL * known["target"]:
        return [usual]
    writing = _writing(source, written.folder / WORK, _INT8, draft=True)
    (writing.folder / writing.prefix).mkdir(parents=True)
    return [usual, (writing.folder, draft.write(writing).part)]


_INT8 = WeightChoice.of("int8", None, None)


def _take_draft(written: Written, folder: Path, draft: ModelPart) -> Written:
    """Put the draft of another folder into the place of the usual one."""
    shutil.rmtree(written.folder / "draft")
    (folder / "draft").rename(written.folder / "draft")
    return replace(written, draft=draft, draft_choice=_INT8)


def _unpredicted(part: MethodPart) -> MethodPart:
    """Drop what was predicted of a method's speed, the note that says it too."""
    notes = None if (part.notes or "").startswith("predicted") else part.notes
    return part.model_copy(update={"predicted_speedup": None, "notes": notes})


def _translation(folder: Path, source: LoadedSource, measured: MeasuredMethods) -> TranslationPart | None:
    """Write what the bundle needs of a draft with another tokenizer; None = it has the target's."""
    draft = source.models.draft
    if draft is None or draft.translation is None:
        return None
    return write_translation(folder, DRAFT, draft.translation, measured.matching, draft.source.path)


# -- close -------------------------------------------------------------------------------------------------------------


def _with_attention_and_devices(
    source: LoadedSource, written: Written, choice: WeightChoice, skip: SkipSetPart | None
) -> Parts:
    """Prepare keys in other formats, and graphs for devices -> entries of target, draft and drafter."""
    options, models, target, draft = source.options, source.models, written.target.part, written.draft
    if source.attention:

        def report(done: int, of: int, what: str) -> None:
            source.progress("attention", done, of, what)

        tokens, attend = source.sample.tokens, _attending(source, written)
        found = prepare_attention(written.folder, target, source.attention, tokens, options.threads, report, attend)
        target = target.model_copy(update={"attention": found.model_copy(update=source.sample.text.facts)})
    for device, precision in product(options.devices, options.device_precisions or ("fp32",)):
        writing = _writing(source, written.folder, choice)
        target = models.target.for_device(writing, target, device, precision, skip)
        if models.draft is not None and draft is not None:
            writing = _writing(source, written.folder, written.draft_choice, draft=True)
            draft = models.draft.for_device(writing, draft, device, precision, None)
    return Parts(target, draft, written.drafter)


def _attending(source: LoadedSource, written: Written) -> Callable[[Slot], None] | None:
    """Return a function that lets another slot of the target attend over the measured source; None without one."""
    read, threads = source.sample.read, source.options.threads
    return None if read is None else lambda slot: read.attend(written.folder, written.target.part, slot, threads)


def _sizes(source: LoadedSource, choice: WeightChoice, draft_choice: WeightChoice) -> dict[str, int]:
    """Name the bytes of all weight files; of what another exporter makes sizes are good to a few percent."""
    options, models = source.options, source.models
    target = models.target.weight_bytes(choice, options.operators)
    draft = None if models.draft is None else models.draft.weight_bytes(draft_choice, options.operators)
    drafter = None if models.drafter is None else plan_drafter(models.drafter, options.choice, options.layout)
    return weight_bytes(target, draft, None if drafter is None else drafter.weight_bytes)


def _provenance(source: LoadedSource, notes: list[str], bits: BitAllocation | None) -> dict[str, Any]:
    options, path = source.options, source.models.target.source.path
    local = Path(options.model)
    found = {
        "model": local.resolve().name if local.exists() else options.model,
        "config_sha256": hashlib.sha256((path / "config.json").read_bytes()).hexdigest(),
        "revision": options.revision,
        "adapter": None if options.adapter is None else Path(options.adapter).resolve().name,
        "draft": None if options.draft is None else Path(options.draft).name,
        "drafter": None if options.its_drafter is None else Path(options.its_drafter).name,
        "notes": notes or None,
        "seed": options.seed,
        "mixed": bits.facts if bits else None,
        "format_choice": source.format_choice.as_dict() if source.format_choice else None,
        **source.models.target.provenance(),
    }
    return {key: value for key, value in found.items() if value is not None}


def _prove(folder: Path, source: LoadedSource, manifest: Manifest) -> Manifest:
    """Add golden vectors to the manifest of a written bundle."""
    source.progress("golden", 0, 1, "plain decoding of the test prompts")
    vectors, seen, made_by = make_golden(folder, source.sample.text.text, source.options.threads, source.copies)
    target, provenance = manifest.target, manifest.provenance | {"golden": made_by}
    if target.image is not None:
        target = target.model_copy(update={"image": target.image.model_copy(update={"proof": seen})})
    manifest = manifest.model_copy(update={"golden": vectors, "target": target, "provenance": provenance})
    save_manifest(folder, manifest)
    source.progress("golden", 1, 1, "done")
    return manifest
