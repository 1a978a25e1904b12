"""Table of the GGUF architectures that are read: names of tensors, metadata, and what llama.cpp's converter changes.

A row says for one architecture of llama.cpp which model type it is here, how its tensors are named in a Hugging Face
checkpoint, what config.json would say, and how rows and values of a checkpoint became those of the file.  Facts come
from llama.cpp's converter (its folder conversion) and from its graphs (src/models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.stored import Stored

Metadata = Mapping[str, Any]
Config = Mapping[str, Any]
Names = Mapping[str, str]
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
"""Returns where the rows (or columns) of a checkpoint's tensor are in the file's, int64 [n], by config.json."""
REBUILD = "export from the Hugging Face checkpoint"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def shortest(value: float) -> float:
    """Return the float32 of a file as the shortest decimal number that means it."""
    return float(str(np.float32(value)))


class Order(NamedTuple):
    """Where rows or columns of a matrix are in the file."""

    length: int  # rows or columns that the metadata implies: compared with the tensor's before memory is taken
    places: Callable[[], Ids]  # [length]


Places = Callable[[Config], Order]


class Facts:
    """The metadata and tensors of one file, checked when they are read.

    Attributes:
        seen: the keys that were read, without the architecture.
    """

    def __init__(self, file: Path, metadata: Metadata, tensors: Mapping[str, Stored]) -> None:
        self.file, self.metadata, self.tensors = file, metadata, tensors
        self.architecture = str(metadata.get("general.architecture"))
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """``ARCHITECTURE.key``."""
        self.seen.add(key)
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def peek(self, key: str) -> Any:
        """Return the value of a key that counts as unread."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a positive number; the same for all layers, where the file has one for each."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.unsupported(key, f"differs between layers: {value}")
            value = value[0]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ExportError(
                f"{self.file}: expected a positive number {self.architecture}.{key}, got {value!r}",
                "the file is damaged: download it again",
            )
        return value

    def each(self, key: str) -> list[Any]:
        """Return a number for each layer that is one, of a list or of one number for all.

        Raises:
            ExportError: the list has another length.
        """
        value, layers = self.get(key), self.layers
        found = value[:layers] if isinstance(value, list) else [value] * layers
        if len(found) != layers or any(not isinstance(one, int) for one in found):
            raise ExportError(f"{self.file}: expected {layers} numbers {self.architecture}.{key}, got {value!r}")
        return found

    def only(self, key: str) -> int:
        """Return the one number that the layers have that have any; 0 = a layer has none."""
        found = {int(value) for value in self.each(key)} - {0}
        if len(found) != 1:
            raise self.unsupported(key, f"differs between layers: {self.get(key)}")
        return found.pop()

    @cached_property
    def layers(self) -> int:
        """Return the layers, without those that guess; each has tensors in the file."""
        value, name = self.number("block_count"), f"{self.architecture}.block_count"
        if not isinstance(value, int) or not 0 < value - self.guessing <= len(self.tensors):
            raise ExportError(
                f"{self.file}: {name} is {value} and {self.guessing} of these layers guess, in a file of "
                f"{len(self.tensors)} tensors",
                "the file is damaged: download it again",
            )
        return value - self.guessing

    @cached_property
    def guessing(self) -> int:
        """Return the layers after the others that guess the next tokens."""
        value = self.get("nextn_predict_layers") or 0
        if not isinstance(value, int) or value < 0:
            raise self.unsupported("nextn_predict_layers", f"is {value!r}: expected a number of layers")
        return value

    def has(self, module: str, kind: str = "weight") -> bool:
        """Whether any layer has a tensor, such as ``attn_q``."""
        return any(f"blk.{layer}.{module}.{kind}" in self.tensors for layer in range(self.layers))

    def rows(self, module: str) -> int:
        """Return the rows of the first such matrix; 0 = no layer has one."""
        names = (f"blk.{layer}.{module}.weight" for layer in range(self.layers))
        return next((self.tensors[name].shape[0] for name in names if name in self.tensors), 0)

    def is_each(self, module: str) -> list[bool]:
        """Return of each layer whether it has a matrix."""
        return [f"blk.{layer}.{module}.weight" in self.tensors for layer in range(self.layers)]

    def unsupported(self, key: str, what: str) -> UnsupportedModel:
        """Return an error about a key."""
        return UnsupportedModel(f"{self.file}: {self.architecture}.{key} {what}", REBUILD)


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {f"attn_{ours}": f"self_attn.{theirs}_proj" for ours, theirs in zip(
    ("q", "k", "v", "output"), "qkvo", strict=True)}  # fmt: skip
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
LAYER = {**NORMS, **ATTENTION, **MLP}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
AROUND = AFTER | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
# matrices of all experts below each other, by the names that the export's own layers have
EXPERTS = {f"ffn_{part}_exps": f"=mlp.experts.{part}" for part in ("gate", "up", "down")}
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
DELTA = {  # gated delta rules
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
}
SPACES = {  # state spaces
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
}
SINKS = {"attn_sinks.weight": "self_attn.sinks"}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}


