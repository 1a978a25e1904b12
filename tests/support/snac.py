"""A small codec of SNAC's kind and a small model of Orpheus' kind, both of random weights.

tests/data/reference/snac.npz (made by tools/make_snac_reference.py) has ``tensors``, JSON of names and shapes as the
authors' code saves them.  For ``codes()`` it has every eighth sample of the ``sound``, and of the result of Orpheus'
own code.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support import hf
from tests.support.sight import write_tokenizer

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "snac.npz"
LEVELS, PLACES, FIRST, CUSTOM, EOT = 16, 7, 120, 110, 100
CONFIG = {"sampling_rate": 24_000, "encoder_dim": 2, "encoder_rates": [2, 4, 8, 8], "decoder_dim": 32,
          "decoder_rates": [8, 8, 4, 2], "attn_window_size": None, "codebook_size": LEVELS, "codebook_dim": 8,
          "vq_strides": [4, 2, 1], "noise": True, "depthwise": True}  # fmt: skip


def codes() -> NDArray[np.int64]:  # [frames, places]
    return np.random.default_rng(5).integers(1, LEVELS, (7, PLACES))  # not 0, which Orpheus' own code leaves out


def weights(shapes: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Make tensors from only their names, such that sound is neither silent nor cut."""
    found = {}
    for name, shape in shapes.items():
        made = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        found[name] = np.float32(0.3) + np.abs(made) / 4 if name.endswith(("alpha", "original0")) else made
    return found


def write_snac(folder: Path, **changes: Any) -> Path:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes), "utf-8")
    with np.load(ARCHIVE) as kept:
        save_file(weights(json.loads(kept["tensors"].tobytes())), folder / "model.safetensors")
    return folder


def write_orpheus(folder: Path) -> Path:
    """Write a Llama whose tokenizer has Orpheus' words, with the codec in its folder ``codes``."""
    config = hf.CONFIGS["llama_tied_gqa"] | {"vocab_size": 256, "max_position_embeddings": 256}
    hf.write_checkpoint(folder, config, 0)
    words = {f"<custom_token_{number}>": CUSTOM + number for number in (1, 2, 3, 4, 5, 10)}
    write_tokenizer(folder, {"<|eot_id|>": EOT, **words})
    write_snac(folder / "codes")
    return folder
