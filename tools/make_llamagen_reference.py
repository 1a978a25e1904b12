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
import transformers

from tests.support.llamagen import (
    ARCHIVE,
    CAPTIONED,
    CLASSES,
    CODES,
    IDS,
    MOST,
    PICTURE,
    SCALE,
    SIDE,
    SIZE,
    T5,
    TOKENS,
    weights,
)


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

    def logits(model: Any, *begins: Any) -> Any:
        """Compute logits after some beginnings [1, n, dim]; the codes follow the last row of each."""
        found, before = [], model.cls_token_num
        for begin in begins:
            x = torch.cat((begin, model.tok_embeddings(codes[:, :-1])), 1)
            ends = model.freqs_cis[before - begin.shape[1] : before + SIDE**2 - 1]
            mask = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))[None, None]
            for layer in model.layers:
                x = layer(x, ends, None, mask)
            found.append(model.output(model.norm(x))[0, begin.shape[1] - 1 :].numpy())
        return np.stack(found)

    t5 = transformers.T5EncoderModel(transformers.T5Config(**T5))
    shapes["t5"] = filled(t5, "encoder.embed_tokens")
    captioned = gpt.Transformer(gpt.ModelArgs(**CAPTIONED))
    shapes["captioned"] = filled(captioned)
    made, n = {}, len(IDS)
    with torch.inference_mode():
        embed = model.cls_embedding
        made["logits"] = logits(model, *(embed(torch.tensor([label]), train=False) for label in (3, CLASSES)))
        guided = generate.generate(model, torch.tensor([3]), SIDE**2, cfg_scale=SCALE, top_k=1)[0].numpy()
        rows = t5(torch.tensor([IDS])).last_hidden_state
        reader = captioned.cls_embedding
        halves = reader.cap_proj(rows), reader.cap_proj(reader.uncond_embedding[None, -n:])
        made["captioned_logits"] = logits(captioned, *halves)
        padded = torch.nn.functional.pad(rows, (0, 0, MOST - n, 0))
        seen = torch.nn.functional.pad(torch.ones(1, n), (MOST - n, 0))
        drawn = generate.generate(captioned, padded, SIDE**2, seen, cfg_scale=SCALE, top_k=1)
        made["captioned"] = drawn[0].numpy()
    picture = vq.VQModel(vq.ModelArgs(codebook_size=SIZE, z_channels=PICTURE["z_channels"]))
    picture.decoder = vq.Decoder(**PICTURE)
    shapes["codes"] = filled(picture, "encoder", "quant_conv", "quantize.codebook_used")
    with torch.inference_mode():
        pixels = picture.decode_code(torch.from_numpy(guided), (1, 8, SIDE, SIDE))[0].permute(1, 2, 0).numpy()
    print(f"codes {guided.tolist()} and {made['captioned'].tolist()}, a picture from {pixels.min()} to {pixels.max()}")
    tensors = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    np.savez_compressed(ARCHIVE, tensors=tensors, guided=guided, picture=pixels, **made)


main(*sys.argv[1:])
