"""Models that write a known text: after each token of a chain comes the next one, whatever else was said."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tests.support import hf


def write_chain(
    folder: Path, tokenizer: Tokenizer, vocab: int, chain: Sequence[str], described: dict[str, Any], eos: Any
) -> Path:
    """A llama checkpoint; its layers add nothing, so that the last token alone decides.

    Args:
        folder: where to write.
        tokenizer: saved as tokenizer.json.
        vocab: rows of the embedding.
        chain: each token is followed by the next.
        described: tokenizer_config.json.
        eos: of generation_config.json.
    """
    config = hf.CONFIGS["llama_tied_gqa"] | {"vocab_size": vocab, "tie_word_embeddings": False, "eos_token_id": eos}
    hf.write_checkpoint(folder, config, 1)
    made = hf.weights(config, 1)
    for name in made:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = np.zeros_like(made[name])
    made["model.norm.weight"] = np.ones_like(made["model.norm.weight"])
    random = np.random.default_rng(0)
    rows = random.standard_normal((vocab, config["hidden_size"]))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    head = 0.01 * random.standard_normal(rows.shape)
    ids = [tokenizer.token_to_id(token) for token in chain]
    for before, after in itertools.pairwise(ids):
        head[after] += rows[before]
    made["model.embed_tokens.weight"] = rows.astype(np.float32)
    made["lm_head.weight"] = head.astype(np.float32)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    hf._write_json(folder / "tokenizer_config.json", described)
    return folder
