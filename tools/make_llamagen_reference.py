"""Compute what LlamaGen's own code makes of a small model's weights, for the tests (tests/support/llamagen.py).

Needs torch, and a checkout of https://github.com/FoundationVision/LlamaGen (commit ce98ec4 made the archive):
python -m tools.make_llamagen_reference LLAMAGEN
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib import import_module
from typing import Any

import numpy as np
import torch

from tests.support.llamagen import ARCHIVE, CLASSES, CODES, PICTURE, SCALE, SIDE, SIZE, TOKENS, weights


def filled(model: Any, *left_out: str) -> dict[str, list[int]]:
    """Give a model the tests' weights -> names and shapes of what it stores."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if not name.startswith(left_out)}
    made = {name: torch.from_numpy(one) for name, one in weights(shapes).items()}
    model.load_state_dict(made, strict=False)
    model.eval()
    return shapes


def main(llamagen: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, llamagen)
    gpt, generate, vq = map(import_module, (
        "autoregressive.models.gpt", "autoregressive.models.generate", "tokenizer.tokenizer_image.vq_model"
    ))  # fmt: skip
    torch.backends.cuda.sdp_kernel = lambda **_: contextlib.nullcontext()
    model = gpt.Transformer(gpt.ModelArgs(**TOKENS))
    shapes = {"tokens": filled(model)}
    codes = torch.from_numpy(CODES)[None]
    with torch.inference_mode():
        ends = model.freqs_cis[: SIDE**2]
        mask = torch.tril(torch.ones(SIDE**2, SIDE**2, dtype=torch.bool))[None, None]
        logits = []
        for label in (3, CLASSES):
            x = model.cls_embedding(torch.tensor([label]), train=False)
            x = torch.cat((x, model.tok_embeddings(codes[:, :-1])), 1)
            for layer in model.layers:
                x = layer(x, ends, None, mask)
            logits.append(model.output(model.norm(x))[0].numpy())
        guided = generate.generate(model, torch.tensor([3]), SIDE**2, cfg_scale=SCALE, top_k=1)[0].numpy()
    picture = vq.VQModel(vq.ModelArgs(codebook_size=SIZE, z_channels=PICTURE["z_channels"]))
    picture.decoder = vq.Decoder(**PICTURE)
    shapes["codes"] = filled(picture, "encoder", "quant_conv", "quantize.codebook_used")
    with torch.inference_mode():
        made = picture.decode_code(torch.from_numpy(guided), (1, 8, SIDE, SIDE))[0].permute(1, 2, 0).numpy()
    print(f"codes {guided.tolist()}, a picture of {made.shape} from {made.min():.2f} to {made.max():.2f}")
    tensors = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    np.savez_compressed(ARCHIVE, tensors=tensors, logits=np.stack(logits), guided=guided, picture=made)


main(*sys.argv[1:])
