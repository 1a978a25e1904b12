"""Tokenizer facts for the manifest, and whether two models speak the same tokens."""

from __future__ import annotations

import json
from typing import Any

from edgespec.errors import IncompatibleDraft
from edgespec.export.described import Described
from edgespec.runtimes.manifest import TokenizerFacts
from edgespec.runtimes.text import TextCodec

PADDING = 128  # vocabularies may differ by unused rows at the end (llama.cpp allows as many)


def tokenizer_facts(arch: Described, codec: TextCodec) -> TokenizerFacts:
    """BOS and EOS ids: generation_config.json first, then config.json, then the tokenizer's own."""
    eos = _ids(_generation(arch).get("eos_token_id")) or _ids(arch.config.get("eos_token_id"))
    if not eos and (own := codec.token_id(codec.special("eos_token"))) is not None:
        eos = [own]
    bos = arch.config.get("bos_token_id")
    if not isinstance(bos, int):
        bos = codec.token_id(codec.special("bos_token"))
    return TokenizerFacts(bos=bos, eos=eos, chat_template=codec.chat_template is not None)


def check_same_vocabulary(target: Described, draft: Described, ours: TextCodec, theirs: TextCodec) -> None:
    """Refuse a draft whose tokens mean something else.

    Raises:
        IncompatibleDraft: sizes too far apart, or a token that differs; both values are named.
    """
    sizes = target.facts.vocab, draft.facts.vocab
    if abs(sizes[0] - sizes[1]) > PADDING:
        raise IncompatibleDraft(
            f"the draft's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}",
            "use a draft of the same model family, with the same tokenizer",
        )
    mine, other = ours.tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    by_id = {number: token for token, number in other.items()}
    for token, number in sorted(mine.items(), key=lambda item: item[1]):
        if by_id.get(number) != token:
            raise IncompatibleDraft(
                f"token {number} is {token!r} in the target's tokenizer and {by_id.get(number)!r} in the draft's",
                "use a draft of the same model family, with the same tokenizer",
            )
    extra = {number: token for token, number in other.items() if token not in mine and number < sizes[0]}
    if extra:
        number = min(extra)
        raise IncompatibleDraft(
            f"token {number} is {extra[number]!r} in the draft's tokenizer and unknown in the target's"
        )


def _generation(arch: Described) -> dict[str, Any]:
    file = arch.source.path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text("utf-8"))
    except ValueError:  # optional file: the configuration has the same facts
        return {}
    return data if isinstance(data, dict) else {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]
