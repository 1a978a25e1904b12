"""A model whose graphs edgespec emits itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import IncompatibleDraft
from edgespec.export.architectures import Architecture
from edgespec.export.architectures.descriptions import approximations, remedies, traits
from edgespec.export.bundle.model import ModelPlan, plan_model, write_model
from edgespec.export.bundle.model_part import ModelSpec
from edgespec.export.bundle.progress import Progress
from edgespec.export.bundle.sizes import model_bytes
from edgespec.export.bundle.source_model import DRAFT, Writing, WrittenModel
from edgespec.export.drafters.head_choice import HeadChoice, cut_draft, head_vocab, write_tokens
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.device import add_device_graphs
from edgespec.export.measuring.parity import parity_report
from edgespec.export.measuring.reading import Reading, shares_encoder
from edgespec.export.options import layout_of
from edgespec.export.quantization.calibrate import SpooledLevels, chosen_levels
from edgespec.export.quantization.k_source import KSource, with_k_blocks
from edgespec.export.quantization.quantizer import DirectLevels
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import Checkpoint
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import MIXED
from edgespec.runtimes.files.manifest import Layout, ModelFacts, ModelPart, Precision, SkipSetPart
from edgespec.runtimes.files.operators import WantedOperators
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.translation import Translation

MIB = 1 << 20


def with_levels(arch: Architecture, choice: WeightChoice, chosen: DirectLevels) -> tuple[Architecture, KSource | None]:
    """Return the model that is written: the same, or one whose matrices are blocks of ``int4-k``, and their source."""
    if choice.format != MIXED:
        return arch, None
    found, source = with_k_blocks(arch)
    source.rows = chosen.k_rows if isinstance(chosen, SpooledLevels) else source.rows
    return found, source


@dataclass
class EmittedModel:
    """A target or a draft whose graphs edgespec emits."""

    arch: Architecture  # the architecture over its checkpoint
    heads: HeadPlan | None = None  # next to or instead of its LM head; None = none
    tokens: NDArray[np.int64] | None = None  # int64 [size], what a cut LM head scores
    shares_encoder: bool = False  # it is a draft that reads what the target's encoder gives
    translation: Translation | None = None  # it is a draft with another tokenizer

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

    @property
    def reformats(self) -> bool:
        """Whether it can be written in several formats."""
        return not self.shares_encoder

    def share_encoder(self, target: Architecture | None) -> None:
        """Read what the target's encoder gives, if a draft has the same one.

        Raises:
            IncompatibleDraft: only one of them reads a source.
        """
        if target is not None:
            if (self.arch.encoder is None) != (target.encoder is None):
                raise IncompatibleDraft("expected a draft and a target that both read a source, or none of them")
            self.shares_encoder = shares_encoder(target, self.arch)

    def equip(self, heads: HeadChoice) -> None:
        self.heads, self.tokens = heads.plan, heads.tokens
        heads.extend(self.arch)

    def cut(self, tokens: NDArray[np.int64]) -> None:  # [size]
        self.heads, self.tokens = cut_draft(self.arch, tokens), tokens

    def plan(self, choice: WeightChoice, layout: Layout, draft: bool = False, gated: bool = False) -> ModelPlan:
        """Plan its files; ``draft``: as those of a draft, ``gated``: sub-layers of a target can be left out."""
        arch = with_k_blocks(self.arch)[0] if choice.format == MIXED else self.arch
        return plan_model(arch, self._spec(choice, layout, draft, gated), choice.quantizer_name)

    def weight_bytes(self, choice: WeightChoice, operators: WantedOperators) -> dict[str, int]:
        return model_bytes(self.plan(choice, layout_of(operators)))

    def _spec(self, choice: WeightChoice, layout: Layout, draft: bool, gated: bool) -> ModelSpec:
        prefix = DRAFT if draft else ""
        return ModelSpec(
            choice.stored,
            head=choice.head,
            fine=choice.fine,
            gated=gated,
            draft=draft,
            prefix=prefix,
            layout=layout,
            plan=self.heads,
            head_vocab=head_vocab(prefix, self.tokens),
            shares_encoder=self.shares_encoder,
        )

    def write(self, writing: Writing) -> WrittenModel:
        choice, what, of = writing.choice, writing.what, 2 * self.facts.layers
        folder = writing.folder / writing.prefix

        def written(done: int, end: int) -> None:
            writing.progress("weights", -(-done // MIB), -(-end // MIB), f"{what}, MiB")

        def quantized(done: int) -> None:
            writing.progress("quantize", done, of, f"{what}, on {texts.size} tokens")

        spec = self._spec(choice, layout_of(writing.operators), writing.draft, writing.gated)
        write_tokens(folder, self.tokens)
        if choice.quantizer is None:
            return write_model(folder, self.arch, spec, progress=written)
        texts = writing.texts(self.facts.context)
        with chosen_levels(self.arch, choice.quantizer, choice.blocks(self.arch), texts, folder, quantized) as chosen:
            arch, source = with_levels(self.arch, choice, chosen)
            made = write_model(folder, arch, spec, chosen, written)
            errors = made.errors if source is None else made.errors | source.rows.errors
            return replace(made, errors=errors, uncalibrated=chosen.uncalibrated)

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
