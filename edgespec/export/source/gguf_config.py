"""The metadata of a GGUF file as config.json and tokenizer.json, and its tensors' names as Hugging Face has them.

Tokenizers are byte-level BPE ("gpt2"), SentencePiece BPE ("llama") and SentencePiece unigram ("t5").
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.gguf_kinds import (
    ATTENTION,
    KINDS,
    LAYER_EPS,
    LONG_FACTORS,
    PAIRS,
    REBUILD,
    ROPE_FACTORS,
    WITHOUT_END,
    Facts,
    Kind,
    Metadata,
    shortest,
)
from edgespec.export.source.gguf_t5 import t5_config, t5_name
from edgespec.export.tokenizers.facts import Described, bpe_model, tokenizer_json
from edgespec.export.tokenizers.sentencepieces import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    describe_sentencepiece,
    new_sentencepiece,
)
from edgespec.export.tokenizers.vocabulary import (
    DEEPSEEK3,
    DEEPSEEK_CODER,
    GPT2,
    GPT4O,
    LLAMA3,
    MINICPM5,
    QWEN2,
    QWEN35,
    SEED,
    TEKKEN,
    TINY_AYA,
    AddedToken,
    describe_byte_level,
    place,
    surround,
)

T5 = ("t5", "umt5")
UGM = "t5"  # llama.cpp's name of unigram tokenizers, whichever model has one
EMBEDDING = ("bert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert",
             "nomic-bert", "nomic-bert-moe", "t5encoder")  # fmt: skip
"""Architectures whose rows see later tokens: they make embeddings, no text."""
RANK = 4  # the pooling of a reranker
LOW, HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every llama3 scaling so far
CHANGES = ("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "logit_scale",
           "residual_scale", "embedding_scale", "attention.scale", "attention.output_scale", "attention.value_scale",
           "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale",
           "attention.shared_kv_layers", "attention.recurrent_layers", "attention.rope_pattern", "expert_count",
           "expert_group_count", "expert_weights_scale", "expert_gating_func", "embedding_length_per_layer_input",
           "shortconv.l_cache", "ssm.inner_size", "rope.scaling.alpha", "rope.dimension_sections", "swin_norm",
           "n_deepstack_layers", "interleave_moe_layer_step", "num_loops")  # fmt: skip
"""Keys of metadata that change what a model computes: a file with one that nothing here reads is refused."""


def kind_of(facts: Facts) -> Kind:
    """Return how the file's architecture is read.

    Raises:
        UnsupportedModel: no row of ``KINDS``.
    """
    if facts.architecture not in KINDS:
        what = ", an embedding model," if facts.architecture in EMBEDDING else ""
        raise UnsupportedModel(
            f"{facts.file}: GGUF architecture {facts.architecture!r}{what} is not supported; supported: "
            f"{', '.join(KINDS)}",
            REBUILD,
        )
    found = KINDS[facts.architecture]
    if isinstance(found, Kind):
        return found
    return found.first if found.where(facts) else found.second


def hf_name(facts: Facts, kind: Kind, name: str, config: Mapping[str, Any]) -> str | None:
    """Return the Hugging Face name of a tensor; None = it is none of the checkpoint's.

    Raises:
        UnsupportedModel: the architecture has no such tensor.
    """
    if name == ROPE_FACTORS or (name in LONG_FACTORS and kind.model_type == "phi3"):
        return None
    if config["model_type"] in T5:
        found = t5_name(name, config)
    elif match := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
        if facts.layers <= int(match[1]) < facts.layers + facts.guessing:
            return None
        found = _named(match[2], kind.layer)
        if found is not None:
            own = found.startswith("=")
            found = f"{'model.layers' if own else kind.at}.{match[1]}.{found.removeprefix('=')}"
    else:
        found = _named(name, kind.outer)
        norm = name == "output_norm.bias" and kind.eps[1] == LAYER_EPS
        if name.endswith(".bias") and not norm and name not in kind.outer:
            found = None
    if found is None:
        raise UnsupportedModel(
            f"{facts.file}: tensor {name} is unknown for model type {config['model_type']}: the file needs more than "
            "this model type has",
            "export from the Hugging Face checkpoint",
        )
    return found


def _named(name: str, table: Mapping[str, str]) -> str | None:
    module, _, end = name.rpartition(".")
    if name in table and (end in ("weight", "bias", "scale") or name in WITHOUT_END):
        return table[name]
    return f"{table[module]}.{end}" if module in table and end in ("weight", "bias") else None


def gguf_config(facts: Facts, kind: Kind) -> dict[str, Any]:
    """Return what config.json would say, from the metadata and the tensors under the file's own names.

    Raises:
        UnsupportedModel: an architecture or an option of it that is not supported.
        ExportError: facts that are missing.
    """
    tensors, metadata = facts.tensors, facts.metadata
    _refuse(facts)
    if kind.model_type in T5:
        start = {"decoder_start_token_id": int(facts.get("decoder_start_token_id", 0))}
        return t5_config(facts.number, tensors) | start | _tokens_named(metadata)
    own = kind.settings(facts)
    heads, hidden = facts.number("attention.head_count"), facts.number("embedding_length")
    size = own.get("head_dim") or facts.number("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "head_dim": size,
        "max_position_embeddings": facts.number("context_length"),
        kind.eps[0]: shortest(facts.number(kind.eps[1])),
        "rope_theta": shortest(facts.number("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": any(facts.has(name, "bias") for name in [*ATTENTION][: 4 - kind.plain_output]),
    }
    if "intermediate_size" not in own:
        width = "feed_forward_length"
        config["intermediate_size"] = facts.number(width, facts.get("expert_feed_forward_length"))
    if "num_key_value_heads" not in own:
        config["num_key_value_heads"] = facts.number("attention.head_count_kv", heads)
    if "global_head_dim" not in own:
        _refuse_heads(facts, kind, size)
        turned = facts.number("rope.dimension_count", size)
        if not kind.whole_heads and kind.model_type != "gpt2":
            share = turned / size
            config["partial_rotary_factor"] = share if int(size * share) == turned else math.nextafter(share, 1)
        if scaling := _scaling(facts, config):
            config["rope_scaling"] = scaling
            if kind.model_type == "gpt_oss":  # as it was trained; llama.cpp rounds the ends of the blend
                scaling["truncate"] = False
    config |= _tokens_named(metadata) | own
    if unread := [key for key in CHANGES if key not in facts.seen and facts.peek(key)]:
        raise facts.unsupported(unread[0], f"is not supported for this architecture: {facts.peek(unread[0])!r}")
    return config


def _refuse(facts: Facts) -> None:
    """Reject files of other models than text decoders, and incomplete ones."""
    file = facts.file
    if facts.get("attention.causal") is False:
        raise UnsupportedModel(
            f"{file}: is an embedding model: its rows see later tokens ({facts.architecture}.attention.causal is "
            "false), so it does not go on with a text",
            "take a model that writes text; embeddings of it are served, too (/v1/embeddings)",
        )
    if facts.get("pooling_type") == RANK:
        raise UnsupportedModel(
            f"{file}: is a reranker ({facts.architecture}.pooling_type {RANK}): it scores texts and writes none",
            "take a model that writes text",
        )
    if "token_embd.weight" not in facts.tensors:
        raise ExportError(f"{file}: has no tensor token_embd.weight", "give the file of a whole model")


def _refuse_heads(facts: Facts, kind: Kind, size: int) -> None:
    file = facts.file
    if facts.number("attention.value_length", size) != size:
        raise UnsupportedModel(f"{file}: values of another length than keys are not supported", REBUILD)
    turned = facts.number("rope.dimension_count", size)
    if turned > size or ((kind.whole_heads or kind.rows is PAIRS) and turned != size):
        raise UnsupportedModel(f"{file}: rotary positions on a part of the head are not supported", REBUILD)
    for name, usual in (
        ("attention.key_length_swa", size),
        ("attention.value_length_swa", size),
        ("rope.dimension_count_swa", turned),
    ):
        if facts.number(name, usual) != usual:
            raise UnsupportedModel(f"{file}: layers with heads of other sizes ({name}) are not supported", REBUILD)


def _tokens_named(metadata: Metadata) -> dict[str, int]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for key, theirs in named.items()}
    return {key: int(number) for key, number in found.items() if number is not None}


def _scaling(facts: Facts, config: Mapping[str, Any]) -> dict[str, Any] | None:
    if ROPE_FACTORS in facts.tensors:
        factors = facts.tensors[ROPE_FACTORS].read(slice(None), None).astype(np.float64)
        return llama3_scaling(facts.file, factors, config["rope_theta"], config["max_position_embeddings"])
    kind = str(facts.get("rope.scaling.type", "linear"))  # as in llama.cpp, a factor without a type is linear
    factor = float(facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 1.0))) or 1.0
    grown = float(facts.get("rope.scaling.attn_factor", 1.0))  # of scores, in addition to yarn's own factor
    if kind == "longrope" or "rope_factors_long.weight" in facts.tensors:
        return None  # of phi3
    if kind != "yarn" and grown != 1:
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}.rope.scaling.attn_factor {grown:g} is supported for yarn alone, and "
            f"the scaling is {kind}",
            REBUILD,
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": shortest(factor)}
    if (original := facts.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling | (_yarn(facts, factor, grown) if kind == "yarn" else {})


def _yarn(facts: Facts, factor: float, grown: float) -> dict[str, Any]:
    """Return what YaRN needs besides its factor, of whose scores ``grown`` is a further one."""
    scaling: dict[str, Any] = {}
    if grown != 1:
        scaling["attention_factor"] = grown * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    if (times := facts.get("rope.scaling.yarn_attn_factor")) is not None:  # that of config.json
        scaling["attention_factor"] = shortest(times)
    if every := facts.get("rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": shortest(every)}
    if beta := facts.get("attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = shortest(beta)
    for name in ("beta_fast", "beta_slow"):
        if (beta := facts.get(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = shortest(float(beta))
    return scaling


def llama3_scaling(file: Path, factors: NDArray[np.float64], theta: float, context: int) -> dict[str, Any]:
    """Return the llama3 scaling whose factors, one a rotary pair, a file holds instead of its parameters.

    A pair of wavelength w has the factor 1 where w < L / HIGH, ``factor`` where w > L / LOW, and between them
    1 / ((1 - s) / factor + s), s = (L / w - LOW) / (HIGH - LOW); so a pair between them gives L, the original context.

    Raises:
        UnsupportedModel: factors of another kind, such as those of longrope.
    """
    size = 2 * len(factors)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    factor = float(factors.max())
    short, long = wavelengths[factors <= 1 + 1e-4], wavelengths[factors >= factor * (1 - 1e-4)]
    guesses = [8192, context]
    if factor > 1 and len(short) + len(long) < len(factors):
        at = int(np.flatnonzero((factors > 1 + 1e-4) & (factors < factor * (1 - 1e-4)))[0])
        blend = (1 / factors[at] - 1 / factor) / (1 - 1 / factor)
        guesses.insert(0, round(float(wavelengths[at] * (LOW + blend * (HIGH - LOW)))))
    elif factor > 1:  # any boundary between the kept and the slowed frequencies gives the same factors
        least = HIGH * float(short.max()) if len(short) else LOW * float(long.min()) / 2
        guesses.append(round(math.sqrt(least * LOW * float(long.min()))))
    for original in guesses:
        blend = np.clip((original / wavelengths - LOW) / (HIGH - LOW), 0, 1)
        if factor >= 1 and np.allclose(1 / ((1 - blend) / factor + blend), factors, rtol=1e-3):
            found = {"factor": shortest(factor), "low_freq_factor": LOW, "high_freq_factor": HIGH}
            return {"rope_type": "llama3", **found, "original_max_position_embeddings": int(original)}
    raise UnsupportedModel(
        f"{file}: {ROPE_FACTORS} holds factors that are not those of the llama3 scaling ({LOW:g} to {HIGH:g})", REBUILD
    )


BESIDE = "put the model's tokenizer.json beside the file: it is then used instead"
DIGITS = (r"\p{N}", *GPT2)
# how text is cut into words, by llama.cpp's names
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
                     "a.x-4.0", "mellum", "modern-bert"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
                    DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx",
                     "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"), QWEN2),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), GPT4O),
    "tiny_aya": TINY_AYA,
    "seed-coder": SEED,
    "minicpm5": MINICPM5,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
    "deepseek-coder": DEEPSEEK_CODER,
}  # fmt: skip
BEGIN = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""BOS comes before a text, unless the file says otherwise."""
WHOLE = (*BEGIN, "glm4", "glm5", "minicpm5")  # a piece that is a token needs no merges
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35", "megrez")  # characters are composed (NFC) first
UNK = "tokenizer.ggml.unknown_token_id"
PLAIN_BPE = "gemma4"  # llama.cpp's name of SentencePiece BPE whose merges a file holds


