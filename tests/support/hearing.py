"""Small decoders with audio input, two of every kind, and transformers' results of them.

tests/data/reference/hearing.npz (made by tools/make_hearing_reference.py) has for each the same as sight.npz for models
that read images (tests/support/sight.py).  For recordings it has ``features.N`` float32 [frames // 7, bands] and
``sound.N`` float32 [rows // 7, width].  The prompt is ``BEFORE``, the first recording between ``AROUND``, ``AFTER``.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support.saved import arrays_of, form_of
from tests.support.sight import GEMMA4, GEMMA4_TOWER, LLAMA, weights, write_tokenizer

ARCHIVE = Path(__file__).parents[1] / "data" / "reference" / "hearing.npz"
Config = dict[str, Any]
reference = partial(arrays_of, ARCHIVE)
Array = NDArray[np.float32]
SIZES = [37_999, 4_000, 97_531]  # samples of recordings
EVERY, SOUND = 7, 99  # of rows that are kept; the id of the token of a recording's rows
BEFORE, AFTER = "what is ", " this"

QWEN3: Config = LLAMA | {"model_type": "qwen3"}
CHUNKS: Config = {
    "model_type": "qwen3_asr_encoder", "num_mel_bins": 80, "encoder_layers": 2, "encoder_attention_heads": 3,
    "encoder_ffn_dim": 80, "d_model": 48, "output_dim": 64, "n_window_infer": 200, "downsample_hidden_size": 24,
}  # fmt: skip
WINDOWS: Config = {
    "model_type": "voxtral_encoder", "hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_mel_bins": 80, "max_source_positions": 100,
}  # fmt: skip
CONFORMER: Config = {
    "model_type": "gemma4_audio", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "subsampling_conv_channels": [16, 8], "output_proj_dims": 40,
}  # fmt: skip
CASES: dict[str, Config] = {
    "gemma4": {"model_type": "gemma4", "text_config": GEMMA4, "audio_config": CONFORMER,
               "vision_config": GEMMA4_TOWER | {"use_clipped_linears": True}},
    "gemma4_unclamped": {
        "model_type": "gemma4", "text_config": GEMMA4 | {"num_kv_shared_layers": 0}, "vision_config": None,
        "audio_config": CONFORMER | {"hidden_size": 64, "num_attention_heads": 4, "subsampling_conv_channels": [32, 6],
                                     "attention_context_left": 19, "attention_chunk_size": 20, "conv_kernel_size": 3,
                                     "num_hidden_layers": 2, "use_clipped_linears": False, "residual_weight": 0.7,
                                     "attention_logit_cap": 5.0},
    },
    "qwen3_asr": {"model_type": "qwen3_asr", "text_config": QWEN3, "audio_config": CHUNKS,
                  "tie_word_embeddings": False},
    "qwen3_asr_tied": {
        "model_type": "qwen3_asr", "text_config": QWEN3 | {"num_hidden_layers": 2, "rms_norm_eps": 1e-3},
        "tie_word_embeddings": True,
        "audio_config": CHUNKS | {"num_mel_bins": 128, "encoder_layers": 3, "encoder_attention_heads": 2, "d_model": 64,
                                  "n_window_infer": 300, "downsample_hidden_size": 20},
    },
    "voxtral": {"model_type": "voxtral", "text_config": LLAMA, "audio_config": WINDOWS},
    "voxtral_three": {
        "model_type": "voxtral", "text_config": LLAMA | {"num_hidden_layers": 2}, "projector_hidden_act": "silu",
        "audio_config": WINDOWS | {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2,
                                   "num_mel_bins": 128, "max_source_positions": 90, "num_hidden_layers": 3},
    },
}  # fmt: skip
FEATURES: dict[str, Config] = {
    "gemma4": {"feature_size": 16},
    "gemma4_unclamped": {"feature_size": 32, "per_bin_mean": [-1.5] * 32, "per_bin_stddev": [2.0] * 32},
}
PROCESSORS: dict[str, Config] = {
    name: {"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor", **more},
           "image_processor": {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}}
    for name, more in FEATURES.items()
}  # fmt: skip
"""processor_config.json of models that have one."""
AROUND = {
    "gemma4": ("<|audio>", "<audio|>"),
    "qwen3_asr": ("<|audio_start|>", "<|audio_end|>"),
    "voxtral": ("[BEGIN_AUDIO]", ""),
}
MARKER = "<asr_text>"
WORDS: dict[str, dict[str, int]] = {
    "gemma4": {"<|audio|>": SOUND, "<|audio>": 98, "<audio|>": 97, "<|image|>": 96, "<|image>": 95, "<image|>": 94,
               "<|turn>": 93, "<turn|>": 92, "\n": 91},
    "qwen3_asr": {"<|audio_pad|>": SOUND, "<|audio_start|>": 98, "<|audio_end|>": 97, "<|im_start|>": 96,
                  "<|im_end|>": 95, MARKER: 94, "\n": 93},
    "voxtral": {"[AUDIO]": SOUND, "[BEGIN_AUDIO]": 98, "[INST]": 97, "[/INST]": 96, "[TRANSCRIBE]": 95, "<s>": 94},
}  # fmt: skip


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = (
    "{% for message in messages %}<|turn>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type in ('audio', 'image') %}<|{{ part.type }}|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def config_of(name: str) -> Config:
    """Give the configuration of a case, with the id of the token of a recording's rows."""
    more = {"image_token_id": 96} if CASES[name]["model_type"] == "gemma4" else {}
    return CASES[name] | {"audio_token_id": SOUND, "pad_token_id": 0, "eos_token_id": 2} | more


