"""Texts between two tokenizers: what grows equals the whole, and what a draft wrote becomes the target's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.decoding.text import INSERTED
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.growing import LONG, GrowingTokens, divides
from edgespec.runtimes.text.translation import (
    ALONE,
    NO_TEXT,
    Pieces,
    TranslatedText,
    Translation,
    incomplete,
    translate,
)
from tests.support import spm
from tests.support.two_tokenizers import byte_level, sentencepiece

KINDS = ("split", "gpt2", "llama", "no_prefix", "bpe_nfkc", "unigram_bytes", "unigram_across_words")
LINES = [line for line in spm.sentences() if line]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextCodec]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    made = {"split": byte_level(folder / "split", 700, True), "gpt2": byte_level(folder / "gpt2", 500, False)}
    return made | {kind: sentencepiece(folder / kind, kind) for kind in KINDS[2:]}


def parts() -> st.SearchStrategy[list[str]]:
    """Make pieces of a text: lines, odd characters, long words, parts of words."""
    line = st.sampled_from(LINES)
    odd = st.text(st.characters(codec="utf-8"), max_size=12)
    word = st.builds(lambda char, count: char * count, st.sampled_from("a-0.\u3042\u00e9"), st.integers(1, 60))
    cut = st.builds(lambda text, at: text[: at % (len(text) + 1)], line, st.integers(0, 200))
    return st.lists(st.one_of(line, odd, word, cut, st.sampled_from([" ", "\n", "  ", "'", "s "])), max_size=25)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_a_growing_text_are_those_of_the_whole(codecs: dict[str, TextCodec], kind: str) -> None:
    codec, windows = codecs[kind], list[int]()

    def encode(text: str) -> list[int]:
        windows.append(len(text))
        return codec.encode(text, special=False)

    where = divides(codec.tokenizer)

    @given(parts())
    def run(texts: list[str]) -> None:
        growing = GrowingTokens(encode, where, [7])
        for at, text in enumerate(texts):
            growing.append(text)
            assert growing.tokens == [7, *codec.encode("".join(texts[: at + 1]), special=False)]

    run()
    growing = GrowingTokens(encode, where, [])
    for line in LINES * 2:  # prose: only its end is tokenized again
        windows.clear()
        growing.append(line + "\n")
        assert max(windows) <= len(line) + 3 * LONG
    assert growing.tokens == codec.encode("".join(line + "\n" for line in LINES * 2), special=False)


def between(target: TextCodec, draft: TextCodec, padding: int = 0) -> Translation:
    return translate(target, draft, (target.vocab_size + padding, draft.vocab_size + 2 * padding))


PAIRS = [("split", "gpt2"), ("gpt2", "split"), ("split", "llama"), ("llama", "split"), ("no_prefix", "gpt2"),
         ("gpt2", "unigram_bytes"), ("bpe_nfkc", "split")]  # fmt: skip


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_a_text_is_translated_piece_by_piece_as_at_once(codecs: dict[str, TextCodec], names: tuple[str, str]) -> None:
    target, draft = (codecs[name] for name in names)
    translation = between(target, draft)
    known = st.integers(0, target.vocab_size - 1)
    written = st.builds(lambda texts: target.encode("".join(texts), special=False), parts())
    tokens = st.one_of(written, st.lists(known, max_size=60), st.builds(lambda a, b: a + b, written, st.lists(known)))

    @given(tokens, st.lists(st.integers(1, 9)))
    def run(ids: list[int], sizes: list[int]) -> None:
        whole = TranslatedText(translation)
        whole.append(ids)
        piecewise, at = TranslatedText(translation), 0
        for size in (*sizes, len(ids)):
            before = list(piecewise.tokens)
            piecewise.append(ids[at : at + size])
            at += size
            if at < len(ids):
                assert len(before) < 40 or piecewise.tokens[:8] == before[:8]
        assert piecewise.tokens == whole.tokens
        assert piecewise.complete == whole.complete
        if whole.complete and not any(token in translation.target.special for token in ids):
            data = translation.target.joined(ids)
            text = data.decode("utf-8", "replace")
            if text.encode() == data:  # no part of a character, and no bytes that are none
                assert whole.tokens == draft.encode(text)[: len(translation.prefix)] + draft.encode(text, special=False)

    run()


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_what_a_draft_writes_becomes_the_targets_own_tokens(
    codecs: dict[str, TextCodec], names: tuple[str, str]
) -> None:
    """A draft that knows the text guesses the target's tokens, whatever they are cut into."""
    target, draft = (codecs[name] for name in names)
    translation, right, tested = between(target, draft), 0, 0
    for line in LINES[:120]:
        ids = target.encode(line, special=False)
        for at in range(3, len(ids) - 8, 5):
            rest = translation.target.joined(ids[at : at + 6])
            if incomplete(rest) or rest[:1] >= b"\x80":
                continue
            whole = draft.encode(translation.target.joined(ids[:at] + ids[at : at + 6]).decode("utf-8"), special=False)
            begin = next(n for n in range(len(whole) + 1) if len(translation.draft.joined(whole[n:])) <= len(rest))
            if translation.draft.joined(whole[begin:]) != rest:  # a token of the draft crosses the place
                continue
            found = translation.guesses(ids[:at], whole[begin:])
            assert rest.strip().startswith(translation.target.joined(found).strip())
            tested, right = tested + 1, right + (found[:4] == ids[at : at + 4])
    assert right > 0.9 * tested
    assert tested > 100


