"""GGUF files of the small configurations, as llama.cpp's converter writes them from a Hugging Face checkpoint.

Names are those of the package gguf.  What the converter does to numbers, and which metadata it writes, is written here
once more from its description (llama.cpp's folder conversion); ``convert`` runs the converter itself.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from tests.support import hf, saved, spm
from tests.support.gguf_files import add_byte_level, interleaved, rope_factors
from tests.support.zoo import CASES

SOURCES = "EDGESPEC_LLAMA_CPP_SOURCES"  # names the folder with llama.cpp's sources
Array = NDArray[np.float32]
Config = dict[str, Any]


class Variant(NamedTuple):
    """A configuration of the tests with changes: mixtures of experts in all layers, as the converter needs them."""

    of: str  # a name of ``hf.CONFIGS``
    changes: Config  # of config.json
    copied: tuple[int, int]  # the layer whose MLP replaces that of another, and the other


VARIANTS = {
    "qwen3_moe_sparse": Variant("qwen3_moe_dense", {"mlp_only_layers": []}, (0, 1)),
    "qwen3_next_sparse": Variant("qwen3_next_dense", {"mlp_only_layers": []}, (0, 1)),
    "mellum_sparse": Variant("mellum_windows", {"mlp_layer_types": ["sparse"] * 4}, (1, 0)),
}
ARCHITECTURES = {
    "llama_untied_mha_llama3_legacy": "llama", "llama_biases_mqa": "llama", "qwen2_untied": "qwen2",
    "qwen3_tied": "qwen3", "gemma_mqa": "gemma", "gemma2_caps": "gemma2", "gemma3_new": "gemma3",
    "qwen2_moe_normed": "qwen2moe", "qwen3_5_delta": "qwen35", "qwen3_5_biases": "qwen35",
    "qwen3_5_moe_shared": "qwen35moe", "gemma4_shared": "gemma4", "gemma4_experts": "gemma4",
    "ministral3_growth": "mistral3", "phi3_long": "phi3", "phi3_short_partial": "phi3", "granite_tied": "granite",
    "granite_biases": "granite", "granitemoe_untied": "granitemoe", "granitemoe_small": "granitemoe",
    "granite_hybrid_dense": "granitehybrid", "granite_hybrid_experts": "granitehybrid",
    "granite_swa_default": "granite_swa", "granite_swa_nope": "granite_swa", "smollm3_interval": "smollm3",
    "olmo2_mha": "olmo2", "olmo2_gqa_tied": "olmo2", "olmo3_yarn": "olmo2", "olmo3_layer_types": "olmo2",
    "olmoe_eight": "olmoe", "lfm2_conv": "lfm2", "lfm2_biases": "lfm2", "lfm2_moe_bias": "lfm2moe",
    "glm_no_bias": "chatglm", "glm4_half": "glm4", "glm4_no_bias": "glm4", "exaone4_pattern": "exaone4",
    "exaone4_global": "exaone4", "starcoder2_window": "starcoder2", "starcoder2_no_bias": "starcoder2",
    "stablelm_quarter": "stablelm", "stablelm_parallel": "stablelm", "cohere_tied": "command-r",
    "cohere2_pattern": "cohere2", "gpt2_default": "gpt2", "gpt_neox_parallel": "gptneox", "falcon_7b": "falcon",
    "falcon_40b": "falcon", "phi_half": "phi2", "hunyuan_biases": "hunyuan-dense", "ernie4_5_tied": "ernie4_5",
    "seed_oss_default": "seed_oss", "seed_oss_biases": "seed_oss", "apertus_llama3": "apertus",
    "qwen3_moe_sparse": "qwen3moe", "qwen3_next_sparse": "qwen3next", "mellum_sparse": "mellum",
}  # fmt: skip
"""Configurations that a GGUF file can say, with its architecture: llama.cpp has no key for the quirks of others."""
LIKE = {"granite_swa": "granite", "mellum": "qwen3moe"}
"""Architectures that some versions of the package gguf do not know, by one with the same names."""


UNSAID: dict[str, Config] = {
    "qwen2_moe_normed": {"norm_topk_prob": False},
    "gemma3_new": {"layer_types": ["sliding_attention"] * 3},
    "glm_no_bias": {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
    "gpt_neox_serial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "granite_hybrid_experts": {"position_embedding_type": "nope"},
    "lfm2_moe_bias": {"routed_scaling_factor": 1.0},
    "stablelm_parallel": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "starcoder2_window": {"sliding_window": None},
}
"""Settings that the converter does not write: the graphs of llama.cpp take them for granted."""


def config_of(name: str) -> Config:
    """Return the config.json of a checkpoint, as transformers saves it, without what a GGUF file cannot say."""
    if name in VARIANTS:
        return {**saved.saved(VARIANTS[name].of)["config"], **VARIANTS[name].changes}
    config = dict(hf.CONFIGS[name] if name in hf.CORE else saved.saved(name)["config"])
    config |= UNSAID.get(name, {})
    if name.startswith(("gemma2", "gemma3")):  # of llama.cpp's graph, except for the largest models
        config["query_pre_attn_scalar"] = config["head_dim"]
    if config["model_type"] == "granite_swa" and config.get("layer_rope_theta"):
        config["layer_rope_theta"] = [1e4 * bool(base) for base in config["layer_rope_theta"]]
    if name.startswith("phi3"):  # computed by the converter
        config["rope_parameters"] = {k: v for k, v in config["rope_parameters"].items() if k != "attention_factor"}
    return config


@cache
def tensors_of(name: str) -> dict[str, Array]:
    """Return the tensors of a checkpoint as transformers saves them."""
    variant = VARIANTS.get(name)
    base = variant.of if variant else name
    one = CASES[base]
    made = hf.weights(one.config, one.seed, scale=one.scale, boost=one.boost)
    found = made if base in hf.CORE else saved.saved_tensors(base, made)
    if variant is None:
        return found
    source, target = (f"model.layers.{layer}.mlp." for layer in variant.copied)
    kept = {key: value for key, value in found.items() if not key.startswith(target)}
    return kept | {key.replace(source, target): value for key, value in kept.items() if key.startswith(source)}


def write_source(folder: Path, name: str) -> Path:
    """Write the checkpoint of a file, in float32."""
    base = VARIANTS[name].of if name in VARIANTS else name
    hf.write_reference_checkpoint(folder, base)
    architectures = json.loads((folder / "config.json").read_text("utf-8"))["architectures"]
    config = {"architectures": architectures, **config_of(name)}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file({key: np.ascontiguousarray(value) for key, value in tensors_of(name).items()},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    return folder


# -- the converter ----------------------------------------------------------------------------------------------------


PIECES = ("gemma", "gemma2", "gemma3_text", "phi3", "qwen2", "ernie4_5")
"""Model types of which the converter reads, or prefers, a tokenizer.model."""
UNGUESSED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Model types that are published with layers that guess; the converter is told that there are none."""


