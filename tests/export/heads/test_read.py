"""Files of heads as strangers write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import ExportError
from edgespec.export.drafters.heads import read_heads


@pytest.mark.parametrize("kind", ["F8_E4M3", "I8", "BOOL"])
def test_tensors_that_are_no_plain_floats(tmp_path: Path, kind: str) -> None:
    header = json.dumps({"0.0.linear.weight": {"dtype": kind, "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "medusa_lm_head.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ExportError, match=f"0.0.linear.weight is of type {kind}, expected one of F16"):
        read_heads(tmp_path)
