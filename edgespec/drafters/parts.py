"""What a bundle offers to the drafters of one session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.drafters.ngram_store.store import NGramStore
from edgespec.formulas.cost import CostModel
from edgespec.runtimes.files.manifest import Manifest
from edgespec.runtimes.slots.slot import Slot


@dataclass(frozen=True)
class Parts:
    """What a bundle offers to the drafters of one session.

    Every drafter's module has ``build(parts, part, options) -> Drafter``, part being the method's entry in the manifest
    and options the request's ``DraftOptions``.  A drafter whose ``step_once`` runs a draft step has such steps
    timed by it before the first request.

    Attributes:
        bundle: its folder; read only.
        manifest: its manifest.
        target: the session's target.
        draft: opens the session's ``draft`` model or ``drafter``, at the first call.
        costs: a cost model of this machine, for the measured verify curve.
        store: n-grams of texts read earlier; None = none were given.
    """

    bundle: Path
    manifest: Manifest
    target: Slot
    draft: Callable[[str], Slot]
    costs: Callable[[], CostModel]
    store: NGramStore | None = None