def recordings() -> list[Array]:
    """Make recordings: tones that rise and fade, and noise."""
    rng, found = np.random.default_rng(7), []
    for size in SIZES:
        time = np.arange(size) / 16_000
        tones = np.sin(2 * np.pi * (200 + 900 * np.sin(time * 3)) * time) * np.exp(-2 * (time % 0.7))
        found.append((0.4 * tones + 0.02 * rng.standard_normal(size)).astype(np.float32))
    return found


def write_checkpoint(folder: Path, name: str, config: Config, shapes: dict[str, list[int]]) -> Path:
    """Write config.json, a tokenizer of letters and weights, and processor_config.json where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    write_tokenizer(folder, WORDS[config["model_type"]])
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] != MARKER
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    if name in PROCESSORS:
        (folder / "processor_config.json").write_text(json.dumps(PROCESSORS[name]), "utf-8")
    if config["model_type"] == "gemma4":
        (folder / "chat_template.jinja").write_text(TURNS, "utf-8")
    if config["model_type"] == "qwen3_asr":
        (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    save_file(weights(shapes), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_case(folder: Path, name: str) -> Path:
    """Write the checkpoint of a case."""
    saved = form_of(ARCHIVE, name)
    return write_checkpoint(folder, name, saved["config"], saved["tensors"])


def write_as_the_authors_do(folder: Path, name: str) -> Path:
    """Write the checkpoint of a case of Qwen3-ASR with the names of QwenLM/Qwen3-ASR."""
    write_case(folder, name)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kept = ("audio_config", "text_config", "audio_token_id", "tie_word_embeddings")
    thinker = {key: config[key] for key in kept if key in config}
    thinker["text_config"] |= {"model_type": "qwen3_asr_text"}
    written = {"model_type": "qwen3_asr", "thinker_config": thinker, "support_languages": ["English"]}
    (folder / "config.json").write_text(json.dumps(written), "utf-8")
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for theirs, value in tensors.items():
        ours = theirs.removeprefix("model.").replace("language_model.", "model.")
        ours = ours.replace("multi_modal_projector.linear_", "audio_tower.proj")
        renamed[f"thinker.{ours}"] = value
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder
