"""Train builtin:reader and builtin:reader-draft: lines of printed text, as pictures, to what they say.

Needs torch, transformers, tokenizers, Pillow, plain text and the fonts DejaVu Sans, Serif and Sans Mono, which come
with matplotlib (they are free: changes to Bitstream Vera that are in the public domain):

    python -m tools.train_reader --text tinyshakespeare.txt -o edgespec/builtin --minutes 75

The last tenth of the text is held out.  The model is LFM2-VL's: a SigLIP 2 tower over patches of 8 pixels, two by two
of them a row of the decoder, and a decoder whose layers all attend; its tokens are bytes.  A line of print is 16
pixels high, so that the rows of an image follow each other as its text does.  While the decoder learns to write the
text, the image's rows also learn it by CTC, which teaches in minutes where each character is (Kim, Hori, Watanabe,
arXiv 1609.06773); that head is not kept.  Images begin narrow, and grow as the loss falls.  A third of the lines are
random characters, so that the model reads and does not only guess.  The draft sees no image, only its number of rows,
and learns only the text.  A report is printed as JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    PreTrainedModel,
)

from tools.printed import Gray, Printer, parts
from tools.train_loop import Plan, ahead, error_rate, optimise, save, spread_loss

PATCH, FACTOR = 8, 2  # pixels, and patches of a row of the decoder, which is as high as a line of print, and as wide
MOST_COLUMNS, MOST_LINES, FRAMES = 20, 2, 4  # rows of an image and of CTC in each
SPECIAL = ("<|pad|>", "<|startoftext|>", "<|im_end|>", "<|im_start|>", "<image>", "<|image_start|>", "<|image_end|>")
PAD, BOS, EOS, ANSWER, IMAGE, BEGIN, END = range(len(SPECIAL))
VOCAB = len(SPECIAL) + 256
PROMPTS = ("", "Read this.")
NARROW = 3  # columns, at first
WIDER_BELOW = 0.35  # nats a character: images grow a column where the mean loss is less
VISION = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3}
DRAFT = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% else %}<|im_start|>{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 1024,
    "pad_token": SPECIAL[PAD],
    "bos_token": SPECIAL[BOS],
    "eos_token": SPECIAL[EOS],
    "image_token": SPECIAL[IMAGE],
    "image_start_token": SPECIAL[BEGIN],
    "image_end_token": SPECIAL[END],
    "chat_template": TEMPLATE,
    "clean_up_tokenization_spaces": False,
}
PIXELS = {
    "image_processor_type": "Lfm2VlImageProcessor",
    "processor_class": "Lfm2VlProcessor",
    "do_image_splitting": False,
    "downsample_factor": FACTOR,
    "encoder_patch_size": PATCH,
    "tile_size": 512,
    "min_tiles": 1,
    "max_tiles": 1,
    "use_thumbnail": False,
    "min_image_tokens": 1,
    "max_image_tokens": 256,
    "max_pixels_tolerance": 2.0,
    "do_resize": True,
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pad": True,
}


def make_tokenizer() -> Tokenizer:
    """Make a tokenizer of bytes and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


@dataclass
class Batch:
    """Images of one size, and their texts.

    Attributes:
        images: uint8 [n, h, w].
        prompt: after the image, the same for all.
        labels: int64 [n, t], padded with -100.
    """

    images: torch.Tensor
    prompt: str
    labels: torch.Tensor


