"""An export from beginning to end: open, write, compare, measure, search, close."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import SPECULATIVE, needing
from edgespec.export.architectures.llamagen import CAPTIONS
from edgespec.export.bundle.drafter import drafter_bytes, write_drafter
from edgespec.export.bundle.source_model import Writing, WrittenModel
from edgespec.export.bundle.writer import (
    GENAI,
    copy_tokenizer,
    genai_config,
    refuse_existing,
    refuse_short_disk,
    staged_folder,
    write_manifest,
)
from edgespec.export.calibrated import CALIBRATED, note
from edgespec.export.codes import CodeTensors, ended, read_codes, write_codes
from edgespec.export.codes.write import FOLDER
from edgespec.export.emitted import EmittedModel
from edgespec.export.measuring.drafters import measure_drafter
from edgespec.export.measuring.method_parts import MethodMeasurer
from edgespec.export.measuring.mixer import Mixer
from edgespec.export.measuring.plan import encoder_bytes
from edgespec.export.measuring.seeing import tower_note
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.export.opened import Opened
from edgespec.export.optimum.write import WORK
from edgespec.export.quantization.calibration_text import MEASURED_TOKENS, MIN_TOKENS, quantizer_texts, unmeasured
from edgespec.export.quantization.coded_keys import prepare_attention
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.tokenizers.files import open_codec
from edgespec.runtimes.files.formats import FILE, FOUR_BITS
from edgespec.runtimes.files.manifest import SCHEMA, CodesPart, Manifest, MethodPart, ModelPart
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec
from edgespec.version import __version__

_SMALL = 0.2  # of the target's bytes: a larger draft has the target's format


@dataclass
class InProgress:
    """A bundle in the making: what the steps so far have made."""

    folder: Path
    written: WrittenModel  # as it was before attention and devices added to it
    target: ModelPart
    draft: ModelPart | None
    drafter: ModelPart | None
    slot: Slot  # with the target
    tokens: list[int]  # what is measured on
    parity: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, MethodPart] = field(default_factory=dict)
    costs: StepCosts | None = None
    codes: CodesPart | None = None


@dataclass
class Exporter(Opened):
    """One export; ``run`` does it, ``plan`` only says what it would do.

    Raises:
        ExportError: the model or the options, when it is made; nothing is written.
    """

    def plan(self) -> dict[str, Any]:
        """Return what ``run`` would write, as a JSON object."""
        refuse_existing(self.options.output, self.options.overwrite)
        if (mixer := self._mixer()) is not None:
            self.notes.append(mixer.foretold(self.options.target_size))
        if self.calibration is not None and isinstance(self.target, EmittedModel):
            self.notes.append(f"calibrates {self.calibration.foretold(self.target)}")
        choice = self.format_choice
        chosen = {} if choice is None else {"choice": choice.as_dict()}
        return self._sizes() | {"model": str(self.path), "notes": self.notes} | chosen

    def run(self) -> Manifest:
        """Write the bundle; returns its manifest.

        Raises:
            ExportError: anything about the source, the options or the disk; nothing is left behind.
        """
        refuse_short_disk(self.options.output, sum(self._sizes()["weight_bytes"].values()))
        with staged_folder(self.options.output, self.options.overwrite) as folder:
            self._mix()
            made = self._write(folder)
            for step in (self._compare, self._see, self._measure, self._learn_attention, self._devices):
                step(made)
            manifest = self._manifest(made)
            if (config := genai_config(manifest.target, self.tokenizer, self.sampling)) is not None:
                (folder / GENAI).write_text(config, "utf-8")
            shutil.rmtree(folder / WORK, ignore_errors=True)
            return write_manifest(folder, manifest)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _mix(self) -> None:
        if (mixer := self._mixer()) is not None:
            kl = self.options.target_kl
            self.mix = mixer.down_to(kl) if kl is not None else mixer.within(self.options.target_size or 0)
            self.notes.append(self.mix.note)

    def _mixer(self) -> Mixer | None:
        options, target = self.options, self.target
        if options.target_size is options.target_kl is None or not isinstance(target, EmittedModel):
            return None
        tokens, encoder, read = unmeasured(self.tokens), target.arch.encoder, None
        if self.read is not None and encoder is not None:
            content, read = self.read.content, self.read.reference(encoder)
            if isinstance(content, list):  # the source itself: what is written about it is not known yet
                words = (self.source_codec or self.codec).decode(content)
                tokens = self.codec.encode(words, special=False)
            tokens = [*self.read.begin, *tokens]
        return Mixer(target.arch, self.choice, options.layout, target.heads, tokens[: target.facts.context],
                     lambda done, of: self.progress("mix", done, of, "each part in int4"), read,
                     sum(encoder_bytes(target.arch, self.choice).values()))  # fmt: skip

    @property
    def _target_choice(self) -> WeightChoice:
        """How the target's matrices are stored; a drafter's as ``choice`` says."""
        return self.mix.choice if self.mix else self.choice

    def _write(self, folder: Path) -> InProgress:
        writing, facts = self._writing(folder, draft=False), dict[str, Any]()
        if self.calibration is not None and isinstance(self.target, EmittedModel):
            written, facts = self.calibration.write(self.target, writing)
            self.notes += [line] if (line := note(facts)) else []
        else:
            written = self.target.write(writing)
        draft = None
        if self.draft is not None:
            (folder / "draft").mkdir()
            draft = self.draft.write(self._writing(folder, draft=True)).part
        drafter = None
        if self.drafter is not None:
            self.progress("weights", 0, 1, "drafter")
            drafter = write_drafter(folder, self.drafter, self.choice, written.part.layout)
        copy_tokenizer(self.target.source.path, folder, self.codec, self.source_codec or self._caption_codec())
        graph = choose_operators(self.options.operators, written.part).graph(written.part, strict=True)
        slot = open_slot(Model(folder, written.part, graph, self.options.threads))
        most = max(MIN_TOKENS, min(MEASURED_TOKENS, self.target.facts.context // 2))
        tokens = self.tokens[:most]
        if self.read is not None:
            self.read.attend(folder, written.part, slot, self.options.threads)
            tokens = self.read.written(slot, most, self.tokenizer.eos)
        return InProgress(folder, written, written.part, draft, drafter, slot, tokens, facts, codes=self._codes(folder))

    def _caption_codec(self) -> TextCodec | None:
        hearing = self.arch.hearing if self.arch else None
        reads = hearing is not None and hearing.sound is None
        return open_codec(self.target.source.path / CAPTIONS) if reads else None

    def _codes(self, folder: Path) -> CodesPart | None:
        """Write the decoder of codes that was named, that of the model itself, or the one in its folder."""
        source, arch = self.target.source, self.arch
        if (own := self.options.codes or source.path / FOLDER).is_dir():
            return write_codes(*read_codes(own), folder, self.codec)
        if arch is None or arch.codes is None:
            return None
        config, names = arch.codes
        tensors = CodeTensors(lambda name: arch.source.read(names[name]), names)
        return write_codes(source.path, config, tensors, folder, self.codec)

    def _writing(self, folder: Path, draft: bool) -> Writing:
        gated = not draft and bool(set(needing("layers", "heads", "drafter")) & set(self.methods))

        def texts(context: int) -> NDArray[np.int64]:  # [S, T]
            return quantizer_texts(self.codec, self.text.text, context)

        options = self.options
        choice = self.draft_choice if draft else self._target_choice
        return Writing(folder, draft, gated, choice, options.operators, texts, options.threads, self.progress)

    @property
    def copies(self) -> bool:
        """Whether weights are copied and nothing is measured: ``quick`` with the weights of a file."""
        options = self.options
        return options.format == FILE and options.quick and not set(self.methods) - set(needing("text"))

    def _compare(self, made: InProgress) -> None:
        if self.options.format == FILE:  # the same numbers
            return
        if isinstance(self.target, EmittedModel):
            found = self.target.parity(made.written, made.slot, made.tokens, self.progress, self.read)
        else:
            found = self.target.parity(made.written, made.slot, made.tokens, self.progress)
        made.parity |= found | self.text.facts

    def _see(self, made: InProgress) -> None:
        if self.arch is not None and self.arch.sight is not None and not self.options.quick:
            line = tower_note(self.arch.sight, made.folder, made.target, self.options.threads)
            self.notes += [line] if line else []

    def _measure(self, made: InProgress) -> None:
        options, choice = self.options, self.choice
        if self.copies:
            made.methods = {name: MethodPart() for name in self.methods}
            return
        weights = made.target.quantizer if choice.quantizer else None, choice.head
        adapted = () if options.adapter is None else (options.adapter,)
        facts = self.target.config, options.format, *weights, options.seed, options.context, *adapted
        measurer = MethodMeasurer(self.methods, options.operators, options.threads, options.trials,
                                  not options.devices, options.seed, options.keep_search, self.heads, self.given_skip,
                                  self.text, str(facts), self.progress)  # fmt: skip
        drafts = [] if made.draft is None else [(made.folder, made.draft), *self._other_draft(made)]
        made.methods, made.costs, best = measurer.measure(made.folder, made.slot, made.tokens, drafts, self.read)
        if best:
            self._take_draft(made, *drafts[best])
        if (part := made.methods.get(SPECULATIVE)) and part.notes:
            self.notes.append(part.notes)
        if self.drafter is not None and made.drafter is not None:
            self.progress("acceptance", 0, 1, "the drafter against the target")
            found = measure_drafter(self.drafter, made.folder, made.drafter, made.slot, made.tokens, choice)
            made.methods[self.drafter.method] = found.method(made.costs, self.text.facts)
            self.notes += found.notes
            self.progress("acceptance", 1, 1, "the drafter against the target")
        if made.costs.busy:  # what was chosen by these times stands; what they predict would mislead
            made.methods = {name: _unpredicted(part) for name, part in made.methods.items()}
            self.notes.append(
                f"{made.costs.busy} while passes were timed, so no speed is predicted: calibrate the bundle with "
                "`edgespec calibrate` when nothing else runs"
            )

    def _other_draft(self, made: InProgress) -> list[tuple[Path, ModelPart]]:
        """Write a small draft of a 4-bit model in int8 as well: rounding may lose more guesses than it saves time."""
        options, draft = self.options, self.draft
        if options.quick or options.draft_format or options.format not in FOUR_BITS:
            return []
        if not isinstance(draft, EmittedModel) or draft.shares_encoder:
            return []
        choice, known = WeightChoice.of("int8", None, None), self._sizes()["weight_bytes"]
        if known["draft"] > _SMALL * known["target"]:
            return []
        writing = replace(self._writing(made.folder / WORK, draft=True), choice=choice)
        (writing.folder / writing.prefix).mkdir(parents=True)
        return [(writing.folder, draft.write(writing).part)]

    def _take_draft(self, made: InProgress, folder: Path, draft: ModelPart) -> None:
        shutil.rmtree(made.folder / "draft")
        (folder / "draft").rename(made.folder / "draft")
        made.draft, self.draft_choice = draft, WeightChoice.of("int8", None, None)
        form = self.options.format
        self.notes.append(f"the draft is in int8, where its guesses gain more: --draft-format {form} changes it")

    def _attending(self, made: InProgress) -> Callable[[Slot], None] | None:
        """Return what lets another slot of the target attend over the measured source; None = there is none."""
        read, threads = self.read, self.options.threads
        return None if read is None else lambda slot: read.attend(made.folder, made.target, slot, threads)

    def _learn_attention(self, made: InProgress) -> None:
        if not self.attention:
            return

        def report(done: int, of: int, what: str) -> None:
            self.progress("attention", done, of, what)

        found = prepare_attention(made.folder, made.target, self.attention, self.tokens, self.options.threads, report,
                                  self._attending(made))  # fmt: skip
        made.target = made.target.model_copy(update={"attention": found.model_copy(update=self.text.facts)})

    def _devices(self, made: InProgress) -> None:
        skip = made.methods["self-spec"].skip if "self-spec" in made.methods else None
        for device, precision in product(self.options.devices, self.options.device_precisions or ("fp32",)):
            writing = self._writing(made.folder, draft=False)
            made.target = self.target.for_device(writing, made.target, device, precision, skip)
            if self.draft is not None and made.draft is not None:
                writing = self._writing(made.folder, draft=True)
                made.draft = self.draft.for_device(writing, made.draft, device, precision, None)

    def _manifest(self, made: InProgress) -> Manifest:
        costs = None if made.costs is None else made.costs.as_dict()
        sizes = self._sizes()
        return Manifest(
            schema_version=SCHEMA,
            edgespec_version=__version__,
            target=made.target,
            draft=made.draft,
            drafter=made.drafter,
            methods=made.methods,
            tokenizer=ended(self.tokenizer, made.codes),
            sampling=self.sampling,
            pooling=self.pooling,
            rules=self.rules,
            text=None if self.speech else self.form,
            speech=self.speech,
            codes=made.codes,
            parity=made.parity,
            cost=costs | {"threads": made.slot.model.threads, "depth": len(made.tokens)} if costs else {},
            memory={name: sizes[name] for name in ("weight_bytes", "kv_bytes_per_token")},
            provenance=self._provenance(),
        )

    def _sizes(self) -> dict[str, Any]:
        """Return the export as a JSON object; of what goes through optimum sizes are good to a few percent."""
        operators, choice, models = self.options.operators, self._target_choice, [self.target]
        known = {"target": self.target.weight_bytes(choice, operators)}
        if self.draft is not None:
            models.append(self.draft)
            known["draft"] = self.draft.weight_bytes(self.draft_choice, operators)
        sizes = {name: own for name, (own, _) in known.items()}
        for prefix, model, own in (("", self.target, choice), ("draft_", self.draft, self.draft_choice)):
            if isinstance(model, EmittedModel) and not model.shares_encoder:
                sizes |= {f"{prefix}{name}": size for name, size in encoder_bytes(model.arch, own).items()}
        if heads := sum(more for _, more in known.values()):
            sizes["heads"] = heads
        quantizer = CALIBRATED if self.calibration and self.options.calibrates else choice.quantizer
        found: dict[str, Any] = {
            "model": str(self.target.source.path),
            "architecture": self.target.facts.architecture,
            "format": choice.format,
            "head_format": choice.head or choice.format,
            "quantizer": quantizer.name if quantizer else None,
            "methods": self.methods,
            "context": self.target.facts.context,
            "weight_bytes": sizes,
            "kv_bytes_per_token": sum(model.facts.kv_bytes_per_token for model in models),
        }
        if self.drafter is not None:
            found["weight_bytes"]["drafter"] = drafter_bytes(self.drafter, self.choice, self.options.layout)
            found["kv_bytes_per_token"] += self.drafter.arch.facts.kv_bytes_per_token
        return found

    def _provenance(self) -> dict[str, Any]:
        options, source = self.options, self.target.source.path
        local = Path(options.model)
        found = {
            "model": local.resolve().name if local.exists() else options.model,
            "config_sha256": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
            "revision": options.revision,
            "adapter": None if options.adapter is None else Path(options.adapter).resolve().name,
            "draft": None if options.draft is None else Path(options.draft).name,
            "drafter": None if options.its_drafter is None else Path(options.its_drafter).name,
            "notes": self.notes or None,
            "seed": options.seed,
            "mixed": self.mix.facts if self.mix else None,
            "format_choice": self.format_choice.as_dict() if self.format_choice else None,
            **self.target.provenance(),
        }
        return {key: value for key, value in found.items() if value is not None}


def _unpredicted(part: MethodPart) -> MethodPart:
    """Drop what was predicted of a method's speed, the note that says it too."""
    notes = None if (part.notes or "").startswith("predicted") else part.notes
    return part.model_copy(update={"predicted_speedup": None, "notes": notes})