def _write_vocabulary(folder: Path, model_type: str, size: int) -> None:
    """Write the kind of tokenizer that a model type is published with, of at most ``size`` tokens."""
    if model_type in PIECES:
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for line in spm.sentences() if line.isascii()]),
            model_writer=written,
            vocab_size=128,
            minloglevel=2,
        )
        (folder / "tokenizer.model").write_bytes(written.getvalue())
    if model_type == "gemma4_text":
        tokens = ["<s>", "</s>", "<unk>", "\u2581", *map(chr, range(0x21, 0x7F)), "th"]
        tokens += [f"<unused{at}>" for at in range(size - len(tokens))]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        made = Tokenizer(models.BPE(vocabulary, [("t", "h")], unk_token="<unk>", byte_fallback=True))
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        made = hf.make_tokenizer(128, False)  # transformers adds tokens of its own to some
        made.add_special_tokens(["<|endoftext|>", "<|user|>"])  # the converter looks these two up for GLM
    made.save(str(folder / "tokenizer.json"))


def convert(sources: Path, name: str, out: Path, kind: str = "f32") -> Path:
    """Convert a checkpoint -> a .gguf file; its source is next to it, in a folder of that name without the end."""
    folder = write_source(out.with_suffix(""), name)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    # what authors publish, but transformers does not save
    spaces = [
        "mamba" if each in ("mamba", "linear_attention") else "attention" for each in config.get("layer_types") or []
    ]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        config["num_kv_heads"] = 1
    bases: list[float] = config.get("layer_rope_theta") or []
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    more = {
        "cohere2": {"rotary_pct": 1.0},
        "falcon": {"num_kv_heads": config.get("num_kv_heads")},
        "gpt2": {"n_ctx": config.get("n_positions")},
        "gpt_neox": {"rotary_pct": rope.get("partial_rotary_factor")},
        "granite_swa": {"no_rope_layers": [int(base > 0) for base in bases]},
        "granitemoehybrid": {"layer_types": spaces},
        "llama": {"num_key_value_heads": config.get("num_key_value_heads") or config.get("num_attention_heads")},
    }
    with tempfile.TemporaryDirectory() as view:
        model = Path(view) / folder.name
        shutil.copytree(folder, model)
        published = config | more.get(config["model_type"], {})
        (model / "config.json").write_text(json.dumps(published), "utf-8")
        _write_vocabulary(model, config["model_type"], config["vocab_size"])
        command = [sys.executable, "-m", "tests.support.llama_convert", str(sources), str(model), str(out), kind]
        command += ["--no-mtp"] * (config["model_type"] in UNGUESSED)
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, f"{name}: {ran.stderr[-2000:]}"
    return out


