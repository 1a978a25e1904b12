"""Small models that read images, two of every kind, and what transformers computes with them.

tests/data/reference/sight.npz has of each (tools/make_sight_reference.py makes it): ``saved``, JSON of config.json and
of the names and shapes of tensors that transformers saves; ``ids`` int64 [T], a prompt with two of the pictures between
words; ``rows`` int64 [R] and ``logits`` float32 [R, vocab] there; ``greedy`` int64 [12]; and for each picture
``features.N`` float32 [rows // 7, width * (1 + deepstack)], every seventh row of the decoder's, and ``text.N``, the ids
of what stands for it.  Weights are a function of names, shapes and a seed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.saved import arrays_of, form_of

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "sight.npz"
Config = dict[str, Any]
reference, saved = partial(arrays_of, ARCHIVE), partial(form_of, ARCHIVE)
SIZES = [(50, 70), (150, 44), (64, 64), (9, 31)]  # of pictures, height and width
SHOWN = (0, 3)  # pictures in the prompt
EVERY = 7
IMAGE = 99  # the id of the token of an image's rows

LLAMA: Config = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 1024,
    "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LFM2: Config = {key: value for key, value in LLAMA.items() if key not in ("intermediate_size", "head_dim")} | {
    "model_type": "lfm2", "block_ff_dim": 96, "intermediate_size": 96, "num_hidden_layers": 2,
    "layer_types": ["conv", "full_attention"],
}  # fmt: skip
GEMMA3: Config = LLAMA | {
    "model_type": "gemma3_text", "query_pre_attn_scalar": 16, "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
TOWER: Config = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 64,
    "patch_size": 8,
}  # fmt: skip
SIGLIP: Config = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 48}
SIGLIP2: Config = TOWER | {"model_type": "siglip2_vision_model", "vision_use_head": False, "num_patches": 36}
QWEN: Config = {
    "hidden_size": 64, "intermediate_size": 80, "depth": 3, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
    "out_hidden_size": 64, "num_position_embeddings": 36,
}  # fmt: skip
QWEN3: Config = LLAMA | {
    "model_type": "qwen3_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
}
QWEN25: Config = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {
    "model_type": "qwen2_5_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
QWEN35: Config = LLAMA | {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                        "mrope_interleaved": True, "mrope_section": [3, 3, 2]},
}  # fmt: skip
GEMMA4: Config = LLAMA | {
    "model_type": "gemma4_text", "num_hidden_layers": 4, "sliding_window": 20, "global_head_dim": 32,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA4_TOWER: Config = {
    "model_type": "gemma4_vision", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2,
    "position_embedding_size": 150,
}  # fmt: skip
GEMMA4_LARGE: Config = GEMMA4 | {  # whose images' rows see each other in layers with a window
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, tuple[Config, Config]] = {
    "idefics3": (
        {"model_type": "idefics3", "text_config": LLAMA, "vision_config": TOWER, "scale_factor": 2},
        {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}},
    ),
    "smolvlm_whole": (
        {"model_type": "smolvlm", "text_config": LLAMA, "scale_factor": 3,
         "vision_config": TOWER | {"hidden_size": 64, "num_attention_heads": 2, "image_size": 72, "patch_size": 12,
                                   "hidden_act": "gelu"}},
        {"size": {"longest_edge": 150}, "max_image_size": {"longest_edge": 72}, "do_image_splitting": False,
         "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
    ),
    "lfm2_vl": (
        {"model_type": "lfm2_vl", "text_config": LFM2, "vision_config": SIGLIP2, "projector_hidden_size": 72,
         "downsample_factor": 2},
        {"encoder_patch_size": 8, "tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6},
    ),
    "lfm2_vl_whole": (
        {"model_type": "lfm2_vl", "text_config": LFM2, "projector_hidden_size": 40, "projector_use_layernorm": False,
         "projector_bias": False, "downsample_factor": 1, "projector_hidden_act": "silu",
         "vision_config": SIGLIP2 | {"patch_size": 10, "num_patches": 25}},
        {"encoder_patch_size": 10, "downsample_factor": 1, "do_image_splitting": False, "min_image_tokens": 6,
         "max_image_tokens": 30},
    ),
    "gemma3": (
        {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": SIGLIP, "mm_tokens_per_image": 9,
         "boi_token_index": 98, "eoi_token_index": 97},
        {"size": {"height": 48, "width": 48}},
    ),
    "gemma3_relu": (
        {"model_type": "gemma3", "text_config": GEMMA3 | {"sliding_window": 6}, "mm_tokens_per_image": 4,
         "boi_token_index": 98, "eoi_token_index": 97,
         "vision_config": SIGLIP | {"image_size": 60, "patch_size": 10, "hidden_act": "relu", "layer_norm_eps": 1e-3}},
        {"size": {"height": 60, "width": 60}, "image_mean": [0.1, 0.2, 0.3]},
    ),
    "gemma4": (
        {"model_type": "gemma4", "text_config": GEMMA4, "vision_config": GEMMA4_TOWER | {"use_clipped_linears": True}},
        {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    ),
    "gemma4_plain": (
        {"model_type": "gemma4", "text_config": GEMMA4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
         "vision_config": GEMMA4_TOWER | {"pooling_kernel_size": 3, "patch_size": 4, "head_dim": 24,
                                          "num_attention_heads": 2, "num_key_value_heads": 1,
                                          "position_embedding_size": 220}},
        {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70, "resample": 2},
    ),
    "gemma4_large": (
        {"model_type": "gemma4", "text_config": GEMMA4_LARGE, "vision_config": GEMMA4_TOWER | {"standardize": True}},
        {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 140},
    ),
    "gemma4_mixed": (
        {"model_type": "gemma4",
         "text_config": GEMMA4_LARGE | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                                        "moe_intermediate_size": 32, "sliding_window": 7},
         "vision_config": GEMMA4_TOWER | {"standardize": True, "head_dim": 24, "num_attention_heads": 2,
                                          "num_key_value_heads": 1, "pooling_kernel_size": 3,
                                          "position_embedding_size": 220}},
        {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 70},
    ),
    "internvl": (
        {"model_type": "internvl", "text_config": LLAMA, "image_seq_length": 16, "projector_hidden_act": "gelu",
         "vision_config": TOWER | {"model_type": "internvl_vision", "attention_bias": True, "image_size": [64, 64],
                                   "patch_size": [8, 8], "hidden_act": "gelu"}},
        {"size": {"height": 64, "width": 64}, "crop_to_patches": True, "max_patches": 6},
    ),
    "internvl_whole": (
        {"model_type": "internvl", "text_config": LLAMA | {"num_hidden_layers": 2}, "image_seq_length": 9,
         "projector_hidden_act": "silu",
         "vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [60, 60], "patch_size": [10, 10],
                                   "use_mean_pooling": False, "layer_norm_eps": 1e-3}},
        {"size": {"height": 60, "width": 60}, "crop_to_patches": False, "image_mean": [0.5, 0.4, 0.3]},
    ),
    "qwen2_vl": (
        {"model_type": "qwen2_vl", "text_config": QWEN25 | {"model_type": "qwen2_vl_text"},
         "vision_config": {"embed_dim": 48, "hidden_size": 64, "depth": 3, "num_heads": 3, "patch_size": 8,
                           "mlp_ratio": 2}},
        {"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 9216}},
    ),
    "qwen2_vl_three": (
        {"model_type": "qwen2_vl", "text_config": QWEN25 | {"model_type": "qwen2_vl_text"},
         "vision_config": {"embed_dim": 96, "hidden_size": 64, "depth": 2, "num_heads": 2, "patch_size": 10,
                           "mlp_ratio": 3, "spatial_merge_size": 3, "hidden_act": "gelu"}},
        {"patch_size": 10, "merge_size": 3, "size": {"shortest_edge": 2000, "longest_edge": 12000}},
    ),
    "qwen2_5_vl": (
        {"model_type": "qwen2_5_vl", "text_config": QWEN25,
         "vision_config": QWEN | {"window_size": 32, "fullatt_block_indexes": [1], "hidden_act": "silu"}},
        {"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 9216}},
    ),
    "qwen2_5_vl_three": (
        {"model_type": "qwen2_5_vl", "text_config": QWEN25,
         "vision_config": QWEN | {"window_size": 60, "fullatt_block_indexes": [0, 3], "depth": 4, "hidden_size": 288,
                                  "num_heads": 9, "spatial_merge_size": 3, "hidden_act": "silu"}},
        {"patch_size": 8, "merge_size": 3, "size": {"shortest_edge": 2000, "longest_edge": 12000}},
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl", "text_config": QWEN3, "vision_config": QWEN | {"deepstack_visual_indexes": [0, 2]}},
        {"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 9216}, "image_mean": [0.5] * 3,
         "image_std": [0.5] * 3},
    ),
    "qwen3_vl_three": (
        {"model_type": "qwen3_vl",
         "text_config": QWEN3 | {"rope_parameters": QWEN3["rope_parameters"] | {"mrope_section": [4, 2, 2]}},
         "vision_config": QWEN | {"deepstack_visual_indexes": [1], "hidden_size": 96, "num_heads": 3, "depth": 2,
                                  "spatial_merge_size": 3, "hidden_act": "silu", "num_position_embeddings": 49}},
        {"patch_size": 8, "merge_size": 3, "size": {"shortest_edge": 2000, "longest_edge": 12000}},
    ),
    "qwen3_vl_moe": (
        {"model_type": "qwen3_vl_moe", "text_config": QWEN3 | EXPERTS | {"model_type": "qwen3_vl_moe_text"},
         "vision_config": QWEN | {"deepstack_visual_indexes": [0, 1]}},
        {"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 9216}},
    ),
    "qwen3_5_moe": (
        {"model_type": "qwen3_5_moe", "vision_config": QWEN,
         "text_config": QWEN35 | EXPERTS | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 32}},
        {"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 9216}},
    ),
    "qwen3_5": (
        {"model_type": "qwen3_5", "text_config": QWEN35, "vision_config": QWEN},
        {"patch_size": 8, "size": {"shortest_edge": 1024, "longest_edge": 9216}},
    ),
    "qwen3_5_ten": (
        {"model_type": "qwen3_5", "text_config": QWEN35 | {"num_attention_heads": 2, "tie_word_embeddings": True},
         "vision_config": QWEN | {"hidden_size": 48, "num_heads": 3, "patch_size": 10, "intermediate_size": 72}},
        {"patch_size": 10, "size": {"shortest_edge": 3000, "longest_edge": 15000}, "resample": 1},
    ),
}  # fmt: skip
WORDS: dict[str, dict[str, int]] = {  # ids of words around images
    "gemma3": {"<start_of_image>": 98, "<image_soft_token>": IMAGE, "<end_of_image>": 97, "\n\n": 96},
    "idefics3": {"<image>": IMAGE, "<fake_token_around_image>": 98, "<global-img>": 97, "\n": 96,
                 **{f"<row_{y}_col_{x}>": 100 + 6 * y + x for y in range(1, 7) for x in range(1, 7)}},
    "lfm2_vl": {"<image>": IMAGE, "<|image_start|>": 98, "<|image_end|>": 97, "<|img_thumbnail|>": 96,
                **{f"<|img_row_{y}_col_{x}|>": 100 + 6 * y + x for y in range(1, 7) for x in range(1, 7)}},
}  # fmt: skip
WORDS["internvl"] = {"<IMG_CONTEXT>": IMAGE, "<img>": 98, "</img>": 97}
WORDS["gemma4"] = {"<|image|>": IMAGE, "<|image>": 98, "<image|>": 97}
WORDS["smolvlm"] = WORDS["idefics3"]
for _kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
    WORDS[_kind] = {"<|image_pad|>": IMAGE, "<|vision_start|>": 98, "<|vision_end|>": 97}


def config_of(name: str) -> Config:
    """Give the configuration of a case, with the id of the token of an image's rows."""
    config = CASES[name][0]
    return config | {"image_token_index" if config["model_type"] == "gemma3" else "image_token_id": IMAGE}


