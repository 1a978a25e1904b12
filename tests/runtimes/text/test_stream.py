"""Streams of every kind of tokenizer: the pieces add up to the text of all tokens, for any tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from edgespec.export.tokenizers.files import open_codec
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.stream import StreamDecoder
from tests.support import hf, spm

SPECIAL = ["<unk>", "<s>", "</s>"]
KINDS = ("byte_level", "llama", "no_prefix", "unigram", "unigram_bytes", "metaspace", "wordpiece", "suffix")
BYTES = ("llama", "no_prefix", "unigram_bytes")  # with byte fallback


def metaspace() -> Tokenizer:
    """As T5's: the decoder itself drops the space of the first word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(spm.sentences(), trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT's: words are joined by spaces, and signs move to the word before."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([*spm.sentences(), "I don't, he's, we 've . you 're ! ? ' s"], trainer)
    return tokenizer


def suffix() -> Tokenizer:
    """As GPT's first: a word ends with a mark, which is written as a space if another word follows."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(spm.sentences(), trainer)
    return tokenizer


MADE: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": lambda: hf.make_tokenizer(400, True),
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "suffix": suffix,
}


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        if kind in MADE:
            MADE[kind]().save(str(folder / "tokenizer.json"))
        else:
            (folder / "tokenizer.model").write_bytes(spm.train(kind))
            added = {str(700 + n): {"content": name} for n, name in enumerate(("<|call|>", "<|turn|>"))}
            added["701"]["special"] = True  # type: ignore[assignment]
            (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}), "utf-8")
        made[kind] = open_codec(folder)
    return made


def whole(codec: TextCodec, prompt: list[int], tokens: list[int]) -> str:
    """Return the text that ``tokens`` add to ``prompt``."""
    return codec.decode([*prompt, *tokens])[len(codec.decode(prompt)) :]


def interesting(codec: TextCodec, kind: str) -> st.SearchStrategy[list[int]]:
    """Token lists: any tokens, padded rows beyond the vocabulary too; bytes; texts; several of these in turn."""
    some = [st.integers(0, codec.vocab_size + 5)]
    if kind in BYTES:
        first = codec.token_id("<0x00>")
        assert first is not None
        some.append(st.integers(first, first + 255))
    single = st.one_of(some).map(lambda token: [token])
    wide = st.sampled_from((*spm.NASTY, "\u20ac", "\U0001f469\u200d\U0001f680", " ", "   "))
    text = wide | st.text(max_size=8)
    written = text.map(lambda text: codec.encode(text, special=False))
    return st.lists(single | written, max_size=12).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_pieces_make_the_text(codecs: dict[str, TextCodec], kind: str, data: st.DataObject) -> None:
    codec = codecs[kind]
    some = interesting(codec, kind)
    prompt, tokens = data.draw(some), data.draw(some)
    decoder = StreamDecoder(codec, prompt)
    pieces = [decoder.push([token]) for token in tokens]
    pieces.append(decoder.finish())
    assert "".join(pieces) == decoder.text
    if "\ufffd" not in codec.decode(prompt)[-3:]:  # else a character may begin in the prompt
        assert decoder.text == whole(codec, prompt, tokens)
    in_one = StreamDecoder(codec, prompt)
    assert in_one.push(tokens) + in_one.finish() == decoder.text
    if "\ufffd" not in decoder.text:
        assert not [piece for piece in pieces if "\ufffd" in piece]


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_half_a_character_is_never_shown(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    tokens = codec.encode("a\U0001f600b", special=False)
    assert len(tokens) > 4
    decoder = StreamDecoder(codec)
    pieces = [decoder.push([token]) for token in tokens]
    assert "".join(pieces) + decoder.finish() == "a\U0001f600b"
    assert {piece for piece in pieces if not piece.isascii()} == {"\U0001f600"}
    unfinished = StreamDecoder(codec)
    shown = [unfinished.push([token]) for token in tokens[:3]]
    assert "\ufffd" not in "".join(shown)
    assert unfinished.finish() == whole(codec, [], tokens[:3])[len("".join(shown)) :]


def test_a_word_after_a_prompt_keeps_its_space(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["llama"]
    prompt = codec.encode("The harbour")
    tokens = codec.encode("lights", special=False)  # written with a leading space
    assert codec.decode(tokens) == "lights"
    decoder = StreamDecoder(codec, prompt)
    assert decoder.push(tokens) + decoder.finish() == " lights"
    alone = StreamDecoder(codec)
    assert alone.push(tokens) + alone.finish() == "lights"


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@given(
    text=st.text(st.sampled_from("ab\n\u00e9\U0001f600"), max_size=25),
    stops=st.lists(st.text(st.sampled_from("ab\n\u00e9\U0001f600"), min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_a_stream_ends_before_the_first_stop_string(
    codecs: dict[str, TextCodec], kind: str, text: str, stops: list[str], cuts: list[int]
) -> None:
    codec = codecs[kind]
    tokens = codec.encode(text, special=False)
    shown = codec.decode(tokens)
    decoder = StreamDecoder(codec, (), stops)
    pieces: list[str] = []
    for token in tokens:
        pieces.append(decoder.push([token]))
        if decoder.stopped is not None:
            break
    pieces.append(decoder.finish())
    found = {stop: shown.find(stop) for stop in stops if stop in shown}
    if not found:
        assert decoder.stopped is None
        assert "".join(pieces) == decoder.text == shown
        return
    assert decoder.stopped in found
    assert "".join(pieces) == decoder.text == shown[: found[decoder.stopped]]
    assert not [stop for stop in stops if stop in decoder.text]
    assert decoder.push(tokens) == decoder.finish() == ""
    in_chunks = StreamDecoder(codec, (), stops)
    for at, size in zip(np.cumsum([0, *cuts * len(tokens)]), cuts * len(tokens), strict=False):
        in_chunks.push(tokens[at : at + size])
    in_chunks.finish()
    assert in_chunks.text == decoder.text
    assert in_chunks.stopped == decoder.stopped


def test_text_that_may_begin_a_stop_string_is_held_back(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte_level"]

    def push(decoder: StreamDecoder, text: str) -> str:
        return decoder.push(codec.encode(text, special=False))

    decoder = StreamDecoder(codec, (), ["END", ""])
    assert push(decoder, "xE") == "x"
    assert push(decoder, "N") == ""
    assert push(decoder, "E") == "EN"
    assert push(decoder, "ND y") == ""
    assert (decoder.stopped, decoder.text) == ("END", "xEN")
    assert push(decoder, "more") == ""
    assert decoder.finish() == ""
    open_end = StreamDecoder(codec, (), ["END"])
    assert push(open_end, "xEN") == "x"
    assert open_end.finish() == "EN"
    assert (open_end.stopped, open_end.text) == (None, "xEN")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_stop_string_is_found_across_tokens(codecs: dict[str, TextCodec], kind: str, data: st.DataObject) -> None:
    codec = codecs[kind]
    tokens = data.draw(interesting(codec, kind))
    text = whole(codec, [], tokens)
    if "\ufffd" in text or not text:
        return
    at = data.draw(st.integers(0, len(text) - 1))
    stop = text[at : at + data.draw(st.integers(1, 6))]
    decoder = StreamDecoder(codec, [], [stop])
    shown = ""
    for token in tokens:
        shown += decoder.push([token])
        assert stop not in shown
    assert shown + decoder.finish() == text[: text.index(stop)]
    assert decoder.stopped == stop


@pytest.mark.parametrize("kind", BYTES)
def test_characters_of_bytes_come_whole(codecs: dict[str, TextCodec], kind: str) -> None:
    codec = codecs[kind]
    first = codec.token_id("<0x00>")
    assert first is not None
    for text in ("\u20ac\U0001f600", "e\u0301", "\u00e9" * 12):
        tokens = [first + byte for byte in text.encode()]
        before = codec.encode("so")
        decoder = StreamDecoder(codec, before)
        pieces = [decoder.push([token]) for token in tokens]
        assert [piece for piece in pieces if piece] == list(text)
        assert decoder.finish() == ""
    decoder = StreamDecoder(codec, codec.encode("so"))
    assert decoder.push([first + 0xE2, first + 0x82]) == ""  # no more bytes come: half a character stays half
    assert decoder.finish() == "\ufffd\ufffd"


def test_special_tokens_in_the_middle(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["llama"]
    one, two = codec.encode("one", special=False), codec.encode("two", special=False)
    call, turn = codec.token_id("<|call|>"), codec.token_id("<|turn|>")
    assert call is not None
    assert turn is not None
    decoder = StreamDecoder(codec, codec.encode("so"))
    assert decoder.push([*one, turn, *two, call]) + decoder.finish() == " one two<|call|>"


def test_rows_without_a_token_have_no_text(codecs: dict[str, TextCodec], tmp_path: Path) -> None:
    for codec in codecs.values():
        beyond = codec.vocab_size + 3
        assert codec.decode([beyond]) == ""
        decoder = StreamDecoder(codec, [beyond])
        assert decoder.push([beyond, beyond]) + decoder.finish() == ""
        assert codec.continuation([beyond], [beyond]) == ""


@pytest.fixture(scope="module")
def reference() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=spm.train("no_prefix"))


def test_what_is_broken_stays_beside_what_is_not(
    codecs: dict[str, TextCodec], reference: sentencepiece.SentencePieceProcessor
) -> None:
    """As sentencepiece decodes: characters next to a byte that is none are characters."""
    codec = codecs["no_prefix"]
    first = codec.token_id("<0x00>")
    assert first is not None
    for data in (
        b"A\x80B",
        b"\xe2\x82A\xe2\x82\xac",
        b"\xf0\x9f\x98\x80\xff\xe2\x96\x81",
        b"\xc0\x80" * 20 + b"\xc3\xa9",
    ):
        tokens = [first + byte for byte in data]
        assert codec.decode(tokens) == reference.decode(tokens)
        decoder = StreamDecoder(codec)
        assert decoder.push(tokens) + decoder.finish() == codec.decode(tokens)
    assert codec.decode([first + 0x41, first + 0x80]) == "A\ufffd"


@given(data=st.binary(max_size=24))
def test_bytes_are_decoded_as_by_sentencepiece(
    codecs: dict[str, TextCodec], reference: sentencepiece.SentencePieceProcessor, data: bytes
) -> None:
    first = codecs["no_prefix"].token_id("<0x00>")
    assert first is not None
    tokens = [first + byte for byte in data]
    assert codecs["no_prefix"].decode(tokens) == reference.decode(tokens)
