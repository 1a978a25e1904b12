"""Proportional rotation: the first channels of a head turn, in steps as if all did (Gemma 4, LFM3)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.rope import Rotary
from edgespec.export.architectures.settings import Settings
from edgespec.export.source.derived import Own, Rows
from edgespec.export.source.extended import Extra
from edgespec.export.source.source import Checkpoint


def rotations_by_kind(settings: Settings, usual: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``rope_parameters`` for each kind of layers in ``usual``, which stands where there are none.

    Full layers may say ``proportional``; what ``proportional`` makes of them is.

    Raises:
        ExportError: not an object for each kind.
        UnsupportedModel: full layers are scaled.
    """
    given = settings.get("rope_parameters", usual)
    if not isinstance(given, dict) or not all(isinstance(given.get(kind), dict) for kind in usual):
        raise ExportError(f"{settings.file}: expected rope_parameters of {' and '.join(usual)}")
    full = dict(given["full_attention"])
    if full.get("rope_type") not in ("default", "proportional", None):
        raise UnsupportedModel(f"{settings.file}: rope type {full['rope_type']!r} is not supported here")
    return {**given, "full_attention": {**full, "rope_type": "default"}}


def proportional(full: Rotary, size: int) -> Rotary:
    """The rotation of full layers, whose heads have ``size`` channels."""
    share = full.parameters.get("partial_rotary_factor") or 1.0
    return Rotary({**full.parameters, "rope_type": "proportional", "channels": size}, 2 * int(share * size // 2))


def turned_first(size: int, dims: int) -> NDArray[np.int64]:
    """The order of a head's channels, [size], in which those that turn, ``dims`` of them, come first.

    Channel i turns with i + size / 2, and only the first of them turn.
    """
    each = np.arange(size).reshape(2, size // 2)
    return np.concatenate([each[:, : dims // 2].ravel(), each[:, dims // 2 :].ravel()])


def turned_rows(
    source: Checkpoint, layer: str, heads: Mapping[str, int], order: NDArray[np.int64], bias: bool
) -> dict[str, Extra]:
    """Projections and norms of a layer's heads, their channels in an order.

    Args:
        source: the checkpoint.
        layer: its name there.
        heads: how many there are, by ``q`` and ``k``.
        order: as of ``turned_first``.
        bias: projections have one.
    """
    found: dict[str, Extra] = {}
    for part, count in heads.items():
        every = (np.arange(count)[:, None] * len(order) + order).ravel()
        rows = {"proj.weight": every, "norm.weight": order} | ({"proj.bias": every} if bias else {})
        for kind, ids in rows.items():
            name = f"{layer}.self_attn.{part}_{kind}"
            found[name] = Rows(Own(source, name), ids)
    return found
