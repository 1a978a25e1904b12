"""Convert LlamaGen's published pickles into folders that ``edgespec export`` reads; needs torch.

    python -m tools.convert_llamagen c2i_B_256.pt vq_ds16_c2i.pt -o llamagen-b

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

GUIDANCE, CLASSES = 4.0, 1000


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
    parser.add_argument("tokens", type=Path, help="c2i_*.pt")
    parser.add_argument("codes", type=Path, help="vq_ds16_c2i.pt")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--size", type=int, default=256, help="pixels of a side")
    parser.add_argument("--heads", type=int, help="else one for each 64 channels; 32 of the 3B")
    given = parser.parse_args()
    tokens, side = read(given.tokens), given.size // 16
    vocab, dim = tokens["tok_embeddings.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in tokens if name.startswith("layers."))
    config = {"model_type": "llamagen", "dim": dim, "n_layer": layers, "n_head": given.heads or dim // 64,
              "vocab_size": vocab, "num_classes": CLASSES, "block_size": side**2, "cls_token_num": 1}  # fmt: skip
    write(given.output, tokens, config)
    image = {"rows": side, "columns": side, "null": [vocab + CLASSES], "guidance": GUIDANCE}
    kept = {name: one for name, one in read(given.codes).items() if not name.startswith(("encoder", "quant_conv"))}
    write(given.output / "codes", kept, {"model_type": "vq", "image": image})
    words = {f"<{code}>": code for code in range(vocab)} | {str(at): vocab + at for at in range(CLASSES)}
    tokenizer = Tokenizer(models.WordLevel(words | {"<none>": vocab + CLASSES}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(given.output / "tokenizer.json"))
    drawn = torch.randint(0, vocab, (8, side**2), generator=torch.Generator().manual_seed(0)).tolist()
    text = "\n".join(" ".join([str(at), *(f"<{code}>" for code in row)]) for at, row in enumerate(drawn))
    (given.output / "calibration.txt").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
