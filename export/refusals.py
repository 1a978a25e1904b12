"""Options that a graph of optimum's cannot serve."""

from __future__ import annotations

from pathlib import Path

from edgespec.drafters.registry import needing
from edgespec.errors import ExportError
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.options import ExportOptions
from edgespec.export.quantization.weights import WeightChoice


def refuse_target(options: ExportOptions, choice: WeightChoice, path: Path) -> None:
    """Say which options need a target with graphs of edgespec's own.

    Raises:
        ExportError: one of them was given.
    """
    given: list[tuple[str, bool]] = [
        *((f"--method {name}", True) for name in options.wanted() if name not in needing("text", "draft")),
        ("--format w8a8", options.format == "w8a8"),
        (f"--quantizer {options.quantizer}", bool(choice.quantizer and choice.quantizer.calibrated)),
        ("--target-size", options.target_size is not None),
        ("--target-kl", options.target_kl is not None),
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


def refuse_draft(options: ExportOptions, path: Path) -> None:
    """Say which options need a draft with graphs of edgespec's own.

    Raises:
        ExportError: one of them was given.
    """
    for option, wrong in (
        ("--draft-vocab", bool(options.draft_vocab)),
        ("--format w8a8", options.format == "w8a8"),
    ):
        if wrong:
            raise ExportError(
                f"{option}: the draft {path} goes through optimum, whose graphs know no such thing",
                f"leave it out, or take a draft that edgespec emits itself: {', '.join(sorted(ARCHITECTURES))}",
            )
