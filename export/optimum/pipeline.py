"""Exporting a model through optimum; the same stages as any export, with what its graph cannot do refused at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.drafters.registry import needing
from edgespec.errors import BundleError, ExportError
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.bundle.model import WrittenModel
from edgespec.export.measuring.method_parts import Progress
from edgespec.export.optimum.model import ForeignModel, is_foreign
from edgespec.export.optimum.parity import foreign_parity
from edgespec.export.optimum.strict import choose_strict
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.manifest import Layout, ModelPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.probe import rows_exact
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot


class ForeignExporter(Exporter):
    """One export of a model whose graph is optimum's; see ``Exporter``."""

    arch: ForeignModel  # type: ignore[assignment]

    def _open_target(self) -> ForeignModel:  # type: ignore[override]
        self._refuse(self.path)
        return ForeignModel.open(self.path, self.options.context)

    def _write_target(self, folder: Path) -> WrittenModel:
        written = self._write_foreign(folder, self.arch, "target")

        def exact(part: ModelPart) -> bool:
            try:
                return rows_exact(open_slot(Model(folder, part, "strict", self.options.threads)))
            except BundleError:  # a graph that cannot be changed so
                return False

        return replace(written, part=choose_strict(folder, written.part, exact))

    def _parity(self, written: WrittenModel, slot: Slot, tokens: list[int]) -> dict[str, Any]:
        assert self.arch.file is not None, "the graph has been written"
        self.progress("parity", 0, 1, "the float32 graph")
        return foreign_parity(self.arch.file, written.part, written.errors, slot, tokens)

    def _layout(self) -> Layout:
        return "stock"

    def _check_devices(self) -> None:
        """It was refused already."""

    def _traits(self) -> list[str]:
        return []  # the graph is not looked into

    def _provenance(self) -> dict[str, Any]:
        graph = self.arch.open_graph().proto
        return super()._provenance() | {"graph": f"{graph.producer_name} {graph.producer_version}".strip() or "unknown"}

    def _refuse(self, path: Path) -> None:
        """Say which options need a graph of edgespec's own.

        Raises:
            ExportError: one of them was given.
        """
        options = self.options
        given: list[tuple[str, bool]] = [
            *((f"--method {name}", True) for name in self.methods if name not in needing("text", "draft")),
            ("--format w8a8", options.format == "w8a8"),
            (f"--quantizer {options.quantizer}", bool(self.choice.quantizer and self.choice.quantizer.calibrated)),
            ("--attention", bool(options.attention)),
            ("--device", bool(options.devices)),
            ("--heads", bool(options.heads)),
            ("--adapter", options.adapter is not None),
            ("--operators native", options.operators == "native"),
        ]
        for option, wrong in given:
            if wrong:
                raise ExportError(
                    f"{option}: {path} goes through optimum, whose graph cannot be cut into layers or rewritten",
                    f"such a model has the methods {', '.join(needing('text', 'draft'))}, in int4, int8 (quantizers "
                    f"rtn, mse) or fp32; architectures that edgespec emits itself: {', '.join(sorted(ARCHITECTURES))}",
                )


def make_exporter(options: ExportOptions, progress: Progress | None = None) -> Exporter:
    """The exporter for a model: through optimum where edgespec does not emit its architecture.

    Raises:
        ExportError: the model or the options; nothing is written.
    """
    kind = ForeignExporter if is_foreign(resolve(options.model, options.revision)) else Exporter
    return kind(options) if progress is None else kind(options, progress)
