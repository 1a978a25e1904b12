"""Opens and checks what an export works on, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import MTP
from edgespec.errors import ExportError, IncompatibleDraft
from edgespec.export.bundle.drafter import check_drafter
from edgespec.export.bundle.model_part import check_coded_keys, check_operators, open_draft, open_model, source_of
from edgespec.export.bundle.progress import Progress, silent
from edgespec.export.calibrated import LEAST_SOURCES, SOUND, SOURCE, Calibration, Rows, arranged
from edgespec.export.chosen_format import chosen_format
from edgespec.export.drafters.drafter import Drafter, cut_drafter
from edgespec.export.drafters.head_choice import choose_heads, frequent_tokens
from edgespec.export.drafters.heads import TrainedHeads
from edgespec.export.drafters.mtp import read_mtp
from edgespec.export.drafters.read import read_drafter
from edgespec.export.drafters.vocabulary import with_tokens
from edgespec.export.emit.plan import kept_types
from edgespec.export.foreign.model import ForeignModel, is_foreign
from edgespec.export.format_choice import FormatChoice
from edgespec.export.loaded_source import LoadedSource, Sample, Tokenizers
from edgespec.export.measuring.reading import Reading, reading, source_rows
from edgespec.export.measuring.skip_search import read_skip_set
from edgespec.export.models import check_target, open_models
from edgespec.export.onnx_model import EmittedModel
from edgespec.export.options import ExportOptions, refuse_draft, refuse_reading, refuse_target
from edgespec.export.quantization.calibration_sound import read_sounds
from edgespec.export.quantization.calibration_text import read_calibration, unmeasured
from edgespec.export.quantization.coded_keys import check_attention
from edgespec.export.quantization.quantizer import Quantizer
from edgespec.export.sentences import read_sentences
from edgespec.export.source.keys import left_out
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.source.stored import LOSS
from edgespec.export.tokenizers.facts import sampling_part, tokenizer_facts, vocabularies_differ
from edgespec.export.tokenizers.files import open_codec, open_source_codec
from edgespec.export.tokenizers.generation import decoder_rules
from edgespec.export.tokenizers.speech import speech_part
from edgespec.export.tokenizers.text_form import text_form
from edgespec.export.tokenizers.translated import own_tokens, special_tokens, translation_of
from edgespec.planning.vocab_pruning import first_ids
from edgespec.runtimes.files.formats import FILE

if TYPE_CHECKING:
    from edgespec.export.models import SourceModel
    from edgespec.runtimes.text.translation import Translation


def load_source(options: ExportOptions, progress: Progress = silent) -> LoadedSource:
    """Open and check the models and texts of an export; nothing is written.

    Raises:
        ExportError: the models or the options.
    """
    options = options.placed()
    methods = options.wanted()
    progress("open", 0, 1, options.model)
    path = resolve(options.model, options.revision)
    target = _open_target(options, path)
    for warning in target.remedies:  # at once: what to do about it is another option
        progress("warning", 1, 1, warning)
    tokenizers = _read_tokenizers(options, target)
    sample = _read_sample(options, target, tokenizers)
    models = open_models(options, methods, Values(options, target, tokenizers, sample.tokens))
    folder, facts = target.source.path, target.facts
    loaded = LoadedSource(
        options,
        progress,
        methods,
        path,
        models,
        tokenizers,
        sample,
        read_skip_set(options.skip_set, facts.layers) if options.skip_set else None,
        [
            *target.source.notes,
            *target.remedies,
            *left_out(folder, target.config, tokenizers.codec, sequence=tokenizers.form is not None),
            *models.notes,
        ],
    )
    progress("open", 1, 1, options.model)
    if options.choose:
        loaded = _with_format(loaded, chosen_format(loaded))
    if loaded.options.format == FILE:
        loaded = replace(loaded, notes=_kept_notes(loaded))
    calibration, note = _calibration(loaded)
    attention = check_attention(options.attention, options.operators, len(sample.tokens))
    check_coded_keys(facts, attention)
    return replace(loaded, calibration=calibration, attention=attention, notes=[*loaded.notes, *note])


@dataclass(frozen=True)
class Values:
    """The models of options with their values, and the tokens of a text; see ``open_models``."""

    options: ExportOptions
    target: SourceModel
    tokenizers: Tokenizers
    text: Sequence[int]  # tokens

    def draft(self) -> SourceModel:
        """Open the draft, and compare its vocabulary with the target's."""
        options, arch = self.options, self.target.arch
        assert options.draft is not None
        path = resolve(options.draft)
        draft: SourceModel
        if is_foreign(path):
            refuse_draft(options, path)
            draft = ForeignModel.open(path, None)
        else:
            if arch is not None and arch.hearing is not None and arch.hearing.sound is None:
                why = "a model that draws by captions has no drafts yet: its other methods need none"
                raise IncompatibleDraft(why)
            draft = EmittedModel(open_draft(path, arch, options.image_rows))
            check_operators(draft.arch, options.operators)
        ours, theirs = self.tokenizers.codec, open_codec(draft.source.path)
        if differs := vocabularies_differ(facts := self.target.facts, draft.facts, ours, theirs):
            if arch is not None and arch.encoder is not None:
                raise IncompatibleDraft(differs, "use a draft of the same model family, with the same tokenizer")
            draft.translation = translation_of(ours, theirs, (facts, draft.facts), self.tokenizers.facts,
                                               draft.source.path, draft.config, differs)  # fmt: skip
        draft.share_encoder(arch)
        return draft

    def heads(self, methods: Sequence[str]) -> dict[str, TrainedHeads]:
        """Read the trained heads of methods."""
        arch, options = self.target.arch, self.options
        if arch is None:
            return {}
        return choose_heads(options.model, options.heads, methods, arch, self.tokenizers.codec)

    def drafter(self, methods: Sequence[str]) -> Drafter | None:
        """Read the drafter that was named, or the one inside the checkpoint."""
        arch, options = self.target.arch, self.options
        if options.its_drafter is None and (MTP not in methods or arch is None):
            return None
        if arch is None:
            raise ExportError("--drafter needs edgespec's own graphs, and this model's are foreign")
        if options.its_drafter is not None:
            found = read_drafter(resolve(options.its_drafter), arch)
        else:
            found = read_mtp(Checkpoint.open(resolve(options.model, options.revision)), arch)
        check_drafter(found, methods, options.operators)
        return found

    def tokens(self, size: int, vocab: int, option: str, translation: Translation | None = None) -> NDArray[np.int64]:
        """Choose the most frequent tokens of the text, and those that end one."""
        text, ends = self.text, self.tokenizers.facts.eos
        if translation is not None:
            text, ends = own_tokens(translation, text), special_tokens(translation)
        return frequent_tokens(text, size, vocab, ends, option)

    def coverage(self, size: int, translation: Translation | None = None) -> float:
        """Measure the share of the text's tokens among the ``size`` first ids."""
        return first_ids(self.text if translation is None else own_tokens(translation, self.text))(size)

    def cut(self, drafter: Drafter, tokens: NDArray[np.int64]) -> Drafter:
        """Choose rows of the drafter's LM head, either its own or the target's."""
        arch = self.target.arch
        assert arch is not None
        return with_tokens(drafter, arch, tokens) if drafter.spec.own_head else cut_drafter(drafter, tokens)


