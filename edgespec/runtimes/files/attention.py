"""Choose the attention of a session: the bundle's default or a requested one, and its tables of coded keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError, InvalidRequest
from edgespec.runtimes.files.formats import DRAFT_ATTENTIONS, LEARNT, SINKS, Attention
from edgespec.runtimes.files.kv import ATTENTION, KvFormat, table_shape
from edgespec.runtimes.files.manifest import ModelPart, Operators


@dataclass(frozen=True)
class AttentionChoice:
    """How a session keeps keys and values."""

    name: Attention  # the attention that decides the text
    draft: Attention | None = None  # the coarser one that self-drafts read; None = the same
    kv: KvFormat | None = None  # the formats; None with stock operators, which keep float32


def exact_attention(part: ModelPart) -> Attention:
    """Return the attention of ``part`` that is exact up to rounding, the default."""
    return "f32" if part.format == "fp32" else "f16"


def default_attention(part: ModelPart) -> Attention:
    """Return the attention that ``part`` was exported for."""
    return part.attention.default if part.attention else exact_attention(part)


def choose_attention(
    part: ModelPart, operators: Operators, wanted: str | None = None, draft: str | None = None
) -> AttentionChoice:
    """Choose the attention of a session.

    Args:
        part: the target.
        operators: stock ones have only float32.
        wanted: what was asked for; None = the bundle's default.
        draft: what self-drafts are to read.

    Raises:
        InvalidRequest: unknown, not possible with stock operators, or not prepared by the export.
    """
    for name, known, option in ((wanted, tuple(ATTENTION), "attention"), (draft, DRAFT_ATTENTIONS, "draft attention")):
        if name is not None and name not in known:
            raise InvalidRequest(f"unknown {option} {name!r}", f"{option}: {', '.join(known)}")
    if operators == "stock":
        if draft is None and wanted in (None, "f32"):
            return AttentionChoice("f32")
        what = f"attention {wanted}" if wanted not in (None, "f32") else f"draft attention {draft}"
        if part.foreign:
            raise InvalidRequest(
                f"{what} needs native operators, and this model's graph was exported by {part.origin}",
                "architectures that edgespec emits itself: docs/architectures.md",
            )
        raise InvalidRequest(f"{what} needs native operators", "see `edgespec info` for why they are off")
    name = cast(Attention, wanted) if wanted else default_attention(part)
    _check_learnt(part, name, "attention")
    if name == "nomad2" and part.attention and (gate := part.attention.gates.get(name)) and not gate.passed:
        raise InvalidRequest(
            f"attention nomad2 failed this bundle's quality gate: perplexity {gate.perplexity_change:+.1%}, "
            f"top-1 agreement {gate.agreement:.3f}",
            "use nomad or int4; `--draft-attention nomad2` stays possible, because drafts change no text",
        )
    kv = ATTENTION[name]
    if draft is None:
        return AttentionChoice(name, None, kv)
    if draft == name:
        raise InvalidRequest(f"drafts read {draft} keys anyway: that is the attention", "leave the draft attention out")
    coarse = cast(Attention, draft)
    _check_learnt(part, coarse, "draft attention")
    return AttentionChoice(name, coarse, with_copy(kv, coarse))


def with_copy(kv: KvFormat, coarse: Attention | None) -> KvFormat:
    """Return ``kv`` with the ``coarse`` copy of its keys that self-drafts read; None = without one."""
    if coarse is None:
        return kv
    codes = ATTENTION[coarse]
    return replace(kv, codes=codes.keys, draft_window=codes.window, sinks=max(kv.sinks, SINKS))


def _check_learnt(part: ModelPart, name: Attention, option: str) -> None:
    keys = ATTENTION[name].keys
    if keys in LEARNT and (part.attention is None or keys not in part.attention.learnt):
        raise InvalidRequest(
            f"{option} {name} needs tables learnt from text, and this bundle has none for it",
            f"export it with `--attention {name}`",
        )


def read_tables(folder: Path, part: ModelPart, kv: KvFormat) -> NDArray[np.float32]:  # [n]
    """Read the tables that the keys and the codes of ``kv`` were learnt with, keys' first; empty where none is needed.

    Raises:
        BundleError: the bundle has no such table, or one of another shape.
    """
    needed = [name for name in (kv.keys, kv.codes) if name in LEARNT]
    if not needed:
        return np.zeros(0, np.float32)
    if part.attention is None or part.attention.tables is None:
        raise BundleError(f"{folder}: {needed[0]} keys need tables, and there are none", "export the bundle again")
    from safetensors.numpy import load_file

    file = folder / part.attention.tables
    try:
        found = load_file(file)
    except Exception as error:  # the library raises its own types
        raise BundleError(f"{file}: not readable: {error}", "export the bundle again") from error
    flat = []
    for name in needed:
        table, shape = found.get(name), table_shape(name, part.facts)
        if table is None or table.dtype != np.float32 or table.shape != shape:
            got = "nothing" if table is None else f"{table.dtype} {list(table.shape)}"
            raise BundleError(f"{file}: {name}: expected float32 {list(shape)}, got {got}", "export the bundle again")
        flat.append(table.ravel())
    return np.concatenate(flat)
