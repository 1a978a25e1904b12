"""A small Janus of random weights.

tests/data/reference/janus.npz (tools/make_janus_reference.py makes it) has ``config`` and ``tensors``, JSON of
config.json and of names and shapes as transformers saves them, and what that computes for the prompt ``IDS``: guided
``codes`` [16], their ``picture``, and ``logits`` [22, codes] of the prompt and all codes but the last.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.llamagen import weights

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "janus.npz"
SIDE, SIZE = 4, 64
WORDS = ["<pad>", "<bos>", "<eos>", "<begin_of_image>", "<|User|>:", "<|Assistant|>:", "a", "cat", "<unk>"]
PROMPT, IDS = "a cat", [1, 4, 6, 7, 5, 3]
GENERATION = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "guidance_scale": 3.0,
              "generation_kwargs": {"boi_token_id": 3}}  # fmt: skip
CONFIG = {
    "text_config": {"model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 160,
                    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64},
    "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8 * SIDE,
                      "patch_size": 8, "projection_dim": 64, "num_image_tokens": SIDE**2},
    "vq_config": {"num_embeddings": SIZE, "embed_dim": 8, "latent_channels": 32, "base_channels": 32,
                  "channel_multiplier": [1, 2], "num_res_blocks": 1, "projection_dim": 64, "image_token_embed_dim": 64},
}  # fmt: skip


def write_janus(folder: Path) -> Path:
    """Write the model's folder as transformers does."""
    folder.mkdir(parents=True)
    with np.load(ARCHIVE) as kept:
        save_file(weights(json.loads(kept["tensors"].tobytes())), folder / "model.safetensors")
        (folder / "config.json").write_bytes(kept["config"].tobytes())
    (folder / "generation_config.json").write_text(json.dumps(GENERATION), "utf-8")
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "calibration.txt").write_text(f"{PROMPT} " * 40, "utf-8")
    return folder
