"""BERT's tokenizer without a tokenizer.json: words of ``vocab.txt``, cut into the longest pieces that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.tokenizers.facts import Described, tokenizer_json
from edgespec.export.tokenizers.vocabulary import AddedToken, place

WORDS = "vocab.txt"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MPNET = ("<pad>", "[UNK]", "<s>", "</s>", "<mask>")
LONGEST = 100  # characters of a word


def describe_word_pieces(folder: Path, config: Mapping[str, Any]) -> Described:
    """Return the tokenizer.json of a folder with a vocab.txt.

    Args:
        folder: of the model.
        config: its tokenizer_config.json.

    Raises:
        ExportError: a file that is not a list of words, or lacks special tokens.
    """
    file = folder / WORDS
    try:
        words = [line.rstrip("\r") for line in file.read_text("utf-8").split("\n")]
    except ValueError as error:
        raise ExportError(f"{file}: not UTF-8 text: {error}", "download it again") from error
    words = words[:-1] if words and not words[-1] else words
    ids = {word: number for number, word in enumerate(words)}
    names = MPNET if "<s>" in ids and "[CLS]" not in ids else SPECIAL
    if lost := [name for name in names[1:4] if name not in ids]:
        raise ExportError(f"{file}: has no {lost[0]}: expected BERT's words", "give a folder with a tokenizer.json")
    lower = bool(config.get("do_lower_case", True))
    accents = config.get("strip_accents")
    chinese = bool(config.get("tokenize_chinese_chars", True))
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": chinese,
                  "strip_accents": accents, "lowercase": lower}  # fmt: skip
    model = {"type": "WordPiece", "unk_token": names[1], "continuing_subword_prefix": "##",
             "max_input_chars_per_word": LONGEST, "vocab": ids}  # fmt: skip
    described = tokenizer_json(
        model,
        normalizer=normalizer,
        words={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
    place(described, {ids[name]: AddedToken(name, special=True) for name in names if name in ids})
    double = names is MPNET
    described["post_processor"] = pair_template(ids, names[2], names[3], double=double, types=not double)
    return described


def pair_template(
    ids: Mapping[str, int], first: str, last: str, double: bool = False, types: bool = False
) -> Described:
    """Put special tokens around a text, and between the texts of a pair.

    Args:
        ids: of tokens.
        first: before a text.
        last: after a text.
        double: twice between two texts, as in RoBERTa.
        types: the second text of a pair has tokens of type 1.
    """

    def token(name: str, kind: int) -> Described:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    second = int(types)
    single: Sequence[Described] = [token(first, 0), {"Sequence": {"id": "A", "type_id": 0}}, token(last, 0)]
    between = [token(last, 0)] if double else []
    after = [*between, {"Sequence": {"id": "B", "type_id": second}}, token(last, second)]
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in (first, last)}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *after], "special_tokens": special}
