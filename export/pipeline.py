"""An export from beginning to end: open, write, compare, measure, search, close."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec import __version__
from edgespec.errors import ExportError
from edgespec.export.architectures import ARCHITECTURES, Architecture
from edgespec.export.architectures.traits import traits
from edgespec.export.attention.prepare import check_attention, prepare_attention
from edgespec.export.bundle.model import WrittenModel, write_model
from edgespec.export.bundle.model_part import check_devices, check_layers, check_operators, open_model
from edgespec.export.bundle.writer import copy_tokenizer, refuse_existing, staged_folder, write_manifest
from edgespec.export.graphs.device_graphs import add_device_graphs
from edgespec.export.heads.choice import HeadChoice, choose_heads, cut_draft
from edgespec.export.heads.description import HeadPlan
from edgespec.export.heads.vocab import frequent_tokens, write_tokens
from edgespec.export.measuring.method_parts import MethodMeasurer, Progress, digest
from edgespec.export.measuring.parity import parity_report
from edgespec.export.measuring.skip_sets import read_skip_set
from edgespec.export.optimum.model import ForeignModel, is_foreign
from edgespec.export.optimum.write import write_foreign
from edgespec.export.options import GATED, ExportOptions
from edgespec.export.planning.plan import describe_export
from edgespec.export.quantization.calibrate import chosen_levels
from edgespec.export.quantization.calibration_text import MEASURED_TOKENS, MIN_TOKENS, quantizer_texts, read_calibration
from edgespec.export.quantization.quantizers import QUANTIZERS
from edgespec.export.quantization.weights import DEFAULT_QUANTIZER, WeightChoice
from edgespec.export.source.source import resolve
from edgespec.export.tokenizers.facts import check_same_vocabulary, tokenizer_facts
from edgespec.export.tokenizers.files import open_codec
from edgespec.runtimes.files.manifest import (
    SCHEMA,
    Layout,
    Manifest,
    MethodPart,
    ModelPart,
)
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

WORK = ".optimum"  # of a bundle in the making: what optimum writes


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
        self.arch = self._open_target()
        self.notes = list(self.arch.source.notes)
        self._check_devices()
        check_layers(self.methods, self.arch.facts)
        check_operators(self.arch, options.operators)
        self.codec = open_codec(self.arch.source.path)
        self.tokenizer = tokenizer_facts(self.arch, self.codec)  # early: it refuses what does not fit
        self.draft: Architecture | ForeignModel | None = None
        if options.draft is not None:
            self.draft = self._open_draft(resolve(options.draft))
            self.notes += [f"draft: {note}" for note in self.draft.source.notes]
            check_same_vocabulary(self.arch, self.draft, self.codec, open_codec(self.draft.source.path))
            self.draft.facts = _limited(self.draft, self.arch.facts.context)
        heads = choose_heads(options.model, options.heads, self.methods, self.arch, self.codec)
        self.given_skip = read_skip_set(options.skip_set, self.arch.facts.layers) if options.skip_set else None
        self.text, self.text_name = read_calibration(options.calibration, self.arch.source.path, self.codec)
        self.heads = HeadChoice(heads, self._frequent(options.head_vocab, self.arch, "--head-vocab"))
        self.heads.extend(self.arch)
        self.draft_tokens = self._frequent(options.draft_vocab, self.draft or self.arch, "--draft-vocab")
        self.draft_plan: HeadPlan | None = None
        if self.draft_tokens is not None and isinstance(self.draft, Architecture):
            self.draft_plan = cut_draft(self.draft, self.draft_tokens)
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
        with staged_folder(options.output, options.overwrite) as folder:
            written = self._write_target(folder)
            draft_part = self._write_draft(folder)
            copy_tokenizer(self.arch.source.path, folder, self.codec)
            self.progress("weights", 1, 1, "written")
            operators = choose_operators(options.operators, written.part)
            slot = open_slot(Model(folder, written.part, operators.graph(written.part, strict=True), options.threads))
            tokens = self._tokens(min(MEASURED_TOKENS, self.arch.facts.context // 2))
            parity = self._parity(written, slot, tokens)
            methods, costs = self._measurer().measure(folder, slot, tokens, draft_part)
            target = self._prepare_attention(folder, written.part)
            target, draft_part = self._for_devices(folder, target, draft_part, methods)
            manifest = Manifest(
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
            )
            shutil.rmtree(folder / WORK, ignore_errors=True)
            return write_manifest(folder, manifest)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _open_target(self) -> Architecture:
        options = self.options
        adapter = None if options.adapter is None else resolve(options.adapter)
        return open_model(self.path, options.context, adapter)

    def _open_draft(self, path: Path) -> Architecture | ForeignModel:
        if not is_foreign(path):
            return open_model(path, None)
        options = self.options
        if options.draft_vocab is not None or options.format == "w8a8":
            what = "--draft-vocab" if options.draft_vocab is not None else "--format w8a8"
            raise ExportError(
                f"{what}: the draft {path} goes through optimum, whose graphs know no such thing",
                f"leave it out, or take a draft that edgespec emits itself: {', '.join(sorted(ARCHITECTURES))}",
            )
        return ForeignModel.open(path, None)

    def _write_target(self, folder: Path) -> WrittenModel:
        scored = None if self.heads.tokens is None else write_tokens(folder, "", self.heads.tokens)
        gated = bool(set(GATED) & set(self.methods))
        return self._write(folder, self.arch, "target", gated=gated, plan=self.heads.plan, head_vocab=scored)

    def _check_devices(self) -> None:
        check_devices(self.arch, self.options.devices)

    def _for_devices(
        self, folder: Path, target: ModelPart, draft: ModelPart | None, methods: dict[str, MethodPart]
    ) -> tuple[ModelPart, ModelPart | None]:
        """Both models with graphs for the devices that were asked for."""
        skip = methods["self-spec"].skip if "self-spec" in methods else None
        for device, precision in product(self.options.devices, self.options.device_precisions or ("fp32",)):
            target = add_device_graphs(folder, self.arch, target, device, skip, precision=precision)
            if draft is not None and isinstance(self.draft, Architecture):
                draft = add_device_graphs(folder / "draft", self.draft, draft, device, None, "draft/", precision)
        return target, draft

    def _parity(self, written: WrittenModel, slot: Slot, tokens: list[int]) -> dict[str, Any]:
        of = 2 * self.arch.facts.layers

        def report(done: int) -> None:
            self.progress("parity", done, of, "source in fp32")

        return parity_report(self.arch, written.errors, slot, tokens, report)

    def _write_draft(self, folder: Path) -> ModelPart | None:
        if self.draft is None:
            return None
        (folder / "draft").mkdir()
        if isinstance(self.draft, ForeignModel):
            return self._write_foreign(folder / "draft", self.draft, "draft", draft=True, prefix="draft/").part
        kind: dict[str, Any] = {"draft": True, "prefix": "draft/"}
        if self.draft_tokens is not None:
            kind["head_vocab"] = write_tokens(folder / "draft", "draft/", self.draft_tokens)
            kind["plan"] = self.draft_plan
        return self._write(folder / "draft", self.draft, "draft", **kind).part

    def _write_foreign(self, folder: Path, model: ForeignModel, what: str, **kind: Any) -> WrittenModel:
        """A part whose graph is optimum's, made now where there is none yet."""
        if model.file is None:
            self.progress("optimum", 0, 1, f"{what}: optimum makes the graph")
        inside = folder.parent if kind.get("prefix") else folder
        graph = model.open_graph(inside / WORK / what)
        choice = self.choice
        if choice.quantizer is not None and choice.quantizer.calibrated:  # a draft: its inputs are not known here
            choice = replace(choice, quantizer=QUANTIZERS[DEFAULT_QUANTIZER])
        self.progress("weights", 0, 1, what)
        stage = "quantize" if choice.quantizer else "weights"
        return write_foreign(
            folder, graph, model.facts, choice, progress=lambda done, of: self.progress(stage, done, of, what), **kind
        )

    def _frequent(self, size: int | None, arch: Architecture | ForeignModel, option: str) -> NDArray[np.int64] | None:
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
        facts = self.arch.config, options.format, *weights, options.seed, options.context, *adapted
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
        kind: dict[str, Any] = {"layout": self._layout(), "plan": self.heads.plan, "draft_plan": self.draft_plan}
        plan = describe_export(self.arch, self.choice, self.methods, self.draft, **kind)
        return plan | {"model": str(self.path), "notes": self.notes}

    def _memory(self, target: ModelPart, draft: ModelPart | None) -> dict[str, Any]:
        plan = self._described()
        return {"weight_bytes": plan["weight_bytes"], "kv_bytes_per_token": plan["kv_bytes_per_token"]}

    def _traits(self) -> list[str]:
        return traits(self.arch)

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
            "traits": self._traits(),
        }
        return {key: value for key, value in found.items() if value is not None}


def _limited(draft: Architecture | ForeignModel, context: int) -> Any:
    """The draft's facts with no more context than it has; the target's context is served as far as it reaches."""
    return draft.facts.model_copy(update={"context": min(context, draft.facts.context)})
