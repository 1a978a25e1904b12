"""Text to tokens and back, and what a tokenizer's file says of itself."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest

from edgespec.errors import BundleError, InvalidRequest
from edgespec.export.tokenizers.files import open_codec
from edgespec.runtimes.text.codec import TextCodec
from tests.support import hf, spm

TEXTS = (
    "The harbour lights came on one after another.",
    "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d \u2026",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002",
    "emoji \U0001f600\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea done",
    "  two  spaces\n\n\tand a tab \n",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    """Open a tokenizer of bytes, and one whose words carry their space and whose unknown characters are bytes."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("bytes", "llama")}
    hf.make_tokenizer(400, True).save(str(folders["bytes"] / "tokenizer.json"))
    (folders["llama"] / "tokenizer.model").write_bytes(spm.train("llama"))
    return {name: open_codec(folder) for name, folder in folders.items()}


def test_tokenizers_know_these_texts(codecs: dict[str, TextCodec]) -> None:
    for codec in codecs.values():
        for text in TEXTS:
            assert codec.decode(codec.encode(text)) == text
        assert codec.encode("a")[0] == codec.token_id("<s>")
        assert codec.encode("a", special=False)[0] != codec.token_id("<s>")
        assert codec.vocab_size == codec.tokenizer.get_vocab_size()


def test_pieces_are_for_display(codecs: dict[str, TextCodec]) -> None:
    codec, words = codecs["bytes"], codecs["llama"]
    (space,), its = codec.encode(" ", special=False), words.token_id("\u2581")
    assert its is not None
    assert codec.continuation([], [space]) == " "
    assert words.continuation(words.encode("a"), [its]) == " "
    assert codec.token_id(None) is None
    assert codec.token_id("no such token") is None
    assert codec.special("bos_token") is None


def test_text_that_is_no_text_is_refused(codecs: dict[str, TextCodec]) -> None:
    with pytest.raises(InvalidRequest, match="the prompt cannot be encoded: character 0,"):
        codecs["bytes"].encode("\ud800")


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    tokenizer = hf.make_tokenizer(400, True)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=30)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextCodec(tmp_path).encode(TEXTS[0]) == hf.make_tokenizer(400, True).encode(TEXTS[0]).ids[:3000]
    assert len(TextCodec(tmp_path).encode(TEXTS[0])) > 10


def test_a_tokenizer_in_use_is_shared_and_nothing_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, more, other = (tmp_path / name for name in ("plain", "more", "other"))
    for folder, size in ((plain, 390), (more, 390), (other, 300)):
        folder.mkdir()
        hf.make_tokenizer(size, True).save(str(folder / "tokenizer.json"))
    (more / "added_tokens.json").write_text(json.dumps({"<new>": 390, "<newer>": 391}), "utf-8")
    first = TextCodec(plain)
    assert open_codec(more).encode("<newer><new>", special=False) == [391, 390]  # tokens that only another file adds
    assert (first.vocab_size, first.token_id("<new>")) == (390, None)
    assert TextCodec(other).vocab_size == 300
    again = TextCodec(plain)
    with monkeypatch.context() as patch:
        patch.setattr("tokenizers.Tokenizer", None)  # which would open the file
        assert TextCodec(plain).encode("a b") == again.encode("a b") == first.encode("a b")
        held = weakref.ref(first.tokenizer)
        del first, again
        assert held() is None
        with pytest.raises(BundleError, match="not a readable tokenizer"):  # it would be opened again
            TextCodec(plain)


@pytest.mark.parametrize("ids", [(401, 402), (400, 402), (399, 400)])
def test_tokens_of_another_vocabulary_are_not_added(tmp_path: Path, ids: tuple[int, int]) -> None:
    hf.make_tokenizer(400, True).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text(json.dumps(dict(zip(("<new>", "<newer>"), ids, strict=True))), "utf-8")
    codec = open_codec(tmp_path)
    assert (codec.vocab_size, codec.token_id("<new>"), codec.token_id("<newer>")) == (400, None, None)
