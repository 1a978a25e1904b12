"""Tokenizers of encoder-decoders compared with those of transformers, and the tokens around their texts."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from edgespec.errors import ExportError, InvalidRequest
from edgespec.export.bundle.writer import copy_tokenizer
from edgespec.export.tokenizers.files import open_codec, open_source_codec
from edgespec.export.tokenizers.text_form import text_form
from edgespec.runtimes.files.seq2seq_format import WritingRules
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.languages import choose_language, code_of
from edgespec.runtimes.text.rules import RuledText
from edgespec.runtimes.text.sources import SourceTexts
from tests.support import spm

transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")
# what sentencepiece and the library's own trimming see alike: the shortest texts are not
TEXTS = [text for text in spm.texts(150) if text.strip() and "\u2581" not in text]


@pytest.fixture(scope="module")
def pieces() -> Callable[..., bytes]:
    """Train each kind of sentencepiece model once."""
    made: dict[str, bytes] = {}

    def train(kind: str, size: int = 500, **more: Any) -> bytes:
        key = f"{kind} {size} {more}"
        made[key] = made.get(key) or spm.train(kind, size, **more)
        return made[key]

    return train


def write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), "utf-8")


def marian(folder: Path, pieces: Callable[..., bytes], *languages: str) -> None:
    """Write a pair of models with one vocabulary, in another order than theirs."""
    both: dict[str, None] = {}
    for side, size in (("source", 400), ("target", 500)):
        model = pieces("unigram", size)
        (folder / f"{side}.spm").write_bytes(model)
        reader = sentencepiece.SentencePieceProcessor(model_proto=model)
        both |= dict.fromkeys(reader.id_to_piece(number) for number in range(3, reader.vocab_size()))
    listed = ["</s>", "<unk>", *languages, *sorted(both), "<pad>"]
    write(folder / "vocab.json", {token: number for number, token in enumerate(listed)})
    told = {"tokenizer_class": "MarianTokenizer", "source_lang": "eng", "target_lang": "fra", "separate_vocabs": False}
    write(folder / "tokenizer_config.json", told)
    write(folder / "config.json", {"model_type": "marian"})
    pad = len(listed) - 1
    write(
        folder / "generation_config.json",
        {"decoder_start_token_id": pad, "eos_token_id": 0, "bad_words_ids": [[pad]], "forced_eos_token_id": 0,
         "max_length": 512, "num_beams": 4},
    )  # fmt: skip


@transformers
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_pair_of_models(tmp_path: Path, pieces: Callable[..., bytes]) -> None:
    from transformers import MarianTokenizer

    marian(tmp_path, pieces, ">>fra<<", ">>deu<<")
    reference = MarianTokenizer.from_pretrained(str(tmp_path))
    codec, sources = open_codec(tmp_path), open_source_codec(tmp_path)
    assert sources is not None
    for text in [*TEXTS, ">>fra<< A text."]:
        assert sources.encode(text) == reference(text)["input_ids"]
        wanted = reference(text_target=text)["input_ids"]
        assert codec.encode(text) == wanted
        if ">>" not in text:
            written = reference.decode(wanted, skip_special_tokens=True, use_source_tokenizer=False)
            assert codec.decode(wanted).strip() == written
    form = text_form(tmp_path, {}, codec, sources)
    pad = len(json.loads((tmp_path / "vocab.json").read_text("utf-8"))) - 1
    assert (form.source, form.prefix_tokens) == (["to", "text", 0], [pad])
    assert form.languages == {"fra": 2, "deu": 3}
    assert (form.rules.max_length, form.rules.beams, form.rules.forced_eos_token_id, form.rules.bad_words_ids) == (
        512,
        4,
        0,
        [[pad]],
    )
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    copy_tokenizer(tmp_path, bundle, codec, sources)
    mine = SourceTexts(bundle, form, TextCodec(bundle))
    for target in ("fr", "fra", "French"):
        assert mine.encode("Hello.", None, target) == reference(">>fra<< Hello.")["input_ids"]
    with pytest.raises(InvalidRequest, match="no language 'ko'; it has: deu, fra"):
        mine.encode("Hello.", "en", "ko")


def test_one_pair_of_languages(tmp_path: Path, pieces: Callable[..., bytes]) -> None:
    marian(tmp_path, pieces)
    codec = open_codec(tmp_path)
    mine = SourceTexts(tmp_path, text_form(tmp_path, {}, codec), codec)
    assert mine.encode("x") == mine.encode("x", "en", "French") == mine.encode("x", None, "fr")
    with pytest.raises(InvalidRequest, match="cannot be told to write ko; it writes fra"):
        mine.encode("x", "en", "ko")
    with pytest.raises(InvalidRequest, match="reads eng, not de"):
        mine.encode("x", "de", "fr")


@transformers
def test_a_vocabulary_beside_one_model(tmp_path: Path, pieces: Callable[..., bytes]) -> None:
    from transformers import M2M100Tokenizer

    (tmp_path / "sentencepiece.bpe.model").write_bytes(pieces("bpe_trimmed"))
    reader = sentencepiece.SentencePieceProcessor(model_proto=pieces("bpe_trimmed"))
    words = [reader.id_to_piece(number) for number in range(3, reader.vocab_size())]
    vocab = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *words[::-1]])}
    write(tmp_path / "vocab.json", vocab)
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    write(tmp_path / "generation_config.json", {"decoder_start_token_id": 2, "eos_token_id": 2})
    reference, codec = M2M100Tokenizer.from_pretrained(str(tmp_path)), open_codec(tmp_path)
    for text in TEXTS:
        assert codec.encode(text) == reference(text)["input_ids"]
        bare = codec.encode(text, special=False)
        assert codec.decode(bare).strip() == reference.decode(bare, skip_special_tokens=True)
    form = text_form(tmp_path, {"model_type": "m2m_100"}, codec)
    assert (form.source, form.prefix_tokens) == (["from", "text", 2], [2, "to"])
    reference.src_lang, mine = "ko", SourceTexts(tmp_path, form, codec)
    assert mine.encode("Hello.", "kor", "en") == reference("Hello.")["input_ids"]
    assert mine.begin("ko", "de") == [2, reference.get_lang_id("de")]
    with pytest.raises(InvalidRequest, match="must be told the language that it translates to"):
        mine.begin("ko")


@transformers
@pytest.mark.parametrize(
    "name, kind, places",
    [
        ("NllbTokenizer", "bpe_trimmed", (["from", "text", 2], [2, "to"])),
        ("MBart50Tokenizer", "unigram", (["from", "text", 2], [2, "to"])),
        ("MBartTokenizer", "unigram", (["text", 2, "from"], [2, "to"])),
    ],
)
def test_fairseqs_numbers(tmp_path: Path, pieces: Callable[..., bytes], name: str, kind: str, places: Any) -> None:
    """transformers opens the tokenizer.json that is written: its own conversion of these files has other ids."""
    import transformers

    listed = ["eng_Latn", "kor_Hang", "zho_Hans", "zho_Hant"] if name == "NllbTokenizer" else None
    told = {"tokenizer_class": name} | ({"additional_special_tokens": listed} if listed else {})
    (tmp_path / "sentencepiece.bpe.model").write_bytes(pieces(kind))
    write(tmp_path / "tokenizer_config.json", told)
    write(tmp_path / "generation_config.json", {"decoder_start_token_id": 2})
    codec = open_codec(tmp_path)
    form = text_form(tmp_path, {}, codec)
    assert (form.source, form.prefix_tokens) == places
    mine = SourceTexts(tmp_path, form, codec)
    korean = mine.encode("Hello.", "ko", "en")
    codec.tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader = sentencepiece.SentencePieceProcessor(model_proto=pieces(kind))
    assert codec.encode("Hello there.", special=False) == [token + 1 for token in reader.encode("Hello there.")]
    code = "kor_Hang" if listed else "ko_KR"
    reference = getattr(transformers, name).from_pretrained(str(tmp_path), src_lang=code)
    assert korean == reference("Hello.")["input_ids"]
    if listed:
        with pytest.raises(InvalidRequest, match="say which: zho_Hans, zho_Hant"):
            mine.begin("ko", "Chinese")


@transformers
@pytest.mark.parametrize("name", ["T5Tokenizer", "PegasusTokenizer"])
def test_sentinels(tmp_path: Path, pieces: Callable[..., bytes], name: str) -> None:
    """T5's sentinels come after the pieces, Pegasus's before them; transformers opens the written files."""
    from transformers import T5Tokenizer

    model = pieces("unigram", 500, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    (tmp_path / "spiece.model").write_bytes(model)
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
    write(tmp_path / "generation_config.json", {"decoder_start_token_id": 0})
    codec, reader = open_codec(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model)
    first = 0 if name == "T5Tokenizer" else 103
    for text in TEXTS:
        assert codec.encode(text) == [*(token + first for token in reader.encode(text)), 1]
    size = reader.vocab_size()
    if name == "T5Tokenizer":
        assert [codec.token_id(f"<extra_id_{at}>") for at in (0, 99)] == [size + 99, size]
    else:
        assert [codec.token_id(text) for text in ("<pad>", "<mask_1>", "<unk_2>", "<unk>")] == [0, 2, 4, 105]
        return
    codec.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (
        codec.encode("A <extra_id_0> b.") == T5Tokenizer.from_pretrained(str(tmp_path))("A <extra_id_0> b.").input_ids
    )
    tasks = {"translation_en_to_de": {"prefix": "translate English to German: "}, "summarization": {"max_length": 9}}
    form = text_form(tmp_path, {"task_specific_params": tasks}, codec)
    assert (form.source, form.prefix_tokens) == (["text", 1], [0])
    mine = SourceTexts(tmp_path, form, codec)
    assert mine.encode("A b.", "en", "German") == codec.encode("translate English to German: A b.")
    with pytest.raises(InvalidRequest, match="does not translate de to en; it knows: en to de"):
        mine.encode("A b.", "de", "en")


@transformers
def test_bytes(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125})
    reference, codec = ByT5Tokenizer(), open_codec(tmp_path)
    for text in [*TEXTS, "a <extra_id_0>b<extra_id_124>"]:
        assert codec.encode(text) == reference(text)["input_ids"]
        assert codec.decode(codec.encode(text)) == reference.decode(codec.encode(text), skip_special_tokens=True)


def test_what_is_missing(tmp_path: Path, pieces: Callable[..., bytes]) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(pieces("unigram"))
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "NllbTokenizer"})
    with pytest.raises(ExportError, match="expected additional_special_tokens"):
        open_codec(tmp_path)
    marian(tmp_path, pieces)
    write(tmp_path / "generation_config.json", {"num_beams": 0, "decoder_start_token_id": 0})
    with pytest.raises(ExportError, match=r"generation_config.json: .*"):
        text_form(tmp_path, {}, open_codec(tmp_path))
    write(tmp_path / "generation_config.json", {"num_beams": 1})
    with pytest.raises(ExportError, match="expected decoder_start_token_id"):
        text_form(tmp_path, {}, open_codec(tmp_path))
    shutil.copy(tmp_path / "tokenizer_config.json", tmp_path / "vocab.json")
    with pytest.raises(ExportError, match="expected an object of token ids"):
        open_codec(tmp_path)


def test_names_of_languages() -> None:
    nllb = ["eng_Latn", "kor_Hang", "arb_Arab", "nob_Latn"]
    for wanted in ("ko", "kor", "KOREAN", "kor_Hang", "ko-KR"):
        assert choose_language(wanted, nllb) == "kor_Hang"
    assert choose_language("ar", nllb) == "arb_Arab"
    assert choose_language("no", nllb) == "nob_Latn"
    for token, code in ((">>fra<<", "fra"), ("__fr__", "fr"), ("<2fr>", "fr"), ("<|fr|>", "fr"), ("fr_XX", "fr_XX")):
        assert code_of(token) == code


def test_rules() -> None:
    """Expected numbers are those of transformers' logits processors for the same settings."""
    given: dict[str, Any] = {
        "suppress_tokens": [5], "begin_suppress_tokens": [6], "bad_words_ids": [[7], [8, 9]],
        "no_repeat_ngram_size": 2, "min_length": 4, "max_length": 8, "forced_eos_token_id": 2,
    }  # fmt: skip
    mine = RuledText(WritingRules(**given), vocab=12, ends=(2,), prompt=1, length=8)
    for prefix, banned in (
        ([1], {2, 5, 6, 7}),
        ([1, 8], {2, 5, 7, 9}),
        ([1, 3, 4, 3], {4, 5, 7}),
        ([1, 3, 3], {2, 3, 5, 7}),
        ([1, 8, 4, 8, 8], {4, 5, 7, 8, 9}),
        ([1, 3, 4, 5, 6, 7, 8], {*range(12)} - {2}),
    ):
        allowed = mine.allowed(prefix)
        assert allowed is not None
        assert {*range(12)} - {*allowed.nonzero()[0].tolist()} == banned, prefix
    assert mine.forced([1] * 7, 3) == [2]
    assert mine.forced([1], 3) == []
