"""Compute the logits of vision models in transformers, for the tests of the export (tests/support/sight.py).

Pillow resizes all images, even where transformers has only a processor of torchvision (LFM2-VL).  Prints the difference
between torchvision's processors and Pillow's.  Needs torch, torchvision and transformers:
python tools/make_sight_reference.py [NAME...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_idefics3 import Idefics3ImageProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.saved import shapes_of, text_array, write_archive
from tests.support.sight import ARCHIVE, CASES, EVERY, IMAGE, SHOWN, config_of, pictures, write_checkpoint

NEW, ROWS = 12, 6
BEFORE = "a picture ", " and another ", " what is it"


class ByPillow(Lfm2VlImageProcessor):  # type: ignore[misc]
    """LFM2-VL's processor, resizing as Pillow does."""


def resize(self: Any, image: Any, size: Any, resample: Any = None, **more: Any) -> Any:
    """Resize uint8 tensors [n, 3, h, w] by Pillow's bilinear filter."""
    made = [
        np.asarray(Image.fromarray(one.permute(1, 2, 0).numpy()).resize((size.width, size.height), 2)) for one in image
    ]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)


PROCESSORS: dict[str, tuple[type, type]] = {
    "idefics3": (Idefics3ImageProcessorPil, Idefics3ImageProcessor),
    "smolvlm": (Idefics3ImageProcessorPil, Idefics3ImageProcessor),
    "lfm2_vl": (ByPillow, Lfm2VlImageProcessor),
    "internvl": (GotOcr2ImageProcessorPil, GotOcr2ImageProcessor),
    "gemma3": (Gemma3ImageProcessorPil, Gemma3ImageProcessor),
    "gemma4": (Gemma4ImageProcessorPil, Gemma4ImageProcessor),
    "qwen3_vl_moe": (Qwen2VLImageProcessorPil, Qwen2VLImageProcessor),
    "qwen3_5_moe": (Qwen2VLImageProcessorPil, Qwen2VLImageProcessor),
    "qwen2_vl": (Qwen2VLImageProcessorPil, Qwen2VLImageProcessor),
    "qwen2_5_vl": (Qwen2VLImageProcessorPil, Qwen2VLImageProcessor),
    "qwen3_vl": (Qwen2VLImageProcessorPil, Qwen2VLImageProcessor),
    "qwen3_5": (Qwen2VLImageProcessorPil, Qwen2VLImageProcessor),
}


def processed(kind: str, processor: Any, picture: Any) -> dict[str, Any]:
    """Process one picture -> tensors."""
    whole = TorchvisionBackend.resize
    if isinstance(processor, ByPillow):
        TorchvisionBackend.resize = resize
    nested = [[picture]] if kind in ("idefics3", "smolvlm", "lfm2_vl") else [picture]
    more = {"return_row_col_info": True} if kind in ("idefics3", "smolvlm", "lfm2_vl") else {}
    try:
        return dict(processor(nested, return_tensors="pt", **more))
    finally:
        TorchvisionBackend.resize = whole


def text_of(kind: str, config: Any, processor: Any, given: dict[str, Any], rows: int) -> str:
    """Write what stands for a picture."""
    if kind in ("idefics3", "smolvlm"):
        tiles = int(given["rows"][0][0]), int(given["cols"][0][0])
        each = rows // (tiles[0] * tiles[1] + 1)
        return get_image_prompt_string(*tiles, each, "<fake_token_around_image>", "<image>", "<global-img>")
    if kind == "lfm2_vl":
        writer = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
        writer.image_processor, writer.image_token = processor, "<image>"
        writer.image_start_token, writer.image_end_token = "<|image_start|>", "<|image_end|>"
        writer.image_thumbnail_token = "<|img_thumbnail|>"
        return writer.replace_image_token(given, 0, use_image_special_tokens=True)
    if kind.startswith("qwen"):
        return "<|image_pad|>" * rows
    if kind == "internvl":
        return "<img>" + "<IMG_CONTEXT>" * rows + "</img>"
    if kind == "gemma4":
        return "<|image>" + "<|image|>" * rows + "<image|>"
    return "\n\n<start_of_image>" + "<image_soft_token>" * rows + "<end_of_image>\n\n"


