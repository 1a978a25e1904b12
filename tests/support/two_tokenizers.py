"""Tokenizers for drafts that have another one than their target: real kinds, and two of a few letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgespec.export.tokenizers.files import open_codec
from edgespec.runtimes.text.codec import TextCodec
from tests.support import spm

SPLIT = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)|\\s+"
)
SPECIAL = ["<|end|>", "<|user|>", "<s>"]


def byte_level(folder: Path, size: int, split: bool, prefix: bool = False) -> TextCodec:
    """Train a byte-level tokenizer; ``split``: by Qwen's expression and NFC, else GPT-2's way."""
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    if split:
        tokenizer.normalizer = normalizers.NFC()
        regex = pre_tokenizers.Split(Regex(SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([regex, level])
    else:
        tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = SPECIAL if split else SPECIAL[1:]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=names, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(spm.sentences(), trainer)
    return saved(folder, tokenizer)


def sentencepiece(folder: Path, kind: str) -> TextCodec:
    """Train a tokenizer of sentencepiece's."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(spm.train(kind))
    cls = "T5Tokenizer" if kind.startswith("unigram") else "LlamaTokenizer"
    config = {"tokenizer_class": cls, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "config.json").write_text("{}", "utf-8")
    return open_codec(folder)


def letters(
    folder: Path, names: Sequence[str], merges: Sequence[tuple[str, str]], begin: str | None = None
) -> TextCodec:
    """Make a tokenizer of these tokens; the first is the special one that ends a text."""
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in names if name.startswith("<")])
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocab[begin])]
        )
    return saved(folder, tokenizer)


def saved(folder: Path, tokenizer: Tokenizer) -> TextCodec:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextCodec(folder)