def pictures() -> list[NDArray[np.uint8]]:
    """Make pictures of odd sizes, [height, width, 3] each: waves, edges and noise."""
    rng, found = np.random.default_rng(5), []
    for height, width in SIZES:
        y, x = np.mgrid[:height, :width]
        waves = np.stack([128 + 100 * np.sin(x / 9 + y / 17), 255 * (x // 7 % 2), (x * 3 + y * 5) % 256], -1)
        found.append(np.clip(waves + rng.normal(0, 20, waves.shape), 0, 255).astype(np.uint8))
    return found


def weights(shapes: dict[str, list[int]]) -> dict[str, NDArray[np.float32]]:
    """Make weights whose logits depend on the pictures, on the text, and on positions."""
    generator, made = np.random.default_rng(3), {}
    for name, shape in shapes.items():
        noise, module = generator.standard_normal(shape), name.split(".")[-2]
        if "norm" in module and name.endswith("weight"):
            values = 1.0 + 0.2 * noise
        elif name.endswith("layer_scalar"):
            values = 0.8 + 0.1 * noise
        elif name.endswith(("_min", "_max")):  # of clamped inputs and outputs
            values = (1 if name.endswith("max") else -1) * (1.2 + 0.3 * np.abs(noise))
        elif len(shape) == 1:
            values = 0.2 * noise
        elif module == "embed_tokens":
            values = 0.1 * noise  # so that a token does not follow itself where the LM head is the embedding
        elif "embed" in module or module == "lm_head":
            values = 0.3 * noise
        else:
            values = 1.5 * noise / np.sqrt(np.prod(shape[1:]))
        made[name] = np.asarray(values, np.float32)
    return made


def write_checkpoint(folder: Path, name: str, config: Config, shapes: dict[str, list[int]]) -> Path:
    """Write config.json, preprocessor_config.json, a tokenizer of letters and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(CASES[name][1]), "utf-8")
    write_tokenizer(folder, WORDS[config["model_type"]])
    save_file(weights(shapes), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_tokenizer(folder: Path, words: dict[str, int]) -> None:
    """Write a tokenizer that has an id for every letter, and for the words around images."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    taken = {3 + at: letter for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    taken |= {number: word for word, number in words.items()}
    letters = {taken.get(number, chr(0x4E00 + number)): number for number in range(256)}
    made = Tokenizer(models.WordLevel(letters, "a"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    made.save(str(folder / "tokenizer.json"))


def write_case(folder: Path, name: str) -> Path:
    """Write the checkpoint of a case."""
    found = saved(name)
    return write_checkpoint(folder, name, found["config"], found["tensors"])