@dataclass(frozen=True)
class Kind:
    """How files of one architecture are read.

    Attributes:
        model_type, name: what config.json would say.
        layer: names of modules of a layer, by the file's; one that begins with ``=`` is named as in the export's own
            layers, whatever the checkpoint's are called.  A name with its end, such as ``ssm_dt.bias``, goes first.
        outer: the same outside of layers.
        at: what names of layers begin with.
        settings: returns what config.json would say besides what all architectures do.
        eps: the key of the epsilon in config.json, and that of the file.
        rows, columns: where rows and columns of a checkpoint's matrix are, by the file's module.
        minus_one: norms of the file are one more than the checkpoint's.
        logarithms: the file's tensors that are -e to the power of the checkpoint's.
        whole_heads: all channels of a head turn, or none.
        plain_output: the output projection of attention has no bias because q, k and v have one.
    """

    model_type: str
    name: str
    layer: Names = field(default_factory=lambda: LAYER)
    outer: Names = field(default_factory=lambda: TOP)
    at: str = "model.layers"
    settings: Callable[[Facts], dict[str, Any]] = lambda facts: {}
    eps: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    rows: Mapping[str, Places] = field(default_factory=dict)
    columns: Mapping[str, Places] = field(default_factory=dict)
    minus_one: bool = False
    logarithms: tuple[str, ...] = ()
    whole_heads: bool = False
    plain_output: bool = False


@dataclass(frozen=True)
class Choice:
    """Two ways to read an architecture: what a file holds decides.

    Attributes:
        where: whether it is the first.
    """

    first: Kind
    second: Kind
    where: Callable[[Facts], bool]


# -- orders of rows ---------------------------------------------------------------------------------------------------


def interleaved(key: str) -> Places:
    """Return where rows of heads are that a converter interleaves: the two of a rotary pair are adjacent in the file.

    Row h * half + i of a head is its row 2 * i + h there, h being 0 or 1.

    Args:
        key: of the number of heads.
    """

    def places(config: Config) -> Order:
        size, heads = int(config["head_dim"]), int(config[key])
        return Order(
            heads * size, lambda: (np.arange(heads)[:, None] * size + np.arange(size).reshape(-1, 2).T.ravel()).ravel()
        )

    return places


def grouped(config: Config) -> Order:
    """Return where rows are that hold each group's queries, its key and its value: the file has all queries first."""
    heads, size = int(config["num_attention_heads"]), int(config["head_dim"])
    groups = int(config["num_key_value_heads"])

    def places() -> Ids:
        first = np.cumsum([0, heads, groups]) * size
        parts = [at + np.arange(count * size).reshape(groups, -1) for at, count in zip(first, (heads, groups, groups),
                                                                                       strict=True)]  # fmt: skip
        return np.concatenate(parts, 1).ravel()

    return Order((heads + 2 * groups) * size, places)


