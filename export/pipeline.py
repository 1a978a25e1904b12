"""An export from beginning to end: open, write, compare, measure, search, close."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec import __version__
from edgespec.errors import ExportError
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.traits import traits
from edgespec.export.attention import check_attention, prepare_attention
from edgespec.export.calibrate import chosen_levels
from edgespec.export.calibration_text import MEASURED_TOKENS, MIN_TOKENS, quantizer_texts, read_calibration
from edgespec.export.head_choice import HeadChoice, choose_heads, cut_draft
from edgespec.export.head_vocab import frequent_tokens, write_tokens
from edgespec.export.method_parts import MethodMeasurer, Progress, digest
from edgespec.export.model import WrittenModel, open_model, write_model
from edgespec.export.options import GATED, ExportOptions
from edgespec.export.parity import parity_report
from edgespec.export.plan import describe_export
from edgespec.export.skip_sets import read_skip_set
from edgespec.export.source import resolve
from edgespec.export.tokenizer import check_same_vocabulary, tokenizer_facts
from edgespec.export.tokenizer_files import open_codec
from edgespec.export.weights import WeightChoice
from edgespec.export.writer import copy_tokenizer, refuse_existing, staged_folder, write_manifest
from edgespec.runtimes.manifest import (
    SCHEMA,
    Layout,
    Manifest,
    ModelPart,
)
from edgespec.runtimes.operators import choose_operators
from edgespec.runtimes.session import Model
from edgespec.runtimes.slot import open_slot


@dataclass
class Exporter:
    """One export; ``run`` does it, ``plan`` only says what it would do."""

    options: ExportOptions
    progress: Progress = field(default=lambda stage, done, of, detail: None)

    def __post_init__(self) -> None:
        options = self.options
        self.methods = options.wanted()
        self.choice = WeightChoice.of(options.format, options.quantizer, options.head_format)
        self.path = resolve(options.model, options.revision)
        adapter = None if options.adapter is None else resolve(options.adapter)
        self.arch = open_model(self.path, options.context, adapter)
        self.notes = list(self.arch.source.notes)
        if "swift" in self.methods and self.arch.facts.layers < 3:
            raise ExportError(
                f"swift leaves out layers between first and last, but the model has {self.arch.facts.layers} layers",
                "use another method",
            )
        self.codec = open_codec(self.arch.source.path)
        self.tokenizer = tokenizer_facts(self.arch, self.codec)  # early: it refuses what does not fit
        self.draft: Architecture | None = None
        if options.draft is not None:
            self.draft = open_model(resolve(options.draft), None)
            self.notes += [f"draft: {note}" for note in self.draft.source.notes]
            check_same_vocabulary(self.arch, self.draft, self.codec, open_codec(self.draft.source.path))
            self.draft.facts = _limited(self.draft, self.arch.facts.context)
        heads = choose_heads(options.model, options.heads, self.methods, self.arch, self.codec)
        self.given_skip = read_skip_set(options.skip_set, self.arch.facts.layers) if options.skip_set else None
        self.text, self.text_name = read_calibration(options.calibration, self.arch.source.path, self.codec)
        self.heads = HeadChoice(heads, self._frequent(options.head_vocab, self.arch, "--head-vocab"))
        self.heads.extend(self.arch)
        self.draft_tokens = self._frequent(options.draft_vocab, self.draft or self.arch, "--draft-vocab")
        self.attention = check_attention(options.attention, options.operators, len(self.codec.encode(self.text)))

    def plan(self) -> dict[str, Any]:
        """What ``run`` would write, as a JSON object."""
        refuse_existing(self.options.output, self.options.overwrite)
        return self._described()

    def run(self) -> Manifest:
        """Write the bundle; returns its manifest.

        Raises:
            ExportError: anything about the source, the options or the disk; nothing is left behind.
        """
        options = self.options
        gated = bool(set(GATED) & set(self.methods))
        with staged_folder(options.output, options.overwrite) as folder:
            scored = None if self.heads.tokens is None else write_tokens(folder, "", self.heads.tokens)
            kind = {"gated": gated, "plan": self.heads.plan, "head_vocab": scored}
            written = self._write(folder, self.arch, "target", **kind)
            draft_part = self._write_draft(folder)
            copy_tokenizer(self.arch.source.path, folder, self.codec)
            self.progress("weights", 1, 1, "written")
            operators = choose_operators(options.operators, written.part)
            slot = open_slot(Model(folder, written.part, operators.graph(written.part, strict=True), options.threads))
            tokens = self._tokens(min(MEASURED_TOKENS, self.arch.facts.context // 2))
            of = 2 * self.arch.facts.layers
            parity = parity_report(
                self.arch,
                written.errors,
                slot,
                tokens,
                lambda done: self.progress("parity", done, of, "source in fp32"),
            )
            methods, costs = self._measurer().measure(folder, slot, tokens, draft_part)
            target = self._prepare_attention(folder, written.part)
            return write_manifest(
                folder,
                Manifest(
                    schema_version=SCHEMA,
                    edgespec_version=__version__,
                    target=target,
                    draft=draft_part,
                    methods=methods,
                    tokenizer=self.tokenizer,
                    parity=parity | {"text": self.text_name, "text_sha256": digest(self.text)},
                    cost=costs.as_dict() | {"threads": slot.model.threads, "depth": len(tokens)},
                    memory=self._memory(written.part, draft_part),
                    provenance=self._provenance(),
                ),
            )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _write_draft(self, folder: Path) -> ModelPart | None:
        if self.draft is None:
            return None
        (folder / "draft").mkdir()
        kind: dict[str, Any] = {"draft": True, "prefix": "draft/"}
        if self.draft_tokens is not None:
            kind["head_vocab"] = write_tokens(folder / "draft", "draft/", self.draft_tokens)
            kind["plan"] = cut_draft(self.draft, self.draft_tokens)
        return self._write(folder / "draft", self.draft, "draft", **kind).part

    def _frequent(self, size: int | None, arch: Architecture, option: str) -> NDArray[np.int64] | None:
        """The tokens of a cut LM head, [size]."""
        if size is None:
            return None
        always = self.tokenizer.eos
        return frequent_tokens(self.codec.encode(self.text), size, arch.facts.vocab, always, option)

    def _layout(self) -> Layout:
        return "stock" if self.options.operators == "stock" else "native"

    def _write(self, folder: Path, arch: Architecture, what: str, **kind: Any) -> WrittenModel:
        choice, of = self.choice, 2 * arch.facts.layers
        layout = self._layout()
        self.progress("weights", 0, 1, what)
        if choice.quantizer is None:
            return write_model(folder, arch, choice.format, layout=layout, **kind)

        def report(done: int) -> None:
            self.progress("quantize", done, of, f"{what}, on {texts.size} tokens")

        texts = quantizer_texts(self.codec, self.text, arch.facts.context)
        with chosen_levels(arch, choice.quantizer, choice.bits(arch), texts, folder, report) as chosen:
            return write_model(folder, arch, choice.format, head=choice.head, chosen=chosen, layout=layout, **kind)

    def _prepare_attention(self, folder: Path, part: ModelPart) -> ModelPart:
        """The target's entry with what was learnt and measured of other attentions."""
        if not self.attention:
            return part
        made = prepare_attention(
            folder,
            part,
            self.attention,
            self.codec.encode(self.text),
            self.options.threads,
            lambda done, of, what: self.progress("attention", done, of, what),
        )
        text = {"text": self.text_name, "text_sha256": digest(self.text)}
        return part.model_copy(update={"attention": made.model_copy(update=text)})

    def _measurer(self) -> MethodMeasurer:
        options, choice = self.options, self.choice
        weights = choice.quantizer.name if choice.quantizer else None, choice.head
        adapted = () if options.adapter is None else (options.adapter,)
        facts = self.arch.source.config, options.format, *weights, options.seed, options.context, *adapted
        return MethodMeasurer(
            options,
            self.methods,
            self.heads,
            self.given_skip,
            self.text,
            self.text_name,
            str(facts),
            self.progress,
        )

    def _tokens(self, limit: int) -> list[int]:
        return self.codec.encode(self.text)[: max(limit, MIN_TOKENS)]

    def _described(self) -> dict[str, Any]:
        plan = describe_export(self.arch, self.choice, self.methods, self.draft, self._layout())
        return plan | {"model": str(self.path), "notes": self.notes}

    def _memory(self, target: ModelPart, draft: ModelPart | None) -> dict[str, Any]:
        plan = self._described()
        return {"weight_bytes": plan["weight_bytes"], "kv_bytes_per_token": plan["kv_bytes_per_token"]}

    def _provenance(self) -> dict[str, Any]:
        config = (self.arch.source.path / "config.json").read_bytes()
        found = {
            "model": self.options.model
            if not Path(self.options.model).exists()
            else Path(self.options.model).resolve().name,
            "config_sha256": hashlib.sha256(config).hexdigest(),
            "revision": self.options.revision,
            "adapter": None if self.options.adapter is None else Path(self.options.adapter).resolve().name,
            "draft": None if self.options.draft is None else Path(self.options.draft).name,
            "notes": self.notes or None,
            "seed": self.options.seed,
            "traits": traits(self.arch),
        }
        return {key: value for key, value in found.items() if value is not None}


def _limited(draft: Architecture, context: int) -> Any:
    """The draft's facts with no more context than it has; the target's context is served as far as it reaches."""
    return draft.facts.model_copy(update={"context": min(context, draft.facts.context)})
