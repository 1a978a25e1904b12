"""A small LlamaGen of classes and a small decoder of its codes, both of random weights.

tests/data/reference/llamagen.npz (tools/make_llamagen_reference.py makes it) has ``tensors``, JSON of names and shapes
of both as the authors' code has them, and what that code computes: ``logits`` [2, 16, codes] behind class 3 and behind
none of the codes of ``CODES``, the ``guided`` codes of class 3, and the ``picture`` of those.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "llamagen.npz"
SIDE, SIZE, CLASSES, SCALE = 4, 48, 5, 3.0
TOKENS = {"dim": 64, "n_layer": 2, "n_head": 2, "multiple_of": 32, "vocab_size": SIZE, "num_classes": CLASSES,
          "block_size": SIDE**2, "cls_token_num": 1}  # fmt: skip
PICTURE = {"z_channels": 32, "ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1}
CODES = (np.arange(SIDE**2) * 7) % SIZE


def weights(shapes: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Make tensors by their names alone: norms near 1, matrices that keep the size of what they read."""
    found: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes.items():
        made = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
        found[name] = np.float32(1) + made / 8 if norm else made * np.float32(1.5 / np.prod(shape[1:]) ** 0.5)
    return found


def write_llamagen(folder: Path) -> Path:
    """Write a model's folder with that of the decoder of its codes, ``codes``."""
    with np.load(ARCHIVE) as kept:
        shapes = json.loads(kept["tensors"].tobytes())
    image = {"rows": SIDE, "columns": SIDE, "null": [SIZE + CLASSES], "guidance": SCALE}
    described = {"tokens": {"model_type": "llamagen", **TOKENS}, "codes": {"model_type": "vq", "image": image}}
    for kind, at in (("tokens", folder), ("codes", folder / "codes")):
        at.mkdir(parents=True)
        save_file(weights(shapes[kind]), at / "model.safetensors")
        (at / "config.json").write_text(json.dumps(described[kind]), "utf-8")
    words = {f"<{code}>": code for code in range(SIZE)} | {str(at): SIZE + at for at in range(CLASSES)}
    tokenizer = Tokenizer(models.WordLevel(words | {"<none>": SIZE + CLASSES}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = np.random.default_rng(0).integers(0, SIZE, (4, SIDE**2))
    text = [" ".join([str(at), *(f"<{code}>" for code in row)]) for at, row in enumerate(rows)]
    (folder / "calibration.txt").write_text("\n".join(text), "utf-8")
    return folder
