"""Tokenizers of encoder-decoders without a tokenizer.json: sentencepiece models whose tokens have other numbers.

Layouts as in transformers: Marian and M2M-100 number pieces by a vocab.json, fairseq's models (mBART, NLLB) put four
special tokens first, T5 and Pegasus add sentinels, and ByT5 has bytes for tokens (arXiv 2105.13626).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.facts import Described, bpe_model, tokenizer_json
from edgespec.export.tokenizers.sentencepieces import NEVER, describe_sentencepiece, read_sentencepiece
from edgespec.export.tokenizers.vocabulary import AddedToken, place, read_vocab, surround
from edgespec.export.tokenizers.word_pieces import pair_template
from edgespec.runtimes.text.byte_tokens import byte_texts
from edgespec.runtimes.text.special import read_object

PIECES = "sentencepiece.bpe.model"
PAIR = "source.spm", "target.spm"
MARIAN_VOCAB, TARGET_VOCAB = "vocab.json", "target_vocab.json"
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
SENTINEL = "<extra_id_{}>"
M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
WMT21 = "en ha is ja cs ru zh de"
MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART50 = (
    f"{MBART} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE "
    "sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)


def convert_renumbered(folder: Path, config: dict[str, Any]) -> Described | None:
    """Return the tokenizer.json of the decoder's texts; None = this folder has a different layout.

    Args:
        folder: of the model.
        config: its tokenizer_config.json.

    Raises:
        ExportError: files that do not fit together.
    """
    if all((folder / name).is_file() for name in PAIR):
        separate = config.get("separate_vocabs") and (folder / TARGET_VOCAB).is_file()
        return _marian(folder, PAIR[1], TARGET_VOCAB if separate else MARIAN_VOCAB, config)
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if (folder / PIECES).is_file():
        return _fairseq(folder, config, name)
    if (folder / "spiece.model").is_file() and name in _SENTINELS:
        return _sentinels(folder / "spiece.model", config, name)
    if name == "ByT5Tokenizer" or _class_in_config(folder) == "ByT5Tokenizer":
        return _bytes(config)
    return None


def convert_source(folder: Path, config: dict[str, Any]) -> Described | None:
    """Return the tokenizer.json of sources; None = they use the tokenizer of the decoder's texts."""
    first, second = (folder / name for name in PAIR)
    if not (first.is_file() and second.is_file()):
        return None
    separate = config.get("separate_vocabs") and (folder / TARGET_VOCAB).is_file()
    if not separate and first.read_bytes() == second.read_bytes():
        return None
    return _marian(folder, PAIR[0], MARIAN_VOCAB, config)


def _marian(folder: Path, spm: str, vocab: str, config: dict[str, Any]) -> Described:
    """Marian: pieces of one of two models, numbered by one vocabulary; ``>>fra<<`` names the language to write."""
    ids = read_vocab(folder / vocab)
    described = _renumbered(folder / spm, ids, config)
    special = [token for token in ids if token in ("</s>", "<unk>", "<pad>") or _is_marian_language(token)]
    return _finished(described, {ids[token]: token for token in special}, None, "</s>")


def _is_marian_language(token: str) -> bool:
    return token.startswith(">>") and token.endswith("<<")


def _fairseq(folder: Path, config: dict[str, Any], name: str) -> Described:
    """M2M-100, whose pieces a vocab.json numbers, and mBART and NLLB: fairseq's four tokens, pieces, languages."""
    file = folder / PIECES
    if (folder / MARIAN_VOCAB).is_file():
        ids = read_vocab(folder / MARIAN_VOCAB)
        codes = WMT21 if config.get("language_codes") == "wmt21" else M2M100
        languages = {f"__{code}__": len(ids) + at for at, code in enumerate(codes.split())}
        special = {ids[token]: token for token in FAIRSEQ if token in ids}
        special |= {number: token for token, number in languages.items()}
        origin = f"__{config.get('src_lang') or 'en'}__"
        return _finished(_renumbered(file, ids | languages, config), special, origin, "</s>")
    pieces = [piece.piece for piece in read_sentencepiece(file).pieces[3:]]
    if name == "XLMRobertaTokenizer":
        return _without_languages(file, pieces, config)
    named = _named_languages(config) or {"MBartTokenizer": MBART, "MBart50Tokenizer": MBART50}.get(name, "").split()
    if not named:
        raise ExportError(
            f"{file}: which languages have tokens is not said: expected additional_special_tokens in "
            "tokenizer_config.json",
            "give a model folder with a tokenizer.json",
        )
    ids = {token: number for number, token in enumerate([*FAIRSEQ, *pieces, *named, "<mask>"])}
    special = {ids[token]: token for token in (*FAIRSEQ, *named, "<mask>")}
    origin = config.get("src_lang") or ("eng_Latn" if "eng_Latn" in ids else "en_XX")
    before = name in ("MBart50Tokenizer", "NllbTokenizer") and not config.get("legacy_behaviour")
    described = _renumbered(file, ids, config)
    return _finished(described, special, origin if before else None, "</s>", None if before else origin)


