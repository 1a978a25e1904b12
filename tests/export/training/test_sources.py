"""Models that transformers would read otherwise than the export, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import TrainingError
from tests.support import hf, packed
from tests.support.checkpoints import write_adapter
from tests.support.gguf_files import write_gguf

NAME = "llama_tied_gqa"


@pytest.mark.parametrize("kind", ["gptq", "gguf", "adapter"])
def test_only_plain_folders(torch: Any, tmp_path: Path, kind: str) -> None:
    from edgespec.export.training.target import Source

    model = hf.write_checkpoint(tmp_path / "model", hf.CONFIGS[NAME], 3)
    assert Source.open(str(model)).path == model
    if kind == "gptq":
        packed.pack_checkpoint(model, *packed.KINDS["gptq4"])
    elif kind == "gguf":
        model = tmp_path / "model.gguf"
        write_gguf(model, NAME)
    else:
        write_adapter(tmp_path / "lora", hf.CONFIGS[NAME], base=model)
        model = tmp_path / "lora"
    with pytest.raises(TrainingError, match="training needs a plain Hugging Face folder"):
        Source.open(str(model))
