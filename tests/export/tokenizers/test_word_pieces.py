"""Tokenizers of encoders without a tokenizer.json: the same tokens as those of transformers, pairs included."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, ExportError
from edgespec.export.tokenizers.files import open_codec
from tests.support import encoders, spm

TEXTS = [
    "Good night, good night!",
    "NAÏVE café  \t kings",
    "日本 and x",
    "",
    "unaffable!?",
    "a" * 200,
    "[SEP] of [CLS]",
]


def vocab(folder: Path) -> Path:
    words = sorted(encoders.word_piece().get_vocab().items(), key=lambda item: item[1])
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words), "utf-8")
    return folder


@pytest.mark.parametrize("lower", [True, False])
def test_words_are_those_of_bert(tmp_path: Path, lower: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[train]'")
    vocab(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        f'{{"tokenizer_class": "BertTokenizer", "do_lower_case": {str(lower).lower()}}}', "utf-8"
    )
    theirs, codec = transformers.BertTokenizer.from_pretrained(tmp_path), open_codec(tmp_path)
    assert codec.converted
    for text in TEXTS:
        assert codec.encode(text) == theirs(text)["input_ids"], text
        told = theirs(TEXTS[0], text)
        tokens, second = codec.encode_pair(TEXTS[0], text or "a", 500)
        if text:
            assert tokens == told["input_ids"]
            assert second == told["token_type_ids"].index(1)


def test_pieces_are_those_of_xlm_roberta(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'edgespec[train]'")
    (tmp_path / "sentencepiece.bpe.model").write_bytes(spm.train("unigram"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}', "utf-8")
    theirs, codec = transformers.XLMRobertaTokenizer.from_pretrained(tmp_path), open_codec(tmp_path)
    for text in ("Good night, good night!", "the king speaks", "of"):
        assert codec.encode(text) == theirs(text)["input_ids"], text
        assert codec.encode_pair("the king", text, 500)[0] == theirs("the king", text)["input_ids"]


def test_a_pair_that_is_too_long_loses_the_end_of_its_second_text(tmp_path: Path) -> None:
    codec = open_codec(vocab(tmp_path))
    whole, second = codec.encode_pair("a king", "love hate moon sun", 100)
    cut, at = codec.encode_pair("a king", "love hate moon sun", 7)
    assert (cut, at) == ([*whole[:6], 3], second)
    assert codec.encode_pair("a king", "love hate moon sun", 100, 2)[0] == cut
    with pytest.raises(EdgespecError, match="leaves no room"):
        codec.encode_pair("a king", "love", 5)
    assert codec.encode_short("a king love", 4) == [*codec.encode("a king love")[:3], 3]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"king\nlove\n"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ExportError, match=r"vocab\.txt"):
        open_codec(tmp_path)
