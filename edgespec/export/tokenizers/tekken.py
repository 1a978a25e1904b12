"""Mistral's own tokenizers, tekken.json: tokens of bytes by rank, after special ones (github.com/mistralai).

Among neighbors in a word, the pair whose joined bytes have the lowest rank is merged first.  A word that is a token
becomes one at once.
"""

from __future__ import annotations

import base64
from pathlib import Path

from edgespec.errors import ExportError
from edgespec.export.tokenizers.facts import Described
from edgespec.export.tokenizers.sentencepieces import merges
from edgespec.export.tokenizers.vocabulary import AddedToken, describe_byte_level, place, surround
from edgespec.runtimes.files.json_file import read_json
from edgespec.runtimes.text.byte_tokens import byte_texts

TEKKEN = "tekken.json"
AGAIN = "download it again"


def describe_tekken(file: Path) -> Described:
    """Make the tokenizer.json of a tekken.json, whose texts begin with BOS.

    Raises:
        ExportError: not what such a file has.
    """
    data = read_json(file, ExportError, AGAIN)
    try:
        config, special = data["config"], int(data["config"]["default_num_special_tokens"])
        words, count = str(config["pattern"]), int(config["default_vocab_size"]) - special
        named = {int(token["rank"]): str(token["token_str"]) for token in data["special_tokens"]}
        letters = byte_texts()
        pieces = [base64.b64decode(token["token_bytes"], validate=True) for token in data["vocab"][:count]]
        tokens = ["".join(letters[byte] for byte in piece) for piece in pieces]
    except (LookupError, TypeError, ValueError) as error:
        raise ExportError(f"{file}: expected config, vocab and special_tokens of Mistral's: {error}", AGAIN) from error
    if len(tokens) < count or len(set(tokens)) < count:
        raise ExportError(f"{file}: has {len(set(tokens))} tokens: expected {count}", AGAIN)
    vocab = {token: special + rank for rank, token in enumerate(tokens)}
    described = describe_byte_level(vocab, merges(tokens, range(count), [True] * count), (words,), ignore_merges=True)
    place(described, {at: AddedToken(named.get(at, f"<SPECIAL_{at}>"), True) for at in range(special)})
    surround(described, "<s>" if "<s>" in named.values() else None)
    return described
