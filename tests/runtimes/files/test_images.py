"""The manifest's image part fits the tower and the projectors, or is refused with a message."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.files.manifest import MANIFEST, Manifest

IMAGE = {
    "processor": {"kind": "qwen2-vl", "patch": 16, "min_pixels": 1024, "max_pixels": 65536},
    "prompt_template": {"placeholder": "<i>", "token": "<i>", "id": 3},
    "merge": {"how": "blocks", "factor": 2},
    "max_rows": 64,
    "positions": "grid",
    "deepstack_layers": [1],
}


def seeing(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Add to a manifest an image part, and encoders that are its own target; ``changes``: of the target."""
    found = deepcopy(data)
    target, side = found["target"], deepcopy(data["target"])
    found["target"] = target | {"image": IMAGE, "tower": side, "projectors": [side, side]} | changes
    return found


def test_images_in_a_manifest(bundle: Callable[..., Path]) -> None:
    data = json.loads((bundle("int4") / MANIFEST).read_text("utf-8"))
    other = deepcopy(data["target"])
    other["facts"]["hidden"] *= 2
    made = Manifest.model_validate(seeing(data))
    assert made.target.image == ImagePart.model_validate(IMAGE)
    assert len(made.target.image.deepstack_layers) == 1
    assert len(made.models) == len(Manifest.model_validate(data).models) + 3
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tower": None}, "expected a tower and a projector"),
        ({"image": None}, "expected a tower and a projector"),
        ({"projectors": [data["target"]]}, "one for each of its taps"),
        ({"projectors": [data["target"], other]}, "projectors: give rows of"),
        ({"image": {**IMAGE, "deepstack_layers": [99]}}, "deepstack_layers: after more than"),
        ({"image": {**IMAGE, "processor": {"kind": "none"}}}, "kind"),
    ]
    for changes, words in cases:
        with pytest.raises(ValueError, match=words):
            Manifest.model_validate(seeing(data, **changes))
    with pytest.raises(ValueError, match="reads text alone"):
        Manifest.model_validate(data | {"draft": seeing(data)["target"]})
