"""Convert LlamaGen's published pickles into folders that ``edgespec export`` reads; needs torch.

    python -m tools.convert_llamagen c2i_B_256.pt vq_ds16_c2i.pt -o llamagen-b
    python -m tools.convert_llamagen t2i_XL_stage1_256.pt vq_ds16_t2i.pt --t5 flan-t5-xl -o llamagen-xl

The files are those of https://huggingface.co/FoundationVision/LlamaGen.  The decoder of codes becomes the folder
``codes`` of the model's.  Classes are words, "0" to "999" of ImageNet, and "<none>".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from edgespec.export.architectures.llamagen import CAPTIONS

GUIDANCE, CAPTIONED, CLASSES = 4.0, 7.5, 1000  # scales of the authors' sample_c2i.py and sample_t2i.py
NOTHING = "cls_embedding.uncond_embedding"


def read(file: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a published checkpoint, whatever trained it."""
    found: Any = torch.load(file, map_location="cpu", weights_only=True)
    while (inner := next((found[key] for key in ("model", "module", "state_dict") if key in found), None)) is not None:
        found = inner
    return {name: tensor.contiguous() for name, tensor in found.items() if torch.is_tensor(tensor)}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tokens", type=Path, help="c2i_*.pt or t2i_*.pt")
    parser.add_argument("codes", type=Path, help="vq_ds16_c2i.pt or vq_ds16_t2i.pt")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--size", type=int, default=256, help="pixels of a side")
    parser.add_argument("--heads", type=int, help="else one for each 64 channels; 32 of the 3B")
    parser.add_argument("--t5", type=Path, help="of t2i: folder of flan-t5-xl, with its weights as safetensors")
    given = parser.parse_args()
    tokens, side = read(given.tokens), given.size // 16
    vocab, dim = tokens["tok_embeddings.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in tokens if name.startswith("layers."))
    config = {"model_type": "llamagen", "dim": dim, "n_layer": layers, "n_head": given.heads or dim // 64,
              "vocab_size": vocab, "num_classes": CLASSES, "block_size": side**2, "cls_token_num": 1}  # fmt: skip
    nothing = tokens.pop(NOTHING, None)
    if (nothing is None) != (given.t5 is None):
        parser.error("--t5 goes with t2i_*.pt, and with it alone")
    if nothing is not None:
        config |= {"cond": "t2i", "cls_token_num": len(nothing)}
    write(given.output, tokens, config)
    null = [] if given.t5 else [vocab + CLASSES]
    image = {"rows": side, "columns": side, "null": null, "guidance": CAPTIONED if given.t5 else GUIDANCE}
    kept = {name: one for name, one in read(given.codes).items() if not name.startswith(("encoder", "quant_conv"))}
    if nothing is not None:
        kept["nothing"] = nothing
        (given.output / CAPTIONS).symlink_to(given.t5.resolve())
    write(given.output / "codes", kept, {"model_type": "vq", "image": image})
    words = {f"<{code}>": code for code in range(vocab)}
    if given.t5 is None:
        words |= {str(at): vocab + at for at in range(CLASSES)} | {"<none>": vocab + CLASSES}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>" if given.t5 else "<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(given.output / "tokenizer.json"))
    drawn = torch.randint(0, vocab, (8, side**2), generator=torch.Generator().manual_seed(0)).tolist()
    text = "\n".join(" ".join(f"<{code}>" for code in row) for row in drawn)
    (given.output / "calibration.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
