"""A small LlamaGen of classes, one of captions, and a small decoder of their codes, of random weights.

tests/data/reference/llamagen.npz (tools/make_llamagen_reference.py makes it) has ``tensors``, JSON of names and shapes
of both as the authors' code has them, and that code's results: ``logits`` [2, 16, codes] of the codes of ``CODES``
after class 3 and after no class, the ``guided`` codes of class 3, and the ``picture`` of those; ``captioned_logits``
and ``captioned`` likewise of the caption ``IDS``.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "llamagen.npz"
SIDE, SIZE, CLASSES, SCALE = 4, 48, 5, 3.0
TOKENS = {"dim": 64, "n_layer": 2, "n_head": 2, "multiple_of": 32, "vocab_size": SIZE, "num_classes": CLASSES,
          "block_size": SIDE**2, "cls_token_num": 1}  # fmt: skip
PICTURE = {"z_channels": 32, "ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1}
MOST, CAPTION, IDS = 120, "A red cat", [3, 4, 5, 1]
CAPTIONED = TOKENS | {"model_type": "t2i", "cls_token_num": MOST, "caption_dim": 48}
T5 = {"d_model": 48, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 2, "vocab_size": 8,
      "feed_forward_proj": "gated-gelu"}  # fmt: skip
CODES = (np.arange(SIDE**2) * 7) % SIZE


def weights(shapes: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Make tensors from only their names: norms near 1, matrices that keep the size of their input."""
    found: dict[str, NDArray[np.float32]] = {}
    for name, shape in shapes.items():
        made = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
        norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
        found[name] = np.float32(1) + made / 8 if norm else made * np.float32(1.5 / np.prod(shape[1:]) ** 0.5)
    return found


def write_llamagen(folder: Path, captions: bool = False) -> Path:
    """Write a model's folder, with ``codes``, the decoder of its codes, and ``t5``, the encoder of captions."""
    with np.load(ARCHIVE) as kept:
        shapes = json.loads(kept["tensors"].tobytes())
    image = {"rows": SIDE, "columns": SIDE, "null": [] if captions else [SIZE + CLASSES], "guidance": SCALE}
    tokens = (
        {**CAPTIONED, "model_type": "llamagen", "cond": "t2i"} if captions else {"model_type": "llamagen", **TOKENS}
    )
    described = {"captioned" if captions else "tokens": (tokens, folder),
                 "codes": ({"model_type": "vq", "image": image}, folder / "codes")}  # fmt: skip
    if captions:
        described["t5"] = {"model_type": "t5", **T5}, folder / "t5"
    for kind, (config, at) in described.items():
        at.mkdir(parents=True)
        found = weights(shapes[kind])
        if kind == "codes" and captions:
            found["nothing"] = weights(shapes["captioned"])["cls_embedding.uncond_embedding"]
        save_file(found, at / "model.safetensors")
        (at / "config.json").write_text(json.dumps(config), "utf-8")
    words = {f"<{code}>": code for code in range(SIZE)}
    if not captions:
        words |= {str(at): SIZE + at for at in range(CLASSES)} | {"<none>": SIZE + CLASSES}
    _tokenizer(words, "<0>" if captions else "<none>").save(str(folder / "tokenizer.json"))
    if captions:
        made = _tokenizer({word: at for at, word in enumerate(["<pad>", "</s>", "<unk>", "a", "red", "cat"])}, "<unk>")
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
        made.save(str(folder / "t5" / "tokenizer.json"))
    rows = np.random.default_rng(0).integers(0, SIZE, (4, SIDE**2))
    text = [" ".join(f"<{code}>" for code in row) for row in rows]
    (folder / "calibration.txt").write_text("\n".join(text), "utf-8")
    return folder


def _tokenizer(words: dict[str, int], unknown: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
