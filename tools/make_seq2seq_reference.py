"""Compute what encoder-decoders give in transformers, for the tests of the export (tests/support/seq2seq.py).

Needs torch and transformers:  python tools/make_seq2seq_reference.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.saved import shapes_of, text_array, write_archive
from tests.support.seq2seq import ARCHIVE, CASES, Config, write_checkpoint

LENGTH, SOURCE, NEW = 300, 130, 200
ROWS = [0, 1, 2, 3, 5, 8, 13, 40, 80, 150, 250, 299]


def reference(config: Config) -> dict[str, Any]:
    """Make the arrays of one case."""
    kind = AutoModelForSpeechSeq2Seq if config["model_type"] == "whisper" else AutoModelForSeq2SeqLM
    described = AutoConfig.for_model(**config)
    rng = np.random.default_rng(1)
    source: Any
    with tempfile.TemporaryDirectory() as folder:
        kind.from_config(described).float().save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text("utf-8"))
        shapes = shapes_of(Path(folder))
        shapes = {each: shape for each, shape in shapes.items() if not computed(each, config)}
        write_checkpoint(Path(folder), written, shapes)
        model = kind.from_pretrained(folder, attn_implementation="eager").float().eval()
    vocab = int(config.get("decoder_vocab_size") or config["vocab_size"])
    tokens = [config["decoder_start_token_id"], *rng.integers(3, vocab - 2, LENGTH - 1).tolist()]
    if "num_mel_bins" in config:
        source = rng.standard_normal((2 * config["max_source_positions"], config["num_mel_bins"])).astype(np.float32)
        given = {"input_features": torch.from_numpy(source.T[None].copy())}
    else:
        source = rng.integers(3, config["vocab_size"] - 2, SOURCE)
        given = {"input_ids": torch.from_numpy(source[None]), "attention_mask": torch.ones(1, SOURCE, dtype=torch.long)}
    with torch.no_grad():
        out = model(**given, decoder_input_ids=torch.tensor([tokens]), use_cache=False)
        greedy, given = tokens[:1], {"encoder_outputs": (out.encoder_last_hidden_state,)}
        for _ in range(NEW):
            step = model(**given, decoder_input_ids=torch.tensor([greedy]), use_cache=False)
            greedy.append(int(step.logits[0, -1].argmax()))
    saved = text_array({"config": written, "tensors": shapes})
    return {"saved": saved, "source": source, "tokens": np.asarray(tokens), "greedy": np.asarray(greedy[1:]),
            "encoded": out.encoder_last_hidden_state[0].numpy(), "rows": np.asarray(ROWS),
            "logits": out.logits[0, ROWS].numpy()}  # fmt: skip


def computed(tensor: str, config: Config) -> bool:
    """Whether a tensor follows from the configuration."""
    return "embed_positions" in tensor and config["model_type"] in ("marian", "pegasus")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_archive(ARCHIVE, CASES, lambda name: reference(CASES[name]))