def _tiled(config: Config, size: int, before: int = 0) -> Order:
    """Return where value heads of ``size`` rows are, after rows that stay: a checkpoint has those of a key head in
    sequence, a file has the first of every key head first."""
    keys, values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])

    def places() -> Ids:
        rows = np.arange(values * size)
        if not values % keys:
            rows = rows.reshape(values // keys, keys, size).swapaxes(0, 1).ravel()
        return np.concatenate([np.arange(before), before + rows])

    return Order(before + values * size, places)


def tiled_one(config: Config) -> Order:
    """Return where numbers of value heads are."""
    return _tiled(config, 1)


def tiled_values(config: Config) -> Order:
    """Return where channels of value heads are."""
    return _tiled(config, int(config["linear_value_head_dim"]))


def tiled_mixed(config: Config) -> Order:
    """Return where channels of queries, keys and values are, of which only values move."""
    before = 2 * int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    return _tiled(config, int(config["linear_value_head_dim"]), before)


PAIRS = {"attn_q": interleaved("num_attention_heads"), "attn_k": interleaved("num_key_value_heads")}
TILES = {"attn_qkv": tiled_mixed, "ssm_conv1d": tiled_mixed, "attn_gate": tiled_values, "ssm_alpha": tiled_one,
         "ssm_beta": tiled_one, "ssm_a": tiled_one, "ssm_dt": tiled_one}  # fmt: skip


# -- what config.json would say ---------------------------------------------------------------------------------------


def windows(facts: Facts, every: int) -> dict[str, Any]:
    """Return the window and which layers have it.

    Args:
        every: layers of a period, of which the last has none, where the file does not say it.
    """
    pattern, window = facts.get("attention.sliding_window_pattern", every), facts.get("attention.sliding_window")
    if not window:
        return {"sliding_window": None, "layer_types": [FULL] * facts.layers}
    if not isinstance(pattern, list):
        pattern = [bool(pattern) and (layer + 1) % int(pattern) != 0 for layer in range(facts.layers)]
    kinds = [SLIDING if slides else FULL for slides in pattern[: facts.layers]]
    return {"sliding_window": int(window), "layer_types": kinds}


def _llama(facts: Facts) -> dict[str, Any]:
    return {"mlp_bias": any(facts.has(name, "bias") for name in MLP)}


def _gemma(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(facts: Facts) -> dict[str, Any]:
    heads, large = facts.number("attention.head_count"), facts.number("block_count") == 46
    for key, usual in (
        ("attention.sliding_window_pattern", 2),
        ("rope.freq_base_swa", facts.get("rope.freq_base", 1e4)),
    ):
        if facts.get(key, usual) != usual:
            raise facts.unsupported(key, f"other than {usual} is not supported")
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
    return _gemma(facts) | {
        "query_pre_attn_scalar": query,
        "attn_logit_softcapping": facts.get("attn_logit_softcapping") or None,
        "final_logit_softcapping": facts.get("final_logit_softcapping") or None,
        "rope_local_base_freq": shortest(facts.number("rope.freq_base_swa", 10000.0)),
        **windows(facts, 6),
    }


def _gemma4(facts: Facts) -> dict[str, Any]:
    kinds, window = windows(facts, 6)["layer_types"], facts.number("attention.sliding_window")
    wide, size = facts.number("attention.key_length"), facts.number("attention.key_length_swa")
    every = facts.each("attention.head_count_kv")
    heads = {kind: {count for its, count in zip(kinds, every, strict=True) if its == kind} for kind in (SLIDING, FULL)}
    inner = {int(count) for count in facts.each("feed_forward_length")}
    shared = int(facts.get("attention.shared_kv_layers") or 0)
    if any(len(found) > 1 for found in heads.values()):
        raise facts.unsupported("attention.head_count_kv", f"differs between layers of a kind: {every}")
    if len(inner) > 1 and (max(inner) != 2 * min(inner) or not shared):
        raise facts.unsupported("feed_forward_length", f"differs between layers: {sorted(inner)}")
    factors = facts.tensors.get(ROPE_FACTORS)
    turned = 1.0
    if factors is not None:  # those of channels that do not turn are huge
        values = factors.read(slice(None), None)
        turned = float((values < 1e6).mean())
        if not np.isin(values[values < 1e6], 1.0).all():
            raise UnsupportedModel(f"{facts.file}: {ROPE_FACTORS} slows rotations of gemma4 down", REBUILD)
    facts.number("attention.value_length", wide), facts.number("attention.value_length_swa", size)
    for key, least in (("rope.dimension_count", wide), ("rope.dimension_count_swa", size)):
        if facts.number(key, least) != least:
            raise facts.unsupported(key, f"other than {least} is not supported")
    local = shortest(facts.number("rope.freq_base_swa", 10000.0))
    full = shortest(facts.number("rope.freq_base", 1e6))
    found = _gemma(facts) | {
        "head_dim": size,
        "global_head_dim": wide,
        "intermediate_size": min(inner),
        "use_double_wide_mlp": len(inner) > 1,
        "num_key_value_heads": next(iter(heads[SLIDING]), None) or next(iter(heads[FULL])),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": int(facts.get("embedding_length_per_layer_input") or 0),
        "vocab_size_per_layer_input": facts.tensors["token_embd.weight"].shape[0],
        "layer_types": kinds,
        "sliding_window": int(window),
        "final_logit_softcapping": facts.get("final_logit_softcapping") or None,
        "attention_k_eq_v": not all(facts.is_each("attn_v")[: facts.layers - shared]),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": local},
            FULL: {"rope_type": "proportional", "rope_theta": full, "partial_rotary_factor": turned},
        },
    }
    if heads[FULL] and heads[FULL] != heads[SLIDING]:
        found["num_global_key_value_heads"] = next(iter(heads[FULL]))
    if count := facts.get("expert_count"):
        found |= {
            "enable_moe_block": True,
            "num_experts": int(count),
            "top_k_experts": facts.number("expert_used_count"),
            "moe_intermediate_size": facts.number("expert_feed_forward_length"),
        }
    return found


def _gpt_oss(facts: Facts) -> dict[str, Any]:
    if facts.get("attention.sliding_window_pattern", 2) != 2:
        raise facts.unsupported("attention.sliding_window_pattern", "other than 2 is not supported")
    theta = shortest(facts.number("rope.freq_base", 10000.0))
    return {
        "attention_bias": True,
        "intermediate_size": facts.number("expert_feed_forward_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # unless there is a scaling
        "num_local_experts": facts.number("expert_count"),
        "num_experts_per_tok": facts.number("expert_used_count"),
        "sliding_window": facts.number("attention.sliding_window"),
    }


def experts(facts: Facts, normed: bool, shared: bool = False) -> dict[str, Any]:
    """Return the sizes of a mixture of experts.

    Args:
        normed: whether the weights of a row's experts add up to one, which llama.cpp's graph of the model says.
        shared: whether an expert gets every row.
    """
    count, chosen = facts.number("expert_count"), facts.number("expert_used_count")
    inner = facts.rows("ffn_up_exps") or facts.rows("ffn_gate_up_exps") // 2
    found: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": facts.number("expert_feed_forward_length", inner // count),
        "norm_topk_prob": normed,
        "mlp_only_layers": [layer for layer, has in enumerate(facts.is_each("ffn_gate_inp")) if not has],
    }
    if shared:
        size = facts.rows("ffn_up_shexp")
        found["shared_expert_intermediate_size"] = facts.number("expert_shared_feed_forward_length", size)
    for key, usual in (("expert_weights_norm", normed), ("expert_weights_scale", 1.0), ("expert_gating_func", 1)):
        if (value := facts.get(key) or usual) != usual:
            raise facts.unsupported(key, f"{value!r} is not supported: expected {usual!r}")
    return found


def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    return experts(facts, normed=False, shared=True) | {"qkv_bias": facts.has("attn_q", "bias")}


def _delta(facts: Facts) -> dict[str, Any]:
    """Return the sizes of layers of the gated delta rule, and which layers have it."""
    values, layers = facts.number("ssm.time_step_rank"), facts.layers
    kinds = facts.get("attention.recurrent_layers")
    every = int(facts.get("full_attention_interval", 4))
    if not isinstance(kinds, list):
        kinds = [(layer + 1) % every != 0 for layer in range(layers)]
    facts.get("rope.dimension_sections")  # the three positions of a text's token are equal
    return {
        "layer_types": [LINEAR if recurrent else FULL for recurrent in kinds[:layers]],
        "linear_num_key_heads": facts.number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": facts.number("ssm.state_size"),
        "linear_value_head_dim": facts.number("ssm.inner_size") // values,
        "linear_conv_kernel_dim": facts.number("ssm.conv_kernel"),
    }


def _delta_experts(facts: Facts) -> dict[str, Any]:
    return _delta(facts) | experts(facts, normed=True, shared=True)


def _mellum(facts: Facts) -> dict[str, Any]:
    found = experts(facts, normed=True)
    dense = found.pop("mlp_only_layers")
    theta = shortest(facts.number("rope.freq_base", 5e5))
    local = shortest(facts.number("rope.freq_base_swa", theta))
    return found | {
        **windows(facts, 4),
        "mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in range(facts.layers)],
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": theta},
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = {"sliding_window": int(facts.get("attention.sliding_window") or 0) or None}
    factors = {name: facts.tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")}
    original = facts.get("rope.scaling.original_context_length")
    if any(factors.values()) and not (all(factors.values()) and original):
        raise facts.unsupported("rope.scaling.original_context_length", "is missing: rotations have factors")
    if original and all(factors.values()):
        scaling = {f"{name}_factor": [float(value) for value in tensor.read(slice(None), None)]
                   for name, tensor in factors.items() if tensor is not None}  # fmt: skip
        found |= {
            "original_max_position_embeddings": int(original),
            "rope_scaling": {"rope_type": "longrope"} | scaling,
        }
        if times := facts.get("rope.scaling.attn_factor"):
            found["rope_scaling"]["attention_factor"] = shortest(times)
    facts.get("rope.scaling.type")
    return found


def _scales(facts: Facts) -> dict[str, Any]:
    """Return the multipliers of Granite."""
    size = facts.number(
        "attention.key_length", facts.number("embedding_length") // facts.number("attention.head_count")
    )
    return {
        "embedding_multiplier": shortest(facts.number("embedding_scale", 1.0)),
        "residual_multiplier": shortest(facts.number("residual_scale", 1.0)),
        "attention_multiplier": shortest(facts.get("attention.scale") or size**-0.5),
        "logits_scaling": shortest(facts.number("logit_scale", 1.0)),
        "mlp_bias": any(facts.has(name, "bias") for name in MLP),
    }


def _granite_experts(facts: Facts) -> dict[str, Any]:
    found = experts(facts, normed=True)
    return _scales(facts) | {
        "num_local_experts": found["num_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "intermediate_size": found["moe_intermediate_size"],
    }


def _granite_hybrid(facts: Facts) -> dict[str, Any]:
    mixed = bool(facts.get("expert_count"))
    found = _granite_experts(facts) if mixed else _scales(facts) | {"num_local_experts": 0, "num_experts_per_tok": 0}
    facts.get("expert_used_count")
    shared = facts.rows("ffn_up_shexp") or facts.rows("ffn_up")
    if not mixed:
        found["intermediate_size"] = shared
    facts.get("expert_shared_feed_forward_length"), facts.get("feed_forward_length")
    spaces = [not attends for attends in facts.is_each("attn_q")]
    turned = facts.get("rope.scaling.finetuned", True)
    found |= {
        "shared_intermediate_size": shared,
        "layer_types": ["mamba" if space else "attention" for space in spaces],
        "num_key_value_heads": facts.only("attention.head_count_kv"),
        "position_embedding_type": "rope" if turned else "nope",
    }
    if not any(spaces):
        return found
    hidden, heads = facts.number("embedding_length"), facts.number("ssm.time_step_rank")
    return found | {
        "mamba_n_heads": heads,
        "mamba_d_head": facts.number("ssm.inner_size") // heads,
        "mamba_d_state": facts.number("ssm.state_size"),
        "mamba_n_groups": facts.number("ssm.group_count"),
        "mamba_d_conv": facts.number("ssm.conv_kernel"),
        "mamba_expand": facts.number("ssm.inner_size") // hidden,
        "mamba_conv_bias": facts.has("ssm_conv1d", "bias"),
        "mamba_proj_bias": facts.has("ssm_in", "bias"),
    }


def _granite_swa(facts: Facts) -> dict[str, Any]:
    theta = shortest(facts.number("rope.freq_base", 10000.0))
    turned = facts.get("attention.rope_pattern") or [True] * facts.layers
    return _scales(facts) | windows(facts, 4) | {
        "layer_rope_theta": [theta if turns else 0 for turns in turned[: facts.layers]],
    }  # fmt: skip


def _minicpm(facts: Facts) -> dict[str, Any]:
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        facts.number(key)
    return _scales(facts)


def _lfm2(facts: Facts) -> dict[str, Any]:
    every = facts.each("attention.head_count_kv")
    return {
        "layer_types": [FULL if heads else "conv" for heads in every],
        "num_key_value_heads": facts.only("attention.head_count_kv"),
        "conv_L_cache": facts.number("shortconv.l_cache"),
        "conv_bias": facts.has("shortconv.in_proj", "bias"),
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": "output.weight" not in facts.tensors,
    }


def _lfm2_moe(facts: Facts) -> dict[str, Any]:
    gates = {2: True, None: True}
    if facts.get("expert_gating_func") not in gates:
        raise facts.unsupported("expert_gating_func", "other than sigmoids is not supported")
    inner = facts.rows("ffn_up_exps") // facts.number("expert_count")
    return _lfm2(facts) | {
        "num_dense_layers": int(facts.get("leading_dense_block_count") or 0),
        "num_experts": facts.number("expert_count"),
        "num_experts_per_tok": facts.number("expert_used_count"),
        "moe_intermediate_size": facts.number("expert_feed_forward_length", inner),
        "routed_scaling_factor": shortest(facts.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", True)),
        "use_expert_bias": facts.has("exp_probs_b", "bias"),
    }


def _ministral3(facts: Facts) -> dict[str, Any]:
    facts.get("rope.scaling.yarn_log_multiplier"), facts.get("attention.temperature_scale")  # see ``gguf_config``
    return {"sliding_window": None}


def _apertus(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "xielu"}


def _stablelm(facts: Facts) -> dict[str, Any]:
    return {"use_parallel_residual": not facts.has("ffn_norm"), "use_qkv_bias": facts.has("attn_q", "bias")}


def _cohere(facts: Facts) -> dict[str, Any]:
    return {"logit_scale": shortest(facts.number("logit_scale", 0.0625))}


def _falcon(facts: Facts) -> dict[str, Any]:
    return {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1 + facts.has("attn_norm_2"),
        "num_kv_heads": facts.number("attention.head_count_kv", 1),
        "ffn_hidden_size": facts.rows("ffn_up"),
        "bias": facts.has("attn_qkv", "bias"),
        "activation": "gelu",
        "intermediate_size": facts.rows("ffn_up"),
    }


def _gpt2(facts: Facts) -> dict[str, Any]:
    return {"activation_function": "gelu_new", "intermediate_size": facts.rows("ffn_up")}


def _neox(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu", "use_parallel_residual": bool(facts.get("use_parallel_residual", True)),
            "attention_bias": facts.has("attn_qkv", "bias")}  # fmt: skip


def _phi2(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu_new", "intermediate_size": facts.rows("ffn_up")}


def _starcoder2(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": facts.has("ffn_up", "bias"),
            "sliding_window": int(facts.get("attention.sliding_window") or 0) or None}  # fmt: skip


def _exaone4(facts: Facts) -> dict[str, Any]:
    return windows(facts, 4)


def _olmo(facts: Facts) -> dict[str, Any]:
    return windows(facts, 4) if facts.get("attention.sliding_window") else {}


def _olmoe(facts: Facts) -> dict[str, Any]:
    found = experts(facts, normed=False)
    del found["mlp_only_layers"]
    return found | {"intermediate_size": found.pop("moe_intermediate_size")}


def _seed(facts: Facts) -> dict[str, Any]:
    return {"attention_out_bias": facts.has("attn_output", "bias"), "mlp_bias": facts.has("ffn_up", "bias")}


def _ernie(facts: Facts) -> dict[str, Any]:
    return {"use_bias": facts.has("attn_q", "bias") or facts.has("ffn_up", "bias")}


def _mrope(facts: Facts) -> dict[str, Any]:
    facts.get("rope.dimension_sections"), facts.get("n_deepstack_layers")  # of images; a text's positions are equal
    return {}


def _mrope_experts(facts: Facts) -> dict[str, Any]:
    return _mrope(facts) | experts(facts, normed=True)


# -- the table --------------------------------------------------------------------------------------------------------

ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the configuration
WITHOUT_END = ("ssm_a", "ssm_d")  # tensors whose names end with the module's
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")  # the same, of phi3
LAYER_EPS = "attention.layer_norm_epsilon"
QWEN_MOE = NORMS | ATTENTION | HEAD_NORMS | EXPERTS | {"ffn_gate_inp": "mlp.gate"}
SHARED_MOE = QWEN_MOE | SHARED | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | MLP
GRANITE_MOE = NORMS | ATTENTION | EXPERTS | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
GRANITE_SHARED = GRANITE_MOE | SPACES | {
    "ffn_gate": "=mlp.gate_proj", "ffn_up": "=mlp.up_proj", "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "=mlp.gate_proj", "ffn_up_shexp": "=mlp.up_proj", "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
QWEN35 = ATTENTION | HEAD_NORMS | MLP | DELTA | {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
QWEN35_MOE = QWEN35 | EXPERTS | SHARED | {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
LFM2 = {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}  # fmt: skip
LFM2_TOP = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm",
            "output_norm": "model.embedding_norm", "output": "lm_head"}  # fmt: skip
LFM2_MOE = LFM2 | EXPERTS | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b.bias": "feed_forward.expert_bias"}
GLM = NORMS | ATTENTION | FUSED_MLP
GLM4 = GLM | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
GEMMA4 = AROUND | ATTENTION | HEAD_NORMS | MLP | EXPERTS | {
    "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}  # fmt: skip
GEMMA4_TOP = TOP | {"per_layer_token_embd": "model.embed_tokens_per_layer",
                    "per_layer_model_proj": "model.per_layer_model_projection",
                    "per_layer_proj_norm": "model.per_layer_projection_norm"}  # fmt: skip
NEOX = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense", "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h"}  # fmt: skip
NEOX_TOP = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}
FALCON = {"attn_norm": "input_layernorm", "attn_qkv": "self_attention.query_key_value",
          "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h",
          "ffn_down": "mlp.dense_4h_to_h"}  # fmt: skip
FALCON_TOP = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}
GPT2 = {"attn_norm": "ln_1", "ffn_norm": "ln_2", **{ours: f"={theirs}" for ours, theirs in (ATTENTION | MLP).items()}}
GPT2_TOP = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
            "output": "lm_head"}  # fmt: skip
PHI2 = NORMS | {**ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
PHI2_TOP = TOP | {"output_norm": "model.final_layernorm", "output.bias": "lm_head.bias"}
STARCODER2 = NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
APERTUS = ATTENTION | HEAD_NORMS | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm",
                                    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
SEED = LAYER | {"post_attention_norm": "post_attention_layernorm"}
OPENAI_MOE = NORMS | ATTENTION | EXPERTS | SINKS | {
    "post_attention_norm": "post_attention_layernorm", "attn_post_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}  # fmt: skip

LAYER_NORM = ("layer_norm_eps", LAYER_EPS)
GRANITE = Kind("granite", "GraniteForCausalLM", settings=_scales, rows=PAIRS)
HYBRID = Kind("granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE_SHARED, settings=_granite_hybrid, rows=PAIRS,
              logarithms=("ssm_a",))  # fmt: skip
OLMO = ATTENTION | HEAD_NORMS | MLP | AFTER
FALCON_7B = Kind("falcon", "FalconForCausalLM", FALCON, FALCON_TOP, "transformer.h", _falcon,
                 ("layer_norm_epsilon", LAYER_EPS), {"attn_qkv": grouped})  # fmt: skip
FALCON_40B = replace(FALCON_7B, layer=FALCON | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})

KINDS: dict[str, Kind | Choice] = {
    "llama": Kind("llama", "LlamaForCausalLM", settings=_llama, rows=PAIRS),
    "qwen2": Kind("qwen2", "Qwen2ForCausalLM", plain_output=True),
    "qwen3": Kind("qwen3", "Qwen3ForCausalLM", LAYER | HEAD_NORMS),
    "gemma": Kind("gemma", "GemmaForCausalLM", settings=_gemma, minus_one=True),
    "gemma2": Kind("gemma2", "Gemma2ForCausalLM", ATTENTION | MLP | AROUND, settings=_gemma2, minus_one=True),
    "gemma3": Kind("gemma3_text", "Gemma3ForCausalLM", ATTENTION | HEAD_NORMS | MLP | AROUND, settings=_gemma3,
                   minus_one=True, whole_heads=True),
    "gpt-oss": Kind("gpt_oss", "GptOssForCausalLM", OPENAI_MOE, settings=_gpt_oss),
    "qwen2moe": Kind("qwen2_moe", "Qwen2MoeForCausalLM", SHARED_MOE, settings=_qwen2_moe, plain_output=True),
    "qwen3moe": Kind("qwen3_moe", "Qwen3MoeForCausalLM", QWEN_MOE | MLP,
                     settings=lambda facts: experts(facts, normed=True)),
    "qwen35": Kind("qwen3_5_text", "Qwen3_5ForCausalLM", QWEN35, settings=_delta, rows=TILES,
                   columns={"ssm_out": tiled_values}, minus_one=True, logarithms=("ssm_a",)),
    "qwen35moe": Kind("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", QWEN35_MOE, settings=_delta_experts, rows=TILES,
                      columns={"ssm_out": tiled_values}, minus_one=True, logarithms=("ssm_a",)),
    "qwen3next": Kind("qwen3_next", "Qwen3NextForCausalLM", QWEN35_MOE, settings=_delta_experts, minus_one=True,
                      logarithms=("ssm_a",)),
    "qwen2vl": Kind("qwen2", "Qwen2ForCausalLM", settings=_mrope, plain_output=True),
    "qwen3vl": Kind("qwen3", "Qwen3ForCausalLM", LAYER | HEAD_NORMS, settings=_mrope),
    "qwen3vlmoe": Kind("qwen3_moe", "Qwen3MoeForCausalLM", QWEN_MOE | MLP, settings=_mrope_experts),
    "gemma4": Kind("gemma4_text", "Gemma4ForCausalLM", GEMMA4, GEMMA4_TOP, settings=_gemma4, whole_heads=True),
    "mistral3": Kind("ministral3", "Ministral3ForCausalLM", settings=_ministral3, rows=PAIRS),
    "phi3": Kind("phi3", "Phi3ForCausalLM", NORMS | ATTENTION | FUSED_MLP | {"attn_qkv": "self_attn.qkv_proj"},
                 settings=_phi3),
    "granite": GRANITE,
    "granitemoe": Choice(HYBRID, Kind("granitemoe", "GraniteMoeForCausalLM", GRANITE_MOE, settings=_granite_experts,
                                      rows=PAIRS), lambda facts: facts.has("ffn_up_shexp")),
    "granitehybrid": HYBRID,
    "granite_swa": Kind("granite_swa", "GraniteSWAForCausalLM", LAYER | SINKS, settings=_granite_swa, rows=PAIRS),
    "smollm3": Kind("smollm3", "SmolLM3ForCausalLM", settings=_llama, rows=PAIRS),
    "olmo2": Choice(Kind("olmo3", "Olmo3ForCausalLM", OLMO, settings=_olmo, whole_heads=True),
                    Kind("olmo2", "Olmo2ForCausalLM", OLMO, settings=_olmo),
                    lambda facts: bool(facts.get("attention.sliding_window"))),
    "olmoe": Kind("olmoe", "OlmoeForCausalLM", NORMS | ATTENTION | HEAD_NORMS | EXPERTS | {"ffn_gate_inp": "mlp.gate"},
                  settings=_olmoe),
    "lfm2": Kind("lfm2", "Lfm2ForCausalLM", LFM2, LFM2_TOP, settings=_lfm2,
                 eps=("norm_eps", "attention.layer_norm_rms_epsilon")),
    "lfm2moe": Kind("lfm2_moe", "Lfm2MoeForCausalLM", LFM2_MOE, LFM2_TOP, settings=_lfm2_moe,
                    eps=("norm_eps", "attention.layer_norm_rms_epsilon")),
    "glm4": Kind("glm4", "Glm4ForCausalLM", GLM4, plain_output=True),
    "chatglm": Kind("glm", "GlmForCausalLM", GLM, plain_output=True),
    "exaone": Kind("llama", "LlamaForCausalLM"),
    "exaone4": Kind("exaone4", "Exaone4ForCausalLM", ATTENTION | HEAD_NORMS | MLP | AFTER, settings=_exaone4),
    "starcoder2": Kind("starcoder2", "Starcoder2ForCausalLM", STARCODER2, settings=_starcoder2,
                       eps=("norm_epsilon", LAYER_EPS)),
    "stablelm": Kind("stablelm", "StableLmForCausalLM", settings=_stablelm, eps=LAYER_NORM, plain_output=True),
    "command-r": Kind("cohere", "CohereForCausalLM", settings=_cohere, eps=LAYER_NORM),
    "cohere2": Kind("cohere2", "Cohere2ForCausalLM", settings=lambda facts: _cohere(facts) | windows(facts, 4),
                    eps=LAYER_NORM),
    "gpt2": Kind("gpt2", "GPT2LMHeadModel", GPT2, GPT2_TOP, "transformer.h", _gpt2, ("layer_norm_epsilon", LAYER_EPS)),
    "gptneox": Kind("gpt_neox", "GPTNeoXForCausalLM", NEOX, NEOX_TOP, "gpt_neox.layers", _neox, LAYER_NORM,
                    {"attn_qkv": grouped}),
    "falcon": Choice(FALCON_40B, FALCON_7B, lambda facts: facts.has("attn_norm_2")),
    "phi2": Kind("phi", "PhiForCausalLM", PHI2, PHI2_TOP, settings=_phi2,
                 eps=LAYER_NORM),
    "minicpm": Kind("granite", "GraniteForCausalLM", settings=_minicpm, rows=PAIRS),
    "internlm2": Kind("llama", "LlamaForCausalLM", settings=_llama, rows=PAIRS),
    "hunyuan-dense": Kind("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", LAYER | {
        "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}),
    "ernie4_5": Kind("ernie4_5", "Ernie4_5ForCausalLM", settings=_ernie),
    "seed_oss": Kind("seed_oss", "SeedOssForCausalLM", SEED, settings=_seed, plain_output=True),
    "apertus": Kind("apertus", "ApertusForCausalLM", APERTUS, settings=_apertus),
    "mellum": Kind("mellum", "MellumForCausalLM", QWEN_MOE | MLP, settings=_mellum, whole_heads=True),
    "t5": Kind("t5", "T5ForConditionalGeneration"),
}  # fmt: skip
"""The architectures by ``general.architecture``.  Mistral is "llama" there, and the same decoder."""


def model_types() -> dict[str, list[str]]:
    """Return the GGUF architectures of each model type."""
    found: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        for one in (kind,) if isinstance(kind, Kind) else (kind.first, kind.second):
            names = found.setdefault(one.model_type, [])
            if name not in names:
                names.append(name)
    return found