def _without_languages(file: Path, pieces: list[str], config: dict[str, Any]) -> Described:
    """XLM-R: fairseq's four tokens, pieces, and a mask; two texts of a pair have two ends between them."""
    ids = {token: number for number, token in enumerate([*FAIRSEQ, *pieces, "<mask>"])}
    special = {ids[token]: token for token in (*FAIRSEQ, "<mask>")}
    described = _finished(_renumbered(file, ids, config), special, None, "</s>")
    described["post_processor"] = pair_template(ids, "<s>", "</s>", double=True)
    return described


def _named_languages(config: dict[str, Any]) -> list[str]:
    """Return the languages that tokenizer_config.json lists as special tokens, in their order."""
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    names = [item.get("content") if isinstance(item, dict) else item for item in listed]
    return [name for name in names if isinstance(name, str) and name != "<mask>"]


_SENTINELS: dict[str, Callable[[list[str], int], dict[str, int]]] = {
    # T5: sentinels after the pieces, the first of them last
    "T5Tokenizer": lambda pieces, extra: (
        {piece: at for at, piece in enumerate(pieces)}
        | {SENTINEL.format(extra - 1 - at): len(pieces) + at for at in range(extra)}
    ),
    # Pegasus: padding, end, two masks and unknown tokens in front; arXiv 1912.08777
    "PegasusTokenizer": lambda pieces, extra: (
        {"<pad>": 0, "</s>": 1, "<mask_1>": 2, "<mask_2>": 3}
        | {f"<unk_{at}>": at + 2 for at in range(2, extra)}
        | {piece: at + extra for at, piece in enumerate(pieces) if at >= 2}
    ),
}  # fmt: skip


def _sentinels(file: Path, config: dict[str, Any], name: str) -> Described:
    pieces = [piece.piece for piece in read_sentencepiece(file).pieces]
    count = config.get("extra_ids", 100) if name == "T5Tokenizer" else config.get("offset", 103)
    ids = _SENTINELS[name](pieces, int(count))
    special = [token for token in ids if token.startswith(("<extra_id_", "<mask_", "<unk_"))]
    special += [token for token in ("<pad>", "</s>", "<unk>") if token in ids]
    return _finished(_renumbered(file, ids, config), {ids[token]: token for token in special}, None, "</s>")


def _renumbered(file: Path, ids: Mapping[str, int], config: dict[str, Any]) -> Described:
    """Describe a sentencepiece model whose pieces have these ids; a piece without one is cut into smaller ones."""
    described = describe_sentencepiece(file, read_sentencepiece(file), {**config, "legacy": True})
    if not all(isinstance(number, int) and 0 <= number < 1 << 24 for number in ids.values()):
        raise ExportError(f"{file.parent}: expected a vocabulary of token ids", "download it again")
    model = described["model"]
    if "<unk>" not in ids:
        raise ExportError(f"{file.parent}: the vocabulary has no <unk>", "download it again")
    if model["type"] == "BPE":
        model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= ids.keys()]
        model["vocab"], model["unk_token"] = dict(ids), "<unk>"
        return described
    scores = dict(model["vocab"])
    never = min(scores.values(), default=0.0) - NEVER
    listed = [[f"<edgespec-no-token-{at}>", never] for at in range(max(ids.values()) + 1)]
    for token, number in ids.items():
        listed[number] = [token, scores.get(token, never)]
    model["vocab"], model["unk_id"] = listed, ids["<unk>"]
    return described


def _finished(
    described: Described, special: Mapping[int, str], before: str | None, after: str | None, last: str | None = None
) -> Described:
    place(described, {number: AddedToken(token, special=True) for number, token in special.items()})
    surround(described, before, after, last)
    return described


def _bytes(config: dict[str, Any]) -> Described:
    """ByT5: one token per byte, after padding, end and unknown; sentinels last."""
    extra = int(config.get("extra_ids") or 125)
    ids = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {text: byte + 3 for byte, text in enumerate(byte_texts())}
    ids |= {SENTINEL.format(at): 259 + at for at in range(extra)}
    words: Described = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    described = tokenizer_json(bpe_model(ids, [], unk_token="<unk>"), normalizer=None, words=words, decoder=dict(words))
    special = {number: token for token, number in ids.items() if number < 3 or number >= 259}
    return _finished(described, special, None, "</s>")


def _class_in_config(folder: Path) -> Any:
    file = folder / "config.json"
    return read_object(file, infinite=True).get("tokenizer_class") if file.is_file() else None
