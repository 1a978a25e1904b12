"""Text: whatever the tokens and however they arrive, the stream is the text; templates are rendered, and fenced in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgespec.errors import InvalidRequest
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.stream import StreamDecoder
from tests.support import hf

TEXTS = (
    "The harbour lights came on one after another.",
    "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d \u2026",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002",
    "emoji \U0001f600\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea done",
    "  two  spaces\n\n\tand a tab \n",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
)


def metaspace(vocab_size: int) -> Tokenizer:
    """As sentencepiece models: words carry their space, decoding strips the first one, unknown characters are bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 256, special_tokens=special, show_progress=False, initial_alphabet=letters[:60]
    )
    tokenizer.train_from_iterator([TEXTS[0], TEXTS[4]], trainer)
    described = json.loads(tokenizer.to_str())
    vocab = described["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    made = {}
    for name, tokenizer in (("bytes", hf.make_tokenizer(400, True)), ("metaspace", metaspace(420))):
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        made[name] = TextCodec(folder)
    return made


def stream(decoder: StreamDecoder, tokens: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Everything given out when tokens arrive in chunks of these sizes, the last text held back included."""
    pieces, at, step = [], 0, 0
    while at < len(tokens):
        size = cuts[step % len(cuts)]
        pieces.append(decoder.push(tokens[at : at + size]))
        at, step = at + size, step + 1
    return [*pieces, decoder.finish()]


def whole(codec: TextCodec, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that ``tokens`` add to ``prompt``."""
    return codec.decode([*prompt, *tokens])[len(codec.decode(list(prompt))) :]


FUZZ = settings(max_examples=200, deadline=None)
KINDS = st.sampled_from(["bytes", "metaspace"])
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def test_tokenizers_know_these_texts(codecs: dict[str, TextCodec]) -> None:
    for codec in codecs.values():
        for text in TEXTS:
            assert codec.decode(codec.encode(text)) == text
        assert codec.encode("a")[0] == codec.token_id("<s>")
        assert codec.encode("a", special=False)[0] != codec.token_id("<s>")
        assert codec.vocab_size == codec.tokenizer.get_vocab_size()


@FUZZ
@given(kind=KINDS, text=st.sampled_from(TEXTS) | st.text(max_size=40), prompt=st.sampled_from(TEXTS), cuts=CUTS)
def test_a_stream_of_any_text_is_the_text(
    codecs: dict[str, TextCodec], kind: str, text: str, prompt: str, cuts: list[int]
) -> None:
    codec = codecs[kind]
    before, tokens = codec.encode(prompt), codec.encode(text, special=False)
    decoder = StreamDecoder(codec, before)
    pieces = stream(decoder, tokens, cuts)
    assert "".join(pieces) == decoder.text == whole(codec, before, tokens)
    if "\ufffd" not in decoder.text:
        assert not [piece for piece in pieces if "\ufffd" in piece]


@FUZZ
@given(kind=KINDS, data=st.data(), cuts=CUTS)
def test_a_stream_of_any_tokens_is_their_text(
    codecs: dict[str, TextCodec], kind: str, data: st.DataObject, cuts: list[int]
) -> None:
    """Models may write tokens that are no valid text: half characters, special tokens in the middle."""
    codec = codecs[kind]
    prompt = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), max_size=6))
    tokens = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), max_size=40))
    decoder = StreamDecoder(codec, prompt)
    text = "".join(stream(decoder, tokens, cuts))
    assert text == decoder.text
    if "\ufffd" not in codec.decode(prompt)[-3:]:  # else a character may begin in the prompt
        assert text == whole(codec, prompt, tokens)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
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
    codec = codecs["metaspace"]
    prompt = codec.encode("The harbour")
    tokens = codec.encode("lights", special=False)  # written with a leading space
    assert codec.decode(tokens) == "lights"
    decoder = StreamDecoder(codec, prompt)
    assert "".join(stream(decoder, tokens, [1])) == " lights"
    assert "".join(stream(StreamDecoder(codec), tokens, [1])) == "lights"


# -- stop strings ------------------------------------------------------------------------------------------------------


@FUZZ
@given(
    kind=KINDS,
    text=st.text(st.sampled_from("ab\n\u00e9\U0001f600"), max_size=25),
    stops=st.lists(st.text(st.sampled_from("ab\n\u00e9\U0001f600"), min_size=1, max_size=4), max_size=3),
    cuts=CUTS,
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
    assert "".join(stream(in_chunks, tokens, cuts)) == in_chunks.text == decoder.text
    assert in_chunks.stopped == decoder.stopped


def test_text_that_may_begin_a_stop_string_is_held_back(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["bytes"]

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


# -- tokens ------------------------------------------------------------------------------------------------------------


def space_of(codec: TextCodec) -> int:
    number = codec.token_id("\u2581")
    assert number is not None
    return number


def test_pieces_are_for_display(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["bytes"]
    (space,) = codec.encode(" ", special=False)
    assert codec.continuation([], [space]) == " "
    assert codecs["metaspace"].continuation(codecs["metaspace"].encode("a"), [space_of(codecs["metaspace"])]) == " "
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