def features(model: Any, given: dict[str, Any]) -> Any:
    """Compute the decoder's rows of one picture, [rows, width]."""
    names = "pixel_values", "pixel_attention_mask", "spatial_shapes", "image_grid_thw", "image_position_ids"
    made = model.model.get_image_features(**{key: given[key] for key in names if key in given})
    deep = getattr(made, "deepstack_features", None) or ()
    return torch.cat([torch.cat(list(one)) for one in (made.pooler_output, *deep)], -1)


def reference(name: str) -> dict[str, Any]:
    """Make the arrays of one case."""
    config = config_of(name)
    kind = config["model_type"]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config)).float().save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text("utf-8"))
        shapes = shapes_of(folder)
        write_checkpoint(folder, name, written, shapes)
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").float().eval()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    mine, other = (make(**CASES[name][1]) for make in PROCESSORS[kind])
    given = [processed(kind, mine, Image.fromarray(one)) for one in pictures()]
    apart = [(one["pixel_values"] - processed(kind, other, Image.fromarray(picture))["pixel_values"]).abs().max()
             for one, picture in zip(given, pictures(), strict=True)]  # fmt: skip
    print(f"{name}: torchvision's pixels are {max(apart):.5f} apart")
    found: dict[str, Any] = {"saved": text_array({"config": written, "tensors": shapes})}
    with torch.no_grad():
        rows = [features(model, one) for one in given]
        texts = [text_of(kind, config, mine, one, len(own)) for one, own in zip(given, rows, strict=True)]
        around = ("<|vision_start|>", "<|vision_end|>") if kind.startswith("qwen") else ("", "")
        first, second = (texts[at].join(around) for at in SHOWN)
        prompt = BEFORE[0] + first + BEFORE[1] + second + BEFORE[2]
        ids = tokenizer.encode(prompt).ids
        shown = torch.cat([rows[at] for at in SHOWN])
        assert ids.count(IMAGE) == len(shown), (ids.count(IMAGE), len(shown))
        logits, greedy = run(model, kind, ids, shown, [given[at] for at in SHOWN])
    for at, (own, words) in enumerate(zip(rows, texts, strict=True)):
        found |= {f"features.{at}": own[::EVERY].numpy(), f"text.{at}": np.asarray(tokenizer.encode(words).ids)}
    kept = np.linspace(0, len(ids) - 1, ROWS).astype(np.int64)
    return found | {"ids": np.asarray(ids), "rows": kept, "logits": logits[kept], "greedy": np.asarray(greedy)}


def run(model: Any, kind: str, ids: list[int], shown: Any, given: list[dict[str, Any]]) -> tuple[Any, list[int]]:
    """Compute logits [T, vocab] of a prompt with images, and continue it greedily."""
    text = model.model.get_input_embeddings()
    tokens, logits = list(ids), None
    for _ in range(NEW + 1):
        row = torch.tensor([tokens])
        embeds = text(row)
        embeds[0, row[0] == IMAGE] = shown[:, : embeds.shape[-1]]
        more: dict[str, Any] = {"inputs_embeds": embeds}
        if kind == "gemma3":
            more["token_type_ids"] = (row == IMAGE).long()
        if kind.startswith("qwen"):  # whose positions follow from the images
            named = "pixel_values", "image_grid_thw"
            more = {"input_ids": row, "mm_token_type_ids": (row == IMAGE).int()}
            more |= {key: torch.cat([one[key] for one in given]) for key in named}
        if kind == "gemma4":  # whose layers look tokens up
            named = "pixel_values", "image_position_ids"
            more = {"input_ids": row, "mm_token_type_ids": (row == IMAGE).long()}
            more |= {key: torch.cat([one[key] for one in given]) for key in named}
        out = model(use_cache=False, **more).logits[0]
        logits = out if logits is None else logits
        tokens.append(int(out[-1].argmax()))
    assert logits is not None
    return logits.numpy(), tokens[len(ids) : -1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_archive(ARCHIVE, sys.argv[1:] or CASES, reference)