@given(st.lists(st.integers(0, 10_000), max_size=6), st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
def test_nothing_that_a_draft_writes_breaks_a_guess(
    codecs: dict[str, TextCodec], before: list[int], drafted: list[int]
) -> None:
    for names in PAIRS:
        target, draft = (codecs[name] for name in names)
        translation = between_cached(target, draft)
        texts = [one % draft.vocab_size for one in drafted]
        texts = [one for one in texts if translation.draft.of(one) is not None]
        found = translation.guesses([one % target.vocab_size for one in before] + [INSERTED], texts)
        assert all(0 <= token < target.vocab_size for token in found)


_MADE: dict[tuple[int, int], Translation] = {}


def between_cached(target: TextCodec, draft: TextCodec) -> Translation:
    return _MADE.setdefault((id(target), id(draft)), between(target, draft))


def test_shared_tokens_have_the_same_bytes_and_one_partner(codecs: dict[str, TextCodec]) -> None:
    for names in PAIRS:
        target, draft = (codecs[name] for name in names)
        found = between(target, draft, padding=3)
        assert len(found.targets) == draft.vocab_size + 6
        shared = found.targets[found.targets >= 0]
        assert len(shared) == len(np.unique(shared)) > 60
        assert shared.max() < target.vocab_size
        assert (found.targets[draft.vocab_size :] == NO_TEXT).all()  # padding
        for token in np.flatnonzero(found.targets >= 0).tolist():
            other = int(found.targets[token])
            assert found.draft.of(token) == found.target.of(other)
            if found.draft.of(token) is None:
                assert found.draft.special[token] == found.target.special[other]
            assert found.drafts[other] == token
        for token in np.flatnonzero(found.targets == ALONE).tolist():
            assert found.draft.of(token)
    assert "<|user|>" in {between(codecs["split"], codecs["gpt2"]).draft.special[one] for one in
                          between(codecs["split"], codecs["gpt2"]).named.values()}  # fmt: skip


def test_special_tokens_are_namesakes_or_text(codecs: dict[str, TextCodec]) -> None:
    target, draft = codecs["split"], codecs["gpt2"]
    user, end = target.token_id("<|user|>"), target.token_id("<|end|>")
    assert user is not None
    assert end is not None
    text = TranslatedText(between(target, draft))
    text.append([*target.encode("Hi ", special=False), user, *target.encode("you", special=False), end, INSERTED])
    named = draft.token_id("<|user|>")
    assert text.tokens == [*draft.encode("Hi ", special=False), named, *draft.encode("you<|end|>", special=False)]
    assert text.complete


def test_a_part_of_a_character_is_given_by_shared_tokens(codecs: dict[str, TextCodec]) -> None:
    target, draft = codecs["split"], codecs["gpt2"]
    translation = between(target, draft)
    ids = target.encode("a \U0001f680!", special=False)
    pieces = [translation.target.of(token) or b"" for token in ids]
    assert len(pieces) > 4
    for at in range(1, len(ids) + 1):
        text = TranslatedText(translation)
        text.append(ids[:at])
        if text.complete:
            assert translation.draft.joined(text.tokens) == b"".join(pieces[:at])
    llama = TranslatedText(between(target, codecs["bpe_trimmed"] if "bpe_trimmed" in codecs else codecs["llama"]))
    llama.append(ids)
    assert llama.complete


@pytest.mark.parametrize(
    "data, size",
    [(b"", 0), (b"a", 0), (b"\xc3", 1), (b"\xc3\xa9", 0), (b"\xf0\x9f", 2), (b"\xf0\x9f\x9a", 3), (b"\xe0\x80", 0),
     (b"\x80", 0), (b"\xff", 0), (b"\xc0", 0), (b"\xf0\x9f\x9a\x80", 0), (b"\xe2a", 0), (b"\xed\xa0", 0)],
)  # fmt: skip
def test_incomplete_characters(data: bytes, size: int) -> None:
    assert incomplete(data) == size


def test_tokenizers_of_other_kinds_are_not_known(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert not Pieces(TextCodec(tmp_path)).known