def _open_target(options: ExportOptions, path: Path) -> SourceModel:
    if is_foreign(path):
        refuse_target(options, options.choice, path)
        return ForeignModel.open(path, options.context)
    adapter = None if options.adapter is None else resolve(options.adapter)
    arch = open_model(path, options.context, adapter, options.text_only)
    check_target(arch, options)
    return EmittedModel(arch)


def _read_tokenizers(options: ExportOptions, target: SourceModel) -> Tokenizers:
    """Open the tokenizers of a target; refuses one that does not fit the model."""
    folder, config, arch = target.source.path, target.config, target.arch
    codec = open_codec(folder)
    facts = tokenizer_facts(folder, config, target.facts.vocab, codec)
    sources, form = None, None
    if arch is not None and arch.encoder is not None:
        refuse_reading(options)
        sources = open_source_codec(folder)
        form = text_form(folder, config, codec, sources)
    read = source_of(arch) if arch else None
    return Tokenizers(
        codec,
        sources,
        facts,
        form,
        speech_part(folder, config, codec) if read and read.features else None,
        sampling_part(folder),
        read_sentences(folder, target.facts.hidden),
        decoder_rules(folder, config) if form is None else None,
    )


def _read_sample(options: ExportOptions, target: SourceModel, tokenizers: Tokenizers) -> Sample:
    """Read the text, or the recordings, that an export calibrates and measures on."""
    arch, form, codec = target.arch, tokenizers.form, tokenizers.codec
    source, sounds = source_of(arch) if arch else None, None
    if source is not None and source.features is not None and options.calibration is not None:
        sounds = read_sounds(options.calibration, source.features, min(SOUND, source.max_rows))
    text = read_calibration(options.calibration if sounds is None else None, target.source.path, codec)
    read = None
    if form is not None and arch is not None:
        sound = None if sounds is None else sounds[-1]
        read = reading(arch, form, tokenizers.source_codec or codec, text.text, options.seed, sound)
    return Sample(text, codec.encode(text.text), sounds, read)