@dataclass
class Pages:
    """Random pages, as batches.

    Attributes:
        words: of the text.
        width: columns that images have at most, and lines; the training widens them.
    """

    words: list[str]
    tokenizer: Tokenizer
    seed: int
    width: torch.Tensor = field(default_factory=lambda: torch.tensor([NARROW, 1]).share_memory_())

    def batches(self, worker: int) -> Iterator[Batch]:
        """Batches without end."""
        printer = Printer(f"{self.seed}.{worker}")
        while True:
            most, lines = self.width.tolist()
            columns = printer.random.choice((most, most, printer.random.randint(NARROW, most)))
            lines = printer.random.randint(1, lines)
            count = max(8, 320 // (columns * lines))
            made = [printer.page(self.words, columns, lines) for _ in range(count)]
            yield self.batch(made, printer.random.choice(PROMPTS))

    def batch(self, made: list[tuple[Gray, str]], prompt: str) -> Batch:
        ids = [[*one.ids, EOS] for one in self.tokenizer.encode_batch([text for _, text in made])]
        longest = max(map(len, ids))
        labels = torch.tensor([one + [-100] * (longest - len(one)) for one in ids])
        return Batch(torch.from_numpy(np.stack([image for image, _ in made])), prompt, labels)


# -- the model ---------------------------------------------------------------------------------------------------------


def text_config(shape: dict[str, int]) -> dict[str, Any]:
    return {
        "model_type": "lfm2",
        "vocab_size": VOCAB,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention"] * shape["num_hidden_layers"],
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **shape,
    }


def new_model() -> Lfm2VlForConditionalGeneration:
    vision = {"model_type": "siglip2_vision_model", "patch_size": PATCH, "num_patches": 576, "vision_use_head": False,
              **VISION}  # fmt: skip
    return Lfm2VlForConditionalGeneration(
        Lfm2VlConfig(
            text_config=text_config(TEXT),
            vision_config=vision,
            image_token_id=IMAGE,
            projector_hidden_size=256,
            downsample_factor=FACTOR,
        )
    )


class Reader(torch.nn.Module):  # type: ignore[misc]
    """The model, and a CTC head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()
        self.ctc = torch.nn.Linear(TEXT["hidden_size"], FRAMES * (VOCAB + 1))

    def rows(self, images: torch.Tensor) -> torch.Tensor:  # uint8 [n, h, w] -> [n, rows, width]
        _, height, width = images.shape
        tall, wide = height // PATCH, width // PATCH
        pixels = images.float().div(127.5).sub(1).unflatten(2, (wide, PATCH)).unflatten(1, (tall, PATCH))
        patches = pixels.transpose(2, 3).flatten(3).flatten(1, 2).repeat_interleave(3, -1)
        model = self.model.model
        tower = model.vision_tower
        tower = getattr(tower, "vision_model", tower)
        shapes = torch.tensor([[tall, wide]], device=images.device)
        hidden = tower.embeddings(patches, shapes.expand(1, 2))
        for layer in tower.encoder.layers:
            hidden = layer(hidden, None)
        hidden = tower.post_layernorm(hidden)
        return model.multi_modal_projector(hidden.unflatten(1, (tall, wide))).flatten(1, 2)

    def forward(self, batch: Batch, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits at the labels [n, t, V], and rows of the image [n, r, width]."""
        model = self.model.model
        embed = model.language_model.embed_tokens
        device = embed.weight.device
        rows = self.rows(batch.images.to(device))
        prompt = [END, *tokenizer.encode(batch.prompt).ids, ANSWER]
        labels = batch.labels.to(device)

        def embedded(ids: list[int]) -> torch.Tensor:
            return embed(torch.tensor(ids, device=device)).expand(len(rows), -1, -1)

        given = [embedded([BOS, BEGIN]), rows, embedded(prompt), embed(labels[:, :-1].clamp(min=PAD))]
        hidden = model.language_model(inputs_embeds=torch.cat(given, 1), use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[:, -labels.shape[1] :]), rows

    def aligned(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Give the loss of CTC, nats a character; ``VOCAB`` is its blank."""
        scores = self.ctc(rows).unflatten(-1, (FRAMES, VOCAB + 1)).flatten(1, 2).float().log_softmax(-1)
        keep = (labels != -100) & (labels != EOS)
        lengths = keep.sum(1)
        frames = torch.full_like(lengths, scores.shape[1])
        found = F.ctc_loss(
            scores.transpose(0, 1), labels[keep], frames, lengths, blank=VOCAB, reduction="sum", zero_infinity=True
        )
        return found / lengths.sum()


def guesses(draft: Lfm2ForCausalLM, batch: Batch, tokenizer: Tokenizer) -> torch.Tensor:  # [n, t, V]
    """Return what a draft, which sees that there are rows and not what is in them, says at the labels."""
    device = draft.lm_head.weight.device
    labels = batch.labels.to(device)
    rows = batch.images.shape[1] * batch.images.shape[2] // (PATCH * FACTOR) ** 2
    before = [BOS, BEGIN, *[IMAGE] * rows, END, *tokenizer.encode(batch.prompt).ids, ANSWER]
    given = torch.tensor(before, device=device).expand(len(labels), -1)
    found = draft(input_ids=torch.cat([given, labels[:, :-1].clamp(min=PAD)], 1), use_cache=False)
    return found.logits[:, -labels.shape[1] :]


def written(reader: Reader, tokenizer: Tokenizer, batch: Batch) -> list[str]:
    """Read images greedily."""
    model = reader.model.model
    embed = model.language_model.embed_tokens
    rows = reader.rows(batch.images)
    prompt = [END, *tokenizer.encode(batch.prompt).ids, ANSWER]
    begin, end = (embed(torch.tensor(ids)).expand(len(rows), -1, -1) for ids in ([BOS, BEGIN], prompt))
    given, cache = torch.cat([begin, rows, end], 1), None
    ids: list[torch.Tensor] = []
    done = torch.zeros(len(rows), dtype=torch.bool)
    for _ in range(batch.labels.shape[1] + 10):
        made = model.language_model(inputs_embeds=given, cache=cache, use_cache=True)
        cache = made.cache
        ids.append(reader.model.lm_head(made.last_hidden_state[:, -1]).argmax(-1))
        done |= ids[-1] == EOS
        if done.all():
            break
        given = embed(ids[-1])[:, None]
    texts = [row[: row.index(EOS)] if EOS in row else row for row in torch.stack(ids, 1).tolist()]
    return [tokenizer.decode(text) for text in texts]


def measured(reader: Reader, tokenizer: Tokenizer, batches: list[Batch]) -> tuple[float, float, list[str]]:
    """Return (character error rate, share of pages without an error, the first texts)."""
    ours: list[str] = []
    theirs: list[str] = []
    with torch.inference_mode():
        for batch in batches:
            ours += written(reader, tokenizer, batch)
            theirs += [tokenizer.decode([t for t in row if t not in (-100, EOS)]) for row in batch.labels.tolist()]
    wrong = error_rate(list(map(list, ours)), list(map(list, theirs)))
    return wrong, sum(map(str.__eq__, ours, theirs)) / len(ours), ours[:6]


def held_out_pages(pages: Pages, columns: int, lines: int, count: int, size: int = 32) -> list[Batch]:
    printer = Printer(f"held out {columns} {lines}")
    made = [printer.page(pages.words, columns, lines, plain=True) for _ in range(count)]
    return [pages.batch(made[at : at + size], PROMPTS[at // size % 2]) for at in range(0, count, size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="its last tenth is held out")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the model's folder")
    parser.add_argument("--minutes", type=float, default=75.0, help="of training")
    parser.add_argument("--draft-minutes", type=float, default=8.0, help="of training the draft")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--begin", type=int, nargs=2, default=(NARROW, 1), help="columns and lines at first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained, held_out = parts(args.text.read_text("utf-8"))
    tokenizer = make_tokenizer()
    pages, others = Pages(trained, tokenizer, args.seed), Pages(held_out, tokenizer, args.seed)
    pages.width[:] = torch.tensor(args.begin)
    reader = Reader()
    mean = [3.0, 0.0]

    def loss(batch: Batch) -> torch.Tensor:
        logits, rows = reader(batch, tokenizer)
        labels = batch.labels.to(logits.device)
        ours = spread_loss(logits, labels)
        mean[:] = [0.98 * mean[0] + 0.02 * ours.item(), mean[1] + 1]
        if mean[0] < WIDER_BELOW and mean[1] > 25:
            mean[1] = 0
            if pages.width[0] < MOST_COLUMNS:
                pages.width[0] += 1
            elif pages.width[1] < MOST_LINES:
                pages.width[1] += 1
        return ours + 0.5 * reader.aligned(rows, labels)

    def validate() -> str:
        columns, lines = pages.width.tolist()
        wrong, whole, texts = measured(reader, tokenizer, held_out_pages(others, columns, lines, 8))
        return f"{columns} x {lines}: CER {wrong:.4f}, whole {whole:.2f}, mean {mean[0]:.3f} {texts[0]!r}"

    optimise(
        reader,
        ahead(pages.batches, device),
        loss,
        validate,
        Plan(args.minutes, args.output / "reader.pt", device, args.rate),
    )
    keep(reader.model, tokenizer, args.output / "reader")
    draft = Lfm2ForCausalLM(Lfm2Config(**text_config(DRAFT)))
    few = held_out_pages(others, MOST_COLUMNS, 1, 64)

    def unlike() -> str:
        with torch.inference_mode():
            return (
                f"{sum(spread_loss(guesses(draft, one, tokenizer), one.labels).item() for one in few) / len(few):.4f}"
            )

    optimise(
        draft,
        ahead(pages.batches, device),
        lambda batch: spread_loss(guesses(draft, batch, tokenizer), batch.labels.to(device)),
        unlike,
        Plan(args.draft_minutes, args.output / "reader-draft.pt", device, args.rate),
    )
    keep(draft, tokenizer, args.output / "reader-draft")
    found: dict[str, Any] = {"parameters": sum(one.numel() for one in reader.model.parameters())}
    for lines in (1, 2):
        wrong, whole, texts = measured(reader, tokenizer, held_out_pages(others, MOST_COLUMNS, lines, 256))
        found[f"{lines} lines"] = {"character error rate": round(wrong, 5), "whole": round(whole, 3), "texts": texts}
    (args.output / "reader.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2), f"\n{time.monotonic() - began:.0f} s")


def keep(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model's folder."""
    save(model, tokenizer, folder, SETTINGS)
    chosen = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(chosen, indent=2) + "\n")
    if isinstance(model, Lfm2VlForConditionalGeneration):
        (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS, indent=2) + "\n")


if __name__ == "__main__":
    main()
