"""Vocabularies: byte-level BPE, as of GPT-2 and Qwen2, and tokens added to one from all files that may name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.facts import Described, bpe_model, tokenizer_json
from edgespec.runtimes.files.json_file import read_json
from edgespec.runtimes.text.special import NAMED, SPECIAL_TOKENS_FILE, read_object, special_name

# How models cut text into words before merging: documented patterns, facts of the models.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
QWEN2 = (rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}",)
QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SEED = (rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
MINICPM5 = (r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORDS}|\p{{N}}+|{_REST}")
GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DEEPSEEK3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)  # fmt: skip
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", *GPT4O)
FAMILIES = {"GPT2Tokenizer": "gpt2", "CodeGenTokenizer": "gpt2", "Qwen2Tokenizer": "qwen2"}
GENERIC = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


def describe_byte_level(
    vocab: dict[str, int],
    merges: list[list[str]],
    splits: Sequence[str] | None,
    *,
    prefix: bool = False,
    ignore_merges: bool = False,
    nfc: bool | None = None,
) -> Described:
    """Make a tokenizer.json, without added tokens and BOS.

    Args:
        merges: pairs of tokens, in the order of their ranks.
        splits: regular expressions whose matches are words, one after the other; None = as in GPT-2.
        prefix: a space is put before the text.
        ignore_merges: a word that is a token needs no merges.
        nfc: characters are composed first; None = as in Qwen2 if words are split as there.
    """
    words: Described = {
        "type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": splits is None,
    }  # fmt: skip
    if splits is not None:
        cut = [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
        ]
        words = {"type": "Sequence", "pretokenizers": [*cut, words]}
    return tokenizer_json(
        bpe_model(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", ignore_merges=ignore_merges),
        normalizer={"type": "NFC"} if (splits == QWEN2 if nfc is None else nfc) else None,
        words=words,
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def read_byte_level(folder: Path, config: dict[str, Any], model_type: str | None) -> Described:
    """Make a tokenizer.json, without added tokens and BOS, from vocab.json and merges.txt in a folder.

    Args:
        config: its tokenizer_config.json; ``tokenizer_class`` says how text is cut into words.
        model_type: of config.json, where the class does not say it.
    """
    splits = QWEN2 if _family(folder, config.get("tokenizer_class"), model_type) == "qwen2" else None
    vocab, merges = read_vocab(folder / "vocab.json"), _read_merges(folder / "merges.txt")
    return describe_byte_level(vocab, merges, splits, prefix=bool(config.get("add_prefix_space", False)))


def _family(folder: Path, name: Any, model_type: str | None) -> str:
    if name in GENERIC:
        return "qwen2" if str(model_type).startswith("qwen") else "gpt2"
    family = FAMILIES.get(str(name).removesuffix("Fast"))
    if family is None:
        raise ExportError(
            f"{folder}: has vocab.json and merges.txt of a {name}; expected {', '.join(FAMILIES)}",
            "give a model folder with a tokenizer.json",
        )
    return family


def read_vocab(file: Path) -> dict[str, int]:
    """Read a vocab.json: token -> id."""
    vocab = read_json(file, ExportError, "download it again")
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int for number in vocab.values()):
        raise ExportError(f"{file}: expected an object of token ids", "download it again")
    return vocab


def _read_merges(file: Path) -> list[list[str]]:
    """Split one pair per line; the first line may be a comment with the version."""
    try:
        lines = file.read_text("utf-8").split("\n")
    except ValueError as error:
        raise ExportError(f"{file}: not UTF-8 text: {error}", "download it again") from error
    pairs = [line.rstrip("\r").split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    for pair in pairs:
        if len(pair) != 2:
            raise ExportError(f"{file}: expected two tokens a line, got {' '.join(pair)[:60]!r}", "download it again")
    return pairs


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before anything else; the last four are as in tokenizer.json."""

    text: str  # what is found, and how the token is called
    special: bool  # decoding leaves it out
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


def added_tokens(
    folder: Path, config: dict[str, Any], base: dict[int, AddedToken], vocab: dict[str, int]
) -> dict[int, AddedToken]:
    """All added tokens by id: of the vocabulary itself, added_tokens.json, added_tokens_decoder, then named ones.

    Args:
        vocab: token -> id of the vocabulary.  As in transformers, a named token without an id gets the next one, if
            texts contain it: not for padding, masks and similar tokens.

    Raises:
        ExportError: an invalid id, or two tokens of one name.
    """
    found = base | explicit_tokens(folder, config)
    ids = {token.text: number for number, token in found.items()}
    if len(ids) < len(found):
        twice = next(token.text for number, token in found.items() if ids[token.text] != number)
        raise ExportError(f"{folder}: the added token {twice!r} has two ids", "repair tokenizer_config.json")
    for text, needed in _named(folder, config).items():
        number = ids.get(text, vocab.get(text, -1))
        if number in found:
            found[number] = AddedToken(**vars(found[number]) | {"special": True})
        elif number >= 0 or needed:
            ids[text] = number = number if number >= 0 else max([*vocab.values(), *found]) + 1
            found[number] = AddedToken(text, special=True)
    return found


