"""Small Hugging Face checkpoint folders, made without torch.

`write_checkpoint` writes config.json, generation_config.json, the weights as one
safetensors file or as shards with an index, tokenizer.json and tokenizer_config.json. The weights are a function of
only the configuration, the seed and the scale, so a test can compare an export of the folder it has just written with
the logits transformers computed from the same folder elsewhere (tests/data/reference, made by
tools/make_reference_logits.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.support import saved
from tests.support.zoo import BOS as BOS
from tests.support.zoo import CASES, SCALE
from tests.support.zoo import CORE as _CORE
from tests.support.zoo import EOS as EOS
from tests.support.zoo import MAX_POSITIONS as MAX_POSITIONS
from tests.support.zoo import Config as Config
from tests.support.zoo import DType as DType

NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""A chat template for tests that want one: `role: content` lines."""

CORE: dict[str, Config] = {name: case.config for name, case in _CORE.items()}
CONFIGS: dict[str, Config] = {name: case.config for name, case in CASES.items()}
"""Every configuration with reference logits; ``CORE`` stands for all where a test is not about architectures."""
SEEDS = {name: case.seed for name, case in CASES.items()}
DTYPES = {name: case.dtype for name, case in CASES.items()}
CONTEXTS = {name: case.context for name, case in CASES.items() if case.context}
"""The context of an export, if it is not the model's own limit."""
_NATIVE_ONLY = ("gemma4_text", "gpt_oss", "granitemoe", "lfm2", "lfm2_moe", "lfm3", "mellum", "olmo_hybrid", "olmoe",
                "granite_swa", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next")  # fmt: skip
NATIVE_ONLY = {
    name
    for name, config in CONFIGS.items()
    if config["model_type"] in _NATIVE_ONLY or "mamba" in config.get("layer_types", [])
}
"""Configurations with layers that stock operators cannot compute."""
LONG = [name for name, case in CASES.items() if case.long]
"""Configurations whose reference reaches far positions."""


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Give the tensors of a checkpoint under their Hugging Face names, in the order of the network."""
    name = next((name for name in CONFIGS if CONFIGS[name] is config), None)
    if name is not None and name not in CORE:
        return {tensor: tuple(shape) for tensor, shape in saved.kept(name, "memory").items()}
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if config["model_type"] == "llama":
        bias_qkv = bias_o = bool(config.get("attention_bias", False))
        bias_mlp = bool(config.get("mlp_bias", False))
    elif config["model_type"] == "qwen2":
        bias_qkv, bias_o, bias_mlp = True, False, False
    else:
        raise ValueError(f"no checkpoint layout for model_type {config['model_type']!r}")
    linears = (  # name, rows (outputs), columns (inputs), has a bias
        ("self_attn.q_proj", heads * head_dim, hidden, bias_qkv),
        ("self_attn.k_proj", key_heads * head_dim, hidden, bias_qkv),
        ("self_attn.v_proj", key_heads * head_dim, hidden, bias_qkv),
        ("self_attn.o_proj", hidden, heads * head_dim, bias_o),
        ("mlp.gate_proj", inner, hidden, bias_mlp),
        ("mlp.up_proj", inner, hidden, bias_mlp),
        ("mlp.down_proj", hidden, inner, bias_mlp),
    )
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found[prefix + "input_layernorm.weight"] = (hidden,)
        found[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, has_bias in linears:
            found[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                found[f"{prefix}{name}.bias"] = (rows,)
    found["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (vocab, hidden)
    return found


def weights(config: Config, seed: int, scale: float = SCALE, boost: float = 1.0) -> dict[str, np.ndarray]:
    """Give the float32 weights of a seeded model whose logits have a standard deviation of about `scale`.

    Queries and keys are large enough for attention to prefer some positions to others, and what the layers add to the
    residual stream outweighs the embedding, so that the next token depends on more than the current one; ``boost``
    makes it larger.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    # norms of these multiply by 1 + weight
    by_offset = (
        config["model_type"].startswith(("gemma", "qwen3_5", "qwen3_next")) and config["model_type"] != "gemma4_text"
    )
    offset = 0.0 if by_offset else 1.0
    made: dict[str, np.ndarray] = {}
    for name, shape in shapes(config).items():
        noise = generator.standard_normal(shape)
        module, kind = name.split(".")[-2:]
        if module == "act_fn":
            values = {"beta": 0.5, "eps": -1e-6}.get(kind, 0.3 + 0.5 * noise) * np.ones(shape)
        elif len(shape) == 3 and "conv" not in module:  # matrices of all experts
            values = (2.5 if "down" in kind or "output" in module else 1.0) * boost / math.sqrt(shape[2]) * noise
        elif kind in _OTHERS:  # of all experts some gates are above the clamp of gpt_oss
            middle, spread = _OTHERS[kind]
            values = middle + spread * noise
        elif module in ("linear_attn", "mamba"):  # A_log, D and dt_bias: states that are forgotten slowly
            values = 0.7 * noise - (2.0 if kind == "A_log" else 0.0)
        elif "norm" in module or module.startswith("ln_"):
            values = ("linear_attn" in name or offset) + 0.15 * noise + (boost - 1 if module in _POST_NORMS else 0)
        elif module in _OUTER:
            values = scale / math.sqrt(shape[1]) * noise
        else:
            inputs = shape[0] if config["model_type"] == "gpt2" else shape[1]
            values = _GAINS.get(module, 1.0) * (boost if module in _ENDS else 1) / math.sqrt(inputs) * noise
        made[name] = np.asarray(values, np.float32)
    return made


_OTHERS = {
    "gate_up_proj_bias": (0.0, 3.0), "down_proj_bias": (0.0, 0.3), "sinks": (1.0, 1.0), "scale": (8.0, 1.2),
    "per_expert_scale": (1.0, 0.15), "expert_bias": (0.0, 0.2), "layer_scalar": (0.8, 0.1), "bias": (0.0, 0.3),
}  # fmt: skip
"""Middles and spreads of what is no matrix, by the end of its name."""
_OUTER = ("embed_tokens", "embed_tokens_per_layer", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
_POST_NORMS = tuple(f"post_{name}" for name in ("attention_layernorm", "feedforward_layernorm", "self_attn_layernorm",
                                                    "mlp_layernorm", "operator_norm", "ffn_norm"))  # fmt: skip
_ENDS = ("o_proj", "dense", "down_proj", "c_proj", "dense_4h_to_h", "fc2", "output_linear", "out_proj", "w2")
_GAINS = {
    **dict.fromkeys(("q_proj", "k_proj", "qkv_proj", "c_attn", "query_key_value"), 1.4),
    **dict.fromkeys(("o_proj", "dense"), 1.5),
    **dict.fromkeys(("down_proj", "c_proj", "dense_4h_to_h", "fc2", "output_linear", "out_proj", "w2"), 2.0),
}


def write_checkpoint(
    folder: Path | str,
    config: Config,
    seed: int,
    dtype: DType = "float32",
    shards: int = 1,
    chat_template: str | None = None,
    saved_as: str | None = None,
    **how: float,
) -> Path:
    """Write a checkpoint folder and return it.

    `dtype` is how the weights are stored; `weights` (``how``: `scale`, `boost`), rounded to it, are what files hold.
    `saved_as`: the name in ``CONFIGS`` whose files are to be named and configured as transformers saves them; None = as
    the configuration says, with tensors named as in memory.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    like = next(name for name, one in CONFIGS.items() if one["model_type"] == config["model_type"])
    architectures = saved.saved(like)["config"]["architectures"]
    # transformers 5 writes rope_parameters and dtype where transformers 4 wrote rope_theta and torch_dtype.
    dtype_key = "dtype" if "rope_parameters" in config else "torch_dtype"
    described: Config = {"architectures": architectures, dtype_key: dtype, **config}
    special: Config = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    generation: Config = {"_from_model_config": True, **special}
    stored = {name: np.asarray(array, NUMPY_DTYPES[dtype]) for name, array in weights(config, seed, **how).items()}
    if saved_as is not None:
        kept = saved.saved(saved_as)
        described, generation = kept["config"], kept["generation_config"]
        stored = saved.saved_tensors(saved_as, stored)
    _write_json(folder / "config.json", described)
    _write_json(folder / "generation_config.json", generation)
    _write_weights(folder, stored, shards)
    write_tokenizer(folder, config, chat_template)
    return folder


def write_reference_checkpoint(folder: Path | str, name: str, shards: int = 1, in_memory: bool = False) -> Path:
    """Write the checkpoint that the reference of ``name`` was computed from, as transformers saves it.

    `in_memory`: with the names that its tensors have in memory, and with the configuration as it is written here: as
    other versions of transformers, and other programs, save it.
    """
    saved_as = None if in_memory else name
    case = CASES[name]
    return write_checkpoint(folder, case.config, case.seed, dtype=case.dtype, shards=shards, scale=case.scale,
                            boost=case.boost, saved_as=saved_as)  # fmt: skip


def make_tokenizer(vocab_size: int, add_bos: bool) -> Tokenizer:
    """Make a byte-level BPE tokenizer of at most `vocab_size` tokens: `<s>` is 0, `</s>` is 1.

    A vocabulary below 258 has no room for every byte: it then knows printable ASCII, the space and the newline, and
    drops the rest.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 2:
        alphabet = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]  # the byte-level names of " " and "\n"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<s>", "</s>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
        )
    return tokenizer


