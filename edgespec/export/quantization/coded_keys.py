"""Prepare coded keys for a bundle: tables learned from one half of a text, a quality gate on the other half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.quantization.key_tables import learn_tables
from edgespec.runtimes.files.attention import exact_attention
from edgespec.runtimes.files.formats import LEARNT, Attention
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.files.manifest import AttentionGate, AttentionPart, ModelPart
from edgespec.runtimes.files.operators import NATIVE, WantedOperators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

TABLES = "kv/tables.safetensors"  # of a bundle: what coded keys were learnt with
MOST_PERPLEXITY_CHANGE = 0.01  # the gate: relative, against float16 keys of the same bundle
LEAST_AGREEMENT = 0.95  # of the likeliest token
SCORED = 2048  # positions, at most
LEAST_TEXT = 256  # tokens, for learning and scoring together
ROWS = 64  # of a scoring pass

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Scores:
    """A model's predictions of a text: likeliest token and -log p of the right one, each [positions]."""

    best: NDArray[np.int64]
    surprise: NDArray[np.float64]

    def gate(self, exact: Scores) -> AttentionGate:
        """Measure the distance from exact attention's scores, and whether it is within the limit."""
        change = float(np.exp(min(self.surprise.mean() - exact.surprise.mean(), 50.0)) - 1)
        agreement = float((self.best == exact.best).mean())
        passed = change <= MOST_PERPLEXITY_CHANGE and agreement >= LEAST_AGREEMENT
        return AttentionGate(perplexity_change=change, agreement=agreement, passed=passed)


def check_attention(wanted: Sequence[str], operators: WantedOperators, tokens: int) -> list[Attention]:
    """Check the attentions to prepare; returns them in the order asked for.

    Raises:
        ExportError: unknown, native operators are not there, or too little text.
    """
    if unknown := [name for name in wanted if name not in ATTENTION]:
        raise ExportError(f"unknown attention {unknown[0]!r}", f"attention: {', '.join(ATTENTION)}")
    names = list(dict.fromkeys(cast(list[Attention], list(wanted))))
    if not names:
        return names
    library = native_library()
    if operators == "stock" or library.path is None:
        why = "--operators stock was given" if operators == "stock" else library.reason
        raise ExportError(
            f"--attention {names[0]} needs native operators: {why}",
            "leave --attention out, or export where edgespec was installed with a C++ compiler",
        )
    if tokens < LEAST_TEXT and any(name not in ("f32", "f16") for name in names):
        raise ExportError(
            f"--attention {names[0]}: expected at least {LEAST_TEXT} tokens of calibration text, got {tokens}",
            "give more text with --calibration",
        )
    return names


def prepare_attention(
    folder: Path,
    part: ModelPart,
    names: Sequence[Attention],
    tokens: Sequence[int],
    threads: int | None,
    progress: Progress,
    attend: Callable[[Slot], None] | None = None,
) -> AttentionPart:
    """Learn the tables of the requested attentions, store them, and measure each.

    The first of ``names`` that is exact or passes becomes the default.  All tables are stored: drafts may read keys of
    any quality, because they change no text.

    Args:
        names: from ``check_attention``.
        tokens: the calibration text; its first half is learnt from, the second scored.
        attend: lets the slots of an encoder-decoder, which learns nothing here, attend over a source.
    """
    learnt = [name for name in LEARNT if any(ATTENTION[wanted].keys == name for wanted in names)]
    measured = [name for name in names if name not in ("f32", "f16")]
    exact = exact_attention(part)
    made = AttentionPart(default=exact)
    middle = len(tokens) // 2
    if learnt:
        slot = open_slot(Model(folder, part, NATIVE, threads, ATTENTION["f32"]))
        what = f"learning {', '.join(learnt)} keys"
        tables = learn_tables(slot, tokens[:middle], learnt, lambda done, of: progress(done, of, what))
        store(folder, tables)
        made = made.model_copy(update={"tables": TABLES, "learnt": learnt})
    gates: dict[Attention, AttentionGate] = {}
    if measured:
        with_tables = part.model_copy(update={"attention": made})

        def scored(kv: KvFormat) -> Scores:
            slot = open_slot(Model(folder, with_tables, NATIVE, threads, kv))
            if attend is not None:
                attend(slot)
            return score(slot, held_out)

        held_out = tokens[middle:][:SCORED]
        reference = scored(ATTENTION["f16"])
        for name in measured:
            progress(len(gates), len(measured), f"quality of {name} keys")
            gates[name] = scored(ATTENTION[name]).gate(reference)
        progress(len(measured), len(measured), "measured")
        positions, depth = len(reference.best), min(len(held_out), part.facts.context) - 1
        made = made.model_copy(update={"positions": positions, "depth": depth})
    good = [name for name in names if name not in gates or gates[name].passed]
    return made.model_copy(update={"gates": gates, "default": good[0] if good else exact})


def score(slot: Slot, tokens: Sequence[int]) -> Scores:
    """Score a text, teacher-forced, in stretches of the context's length; the first token of each has no score."""
    best, surprise = [], []
    for start in range(0, len(tokens) - 1, slot.context):
        stretch = np.asarray(tokens[start : start + slot.context], np.int64)
        slot.follow([])
        for at in range(0, len(stretch) - 1, ROWS):
            rows = stretch[at : min(at + ROWS, len(stretch) - 1)]
            logits = slot.forward(rows).logits.astype(np.float64)  # [rows, vocab]
            slot.keep(range(len(rows)))
            largest = logits.max(-1)
            total = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
            best.append(logits.argmax(-1))
            surprise.append(total - logits[np.arange(len(rows)), stretch[at + 1 : at + 1 + len(rows)]])
    return Scores(np.concatenate(best), np.concatenate(surprise))


def store(folder: Path, tables: dict[str, NDArray[np.float32]]) -> None:
    """Write a bundle's tables."""
    from safetensors.numpy import save_file

    file = folder / TABLES
    file.parent.mkdir(exist_ok=True)
    save_file(tables, file)
