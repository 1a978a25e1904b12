"""A model whose graphs edgespec emits itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.architectures.words import approximations, remedies, traits
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec
from edgespec.export.bundle.progress import Progress
from edgespec.export.bundle.source_model import Writing, WrittenModel
from edgespec.export.drafters.head_choice import HeadChoice, cut_draft, write_tokens
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.device import add_device_graphs
from edgespec.export.measuring.parity import parity_report
from edgespec.export.measuring.plan import model_bytes
from edgespec.export.measuring.reading import Reading
from edgespec.export.quantization.calibrate import chosen_levels
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.manifest import Layout, ModelFacts, ModelPart, Precision, SkipSetPart
from edgespec.runtimes.files.operators import WantedOperators
from edgespec.runtimes.slots.slot import Slot

MIB = 1 << 20


@dataclass
class EmittedModel:
    """A target or a draft whose graphs edgespec emits."""

    arch: Architecture  # the architecture over its checkpoint
    heads: HeadPlan | None = None  # beside or instead of its LM head; None = none
    tokens: NDArray[np.int64] | None = None  # int64 [size], what a cut LM head scores
    shares_encoder: bool = False  # it is a draft that reads what the target's encoder gives

    @property
    def facts(self) -> ModelFacts:
        return self.arch.facts

    @property
    def config(self) -> dict[str, Any]:
        return self.arch.config

    @property
    def source(self) -> Checkpoint:
        return self.arch.source

    @property
    def remedies(self) -> list[str]:
        return remedies(self.arch)

    def limit(self, context: int) -> None:
        self.arch.facts = self.facts.model_copy(update={"context": min(context, self.facts.context)})

    def equip(self, heads: HeadChoice) -> None:
        self.heads, self.tokens = heads.plan, heads.tokens
        heads.extend(self.arch)

    def cut(self, tokens: NDArray[np.int64]) -> None:  # [size]
        self.heads, self.tokens = cut_draft(self.arch, tokens), tokens

    def weight_bytes(self, choice: WeightChoice, operators: WantedOperators) -> tuple[int, int]:
        return model_bytes(self.arch, choice, _layout(operators), self.heads)

    def write(self, writing: Writing) -> WrittenModel:
        choice, what, of = writing.choice, writing.what, 2 * self.facts.layers
        folder = writing.folder / writing.prefix
        writing.progress("weights", 0, 1, what)

        def written(done: int, end: int) -> None:
            writing.progress("weights", -(-done // MIB), -(-end // MIB), f"{what}, MiB")

        def quantized(done: int) -> None:
            writing.progress("quantize", done, of, f"{what}, on {texts.size} tokens")

        spec = ModelSpec(
            choice.format,
            gated=writing.gated,
            draft=writing.draft,
            prefix=writing.prefix,
            layout=_layout(writing.operators),
            plan=self.heads,
            head_vocab=None if self.tokens is None else write_tokens(folder, writing.prefix, self.tokens),
            shares_encoder=self.shares_encoder,
        )
        if choice.quantizer is None:
            return write_model(folder, self.arch, spec, progress=written)
        texts = writing.texts(self.facts.context)
        with chosen_levels(self.arch, choice.quantizer, choice.blocks(self.arch), texts, folder, quantized) as chosen:
            spec = replace(spec, head=choice.head, fine=choice.fine)
            made = write_model(folder, self.arch, spec, chosen, written)
            return replace(made, uncalibrated=chosen.uncalibrated)

    def parity(
        self, written: WrittenModel, slot: Slot, tokens: Sequence[int], progress: Progress, read: Reading | None = None
    ) -> dict[str, Any]:
        of = 2 * self.facts.layers

        def report(done: int) -> None:
            progress("parity", done, of, "source in fp32")

        return parity_report(self.arch, written.errors, slot, tokens, report, read)

    def for_device(
        self, writing: Writing, part: ModelPart, device: DeviceName, precision: Precision, skip: SkipSetPart | None
    ) -> ModelPart:
        folder = writing.folder / writing.prefix
        return add_device_graphs(folder, self.arch, part, device, skip, writing.prefix, precision, writing.choice.fine)

    def provenance(self) -> dict[str, Any]:
        return {"traits": traits(self.arch), "approximations": approximations(self.arch) or None}


def _layout(operators: WantedOperators) -> Layout:
    return "stock" if operators == "stock" else "native"
