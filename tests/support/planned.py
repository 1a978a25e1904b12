"""Small models with random heads, for tests of hidden states and heads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.drafters.heads import CUT, HeadPlan
from edgespec.export.options import ExportOptions
from edgespec.export.plan_manifest import plan_bundle
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, chosen_rows, held
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import HeadGroup, HeadVocab, Manifest, Operators
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import Written
from tests.support.passes import states

Array = NDArray[np.float32]
Ids = NDArray[np.int64]
COUNT, INNER, CUT_SIZE = 3, 40, 70


@dataclass(frozen=True)
class Planned:
    """A model with heads, and what was put into it."""

    written: Written
    tensors: dict[str, Array]
    tokens: Ids | None  # of the cut LM head

    def slot(self, threads: int = 1) -> Slot:
        return self.written.slot(threads=threads)


GROUPS = (
    HeadGroup(name="blockwise", kind="blockwise", count=COUNT, inner=INNER),
    HeadGroup(name="medusa", kind="medusa", count=COUNT),
    HeadGroup(name="exit.1", kind="exit", count=1, layer=1),
    HeadGroup(name="exit.last", kind="exit", count=1, layer=3),
)
PLANS = {
    "shared": HeadPlan(GROUPS),
    "cut": HeadPlan(GROUPS, cut=True),
    "own": HeadPlan((HeadGroup(name="medusa", kind="medusa", count=COUNT, own=True),)),
    "own cut": HeadPlan((HeadGroup(name="medusa", kind="medusa", count=COUNT, own=True),), cut=True),
    "only": HeadPlan(cut=True, only=True),
}
MEDUSA = [name for name in PLANS if name != "only"]
NATIVE = pytest.mark.parametrize("operators", ["native"], indirect=True)


def with_heads(
    folder: Path, source: Path, plan: HeadPlan, form: Format = "fp32", layout: Operators = "native"
) -> Planned:
    """Write a checkpoint with random heads into ``folder``."""
    arch = open_model(source, None)
    facts, base, random = arch.facts, arch.source, np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {
        "blockwise.inner.weight": normal(INNER, facts.hidden),
        "blockwise.inner.bias": normal(INNER),
        "blockwise.outer.weight": normal(COUNT * facts.hidden, INNER),
        "blockwise.outer.bias": normal(COUNT * facts.hidden),
        "exit.1.weight": normal(facts.hidden, facts.hidden),
        "exit.3.weight": np.eye(facts.hidden, dtype=np.float32),
    }
    tokens = np.sort(np.random.default_rng(1).permutation(facts.vocab)[:CUT_SIZE]) if plan.cut else None
    for i in range(COUNT):
        tensors[f"medusa.{i}.weight"], tensors[f"medusa.{i}.bias"] = (
            normal(facts.hidden, facts.hidden),
            normal(facts.hidden),
        )
        own = normal(facts.vocab, facts.hidden)
        tensors[f"medusa.{i}.lm_head.weight"] = own if tokens is None else own[tokens]
    tensors["head"] = base.read(arch.head.weight)
    tensors["norm"] = base.read(arch.final_norm.weight)
    extra: dict[str, Extra] = {name: held(value) for name, value in tensors.items()}
    if tokens is not None:
        extra[CUT] = chosen_rows(base, arch.head.weight, tokens, facts.hidden)
        (folder / "tokens").write_bytes(tokens.astype("<i4").tobytes())
    arch.source = ExtendedCheckpoint(base, extra)
    cut = None if tokens is None else HeadVocab(file="tokens", size=CUT_SIZE)
    result = write_model(folder, arch, ModelSpec(form, gated=True, layout=layout, plan=plan, head_vocab=cut))
    return Planned(Written(folder, arch, result.part, result.errors), tensors, tokens)


def config_only(source: Path, folder: Path, *more: str) -> Path:
    """Copy config.json and the files ``more`` of ``source`` to ``folder``, without the weights."""
    folder.mkdir()
    for name in ("config.json", *more):
        shutil.copyfile(source / name, folder / name)
    return folder


def plan_of(model: str | Path, **options: Any) -> Manifest:
    """Plan a bundle; ``options`` are those of an export."""
    return plan_bundle(ExportOptions(str(model), **options))


def text(slot: Slot, count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(2, slot.vocab_size, count)


def final(slot: Slot, tokens: Sequence[int] | Ids) -> tuple[Array, Array]:
    """Give the last residual stream and the logits of rows that are not kept."""
    output = states(slot, np.asarray(tokens, np.int64))
    assert output.hidden is not None
    return output.hidden.copy(), output.logits.copy()