def write_tokenizer(folder: Path, config: Config, chat_template: str | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json. As in the wild, llama puts `<s>` in front and qwen2 does not."""
    add_bos = config["model_type"] == "llama"
    make_tokenizer(config["vocab_size"], add_bos).save(str(folder / "tokenizer.json"))
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": add_bos,
        "model_max_length": config.get("max_position_embeddings", MAX_POSITIONS),
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        described["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", described)


def _write_weights(folder: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    """One model.safetensors, or `shards` files of about one size with model.safetensors.index.json."""
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot make {shards} shards")
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return
    total = sum(array.nbytes for array in tensors.values())
    parts: list[dict[str, np.ndarray]] = [{}]
    written = 0
    for left, (name, array) in zip(range(len(tensors), 0, -1), tensors.items(), strict=True):
        shards_left = shards - len(parts)
        if parts[-1] and shards_left and (written >= total * len(parts) / shards or left <= shards_left):
            parts.append({})
        parts[-1][name] = array
        written += array.nbytes
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        save_file(part, folder / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Config) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


_TEXT = """\
The harbour lights came on one after another while the ferry was still far out on the water.
On the quay the men who mend the nets had put their needles away, and the children who had been
throwing stones at the buoys were called home. There was nothing left to do but wait.
"How long will it be?" asked the girl with the lantern. "As long as it takes," said the old man,
and he told her the story of the boat that came home without its crew, in 1873, with 12 lamps lit.
She had heard it before. She listened all the same, as the tide came in, as the wind went down,
and when the ferry's horn was heard at last they both stood up and walked to the end of the pier.
"""
