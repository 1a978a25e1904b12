"""Compare with the installed transformers on the same files; without it, with sentencepiece and our own reader."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from edgespec.export.tokenizers.files import open_codec
from tests.support import hf, spm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "</s>"}
TURN = "<|turn|>"


def write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), "utf-8")


@pytest.mark.parametrize("name, model_type", [("GPT2Tokenizer", "gpt2"), ("Qwen2Tokenizer", "qwen2")])
def test_vocabulary_and_merges(tmp_path: Path, name: str, model_type: str) -> None:
    import transformers

    model = json.loads(hf.make_tokenizer(700, False).to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    added = {"0": "<s>", "1": "</s>", str(len(model["vocab"])): TURN}
    described = {number: {"content": text, "special": True} for number, text in added.items()}
    write(tmp_path / "vocab.json", model["vocab"])
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    write(tmp_path / "config.json", {"model_type": model_type})
    write(tmp_path / "tokenizer_config.json", NAMES | {"tokenizer_class": name, "added_tokens_decoder": described})
    reference, codec = getattr(transformers, name).from_pretrained(str(tmp_path)), open_codec(tmp_path)
    for text in [*spm.texts(500), f"a{TURN} b</s>"]:
        tokens = reference(text)["input_ids"]
        assert codec.encode(text) == tokens
        assert codec.decode(tokens) == reference.decode(tokens, skip_special_tokens=True)


def test_sentencepiece(tmp_path: Path) -> None:
    """Only tokenizers that are not legacy: transformers 5 drops the space that begins a text of legacy ones."""
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.model").write_bytes(spm.train("llama"))
    described = NAMES | {"unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer", "legacy": False}
    write(tmp_path / "tokenizer_config.json", described | {"add_bos_token": True})
    write(tmp_path / "config.json", {"model_type": "llama"})
    reference, codec = AutoTokenizer.from_pretrained(str(tmp_path)), open_codec(tmp_path)
    for text in [*spm.texts(500), "a</s>b", "a</s> b", "<s>[INST] a"]:
        assert codec.encode(text) == reference(text)["input_ids"]
