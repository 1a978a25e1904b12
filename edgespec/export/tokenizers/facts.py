"""Read tokenizer facts and a model's sampling settings for the manifest, and compare two models' vocabularies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import BundleError, ExportError, InvalidRequest
from edgespec.runtimes.files.manifest import ModelFacts, SamplingPart, TokenizerFacts
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.special import read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Described = dict[str, Any]


def tokenizer_json(
    model: Described, *, normalizer: Described | None, words: Described | None, decoder: Described
) -> Described:
    """Return a tokenizer without added tokens; ``words``: how text is split before the model."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": words,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def bpe_model(vocab: dict[str, int], merges: list[list[str]], **options: Any) -> Described:
    """Return a BPE model; ``options``: differences from a byte-level one."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocab,
        "merges": merges,
    }


def build(described: Described, source: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises a plain Exception
        raise ExportError(f"{source}: its tokenizer cannot be converted: {error}", "download it again") from error


GENERATION = "generation_config.json"
PADDING = 128  # vocabularies may differ by unused rows at the end (llama.cpp allows as many)


def tokenizer_facts(folder: Path, config: Mapping[str, Any], vocab: int, codec: TextCodec) -> TokenizerFacts:
    """Read a model's BOS and EOS ids; see ``begin_and_ends``.

    Args:
        folder: of the model.
        config: the part of its config.json for text.
        vocab: tokens that it has.

    Raises:
        ExportError: an EOS, or a token of the tokenizer, outside the model's vocabulary.
    """
    bos, eos = begin_and_ends(folder, config, codec)
    check_vocabulary(folder, vocab, codec, eos)
    first = next((number for number in bos if number < vocab), None)
    return TokenizerFacts(bos=first, eos=eos, chat_template=codec.chat_template is not None)


def begin_and_ends(folder: Path, config: Mapping[str, Any], codec: TextCodec | None) -> tuple[list[int], list[int]]:
    """Find BOS and EOS ids: of generation_config.json first, then config.json, then the tokenizer's own (None = none).

    The tokenizer's EOS always ends a text too: of chat-tuned models it is the end of a turn, while the other files
    often keep that of the base model.  Servers read both; transformers' ``generate`` would run on.
    """
    generation = read_if_sound(folder / GENERATION)
    whole = read_if_sound(folder / "config.json") | {**config}  # EOS may be named outside the text part

    def own(name: str) -> list[int]:
        return [] if codec is None else _ids(codec.token_id(codec.special(name)))

    named = _ids(generation.get("eos_token_id")) or _ids(whole.get("eos_token_id"))
    eos = list(dict.fromkeys(named + own("eos_token")))
    return _ids(generation.get("bos_token_id")) or _ids(whole.get("bos_token_id")) or own("bos_token"), eos


def check_vocabulary(folder: Path, size: int, codec: TextCodec, eos: Sequence[int] = ()) -> None:
    """Reject a tokenizer with tokens that the model does not have; the model may have more (padding)."""
    beyond = [(number, token) for token, number in codec.tokenizer.get_vocab().items() if number >= size]
    if beyond:
        number, token = min(beyond)
        raise ExportError(
            f"{folder}: the tokenizer has {token!r} as token {number}, but the model has {size} tokens",
            "take tokenizer and weights of the same model; after adding tokens, resize the model's embeddings",
        )
    if wrong := [number for number in eos if number >= size]:
        raise ExportError(
            f"{folder}: eos_token_id {wrong[0]}, but the model has {size} tokens",
            "repair generation_config.json or config.json",
        )


def sizes_differ(target: ModelFacts, draft: ModelFacts) -> str | None:
    """Say that a draft's vocabulary has another size than the target's, beyond padding; None = it has not."""
    if abs(target.vocab - draft.vocab) <= PADDING:
        return None
    return f"the draft's vocabulary has {draft.vocab} tokens, the target's {target.vocab}"


def vocabularies_differ(target: ModelFacts, draft: ModelFacts, ours: TextCodec, theirs: TextCodec) -> str | None:
    """Say which of a draft's tokens means something else than the target's; None = they mean the same."""
    if why := sizes_differ(target, draft):
        return why
    mine, other = ours.tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    by_id = {number: token for token, number in other.items()}
    for token, number in sorted(mine.items(), key=lambda item: item[1]):
        if by_id.get(number) != token:
            return f"token {number} is {token!r} in the target's tokenizer and {by_id.get(number)!r} in the draft's"
    extra = {number: token for token, number in other.items() if token not in mine and number < target.vocab}
    if extra:
        number = min(extra)
        return f"token {number} is {extra[number]!r} in the draft's tokenizer and unknown in the target's"
    return None


def read_if_sound(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty if it is missing or damaged, because another file has the same facts."""
    try:
        return read_object(file, infinite=True)
    except BundleError:
        return {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]  # -1 says none


RULES = ("top_k", "top_p", "min_p")  # which transformers applies only where it samples


def sampling_part(folder: Path) -> SamplingPart | None:
    """Read a model's default sampling parameters; None = it has none.

    As in transformers, ``do_sample`` decides whether temperature and the other rules are used at all.  A rule that the
    file leaves out is off; the temperature is then 1.

    Raises:
        ExportError: a value that cannot be.
    """
    told = read_if_sound(folder / GENERATION) or read_if_sound(folder / "config.json")  # older models write it there
    given = {name: value for name, value in told.items() if value is not None}
    wanted = given.get("do_sample")
    names = ("temperature", *RULES) if wanted is True else ()
    found = {name: given[name] for name in (*names, "repetition_penalty") if name in given}
    if wanted is not None:
        found = {"temperature": 1.0 if wanted is True else 0.0} | found
    try:
        SamplingParams(**found)
    except InvalidRequest as error:
        raise ExportError(f"{folder / GENERATION}: {error.message}", "repair this setting, or delete it") from error
    part = SamplingPart(**found)
    return None if part == SamplingPart() else part
