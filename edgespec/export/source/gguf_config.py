"""The metadata of a GGUF file as config.json and tokenizer.json, and its tensors' names as Hugging Face has them.

Tokenizers are byte-level BPE ("gpt2"), SentencePiece BPE ("llama") and SentencePiece unigram ("t5").
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.gguf_t5 import t5_config, t5_name
from edgespec.export.source.stored import Stored
from edgespec.export.tokenizers.facts import Described, build
from edgespec.export.tokenizers.sentencepieces import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    describe_sentencepiece,
    new_sentencepiece,
)
from edgespec.export.tokenizers.vocabulary import (
    GPT2,
    GPT4O,
    LLAMA3,
    QWEN2,
    TEKKEN,
    AddedToken,
    describe_byte_level,
    place,
    surround,
)

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
MLP = ("ffn_gate", "ffn_up", "ffn_down")
SANDWICH = {  # gemma 2 and 3: norms before and after each sub-layer
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OPENAI_MOE = {  # norms of both sub-layers are named after attention; experts are matrices below each other
    "post_attention_norm": "post_attention_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_down_exps": "mlp.experts.down",
}
SINKS = re.compile(r"blk\.(\d+)\.attn_sinks\.weight")
SANDWICHED = ("gemma2", "gemma3_text")
MIXTURES = ("gpt_oss",)
T5 = ("t5", "umt5")
UGM = "t5"  # llama.cpp's name of unigram tokenizers, whichever model has one
ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the configuration


def hf_name(file: Path, name: str, config: Mapping[str, Any]) -> str | None:
    """Return the Hugging Face name of a tensor; None = it is none of the checkpoint's."""
    if name == ROPE_FACTORS:
        return None
    model_type = str(config["model_type"])
    if model_type in T5 and (known := t5_name(name, config)):
        return known
    layer = LAYER | (SANDWICH if model_type in SANDWICHED else OPENAI_MOE if model_type in MIXTURES else {})
    if model_type in MIXTURES and (match := SINKS.fullmatch(name)):
        return f"model.layers.{match[1]}.self_attn.sinks"
    if (match := re.fullmatch(r"(\w+)\.(weight)", name)) and match[1] in TOP:
        return f"{TOP[match[1]]}.{match[2]}"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and match[2] in layer:
        return f"model.layers.{match[1]}.{layer[match[2]]}.{match[3]}"
    raise UnsupportedModel(
        f"{file}: tensor {name} is unknown for model type {model_type}: the file needs more than this model type has",
        "export from the Hugging Face checkpoint",
    )


Metadata = Mapping[str, Any]
MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "t5": ("t5", "T5ForConditionalGeneration"),
}
"""general.architecture -> model_type and class; mistral is "llama" there, and the same decoder."""
EMBEDDING = ("bert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert",
             "nomic-bert", "nomic-bert-moe", "t5encoder")  # fmt: skip
"""Architectures whose rows see later tokens: they make embeddings, no text."""
RANK = 4  # the pooling of a reranker
LOW, HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every llama3 scaling so far
REBUILD = "export from the Hugging Face checkpoint"


