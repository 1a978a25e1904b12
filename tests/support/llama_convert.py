"""Run llama.cpp's converter on a checkpoint of the tests.

``python -m tests.support.llama_convert SOURCES MODEL OUT TYPE [OPTION ...]``: SOURCES is a folder with llama.cpp's
sources, TYPE such as ``f32`` or ``q8_0``, and options are the converter's.  The converter knows a tokenizer by a digest
of what it does to a text, and refuses others; those of the tests count as GPT-2's.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main(sources: str, model: str, out: str, kind: str, *options: str) -> None:
    """Convert one checkpoint."""
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    from conversion.base import ModelBase, TextModel  # type: ignore[import-not-found,unused-ignore]

    known = ModelBase.load_hparams

    def load_hparams(dir_model: Path, is_mistral_format: bool) -> dict[str, Any]:
        """Read a configuration with the keys that newer versions of transformers leave out."""
        published: dict[str, Any] = json.loads((dir_model / "config.json").read_text("utf-8"))
        return published | known(dir_model, is_mistral_format)

    ModelBase.load_hparams = staticmethod(load_hparams)
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", kind, *options]
    runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
