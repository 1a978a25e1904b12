"""What an export works on: models, texts and choices, opened and checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import EAGLE, MTP
from edgespec.errors import ExportError, IncompatibleDraft
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.sights import limit_images
from edgespec.export.bundle.drafter import check_drafter
from edgespec.export.bundle.model_part import (
    check_coded_keys,
    check_devices,
    check_layers,
    check_operators,
    open_draft,
    open_model,
    source_of,
)
from edgespec.export.bundle.progress import Progress
from edgespec.export.calibrated import LEAST_SOURCES, SOUND, SOURCE, Calibration, Rows, arranged
from edgespec.export.chosen_format import chosen_format
from edgespec.export.drafters.drafter import Drafter, cut_drafter
from edgespec.export.drafters.head_choice import HeadChoice, choose_heads, frequent_tokens
from edgespec.export.drafters.mtp import read_mtp
from edgespec.export.drafters.read import read_drafter
from edgespec.export.drafters.vocabulary import with_tokens
from edgespec.export.emit.plan import kept_types
from edgespec.export.emitted import EmittedModel
from edgespec.export.format_choice import FormatChoice
from edgespec.export.measuring.mixer import BitAllocation
from edgespec.export.measuring.plan import best_vocab_rows
from edgespec.export.measuring.reading import Reading, reading, shares_encoder, source_rows
from edgespec.export.measuring.skip_search import read_skip_set
from edgespec.export.optimum.model import OptimumModel, is_foreign
from edgespec.export.options import ExportOptions, refuse_draft, refuse_reading, refuse_target
from edgespec.export.quantization.calibration_sound import read_sounds
from edgespec.export.quantization.calibration_text import read_calibration, unmeasured
from edgespec.export.quantization.coded_keys import check_attention
from edgespec.export.quantization.quantizer import Quantizer
from edgespec.export.source.keys import left_out
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.source.stored import LOSS
from edgespec.export.tokenizers.facts import check_same_vocabulary, pooling_of, sampling_part, tokenizer_facts
from edgespec.export.tokenizers.files import open_codec, open_source_codec
from edgespec.export.tokenizers.generation import decoder_rules
from edgespec.export.tokenizers.speech import speech_part
from edgespec.export.tokenizers.text_form import text_form
from edgespec.planning.cut import first_ids
from edgespec.runtimes.files.formats import FILE
from edgespec.runtimes.files.manifest import TextForm
from edgespec.runtimes.text.codec import TextCodec

SourceModel = EmittedModel | OptimumModel
"""A target or a draft on its way into a bundle, whoever makes its graphs."""


@dataclass
class Opened:
    """The models and texts of an export, as its options ask for them.

    Raises:
        ExportError: the models or the options, when it is made.
    """

    options: ExportOptions
    progress: Progress = field(default=lambda stage, done, of, detail: None)

    def __post_init__(self) -> None:
        options = self.options
        self.methods = options.wanted()
        self.choice, self.draft_choice = options.choice, options.draft_choice
        self.format_choice: FormatChoice | None = None
        self.progress("open", 0, 1, options.model)
        self.mix: BitAllocation | None = None  # of the target
        self.path = resolve(options.model, options.revision)
        self.target = self._open_target()
        self.notes = [*self.target.source.notes, *self.target.remedies]
        for warning in self.target.remedies:  # at once: what to do about it is another option
            self.progress("warning", 1, 1, warning)
        check_layers(self.methods, self.target.facts)
        folder = self.target.source.path
        self.codec = open_codec(folder)
        # early: it refuses what does not fit
        self.tokenizer = tokenizer_facts(folder, self.target.config, self.target.facts.vocab, self.codec)
        self.source_codec, self.form = self._texts()
        read = source_of(self.arch) if self.arch else None
        self.speech = speech_part(folder, self.target.config, self.codec) if read and read.features else None
        self.sampling, self.pooling = sampling_part(folder), pooling_of(folder)
        self.rules = decoder_rules(folder, self.target.config) if self.form is None else None
        self.notes += left_out(folder, self.target.config, self.codec, sequence=self.form is not None)
        self.draft: SourceModel | None = None
        if options.draft is not None:
            self.draft = self._open_draft(resolve(options.draft))
            self.notes += [f"draft: {note}" for note in self.draft.source.notes]
            check_same_vocabulary(self.target.facts, self.draft.facts, self.codec, open_codec(self.draft.source.path))
            self.draft.limit(self.target.facts.context)
            self._share_encoder(self.draft)
        trained = {}
        if self.arch is not None:
            trained = choose_heads(options.model, options.heads, self.methods, self.arch, self.codec)
        self.drafter: Drafter | None = None
        if options.its_drafter is not None:
            if self.arch is None:
                raise ExportError("--drafter needs graphs of edgespec's own, and this model's are optimum's")
            self.drafter = read_drafter(resolve(options.its_drafter), self.arch)
        elif MTP in self.methods and self.arch is not None:
            self.drafter = read_mtp(Checkpoint.open(self.path), self.arch)
        if self.drafter is not None:
            check_drafter(self.drafter, self.methods, options.operators)
        self.given_skip = read_skip_set(options.skip_set, self.target.facts.layers) if options.skip_set else None
        self.sounds = self._sounds()
        text = options.calibration if self.sounds is None else None
        self.text = read_calibration(text, folder, self.codec)
        self.tokens = self.codec.encode(self.text.text)
        self.read: Reading | None = None
        if self.form is not None and self.arch is not None:
            source_codec, sound = self.source_codec or self.codec, None if self.sounds is None else self.sounds[-1]
            self.read = reading(self.arch, self.form, source_codec, self.text.text, options.seed, sound)
        tapped = self.drafter.tapped if self.drafter else ()
        self.heads = HeadChoice(trained, self._frequent(options.head_vocab, self.target, "--head-vocab"), tapped)
        self.target.equip(self.heads)
        self._cut_draft()
        self._cut_drafter()
        self.progress("open", 1, 1, options.model)
        if options.choose:
            self._choose()
        if self.options.format == FILE:
            self._keep()
        self.calibration = self._calibration()
        self.attention = check_attention(options.attention, options.operators, len(self.tokens))
        check_coded_keys(self.target.facts, self.attention)

    @property
    def arch(self) -> Architecture | None:
        """Of the target; None = its graphs are optimum's."""
        return self.target.arch if isinstance(self.target, EmittedModel) else None

    def _choose(self) -> None:
        """Choose the format by what each loses on a text."""
        found = chosen_format(self)
        self.format_choice = found
        self.options = replace(self.options, format=found.pick.format, choose=False)
        self.choice, self.draft_choice = self.options.choice, self.options.draft_choice
        self.progress("choice", 1, 1, found.line)

    def _keep(self) -> None:
        """Say which weights stay as their file has them, and which cannot.

        Raises:
            ExportError: the model is no GGUF file.
        """
        arch = self.arch
        if arch is None or arch.encoder is not None or not (kept := kept_types(arch))[0]:
            raise ExportError(f"{self.path}: --format file is for GGUF files of decoders", "choose another --format")
        types, others = kept
        self.notes = [note for note in self.notes if LOSS not in note]
        self.notes.append(f"weights are the file's own ({', '.join(types)})")
        if others:
            self.notes.append(f"int8 instead of {', '.join(others)}, which no kernels are for: this loses a little")

    def _texts(self) -> tuple[TextCodec | None, TextForm | None]:
        """Of an encoder-decoder: the tokenizer of its sources, if it is another one, and what stands around texts."""
        if self.arch is None or self.arch.encoder is None:
            return None, None
        refuse_reading(self.options)
        folder = self.target.source.path
        sources = open_source_codec(folder)
        return sources, text_form(folder, self.target.config, self.codec, sources)

    def _sounds(self) -> NDArray[np.float32] | None:
        source = source_of(self.arch) if self.arch else None
        if source is None or source.features is None or self.options.calibration is None:
            return None
        return read_sounds(self.options.calibration, source.features, min(SOUND, source.most))

    def _share_encoder(self, draft: SourceModel) -> None:
        """Let a draft read what the target's encoder gives, if both have the same one."""
        if isinstance(draft, EmittedModel) and self.arch is not None:
            if (draft.arch.encoder is None) != (self.arch.encoder is None):
                raise IncompatibleDraft("expected a draft and a target that both read a source, or none of them")
            draft.shares_encoder = shares_encoder(self.arch, draft.arch)

    def _open_target(self) -> SourceModel:
        options = self.options
        if is_foreign(self.path):
            refuse_target(options, self.choice, self.path)
            return OptimumModel.open(self.path, options.context)
        adapter = None if options.adapter is None else resolve(options.adapter)
        arch = open_model(self.path, options.context, adapter, options.text_only)
        check_devices(arch, options.devices)
        limit_images(arch, options.image_rows)
        check_operators(arch, options.operators)
        return EmittedModel(arch)

    def _open_draft(self, path: Path) -> SourceModel:
        if is_foreign(path):
            refuse_draft(self.options, path)
            return OptimumModel.open(path, None)
        if self.arch is not None and self.arch.hearing is not None and self.arch.hearing.sound is None:
            raise IncompatibleDraft("a model that draws by captions has no drafts yet: its other methods need none")
        arch = open_draft(path, self.arch, self.options.image_rows)
        check_operators(arch, self.options.operators)
        return EmittedModel(arch)

    def _cut_draft(self) -> None:
        size = self.options.draft_vocab
        if size is None and self.arch is not None and isinstance(self.draft, EmittedModel):
            size = best_vocab_rows(self.arch, self.draft.arch, first_ids(self.tokens))
        if self.draft is not None and size:
            scored = self._frequent(size, self.draft, "--draft-vocab")
            assert scored is not None
            self.draft.cut(scored)

    def _cut_drafter(self) -> None:
        """Give a drafter the tokens that were asked for; else one with the target's LM head as many as pay."""
        size, facts = self.options.draft_vocab, self.target.facts
        if self.drafter is None or self.arch is None:
            return
        own = self.drafter.arch.own_head
        if size is None and self.drafter.tokens is None and self.drafter.method != EAGLE:
            size = best_vocab_rows(self.arch, self.drafter.arch, first_ids(self.tokens))
        if size == 0 and own and self.drafter.tokens is not None:
            size = facts.vocab
        if size and (tokens := self._frequent(size, self.target, "--draft-vocab")) is not None:
            drafter = self.drafter
            self.drafter = with_tokens(drafter, self.arch, tokens) if own else cut_drafter(drafter, tokens)
        self.notes += [f"drafter: {note}" for note in self.drafter.notes]

    def _calibration(self) -> Calibration | None:
        options, asked = self.options, self.choice.quantizer
        asked = asked if asked and asked.calibrated else None
        if self.arch is None or not (asked or options.calibrates):
            return None
        if self.read is not None:
            return self._sourced(self.read, asked)
        bos = self.tokenizer.bos
        begin = self.codec.encode("")[:1] or ([] if bos is None else [bos])
        tokens, given = self.codec.encode(self.text.text, special=False), None
        if options.calibration is not None:
            given = unmeasured(tokens)
            if given is tokens:  # too short for both
                own = read_calibration(None, self.target.source.path, self.codec).text
                tokens = self.codec.encode(own, special=False)
        return Calibration(asked, given, tokens, begin, self.tokenizer.eos, options.seed)

    def _sourced(self, read: Reading, asked: Quantizer | None) -> Calibration | None:
        """Return how an encoder-decoder's levels are calibrated: on what it writes about parts of texts or sounds."""
        arch, codec = self.arch, self.source_codec or self.codec
        rows: Rows | None = self.sounds
        assert arch is not None
        assert arch.encoder is not None
        why, instead = "no recordings", "--calibration FOLDER with some, or --quantizer mse"
        if isinstance(read.content, list):
            rows = source_rows(read, codec, self.text.text, min(SOURCE, arch.encoder.facts.context))
            why, instead = f"{len(rows)} sources of {SOURCE} tokens", "--quantizer mse"
        elif rows is not None:
            why = f"{len(rows)} pieces of recordings, fewer than {LEAST_SOURCES},"
        if rows is None or len(rows) < LEAST_SOURCES:
            if asked:
                raise ExportError(f"--quantizer {asked.name}: there are {why} to calibrate on", instead)
            self.notes.append(f"levels are chosen by mse: there are {why} to calibrate on ({instead})")
            return None
        sources = arranged(rows, arch)
        return Calibration(asked, None, [], read.begin, self.tokenizer.eos, self.options.seed, sources)

    def _frequent(self, size: int | None, model: SourceModel, option: str) -> NDArray[np.int64] | None:
        if size is None:
            return None
        return frequent_tokens(self.tokens, size, model.facts.vocab, self.tokenizer.eos, option)
