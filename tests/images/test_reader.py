"""The embedded model that reads print: and the same one made wider."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec import Image, load
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.export.source.widened import FILE
from tests.images.conftest import PRINT, SAID

pytestmark = pytest.mark.usefixtures("native")


def test_a_wider_reader_reads_the_same(tmp_path: Path) -> None:
    """Twice as wide here; the same function makes the embedded one, which is sixteen times as wide."""
    small, wide = resolve("builtin:reader"), tmp_path / "wide"
    shutil.copytree(small, wide, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((small / "config.json").read_text("utf-8"))
    text = config["text_config"]
    text |= {name: 2 * text[name] for name in ("hidden_size", "intermediate_size")}
    text |= {"norm_eps": text["norm_eps"] / 2, "tie_word_embeddings": False}
    (wide / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), "utf-8")
    (wide / FILE).write_text(json.dumps({"source": str(small), "factor": 2}), "utf-8")
    logits: list[NDArray[np.float32]] = []
    for at, source in enumerate((small, wide)):
        export_model(ExportOptions(str(source), tmp_path / str(at), [], "fp32", threads=1, quick=True), golden=False)
        with load(tmp_path / str(at), threads=1) as engine:
            asked: list[str | Image] = [Image.open(PRINT / "line.png"), SAID["line"]]
            tokens = engine.encode(asked)
            with tokens:
                slot = engine.open_slot()
                slot.prefill(tokens[:-1])
                logits.append(slot.forward(np.array(tokens[-1:], np.int64)).logits[0].copy())
                slot.close()
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4, rtol=0)
    embedded = Checkpoint.open(resolve("builtin:reader-133m"))
    assert sum(int(np.prod(tensor.shape)) for tensor in embedded.tensors.values()) > 130_000_000