def explicit_tokens(folder: Path, config: dict[str, Any]) -> dict[int, AddedToken]:
    """Return added tokens whose ids are in added_tokens.json or added_tokens_decoder."""
    found: dict[int, AddedToken] = {}
    for text, number in read_object(folder / "added_tokens.json").items():
        found[_id(number, text, folder)] = AddedToken(text, special=False)
    decoder = config.get("added_tokens_decoder")
    for number, item in decoder.items() if isinstance(decoder, dict) else ():
        found[_id(number, item, folder)] = _described(item, folder)
    return found


def place(described: Described, added: dict[int, AddedToken]) -> None:
    """Write added tokens into a tokenizer.json, each with its own id; the vocabulary grows to hold them."""
    model, gone = described["model"], set[str]()
    for number, token in sorted(added.items()):
        if isinstance(model["vocab"], dict):
            gone |= _place_in_map(model["vocab"], number, token.text)
        else:
            _place_in_list(model["vocab"], number, token.text)
    if gone:
        merges = model["merges"]
        model["merges"] = [pair for pair in merges if not gone.intersection((*pair, "".join(pair)))]
    described["added_tokens"] = [
        {
            "id": number,
            "content": token.text,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": False,  # a normalised one would begin with the space that the normaliser puts before
            "special": token.special,
        }
        for number, token in sorted(added.items())
    ]


def vocabulary(described: Described) -> dict[str, int]:
    """Return the vocabulary of a tokenizer.json: token -> id."""
    vocab = described["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {item[0]: number for number, item in enumerate(vocab)}


def surround(described: Described, before: str | None, *after: str | None) -> None:
    """Let encoding put tokens around the text, such as a BOS before and an EOS after it; None = none."""
    known = vocabulary(described)
    parts = [part for part in (before, "$A", *after) if part is not None]

    def template(sequences: tuple[str, ...]) -> list[Described]:
        found: list[Described] = []
        for number, name in enumerate(sequences):
            for part in parts:
                kind = "Sequence" if part == "$A" else "SpecialToken"
                found.append({kind: {"id": name if part == "$A" else part, "type_id": number}})
        return found

    tokens = {part: {"id": part, "ids": [known[part]], "tokens": [part]} for part in parts if part != "$A"}
    if tokens:
        described["post_processor"] = {
            "type": "TemplateProcessing",
            "single": template(("A",)),
            "pair": template(("A", "B")),
            "special_tokens": tokens,
        }


def _place_in_map(vocab: dict[str, int], number: int, text: str) -> set[str]:
    """Give a token its id; return the tokens that it displaced."""
    if vocab.get(text) == number:
        return set()
    gone = {name for name, at in vocab.items() if at == number}
    for name in gone:
        del vocab[name]
    vocab[text] = number
    return gone


def _place_in_list(vocab: list[list[Any]], number: int, text: str) -> None:
    if number >= len(vocab) + (1 << 16):
        raise ExportError(f"the added token {text!r} has id {number}, far beyond the {len(vocab)} tokens before it")
    never = min(score for _, score in vocab)
    while len(vocab) <= number:
        vocab.append([f"<edgespec-no-token-{len(vocab)}>", never])
    vocab[number][0] = text


def _named(folder: Path, config: dict[str, Any]) -> dict[str, bool]:
    """Return the names of tokens with a role -> whether the role needs an id; in the files' order."""
    other = read_object(folder / SPECIAL_TOKENS_FILE)
    found = {special_name(config, other, key): key in ("bos_token", "eos_token") for key in reversed(NAMED)}
    for source in (config, other):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = source.get(key)
            items = list(more.values()) if isinstance(more, dict) else more if isinstance(more, list) else []
            found |= {item.get("content") if isinstance(item, dict) else item: True for item in items}
    return {text: needed for text, needed in found.items() if isinstance(text, str) and text}


def _id(number: Any, of: object, folder: Path) -> int:
    try:
        found = int(number)
    except (TypeError, ValueError):
        found = -1
    if found < 0:
        raise ExportError(f"{folder}: the added token {of!r} has id {number!r}: expected a number from 0")
    return found


def _described(item: Any, folder: Path) -> AddedToken:
    if isinstance(item, str):
        return AddedToken(item, special=True)
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        raise ExportError(f"{folder}: added_tokens_decoder has {item!r}: expected a token with its content")
    flags = {key: bool(item.get(key, False)) for key in ("special", "lstrip", "rstrip", "single_word")}
    return AddedToken(item["content"], **flags)
