"""Run llama.cpp's converter on a checkpoint of the tests.

``python -m tests.support.llama_convert SOURCES MODEL OUT TYPE``: SOURCES is a folder with llama.cpp's sources, and TYPE
such as ``f32`` or ``q8_0``.  The converter knows a tokenizer by a digest of what it does to a text, and refuses others;
those of the tests count as GPT-2's.
"""

from __future__ import annotations

import runpy
import sys


def main(sources: str, model: str, out: str, kind: str) -> None:
    """Convert one checkpoint."""
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    from conversion.base import TextModel  # type: ignore[import-not-found,unused-ignore]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", kind]
    runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
