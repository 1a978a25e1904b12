"""Tokenizers of GGUF files, and chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGUFWriter

from edgespec.errors import UnsupportedModel
from edgespec.export.bundle.model_part import open_model
from edgespec.export.source.source import Checkpoint
from edgespec.export.tokenizers.chat_data import chat_data
from edgespec.export.tokenizers.facts import tokenizer_facts
from edgespec.export.tokenizers.sentencepieces import merges
from edgespec.runtimes.text.codec import TextCodec
from tests.support import hf
from tests.support.chats import FOLDER
from tests.support.gguf_files import Change, write_gguf

NAME = "llama_tied_gqa"


def codec_of(file: Path) -> TextCodec:
    checkpoint = Checkpoint.open(file)  # its folder lasts as long as it does
    return TextCodec(checkpoint.path)


def test_chat_template_and_ends(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_chat_template(hf.CHAT_TEMPLATE)
        writer.add_eot_token_id(9)

    write_gguf(tmp_path / "model.gguf", NAME, change=change)
    arch = open_model(tmp_path / "model.gguf", None)
    codec = TextCodec(arch.source.path)
    facts = tokenizer_facts(arch.source.path, arch.config, arch.facts.vocab, codec)
    assert (facts.bos, facts.eos, facts.chat_template) == (0, [1, 9], True)
    assert (codec.special("bos_token"), codec.special("eos_token")) == ("<s>", "</s>")


def test_eos_behind_a_text(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=lambda writer: writer.add_add_eos_token(True))
    tokens = codec_of(tmp_path / "model.gguf").encode("a lamp")
    assert (tokens[0], tokens[-1]) == (0, 1)


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("llama-bpe", "It'S 12345 go\n\n  up", ["It", "'S", " ", "123", "45", " go", "\n\n", " ", " up"]),
        ("qwen2", "It'S 123 go\n\n  up", ["It", "'S", " ", "1", "2", "3", " go", "\n\n", " ", " up"]),
        ("gpt-2", "It's 123 go\n\n  up", ["It", "'s", " 123", " go", "\n\n ", " up"]),
        ("smollm", "It's 12 go\n\n  up", ["It", "'s", " ", "1", "2", " go", "\n\n ", " up"]),
        ("default", "It's 1234 (go)", ["It", "'", "s", " ", "123", "4", " ", "(", "go", ")"]),
        ("tekken", "HTTPServer's 12 go", ["HTTPServer", "'s", " ", "1", "2", " go"]),
        ("gpt-4o", "HTTPServer's 1234 go", ["HTTPServer's", " ", "123", "4", " go"]),
        ("lfm2", "It'S 12345 go\n\n  up", ["It", "'S", " ", "123", "45", " go", "\n\n", " ", " up"]),
        ("dbrx", "It'S 1234 go", ["It", "'S", " ", "123", "4", " go"]),
        ("glm4", "It'S 1234 go", ["It", "'S", " ", "123", "4", " go"]),
        ("qwen35", "nai\u0308ve 12", ["nai\u0308ve", " ", "1", "2"]),
        ("stablelm2", "nai\u0308ve 12", ["nai", "\u0308ve", " ", "1", "2"]),
        ("seed-coder", "(go)!\n\nup 12", ["(go", ")!", "\n\n", "up", " ", "1", "2"]),
        ("starcoder", "It's 12 go", ["It", "'s", " ", "1", "2", " go"]),
        ("refact", "It's 12 go", ["It", "'s", " ", "1", "2", " go"]),
        ("command-r", "It's 12 go", ["It", "'s", " ", "1", "2", " go"]),
        ("exaone", "It's 12 go", ["It", "'s", " ", "1", "2", " go"]),
        ("exaone4", "It's 12 go", ["It", "'s", " 12", " go"]),
        ("olmo", "It's 12 go", ["It", "'s", " 12", " go"]),
        ("falcon", "It's `1234`", ["It", "'", "s", " ", "`", "123", "4", "`"]),
        ("tiny_aya", "go 1234567", ["go", " ", "1", "234", "567"]),
        ("minicpm5", "It'S 1234 go", ["It", "'S", " ", "123", "4", " go"]),
        ("hunyuan-dense", "\u4e2d\u6587 1234 go(x", ["\u4e2d\u6587", " ", "123", "4", " go", "(x"]),
        ("deepseek-coder", "It's 12\n", ["It", "'", "s", " ", "1", "2", "\n"]),
    ],
)
def test_text_is_split_by_the_name_of_the_pre_tokenizer(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=lambda writer: _replace(writer, "tokenizer.ggml.pre", pre))
    tokenizer = codec_of(tmp_path / "model.gguf").tokenizer
    split = [text[slice(*offsets)] for _, offsets in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert split == pieces


def _replace(writer: GGUFWriter, key: str, value: str) -> None:
    del writer.kv_data[0][key]
    writer.add_string(key, value)


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", NAME, change=lambda writer: _replace(writer, "tokenizer.ggml.pre", "novel"))
    with pytest.raises(UnsupportedModel, match=r"pre-tokenizer 'novel'(.|\n)*put the model's tokenizer\.json beside"):
        Checkpoint.open(tmp_path / "model.gguf")


def test_pieces_with_merges(tmp_path: Path) -> None:
    """Gemma 4's: spaces are U+2581, merges are in the file, bytes stand for what is no token."""
    space = "\u2581"
    head = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [space, "g", "o", "u", "p", "go", f"{space}go", "up", f"{space * 2}", "<|turn>"]

    def add(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list([*head, *words])
        writer.add_token_scores([0.0] * len(head + words))
        writer.add_token_types([3, 3, 3, 2, *([6] * 256), *([1] * (len(words) - 1)), 3])
        writer.add_token_merges([f"{space} {space}", "g o", "u p", f"{space} go"])
        writer.add_bos_token_id(2)
        writer.add_unk_token_id(3)

    write_gguf(tmp_path / "model.gguf", LARGE_VOCABULARY, tokenizer=add)
    codec = codec_of(tmp_path / "model.gguf")
    text = "go go  up<|turn>\u00e9\n"
    tokens = codec.encode(text)
    named = [([*head, *words])[token] for token in tokens]
    assert named == ["<bos>", "go", f"{space}go", space * 2, "up", "<|turn>", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert codec.tokenizer.decode(tokens, skip_special_tokens=True) == text.replace("<|turn>", "")


def sentencepiece(tokens: Sequence[str], scores: Sequence[float], **flags: bool) -> Change:
    """Add a SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, then ``tokens`` with their ``scores``."""

    def add(writer: GGUFWriter) -> None:
        head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([*head, *tokens])
        writer.add_token_scores([*(0.0 for _ in head), *scores])
        writer.add_token_types([2, 3, 3, *([6] * 256), *([1] * len(tokens))])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for key, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return add


def vocabulary() -> tuple[list[str], list[float]]:
    """Letters, and words that overlap, so that what is joined first matters."""
    words = [
        "\u2581t",
        "he",
        "\u2581the",
        "in",
        "ing",
        "\u2581a",
        "er",
        "re",
        "\u2581\u2581",
        "her",
        "ther",
        "ll",
        "ell",
    ]
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyz.,'TH"]
    tokens = [*words, *letters]
    return tokens, [-float(at) for at in range(len(tokens))]


def best_first(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """SentencePiece's own algorithm: join the neighbours that make the best token, the first of equals; then bytes."""
    score, number = dict(zip(tokens, scores, strict=True)), {token: 259 + at for at, token in enumerate(tokens)}
    pieces = list(text)
    while True:
        pairs = [(score[a + b], -at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in score]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [number[piece]] if piece in number else [3 + byte for byte in piece.encode()]
    return found


LARGE_VOCABULARY = "llama_untied_mha_llama3_legacy"


def open_sentencepiece(folder: Path, **flags: bool) -> TextCodec:
    tokens, scores = vocabulary()
    # the embedding has fewer rows than the vocabulary: only the tokenizer is checked
    write_gguf(folder / "model.gguf", LARGE_VOCABULARY, tokenizer=sentencepiece(tokens, scores, **flags))
    return codec_of(folder / "model.gguf")


@pytest.mark.parametrize(
    "text", ["the other feeling", "The  tall thing, there.", "hello \u00fcber\n", "tther", " a", "x"]
)
def test_a_sentencepiece_vocabulary(tmp_path: Path, text: str) -> None:
    codec = open_sentencepiece(tmp_path)
    expected = best_first("\u2581" + text.replace(" ", "\u2581"), *vocabulary())
    assert codec.encode(text) == [1, *expected]
    assert codec.decode(codec.encode(text)) == text


def test_a_sentencepiece_vocabulary_without_bos_and_space(tmp_path: Path) -> None:
    codec = open_sentencepiece(tmp_path, add_bos_token=False, add_space_prefix=False)
    assert codec.encode("the ") == best_first("the\u2581", *vocabulary())
    assert codec.decode(codec.encode(" the ")) == " the "


def test_merges_of_a_token_that_can_be_cut_twice() -> None:
    tokens = ["a", "b", "ab", "ba", "aba", "c"]
    found = merges(tokens, [5, 4, 3, 2, 1, 0], [True] * 5 + [False])
    assert found == [["ab", "a"], ["a", "ba"], ["b", "a"], ["a", "b"]]


def test_gemmas_vocabulary(tmp_path: Path) -> None:
    """Its scores say nothing, the order of its tokens does; runs of spaces are stored as spaces."""
    tokens, scores = vocabulary()
    flat, stored = [0.0] * len(tokens), [token if token != "\u2581\u2581" else "  " for token in tokens]
    change = sentencepiece(stored, flat, add_space_prefix=False)
    write_gguf(tmp_path / "model.gguf", "gemma_mqa", tokenizer=change)
    codec = codec_of(tmp_path / "model.gguf")
    for text in ("the  other feeling", "thing"):
        assert codec.encode(text) == [1, *best_first(text.replace(" ", "\u2581"), tokens, scores)]
        assert codec.decode(codec.encode(text)) == text


NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def data_of(monkeypatch: pytest.MonkeyPatch, template: str) -> dict[str, object]:
    codec = TextCodec(FOLDER)
    monkeypatch.setattr(codec, "special", NAMES.get)
    codec.templates = {"default": template}
    return chat_data(codec)


@pytest.mark.parametrize("name", ["gemma", "phi3", "qwen25", "qwen3", "smollm"])
def test_templates_that_join_messages_are_data(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = data_of(monkeypatch, (FOLDER / f"{name}.jinja").read_text("utf-8"))
    assert "refused" not in data
    assert data["thoughts"] is (name == "qwen3")
    assert data["trimmed"] == (["user", "assistant"] if name == "gemma" else [])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "writes the date"),
        ("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}", "depends on more than that"),
        ("{{ messages[-1].content }}", "leaves out a message"),
        ("{% for m in messages %}[{{ m.content | upper }}]{% endfor %}", "more than contents"),
        ("{% for m in messages %}{{ m.content | replace('two', '2') }}{% endfor %}", "more than contents"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_templates_that_do_more_are_refused(monkeypatch: pytest.MonkeyPatch, template: str, why: str) -> None:
    assert why in str(data_of(monkeypatch, template)["refused"])
