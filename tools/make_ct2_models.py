"""Train a small translator and a small Whisper, and convert both by CTranslate2: whole folders for one command.

Needs torch, transformers, sentencepiece and ctranslate2:  python tools/make_ct2_models.py
tests/support/ct2.py says what the archive holds.  Both know by heart what they were trained with.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from ctranslate2.converters import TransformersConverter
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edgespec.library import EMBEDDED
from edgespec.runtimes.audio.reading import pieces
from tests.support.ct2 import HEARD, MODELS, TRANSLATED
from tests.support.whisper import DIGITS, SAID

HEARS = EMBEDDED / "spoken-digits"


def learn(model: Any, steps: int, until: float, **batch: torch.Tensor) -> None:
    """Train until the loss is small enough."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    for step in range(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(step, loss.item(), flush=True)
        if loss.item() < until:
            break
    model.eval()


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    """Make a matrix of rows of several lengths."""
    most = max(map(len, rows))
    return torch.tensor([row + [filler] * (most - len(row)) for row in rows])


def translator(folder: Path) -> dict[str, str]:
    """Write a Marian with its tokenizer's files, as opus-mt has them -> what it makes of texts, by transformers."""
    both: dict[str, None] = {}
    for side, texts in (("source", list(TRANSLATED)), ("target", list(TRANSLATED.values()))):
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=made,
            vocab_size=90,
            hard_vocab_limit=False,
            minloglevel=2,
            normalization_rule_name="identity",
        )
        (folder / f"{side}.spm").write_bytes(made.getvalue())
        reader = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
        both |= dict.fromkeys(reader.id_to_piece(number) for number in range(3, reader.vocab_size()))
    listed = ["</s>", "<unk>", *sorted(both), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(listed)}), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}), "utf-8")
    torch.manual_seed(0)
    pad = len(listed) - 1
    model = MarianMTModel(
        MarianConfig(
            vocab_size=len(listed), d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
            scale_embedding=True, activation_function="swish", pad_token_id=pad, decoder_start_token_id=pad,
            eos_token_id=0, forced_eos_token_id=None, dropout=0.0, init_std=0.1,
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(
        decoder_start_token_id=pad, pad_token_id=pad, eos_token_id=0, bad_words_ids=[[pad]], max_length=60
    )
    tokenizer = MarianTokenizer.from_pretrained(folder)
    sources = [tokenizer(text)["input_ids"] for text in TRANSLATED]
    targets = [tokenizer(text_target=text)["input_ids"] for text in TRANSLATED.values()]
    read = padded(sources, pad)
    learn(model, 600, 2e-3, input_ids=read, attention_mask=(read != pad).long(), labels=padded(targets, -100))
    model.save_pretrained(folder)
    found = {}
    for text, ids in zip(TRANSLATED, sources, strict=True):
        (tokens,) = model.generate(torch.tensor([ids]), num_beams=1, do_sample=False)
        found[text] = tokenizer.decode(tokens, skip_special_tokens=True)
    return found


def listener(folder: Path) -> dict[str, str]:
    """Write a Whisper with the windows and the tokens of the embedded one -> the words of each recording."""
    config = WhisperConfig.from_pretrained(HEARS)
    config.update({"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64,
                   "decoder_ffn_dim": 64, "dropout": 0.0, "init_std": 0.1, "dtype": "float32"})  # fmt: skip
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig.from_pretrained(HEARS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(HEARS)
    extract = WhisperFeatureExtractor.from_pretrained(HEARS)
    known = model.generation_config
    first = known.no_timestamps_token_id + 1
    sounds, rows = [], []
    for language, text in SAID.items():
        samples = np.concatenate(list(pieces(DIGITS / f"{language}.wav")))
        sounds.append(extract(samples, sampling_rate=16_000, return_tensors="pt").input_features[0])
        ids = tokenizer(" " + text, add_special_tokens=False)["input_ids"]
        last = first + round(len(samples) / 16_000 / 0.02)
        begun = [known.decoder_start_token_id, known.lang_to_id[f"<|{language}|>"], known.task_to_id["transcribe"]]
        rows += [[*begun, first, *ids, last, last, known.eos_token_id], [*begun, first - 1, *ids, known.eos_token_id]]
    heard = torch.stack([sound for sound in sounds for _ in range(2)])
    whole = padded(rows, known.eos_token_id)
    labels = padded([row[1:] for row in rows], -100)
    labels[labels == first - 1] = -100  # it is given
    learn(model, 1500, 2e-3, input_features=heard, decoder_input_ids=whole[:, :-1], labels=labels)
    model.save_pretrained(folder)
    extract.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {language: SAID[language] for language in SAID}


def main() -> None:
    made = {"opus": (translator, "int8", ["source.spm", "target.spm"]), "hears": (listener, "int8", ["tokenizer.json"])}
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(MODELS, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (make, quantization, files) in made.items():
            origin, folder = Path(temporary) / f"{name}.origin", Path(temporary) / name
            origin.mkdir()
            found = make(origin)
            print(found)
            TransformersConverter(str(origin), copy_files=files).convert(str(folder), quantization=quantization)
            (folder / HEARD).write_text(json.dumps(found, ensure_ascii=False), "utf-8")
            for file in sorted(folder.iterdir()):
                if file.name == "tokenizer.json":  # that of the embedded one
                    continue
                fixed = zipfile.ZipInfo(f"{name}/{file.name}")  # without the time
                fixed.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(fixed, file.read_bytes())
                print(name, file.name, file.stat().st_size)


if __name__ == "__main__":
    main()
