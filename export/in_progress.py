"""What the steps of an export have made so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.export.bundle.source_model import WrittenModel
from edgespec.export.measuring.skip_search import StepCosts
from edgespec.runtimes.files.manifest import MethodPart, ModelPart
from edgespec.runtimes.slots.slot import Slot


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
