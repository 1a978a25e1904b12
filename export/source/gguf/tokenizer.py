"""The tokenizer of a GGUF file as a tokenizer.json: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

The regular expressions are those by which the models' own tokenizers split text before merging; llama.cpp names them by
``tokenizer.ggml.pre``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.gguf.config import Metadata
from edgespec.export.source.gguf.merges import sentencepiece_merges, split_merges

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type
BESIDE = "put the model's tokenizer.json beside the file: it is then used instead"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = [rf"{ENDINGS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"]
QWEN2 = [rf"{ENDINGS}|{WORDS}|\p{{N}}|{REST}"]
GPT2 = [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"]
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
TEKKEN = [
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]
SPLITS = {
    "default": DEFAULT,
    "gpt-2": GPT2,
    "smollm": [r"\p{N}", *GPT2],
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a piece that is a token needs no merges
BEGIN = ("llama-bpe", "llama3", "llama-v3")  # BOS, unless the file says otherwise


def build_tokenizer(file: Path, metadata: Metadata) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
        UnsupportedModel: a kind of tokenizer, or a way to split text, that is not supported.
        ExportError: no or inconsistent tokens.
    """
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedModel(
            f"{file}: tokenizer model {kind!r} is not supported; supported: {', '.join(builders)}", BESIDE
        )
    tokens, types = _tokens(file, metadata)
    try:
        tokenizer = builders[kind](file, metadata, tokens, types)
        _add_tokens(tokenizer, tokens, types)
        _add_ends(tokenizer, metadata, tokens)
    except ExportError:
        raise
    except Exception as error:  # the library raises a plain Exception
        raise ExportError(f"{file}: its tokenizer is damaged: {error}", BESIDE) from error
    return tokenizer


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """What tokenizer_config.json says."""
    tokens = metadata["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            found[f"{name}_token"] = tokens[number]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        found["chat_template"] = template
    return found | {"add_bos_token": _begins(metadata)}


def _tokens(file: Path, metadata: Metadata) -> tuple[list[str], list[int]]:
    """The tokens by id and their types, without the unused ones at the end, which only fill the embedding."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ExportError(f"{file}: has no tokenizer.ggml.tokens", BESIDE)
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ExportError(f"{file}: has {len(tokens)} tokens and {len(types)} token types", BESIDE)
    size = len(tokens)
    while size > 1 and types[size - 1] == UNUSED:
        size -= 1
    return tokens[:size], types[:size]


def _byte_level(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise UnsupportedModel(
            f"{file}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(SPLITS)}",
            BESIDE,
        )
    merges = split_merges(file, metadata.get("tokenizer.ggml.merges"))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in WHOLE))
    if SPLITS[name] is QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in SPLITS[name]]
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_alone])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if gemma:  # runs of spaces are stored as such
        tokens = ["\u2581" * len(token) if token and not token.strip(" ") else token for token in tokens]
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise ExportError(f"{file}: has no tokenizer.ggml.scores for its {len(tokens)} tokens", BESIDE)
    # gemma's scores do not follow its merges: the order of its tokens does
    ranks = list(range(len(tokens))) if gemma else [-score for score in scores]
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 0))
    bpe = models.BPE(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=sentencepiece_merges(tokens, ranks, [kind in (NORMAL, USER_DEFINED) for kind in types]),
        unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", "\u2581")
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens, which are special, and user-defined ones: text that is one of them is never cut."""
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    for kind, special, add in (
        (CONTROL, True, tokenizer.add_special_tokens),
        (UNKNOWN, True, tokenizer.add_special_tokens),
        (USER_DEFINED, False, tokenizer.add_tokens),
    ):
        named = [token for token, its in zip(tokens, types, strict=True) if its == kind and token in vocabulary]
        add([AddedToken(token, normalized=False, special=special) for token in named if token])


def _begins(metadata: Metadata) -> bool:
    """Whether BOS is put in front of a text."""
    own = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in BEGIN
    return bool(metadata.get("tokenizer.ggml.add_bos_token", own))


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    """BOS in front of a text, and EOS behind it, where the model wants them."""
    from tokenizers import processors

    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    first = [int(bos)] if bos is not None and _begins(metadata) else []
    last = [int(eos)] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        single = [*(tokens[number] for number in first), "$A", *(tokens[number] for number in last)]
        pair = [*single, *(tokens[number] for number in first), "$B", *(tokens[number] for number in last)]
        named = [(tokens[number], number) for number in {*first, *last}]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