def describe_tokenizer(file: Path, metadata: Metadata) -> Described:
    """Return the tokenizer.json of a GGUF file."""
    check_tokenizer(file, metadata)
    tokens, types = _tokens(file, metadata)
    try:
        described = TOKENIZERS[metadata["tokenizer.ggml.model"]](file, metadata, tokens, types)
        # control tokens are special; text that is a user-defined one is never cut
        kept = (CONTROL, UNKNOWN, USER_DEFINED)
        added = {at: (token, its) for at, (token, its) in enumerate(zip(tokens, types, strict=True)) if its in kept}
        place(described, {at: AddedToken(token, its != USER_DEFINED) for at, (token, its) in added.items() if token})
        surround(described, *_ends(metadata, tokens))
    except ExportError:
        raise
    except Exception as error:  # of settings of unexpected types
        raise ExportError(f"{file}: its tokenizer is damaged: {error}", BESIDE) from error
    return described


def check_tokenizer(file: Path, metadata: Metadata) -> None:
    """Refuse a tokenizer that cannot be described, without describing it.

    Raises:
        ExportError: no tokens.
        UnsupportedModel: an unknown kind, or an unknown way to cut a text.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in TOKENIZERS:
        raise UnsupportedModel(
            f"{file}: tokenizer model {kind!r} is not supported; supported: {', '.join(TOKENIZERS)}", BESIDE
        )
    _tokens(file, metadata)
    name = metadata.get("tokenizer.ggml.pre", "default")
    if TOKENIZERS[kind] is _byte_level and name not in SPLITS:
        raise UnsupportedModel(
            f"{file}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {', '.join(SPLITS)}",
            BESIDE,
        )


def tokenizer_bytes(metadata: Metadata) -> int:
    """Estimate the size of the tokenizer.json that ``describe_tokenizer`` would make."""
    return TOKEN_BYTES[metadata["tokenizer.ggml.model"]] * len(metadata["tokenizer.ggml.tokens"])


def tokenizer_settings(metadata: Metadata) -> dict[str, Any]:
    """Return what tokenizer_config.json says."""
    tokens = metadata["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and 0 <= number < len(tokens):
            found[f"{name}_token"] = tokens[number]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        begins = "tokenizer.chat_template."
        more = {key.removeprefix(begins): value for key, value in metadata.items() if key.startswith(begins)}
        named = [{"name": name, "template": each} for name, each in {"default": template, **more}.items()]
        found["chat_template"] = named if more else template
    return found | {"add_bos_token": _begins(metadata)}


def _tokens(file: Path, metadata: Metadata) -> tuple[list[str], list[int]]:
    """Return the tokens by id and their types, without the unused ones at the end, which only fill the embedding."""
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


def _byte_level(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Described:
    name = metadata.get("tokenizer.ggml.pre", "default")
    vocab, pairs = {token: number for number, token in enumerate(tokens)}, _merges(file, metadata)
    return describe_byte_level(vocab, pairs, SPLITS[name], ignore_merges=name in WHOLE, nfc=name in COMPOSED)


def _plain(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Described:
    """Describe a tokenizer whose tokens are text with U+2581 for spaces, with merges, and bytes for what is none."""
    vocab, unknown = {token: number for number, token in enumerate(tokens)}, metadata.get(UNK)
    named = tokens[int(unknown)] if unknown is not None and 0 <= int(unknown) < len(tokens) else None
    space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return tokenizer_json(
        bpe_model(vocab, _merges(file, metadata), unk_token=named, fuse_unk=True, byte_fallback=True),
        normalizer=space,
        words=None,
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    )


def _merges(file: Path, metadata: Metadata) -> list[list[str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ExportError(f"{file}: has no tokenizer.ggml.merges", BESIDE)
    pairs = [[merge[:at], merge[at + 1 :]] for merge in merges if (at := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ExportError(f"{file}: a merge of its tokenizer is not two tokens", "download it again")
    return pairs


def _sentencepiece(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Described:
    gemma, ugm = str(metadata.get("general.architecture")).startswith("gemma"), _is_ugm(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise ExportError(f"{file}: has no tokenizer.ggml.scores for its {len(tokens)} tokens", BESIDE)
    model = new_sentencepiece()
    for at, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=False)):
        if gemma:  # runs of spaces are stored as such, and not the scores but the order of tokens says what is merged
            token, score = SPACE * len(token) if token and not token.strip(" ") else token, -at
        model.pieces.add(piece=token, score=score, type=kind)
    unknown = int(metadata.get(UNK, 2 if ugm else 0))
    model.trainer_spec.model_type = UNIGRAM if ugm else BPE
    model.trainer_spec.byte_fallback = not ugm or BYTE in types
    model.trainer_spec.unk_id = unknown if 0 <= unknown < len(tokens) else 0
    extra = metadata.get("tokenizer.ggml.remove_extra_whitespaces")
    model.normalizer_spec.remove_extra_whitespaces = ugm and bool(extra)
    if ugm:
        model.normalizer_spec.precompiled_charsmap = bytes(metadata.get("tokenizer.ggml.precompiled_charsmap", ()))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return describe_sentencepiece(file, model, {"add_prefix_space": prefix})


def _is_ugm(metadata: Metadata) -> bool:
    return metadata.get("tokenizer.ggml.model") == UGM


def _begins(metadata: Metadata) -> bool:
    own = metadata.get("tokenizer.ggml.model") in ("llama", PLAIN_BPE) or metadata.get("tokenizer.ggml.pre") in BEGIN
    return bool(metadata.get("tokenizer.ggml.add_bos_token", own))


def _ends(metadata: Metadata, tokens: list[str]) -> tuple[str | None, str | None]:
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    ends = metadata.get("tokenizer.ggml.add_eos_token", _is_ugm(metadata))
    return (
        tokens[int(bos)] if bos is not None and _begins(metadata) else None,
        tokens[int(eos)] if eos is not None and ends else None,
    )


TOKENIZERS = {"gpt2": _byte_level, "llama": _sentencepiece, UGM: _sentencepiece, PLAIN_BPE: _plain}
"""Reader of a tokenizer's description, by llama.cpp's name of the tokenizer's kind."""
TOKEN_BYTES = {"gpt2": 75, "llama": 127, UGM: 60, PLAIN_BPE: 127}
"""Bytes of tokenizer.json a token: in those of Qwen 2.5 and Gemma 3, each with its merges; a piece and its score."""
