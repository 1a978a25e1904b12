"""Published drafters: identify the kind and layout of a checkpoint, and choose its reader.

Layouts differ in names, in how they list tapped hidden states, and in options; no tensor tells which is meant.  Layers
are counted here as boundaries: the number of layers before the residual stream is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgespec.drafters.registry import ASSISTANT, DFLASH, DSPARK, EAGLE, EAGLE1, MTP, PEAGLE
from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.architectures.base import Architecture
from edgespec.export.drafters import assistant, dflash, dspark, eagle1, eagle3, mtp
from edgespec.export.drafters.drafter import Drafter, Published, flat, kind_of
from edgespec.export.source.source import Checkpoint

# the first that matches a checkpoint reads it
PUBLISHED: dict[str, Published] = {
    ASSISTANT: assistant.PUBLISHED,
    DSPARK: dspark.PUBLISHED,
    DFLASH: dflash.PUBLISHED,
    MTP: mtp.PUBLISHED,
    EAGLE: eagle3.PUBLISHED,
    PEAGLE: eagle3.PARALLEL,
    EAGLE1: eagle1.PUBLISHED,
}
# other published drafters, by a word of their names: the feature that no graph here computes
REFUSED = {
    "domino": "a recurrent head corrects its guesses",
    "xpress": "passes that refine all guesses of a block",
    "hydra": "its heads read each other's guesses",
}


def read_drafter(path: Path, target: Architecture) -> Drafter:
    """Read a drafter and check it against its target.

    Raises:
        ExportError: an unknown kind of drafter, only pickles, or a drafter of another model.
    """
    source = _opened(path)
    _refuse(source.path, source.config)
    if kind := next((kind for kind in PUBLISHED.values() if kind.matches(source)), None):
        return kind.read(source, target)
    raise UnsupportedModel(
        f"{source.path}: {kind_of(source.config)!r} is not a drafter that edgespec knows: expected EAGLE, P-EAGLE, "
        "DFlash, DSpark or a layer for multi-token prediction, as their authors, speculators, SpecForge or "
        "transformers write them, or an assistant of Gemma 4",
        "the layer inside a checkpoint needs no folder: --method mtp",
    )


def _opened(path: Path) -> Checkpoint:
    if path.is_dir() and not any(path.glob("*.safetensors")) and (old := next(path.glob("*.bin"), None)):
        raise ExportError(
            f"{old}: is a pickle, which may run code when it is opened: expected safetensors",
            f'convert it where you trust it: python -c "import torch; from safetensors.torch import save_file; '
            f"save_file({{k: v.contiguous() for k, v in torch.load('{old.name}', weights_only=True).items()}}, "
            f"'model.safetensors')\"",
        )
    return Checkpoint.open(path)


def _refuse(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse published drafters that are not supported, by name."""
    kind = f"{kind_of(config)} {flat(config, 'dflash_config').get('projector_type', '')}".strip()
    if why := next((why for word, why in REFUSED.items() if word in kind.lower()), ""):
        raise UnsupportedModel(f"{path}: {kind!r}: {why}, which edgespec does not compute", "take another drafter")
