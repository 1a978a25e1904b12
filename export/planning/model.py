"""A target or draft of a planned bundle."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model_part import model_part, stock_graphs
from edgespec.export.emit.plans import storage_plans
from edgespec.export.heads.description import HeadPlan
from edgespec.export.heads.vocab import check_size
from edgespec.export.planning.files import device_graphs, head_tokens, model_files
from edgespec.export.planning.heads import PlannedHeads, Shaped, cut_shapes
from edgespec.export.planning.plan import model_bytes
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.extended import ExtendedCheckpoint
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.manifest import HeadVocab, Layout, ModelPart, SkipSetPart


class PlannedModel:
    """A target or draft of a planned bundle.

    Args:
        arch: the model.
        choice: how its matrices are stored.
        layout: of its weights.
        devices: with graphs of their own.
        cut: rows of a cut LM head; None = there is none.
        prefix: where its files are.
    """

    part: ModelPart

    def __init__(
        self,
        arch: Architecture,
        choice: WeightChoice,
        layout: Layout,
        devices: Sequence[DeviceName],
        cut: int | None,
        prefix: str = "",
    ) -> None:
        if cut is not None:
            check_size(cut, arch.facts.vocab, "--draft-vocab" if prefix else "--head-vocab")
        self.arch, self.choice, self.layout, self.devices, self.cut = arch, choice, layout, devices, cut
        self.prefix = prefix
        self.plan: HeadPlan | None = None

    def with_heads(self, heads: PlannedHeads, gated: bool) -> None:
        """A target."""
        heads.extend(self.arch, self.cut)
        self.plan = heads.plan(self.cut is not None)
        self._describe(gated, draft=False)

    def as_draft(self) -> None:
        """A draft: its cut LM head is the only one."""
        if self.cut is not None:
            extra = {name: Shaped(shape) for name, shape in cut_shapes(self.arch, self.cut).items()}
            self.arch.source = ExtendedCheckpoint(self.arch.source, extra)
            self.plan = HeadPlan(cut=True, only=True)
        self._describe(False, draft=True)

    def _describe(self, gated: bool, draft: bool) -> None:
        choice = self.choice
        tokens = None if self.cut is None else HeadVocab(file=head_tokens(self.prefix), size=self.cut)
        self.part = model_part(
            self.arch,
            choice.format,
            head=choice.head,
            quantizer=choice.quantizer.name if choice.quantizer else "rtn",
            graphs=stock_graphs(self.arch, gated, draft, self.plan is not None and not draft, self.prefix, self.layout),
            plan=self.plan or HeadPlan(),
            prefix=self.prefix,
            layout=self.layout,
            head_vocab=tokens,
        )

    def for_devices(self, skip: SkipSetPart | None) -> None:
        """Add graphs for the devices."""
        for device in self.devices:
            self.part = device_graphs(self.part, device, skip, self.prefix)

    def files(self) -> dict[str, int]:
        """Its files and their sizes."""
        return model_files(self.part, storage_plans(self.arch, self.choice.format, self.choice.head, self.plan))

    def weights(self) -> tuple[int, int]:
        """Bytes of the model and of its heads."""
        return model_bytes(self.arch, self.choice, self.layout, self.plan)