# -- the same, without it ---------------------------------------------------------------------------------------------


def metadata_of(name: str) -> dict[str, Any]:
    """Return a file's metadata without the architecture's name before each key."""
    config, kind = config_of(name), ARCHITECTURES[name]
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    size = config.get("head_dim") or hidden // heads
    share = full.get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)))
    found: dict[str, Any] = {
        "block_count": layers,
        "context_length": config.get("max_position_embeddings") or config.get("n_positions") or 2048,
        "embedding_length": hidden,
        "feed_forward_length": config.get("intermediate_size") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or config.get("num_kv_heads") or heads,
        "rope.freq_base": float(full.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "rope.dimension_count": int(size * share),
    }
    if kind == "falcon":
        found["attention.head_count_kv"] = config.get("num_kv_heads") if config["new_decoder_architecture"] else 1
        found["feed_forward_length"] = 4 * hidden
    for key, theirs in (
        ("attention.layer_norm_rms_epsilon", ("rms_norm_eps", "norm_eps")),
        ("attention.layer_norm_epsilon", ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
    ):
        if (value := next((config[one] for one in theirs if one in config), None)) is not None:
            found[key] = float(value)
    if "attention.layer_norm_epsilon" not in found and "attention.layer_norm_rms_epsilon" not in found:
        found["attention.layer_norm_rms_epsilon"] = found["attention.layer_norm_epsilon"] = 1e-5
    if config.get("head_dim") and kind not in ("granite", "granitemoe", "granitehybrid"):
        found |= {"attention.key_length": size, "attention.value_length": size}
    if full.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(full["factor"]),
            "rope.scaling.original_context_length": full["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(full.get("beta_fast") or 32.0),
            "rope.scaling.yarn_beta_slow": float(full.get("beta_slow") or 1.0),
        }
    kinds = config.get("layer_types") or []
    if config.get("sliding_window") and kind not in (
        "qwen2",
        "llama",
        "smollm3",
        "mistral3",
        "gemma",
        "gemma4",
        "lfm2",
    ):
        found["attention.sliding_window"] = config["sliding_window"]
        if kinds and kind not in ("gemma2", "cohere2", "phi3", "starcoder2"):
            found["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in kinds]
    if count := config.get("num_local_experts") or (kind != "llama" and config.get("num_experts")):
        found |= {"expert_count": count, "expert_used_count": config.get("num_experts_per_tok") or 1}
    if inner := config.get("moe_intermediate_size"):
        found["expert_feed_forward_length"] = inner
    if inner := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
        found["expert_shared_feed_forward_length"] = inner
    return found | _more(kind, name, config, rope, layers)


def _more(kind: str, name: str, config: Config, rope: Config, layers: int) -> dict[str, Any]:
    """Return the metadata of one architecture."""
    kinds, found = config.get("layer_types") or [], dict[str, Any]()
    if kind.startswith("granite"):
        names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
                 "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip
        found |= {key: float(config[theirs]) for key, theirs in names.items()}
    if kind == "granite_swa" and config.get("layer_rope_theta"):
        found["attention.rope_pattern"] = [bool(base) for base in config["layer_rope_theta"]]
    if kind == "granitehybrid":
        found |= {
            "attention.head_count_kv": [
                config["num_key_value_heads"] * each.endswith("attention") * (each[0] != "l") for each in kinds
            ],
            "ssm.conv_kernel": config["mamba_d_conv"],
            "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
            "ssm.time_step_rank": config["mamba_n_heads"],
            "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        }
    if kind.startswith(("qwen35", "qwen3next")):
        found |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
            "attention.recurrent_layers": [each == "linear_attention" for each in kinds],
            "rope.dimension_sections": [11, 11, 10, 0],
        }
    return found | _others(kind, name, config, rope, layers)


def _others(kind: str, name: str, config: Config, rope: Config, layers: int) -> dict[str, Any]:
    kinds, found = config.get("layer_types") or [], dict[str, Any]()
    if kind.startswith("lfm2"):
        found["attention.head_count_kv"] = [config["num_key_value_heads"] * (each != "conv") for each in kinds]
        found["shortconv.l_cache"] = config["conv_L_cache"]
    if kind == "lfm2":
        found["feed_forward_length"] = tensors_of(name)["model.layers.0.feed_forward.w1.weight"].shape[0]
    if kind == "lfm2moe":
        found |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
        found["expert_weights_scale"] = float(config["routed_scaling_factor"])
    if kind in ("command-r", "cohere2"):
        found |= {"logit_scale": float(config["logit_scale"]), "rope.scaling.type": "none"}
    if kind == "mistral3":
        found["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
        found["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if kind in ("gemma3", "mellum"):
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if kind == "gemma2":
        found |= {f"{key}_logit_softcapping": float(config[f"{key}_logit_softcapping"]) for key in ("attn", "final")}
    if kind == "gemma4":
        found |= _gemma4(config, rope, layers)
    if kind == "phi3":
        grown = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        trained = config["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = trained
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(grown) / np.log(trained)))
        found["attention.sliding_window"] = config.get("sliding_window") or 0
    return found


def _gemma4(config: Config, rope: Config, layers: int) -> dict[str, Any]:
    slides = [each == "sliding_attention" for each in config["layer_types"]]
    every = config.get("per_layer_config") or {}
    own = next((one for one in every.values() if isinstance(one, dict)), {})
    wide = config.get("global_head_dim") or own["head_dim"]
    some = config.get("num_global_key_value_heads") or own.get("num_key_value_heads")
    shared, inner = config.get("num_kv_shared_layers") or 0, config["intermediate_size"]
    found: dict[str, Any] = {
        "attention.key_length": wide, "attention.value_length": wide, "rope.dimension_count": wide,
        "attention.key_length_swa": config["head_dim"], "attention.value_length_swa": config["head_dim"],
        "rope.dimension_count_swa": config["head_dim"], "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": slides,
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "final_logit_softcapping": float(config.get("final_logit_softcapping") or 0),
    }  # fmt: skip
    if config.get("use_double_wide_mlp"):
        found["feed_forward_length"] = [inner * (1 + (layer >= layers - shared)) for layer in range(layers)]
    if some:
        found["attention.head_count_kv"] = [config["num_key_value_heads"] if one else some for one in slides]
    if config.get("enable_moe_block"):
        found["expert_used_count"] = config["top_k_experts"]
    return found


EXPERT = re.compile(r"(.*experts\.)(\d+)\.(.*)")
ENDS = {".expert_bias": ".bias", ".sinks": ".weight", ".layer_scalar": ".weight"}


def tensors_in(name: str) -> dict[str, Array]:
    """Return a file's tensors by its names."""
    kind, config, tensors = ARCHITECTURES[name], config_of(name), dict(tensors_of(name))
    grouped: dict[str, dict[int, Array]] = {}
    for key in [key for key in tensors if EXPERT.fullmatch(key)]:
        start, number, rest = EXPERT.fullmatch(key).groups()  # type: ignore[union-attr]
        grouped.setdefault(start + rest, {})[int(number)] = tensors.pop(key)
    tensors |= {key: np.stack([values[at] for at in sorted(values)]) for key, values in grouped.items()}
    names = gguf.get_tensor_name_map(
        next(arch for arch, own in gguf.MODEL_ARCH_NAMES.items() if own == LIKE.get(kind, kind)), 16
    )
    found: dict[str, Array] = {}
    for key, value in tensors.items():
        for its, part in _changed(kind, config, key, value):
            layer = re.search(r"\.(\d+)\.", its)
            if its.startswith("blk."):
                found[its] = part
            elif kind == "granite_swa" and its.endswith("sinks.weight") and layer:
                found[f"blk.{layer[1]}.attn_sinks.weight"] = part
            else:
                known = names.get_name(its, try_suffixes=(".weight", ".bias"))
                assert known, its
                found[known] = part
    if (factors := rope_factors({"head_dim": config.get("head_dim") or 16, **config})) is not None:
        found["rope_freqs.weight"] = factors
    if kind == "gemma4":
        wide = next(
            value
            for key, value in found.items()
            if key.endswith("attn_q_norm.weight") and len(value) > config["head_dim"]
        )
        turned = int(len(wide) * config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1.0) / 2)
        found["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (len(wide) // 2 - turned), np.float32)
    if kind == "phi3":
        for each in ("short", "long"):
            found[f"rope_factors_{each}.weight"] = np.array(config["rope_parameters"][f"{each}_factor"], np.float32)
    return found


PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid", "granite_swa", "smollm3", "mistral3")
OFFSET = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")


def _changed(kind: str, config: Config, key: str, value: Array) -> Iterator[tuple[str, Array]]:
    """Return what the converter makes of one tensor, by Hugging Face's names or by those of the file."""
    if "act_fn" in key:
        return
    value = _numbers(kind, config, key, value)
    for own, end in ENDS.items():
        key += end if key.endswith(own) else ""
    key = key.replace(".dt_bias", ".dt_proj.bias")
    layer = (re.search(r"\.(\d+)\.", key) or ["", ""])[1]
    mixed = config.get("num_local_experts")
    if "in_proj_qkvz" in key:
        for part, its in zip(("attn_qkv", "attn_gate"), _split_delta(config, value), strict=True):
            yield f"blk.{layer}.{part}.weight", its
    elif key.endswith(("block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight")):
        end = "_exps" if value.ndim == 3 else "_shexp" if mixed else ""
        for part, its in zip(("gate", "up"), np.split(value, 2, -2), strict=True):
            yield f"blk.{layer}.ffn_{part}{end}.weight", its
    elif key.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{'_shexp' if mixed else ''}.weight", value
    elif key.endswith(("router.scale", "per_expert_scale")):
        yield f"blk.{layer}.{'ffn_gate_inp' if key.endswith('router.scale') else 'ffn_down_exps'}.scale", value
    elif kind == "lfm2moe" and ".experts." in key:
        yield key.removeprefix("model."), value
    elif kind == "gemma4" and ".experts." in key:
        yield f"{key.removesuffix('.weight')}.weight", value
    else:
        yield key, value


def _numbers(kind: str, config: Config, key: str, value: Array) -> Array:
    """Return the numbers of a tensor as the converter writes them."""
    if kind in PERMUTED:
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if f".{part}_proj." in key:
                return interleaved(value, config.get(heads) or config["num_attention_heads"])
    if kind in OFFSET and key.endswith("norm.weight") and "linear_attn.norm" not in key:
        return value + np.float32(1)
    if key.endswith("A_log"):
        value = -np.exp(value)
    if ".mamba." in key and key.endswith(("A_log", ".D")):
        value = value[:, None]
    if key.endswith("mamba.norm.weight"):
        value = value[None]
    if "conv" in key and value.ndim == 3:
        value = value[:, 0]
    if kind.startswith("qwen35") and "linear_attn" in key:
        value = _tiled(config, key, value)
    if kind in ("gptneox", "falcon") and "query_key_value" in key:
        return _ungrouped(config, value)
    if kind == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight", key):
        return value.T
    return value[0] if key.endswith("shared_expert_gate.weight") else value


def _ungrouped(config: Config, value: Array) -> Array:
    """Put all queries first, then all keys, then all values, of rows that are sorted by key heads."""
    groups = 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else 0
    groups = groups or config.get("num_kv_heads") or config["num_attention_heads"]
    size = config["hidden_size"] // config["num_attention_heads"]
    parts = value.reshape(groups, -1, size, *value.shape[1:])
    return np.concatenate([part.reshape(-1, *value.shape[1:]) for part in (parts[:, :-2], parts[:, -2], parts[:, -1])])


def _split_delta(config: Config, value: Array) -> tuple[Array, Array]:
    """Split Qwen3-Next's fused projection, which is sorted by key heads."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    each = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = np.split(value.reshape(keys, -1, value.shape[1]), np.cumsum([size, size, each]), 1)
    q, k, v, z = (part.reshape(-1, value.shape[1]) for part in parts)
    return np.concatenate([q, k, v]), z


def _tiled(config: Config, key: str, value: Array) -> Array:
    """Sort value heads: the first of each key head, then the second of each."""
    keys, values, size = (config[f"linear_{one}"] for one in ("num_key_heads", "num_value_heads", "value_head_dim"))

    def swap(part: Array, axis: int, width: int) -> Array:
        rows = np.moveaxis(part, axis, 0)
        cut = rows.reshape(keys, values // keys, width, *rows.shape[1:])
        return np.moveaxis(cut.swapaxes(0, 1).reshape(rows.shape), 0, axis)

    if "out_proj" in key:
        return swap(value, 1, size)
    if re.search(r"in_proj_[ab]|A_log|dt_", key):
        return swap(value, 0, 1)
    if "in_proj_z" in key:
        return swap(value, 0, size)
    if "in_proj_qkv" in key or "conv1d" in key:
        first = 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([value[:first], swap(value[first:], 0, size)])
    return value


def write_file(
    file: Path,
    name: str,
    architecture: str = "",
    without: str | re.Pattern[str] = "",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array] | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write the file of a configuration.

    Args:
        architecture: another one than the configuration's.
        without: a tensor that is left out, or a pattern of such.
        metadata, tensors: more of them.
        kind: of the matrices whose rows are whole blocks; a router's stays in float32.
    """
    writer = GGUFWriter(file, architecture or ARCHITECTURES[name])
    for key, value in (metadata_of(name) | dict(metadata or {})).items():
        _add(writer, f"{writer.arch}.{key}", value)
    if ARCHITECTURES[name] == "apertus":
        for part in ("alpha_n", "alpha_p", "beta", "eps"):
            values = [
                float(value.reshape(())) for key, value in tensors_of(name).items() if key.endswith(f"act_fn.{part}")
            ]
            writer.add_array(f"xielu.{part}", values)
    held = tensors_in(name) | dict(tensors or {})
    size = held["token_embd.weight"].shape[0]
    add_byte_level(writer, hf.make_tokenizer(size, False), size, False)
    gone = re.compile(re.escape(without)) if isinstance(without, str) else without
    for key, array in held.items():
        if gone.fullmatch(key):
            continue
        value = np.ascontiguousarray(array, np.float32)
        if value.ndim > 1 and value.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and "_inp" not in key:
            writer.add_tensor(key, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_key_value(key, value, GGUFValueType.UINT32)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
