"""Train builtin:glyphs and builtin:glyphs-draft: a letter, and a style, to a picture of 8 x 8 codes.

Needs torch, transformers, tokenizers, Pillow and the fonts DejaVu Sans, Serif and Sans Mono, which come with
matplotlib (they are free: changes to Bitstream Vera that are in the public domain):

    python -m tools.train_glyphs -o edgespec/builtin --minutes 12

A picture of 32 x 32 pixels is cut into patches of 4 x 4, of which a code is one of 512 means (k-means).  A tenth of the
prompts say nothing, which is guidance's other half (arXiv 2207.12598).  Glyphs two pixels
smaller or larger than those seen in training are held out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tools.train_loop import Plan, optimise, save, spread_loss

SIDE, PATCH, CODES = 8, 4, 512
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
STYLES = {"sans": "DejaVuSans", "serif": "DejaVuSerif", "mono": "DejaVuSansMono"}
WEIGHTS = {"": "", "bold": "-Bold"}
NOTHING = "<nothing>"
WORDS = [f"<{code}>" for code in range(CODES)] + [*LETTERS, *STYLES, "bold", NOTHING]
IDS = {word: number for number, word in enumerate(WORDS)}
SIZES, UNSEEN = (22, 24, 26, 28), (20, 30)
MOST = SIDE * SIDE + 3  # a letter, a style, a weight
NONE, SOME = 0.1, 0.35  # shares of prompts that say nothing, and that leave each word but the letter out
TARGET = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 3}
DRAFT = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
Pixels = NDArray[np.uint8]  # [32, 32]


def drawn(letter: str, style: str, weight: str, size: int, shift: tuple[int, int] = (0, 0)) -> Pixels:
    """Print a letter in the middle of a picture, dark on light."""
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{STYLES[style]}{WEIGHTS[weight]}.ttf"
    font = ImageFont.truetype(file, size, layout_engine=ImageFont.Layout.BASIC)
    page = Image.new("L", (SIDE * PATCH, SIDE * PATCH), 255)
    ImageDraw.Draw(page).text((16 + shift[0], 26 + shift[1]), letter, fill=0, font=font, anchor="ms")
    return np.asarray(page)


def patches(pixels: Pixels) -> NDArray[np.float32]:
    """Cut pictures [n, 32, 32] into patches, [n, 64, 16], -1 to 1."""
    cut = pixels.reshape(-1, SIDE, PATCH, SIDE, PATCH).transpose(0, 1, 3, 2, 4)
    return cut.reshape(-1, SIDE * SIDE, PATCH * PATCH).astype(np.float32) / 127.5 - 1


def codebook(all_patches: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:  # [n, 16]
    """Find the means of patches by k-means -> [512, 16]; the first one is the paper."""
    points = np.unique(all_patches, axis=0)
    means = points[random.choice(len(points), CODES, replace=False)]
    for _ in range(20):
        of = nearest(points, means)
        means = np.stack([points[of == code].mean(0) if (of == code).any() else means[code] for code in range(CODES)])
    means[nearest(np.ones((1, PATCH * PATCH), np.float32), means)[0]] = 1
    return means[np.argsort(-means.mean(1), kind="stable")].astype(np.float32)


def nearest(points: NDArray[np.float32], means: NDArray[np.float32]) -> NDArray[np.int64]:
    """Name the nearest mean of each point."""
    return np.concatenate([((means**2).sum(1) - 2 * part @ means.T).argmin(1) for part in np.array_split(points, 64)])


def prompt(letter: str, style: str, weight: str) -> list[int]:
    """Encode the description of a glyph."""
    return [IDS[word] for word in (letter, style, weight) if word]


class Glyphs:
    """All glyphs, as codes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.random = np.random.default_rng(1)
        shifts = [(x, y) for x in (-2, -1, 0, 1, 2) for y in (-1, 0, 1)]
        self.what = [(letter, style, weight) for letter in LETTERS for style in STYLES for weight in WEIGHTS]
        self.patches = np.stack([
            patches(np.stack([drawn(*one, size, shift) for size in sizes for shift in shifts])) for one in self.what
        ])  # fmt: skip
        self.codes: NDArray[np.int64] = np.empty(0, np.int64)

    def coded(self, means: NDArray[np.float32]) -> None:
        """Name the patches' codes: [glyphs, sizes and shifts, 64]."""
        self.codes = nearest(self.patches.reshape(-1, PATCH * PATCH), means).reshape(self.patches.shape[:3])

    def batches(self, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Make tokens and labels [rows, tokens] without end."""
        while True:
            found = [self.row() for _ in range(rows)]
            tokens = torch.tensor([words + [0] * (MOST - len(words)) for words, _ in found])
            labels = tokens.clone()
            for row, (words, before) in enumerate(found):
                labels[row, :before] = labels[row, len(words) :] = -100
            yield tokens, labels

    def row(self) -> tuple[list[int], int]:
        """Draw a glyph with some of its prompt -> its tokens, and how many are the prompt's."""
        glyph, random = self.random.integers(len(self.what)), self.random
        letter, style, weight = self.what[glyph]
        words = prompt(letter, *(word if random.random() > SOME else "" for word in (style, weight)))
        if random.random() < NONE:
            words = [IDS[NOTHING]]
        codes = self.codes[glyph, random.integers(self.codes.shape[1])]
        return [*words, *codes.tolist()], len(words)


def train(glyphs: Glyphs, held: Glyphs, shape: dict[str, int], plan: Plan) -> LlamaForCausalLM:
    """Train a model of a shape."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=MOST + 5, tie_word_embeddings=True,
                         bos_token_id=None, eos_token_id=None, **shape)  # fmt: skip
    model, unseen = LlamaForCausalLM(config), next(held.batches(256))

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return spread_loss(model(batch[0]).logits[:, :-1], batch[1][:, 1:])

    def validate() -> str:
        with torch.no_grad():
            return f"{loss(unseen).item():.4f}"

    optimise(model, glyphs.batches(64), loss, validate, plan)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--draft-minutes", type=float, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    glyphs, held = Glyphs(SIZES), Glyphs(UNSEEN)
    means = codebook(glyphs.patches[:, :60:4].reshape(-1, PATCH * PATCH), np.random.default_rng(0))
    glyphs.coded(means)
    held.coded(means)
    lost = np.abs(means[glyphs.codes[:, 0]] - glyphs.patches[:, 0]).mean()
    print(json.dumps({"glyphs": len(glyphs.what), "codes": CODES, "error of codes": float(lost)}))
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=NOTHING))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": NOTHING, "model_max_length": MOST + 5}
    for name, shape, minutes in (("glyphs", TARGET, given.minutes), ("glyphs-draft", DRAFT, given.draft_minutes)):
        folder = given.output / name
        model = train(glyphs, held, shape, Plan(minutes, given.output / f"{name}.state", "cpu"))
        save(model, tokenizer, folder, settings)
        (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.95}\n')
    folder = given.output / "glyphs"
    rows = [glyphs.row()[0] for _ in range(24)]
    (folder / "calibration.txt").write_text("\n".join(" ".join(WORDS[word] for word in row) for row in rows) + "\n")
    (folder / "codes").mkdir(exist_ok=True)
    save_file({"codebook": np.repeat(means, 3, 1).astype(np.float16)}, folder / "codes" / "model.safetensors")
    image = {"rows": SIDE, "columns": SIDE, "null": [IDS[NOTHING]], "guidance": 1.5}
    (folder / "codes" / "config.json").write_text(
        json.dumps({"model_type": "patches", "image": image}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