class Facts:
    """The metadata of one architecture, checked when it is read."""

    def __init__(self, file: Path, metadata: Metadata) -> None:
        self.file, self.metadata = file, metadata
        self.architecture = str(metadata.get("general.architecture"))
        if self.architecture not in MODEL_TYPES:
            what = ", an embedding model," if self.architecture in EMBEDDING else ""
            raise UnsupportedModel(
                f"{file}: GGUF architecture {self.architecture!r}{what} is not supported; supported: "
                f"{', '.join(MODEL_TYPES)}",
                REBUILD,
            )

    def get(self, key: str, default: Any = None) -> Any:
        """``ARCHITECTURE.key``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a positive number; the same for all layers, where the file has one for each."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                name = f"{self.architecture}.{key}"
                raise UnsupportedModel(f"{self.file}: {name} differs between layers: {value}", REBUILD)
            value = value[0]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ExportError(
                f"{self.file}: expected a positive number {self.architecture}.{key}, got {value!r}",
                "the file is damaged: download it again",
            )
        return value


def gguf_config(file: Path, metadata: Metadata, tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Return what config.json would say, from the metadata and the tensors under the file's own names.

    Raises:
        UnsupportedModel: an architecture or an option of it that is not supported.
        ExportError: facts that are missing.
    """
    facts = Facts(file, metadata)
    _refuse(facts, tensors)
    model_type, name = MODEL_TYPES[facts.architecture]
    if model_type in T5:
        start = {"decoder_start_token_id": int(facts.get("decoder_start_token_id", 0))}
        return t5_config(facts.number, tensors) | start | _tokens_named(metadata)
    heads, hidden = facts.number("attention.head_count"), facts.number("embedding_length")
    key_length = facts.number("attention.key_length", hidden // heads)
    _refuse_heads(facts, key_length)
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": facts.number(
            "expert_feed_forward_length" if model_type in MIXTURES else "feed_forward_length"
        ),
        "num_hidden_layers": facts.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.number("attention.head_count_kv", heads),
        "head_dim": key_length,
        "max_position_embeddings": facts.number("context_length"),
        "rms_norm_eps": _short(facts.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(facts.number("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    config |= _tokens_named(metadata)
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = any(f"blk.0.{name}.bias" in tensors for name in ATTENTION)
    if model_type == "llama":
        config["mlp_bias"] = any(f"blk.0.{name}.bias" in tensors for name in MLP)
    if scaling := _scaling(facts, tensors, config):
        config["rope_scaling"] = scaling
        if model_type == "gpt_oss":  # as it was trained; llama.cpp rounds the ends of the blend
            scaling["truncate"] = False
    return config | (EXTRA[model_type](facts) if model_type in EXTRA else {})


def _refuse(facts: Facts, tensors: Mapping[str, Stored]) -> None:
    """Reject files of other models than text decoders, and incomplete ones."""
    file = facts.file
    if facts.get("expert_count") and MODEL_TYPES[facts.architecture][0] not in MIXTURES:
        raise UnsupportedModel(f"{file}: a mixture of experts is not supported for {facts.architecture}", REBUILD)
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
    if "token_embd.weight" not in tensors:
        raise ExportError(f"{file}: has no tensor token_embd.weight", "give the file of a whole model")


def _refuse_heads(facts: Facts, key_length: int) -> None:
    """Refuse heads that are not all alike."""
    file = facts.file
    if facts.number("attention.value_length", key_length) != key_length:
        raise UnsupportedModel(f"{file}: values of another length than keys are not supported", REBUILD)
    if facts.number("rope.dimension_count", key_length) != key_length:
        raise UnsupportedModel(f"{file}: rotary positions on a part of the head are not supported", REBUILD)
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        if facts.number(name, key_length) != key_length:
            raise UnsupportedModel(f"{file}: layers with heads of other sizes ({name}) are not supported", REBUILD)
    if facts.get("nextn_predict_layers"):
        raise UnsupportedModel(f"{file}: layers that guess (nextn_predict_layers) are not supported", REBUILD)


def _tokens_named(metadata: Metadata) -> dict[str, int]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for key, theirs in named.items()}
    return {key: int(number) for key, number in found.items() if number is not None}


def _scaling(facts: Facts, tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if ROPE_FACTORS in tensors:
        factors = tensors[ROPE_FACTORS].read(slice(None), None).astype(np.float64)
        return llama3_scaling(facts.file, factors, config["rope_theta"], config["max_position_embeddings"])
    kind = str(facts.get("rope.scaling.type", "linear"))  # as in llama.cpp, a factor without a type is linear
    factor = float(facts.get("rope.scaling.factor", facts.get("rope.scale_linear", 1.0))) or 1.0
    grown = float(facts.get("rope.scaling.attn_factor", 1.0))  # of scores, in addition to yarn's own factor
    if kind != "yarn" and grown != 1:
        raise UnsupportedModel(
            f"{facts.file}: {facts.architecture}.rope.scaling.attn_factor {grown:g} is supported for yarn alone, and "
            f"the scaling is {kind}",
            REBUILD,
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _short(factor)}
    if (original := facts.get("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = int(original)
    if kind == "yarn":
        if grown != 1:
            scaling["attention_factor"] = grown * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
        for name in ("beta_fast", "beta_slow"):
            if (beta := facts.get(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = _short(float(beta))
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
            found = {"factor": _short(factor), "low_freq_factor": LOW, "high_freq_factor": HIGH}
            return {"rope_type": "llama3", **found, "original_max_position_embeddings": int(original)}
    raise UnsupportedModel(
        f"{file}: {ROPE_FACTORS} holds factors that are not those of the llama3 scaling ({LOW:g} to {HIGH:g})", REBUILD
    )


def _gemma(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(facts: Facts) -> dict[str, Any]:
    heads, large = facts.number("attention.head_count"), facts.number("block_count") == 46
    for key, usual in (
        ("attention.sliding_window_pattern", 2),
        ("rope.freq_base_swa", facts.get("rope.freq_base", 1e4)),
    ):
        if facts.get(key, usual) != usual:
            raise UnsupportedModel(f"{facts.file}: gemma2.{key} other than {usual} is not supported", REBUILD)
    query = facts.number("embedding_length") // heads if large else facts.number("attention.key_length", 256)
    return _gemma(facts) | {  # only the 27B model scales queries by another size than the head's
        "query_pre_attn_scalar": query,
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "sliding_window": int(facts.number("attention.sliding_window", 4096)),
    }


def _gemma3(facts: Facts) -> dict[str, Any]:
    heads, large = facts.number("attention.head_count"), facts.number("block_count") == 62
    query = facts.number("embedding_length") // heads if large else facts.number("attention.key_length", 256)
    pattern, window = facts.get("attention.sliding_window_pattern", 6), int(facts.get("attention.sliding_window") or 0)
    if not window:
        local: dict[str, Any] = {"layer_types": ["full_attention"] * facts.number("block_count")}
    elif isinstance(pattern, list):  # whether each layer has a window
        local = {"layer_types": [f"{'sliding' if slides else 'full'}_attention" for slides in pattern]}
    else:
        local = {"sliding_window_pattern": int(pattern)}
    return _gemma(facts) | {
        "query_pre_attn_scalar": query,
        "attn_logit_softcapping": facts.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": facts.get("final_logit_softcapping") or None,
        "sliding_window": window or None,
        "rope_local_base_freq": _short(facts.number("rope.freq_base_swa", 10000.0)),
        **local,
    }


def _gpt_oss(facts: Facts) -> dict[str, Any]:
    if facts.get("attention.sliding_window_pattern", 2) != 2:
        raise UnsupportedModel(f"{facts.file}: a sliding_window_pattern other than 2 is not supported", REBUILD)
    theta = _short(facts.number("rope.freq_base", 10000.0))
    return {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # unless there is a scaling
        "num_local_experts": facts.number("expert_count"),
        "num_experts_per_tok": facts.number("expert_used_count"),
        "sliding_window": facts.number("attention.sliding_window"),
    }


EXTRA: dict[str, Callable[[Facts], dict[str, Any]]] = {
    "gemma": _gemma, "gemma2": _gemma2, "gemma3_text": _gemma3, "gpt_oss": _gpt_oss,
}  # fmt: skip


def _short(value: float) -> float:
    """Return the float32 of a file as the shortest decimal number that means it."""
    return float(str(np.float32(value)))


BESIDE = "put the model's tokenizer.json beside the file: it is then used instead"
# how text is cut into words, by llama.cpp's names
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": GPT2,
    "smollm": (r"\p{N}", *GPT2),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
    "gpt-4o": GPT4O,
}
WHOLE = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a piece that is a token needs no merges
BEGIN = ("llama-bpe", "llama3", "llama-v3", "tekken")  # BOS, unless the file says otherwise


def describe_tokenizer(file: Path, metadata: Metadata) -> Described:
    """Return the tokenizer.json of a GGUF file."""
    check_tokenizer(file, metadata)
    tokens, types = _tokens(file, metadata)
    try:
        described = KINDS[metadata["tokenizer.ggml.model"]](file, metadata, tokens, types)
        # control tokens are special; text that is a user-defined one is never cut
        kept = (CONTROL, UNKNOWN, USER_DEFINED)
        added = {at: (token, its) for at, (token, its) in enumerate(zip(tokens, types, strict=True)) if its in kept}
        place(described, {at: AddedToken(token, its != USER_DEFINED) for at, (token, its) in added.items() if token})
        surround(described, *_ends(metadata, tokens))
        build(described, file)
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
    if kind not in KINDS:
        raise UnsupportedModel(
            f"{file}: tokenizer model {kind!r} is not supported; supported: {', '.join(KINDS)}", BESIDE
        )
    _tokens(file, metadata)
    name = metadata.get("tokenizer.ggml.pre", "default")
    if KINDS[kind] is _byte_level and name not in SPLITS:
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
    vocab, merges = {token: number for number, token in enumerate(tokens)}, metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ExportError(f"{file}: has no tokenizer.ggml.merges", BESIDE)
    pairs = [[merge[:at], merge[at + 1 :]] for merge in merges if (at := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise ExportError(f"{file}: a merge of its tokenizer is not two tokens", "download it again")
    return describe_byte_level(vocab, pairs, SPLITS[name], ignore_merges=name in WHOLE)


def _sentencepiece(file: Path, metadata: Metadata, tokens: list[str], types: list[int]) -> Described:
    gemma, ugm = str(metadata.get("general.architecture")).startswith("gemma"), _is_ugm(metadata)
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise ExportError(f"{file}: has no tokenizer.ggml.scores for its {len(tokens)} tokens", BESIDE)
    model = new_sentencepiece()
    for at, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=False)):
        if gemma:  # runs of spaces are stored as such, and not the scores but the order of tokens says what is merged
            token, score = "\u2581" * len(token) if token and not token.strip(" ") else token, -at
        model.pieces.add(piece=token, score=score, type=kind)
    unknown = int(metadata.get("tokenizer.ggml.unknown_token_id", 2 if ugm else 0))
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
    own = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in BEGIN
    return bool(metadata.get("tokenizer.ggml.add_bos_token", own))


def _ends(metadata: Metadata, tokens: list[str]) -> tuple[str | None, str | None]:
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    ends = metadata.get("tokenizer.ggml.add_eos_token", _is_ugm(metadata))
    return (
        tokens[int(bos)] if bos is not None and _begins(metadata) else None,
        tokens[int(eos)] if eos is not None and ends else None,
    )


KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, UGM: _sentencepiece}
"""Reader of a tokenizer's description, by llama.cpp's name of the tokenizer's kind."""
TOKEN_BYTES = {"gpt2": 75, "llama": 127, UGM: 60}
"""Bytes of tokenizer.json a token: in those of Qwen 2.5 and Gemma 3, each with its merges; a piece and its score."""