def _with_format(loaded: LoadedSource, found: FormatChoice) -> LoadedSource:
    """Take the format that was chosen by what each loses on a text."""
    loaded.progress("choice", 1, 1, found.line)
    options = replace(loaded.options, format=found.pick.format, choose=False).placed()
    return replace(loaded, options=options, format_choice=found)


def _kept_notes(loaded: LoadedSource) -> list[str]:
    """Report which weights stay as their file has them, and which cannot.

    Raises:
        ExportError: nothing can stay as it is.
    """
    arch, layout = loaded.arch, loaded.options.layout
    kept = None if arch is None or arch.encoder is not None else kept_types(arch, layout)
    if kept is not None and not kept[0] and layout == "stock":
        why = f"stock operators can hold none of its weights exactly ({', '.join(kept[1])})"
        raise ExportError(f"{loaded.path}: --format file: {why}", "choose another --format")
    if kept is None or not kept[0]:
        raise ExportError(f"{loaded.path}: --format file is for the weights of decoders", "choose another --format")
    types, others = kept
    own = f"weights are the file's own ({', '.join(types)})"
    notes = [note.replace(LOSS, own) for note in loaded.notes]
    if notes == [*loaded.notes]:  # the file is not quantized
        notes.append(own)
    if others:
        why = "which no kernels are for" if layout == "native" else "which stock operators cannot hold exactly"
        notes.append(f"int8 instead of {', '.join(others)}, {why}: this loses a little")
    return notes


def _calibration(loaded: LoadedSource) -> tuple[Calibration | None, list[str]]:
    """Return how levels are calibrated, None = they are not, and notes."""
    options, sample, target = loaded.options, loaded.sample, loaded.models.target
    asked = options.choice.quantizer
    asked = asked if asked and asked.calibrated else None
    if isinstance(target, ForeignModel) or not (asked or options.calibrates):
        return None, []
    if sample.read is not None:
        return _calibration_on_sources(loaded, target, sample.read, asked)
    codec, facts = loaded.tokenizers.codec, loaded.tokenizers.facts
    begin = codec.encode("")[:1] or ([] if facts.bos is None else [facts.bos])
    tokens, given = codec.encode(sample.text.text, special=False), None
    if options.calibration is not None:
        given = unmeasured(tokens)
        if given is tokens:  # too short for both
            own = read_calibration(None, target.source.path, codec).text
            tokens = codec.encode(own, special=False)
    return Calibration(target, asked, given, tokens, begin, facts.eos, options.seed), []


def _calibration_on_sources(
    loaded: LoadedSource, target: EmittedModel, read: Reading, asked: Quantizer | None
) -> tuple[Calibration | None, list[str]]:
    """Return how an encoder-decoder's levels are calibrated: on what it writes about parts of texts or sounds."""
    encoder, tokenizers, sample = target.arch.encoder, loaded.tokenizers, loaded.sample
    rows: Rows | None = sample.sounds
    assert encoder is not None
    why, instead = "no recordings", "--calibration FOLDER with some, or --quantizer mse"
    if isinstance(read.content, list):
        codec = tokenizers.source_codec or tokenizers.codec
        rows = source_rows(read, codec, sample.text.text, min(SOURCE, encoder.facts.context))
        why, instead = f"{len(rows)} sources of {SOURCE} tokens", "--quantizer mse"
    elif rows is not None:
        why = f"{len(rows)} pieces of recordings, fewer than {LEAST_SOURCES},"
    if rows is None or len(rows) < LEAST_SOURCES:
        if asked:
            raise ExportError(f"--quantizer {asked.name}: there are {why} to calibrate on", instead)
        return None, [f"levels are chosen by mse: there are {why} to calibrate on ({instead})"]
    sources, eos = arranged(rows, target.arch), tokenizers.facts.eos
    return Calibration(target, asked, None, [], read.begin, eos, loaded.options.seed, sources), []
