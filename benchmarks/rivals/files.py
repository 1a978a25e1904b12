"""Writes one model of random weights three times: our bundle, a GGUF file (Q4_0), a checkpoint of Hugging Face.

    python -m benchmarks.rivals.files SHAPE FOLDER [--context 8448] [--only bundle,gguf,checkpoint]

The weights of the three differ, their shapes and formats do not: they say how fast a runtime is, not how well.
onnxruntime-genai's builder and OpenVINO's GGUF reader make their own files from these.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import SHAPES, write_shape
from edgespec.export.source.source import resolve

_CLASSES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
_BYTES = np.random.default_rng(0).integers(0, 256, 4194301, dtype=np.uint8)  # a prime, so that rows differ
_NOISE = np.random.default_rng(0).standard_normal(4194301).astype(np.float32)


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name in a checkpoint, name in a GGUF file, shape) of a tied Llama or Qwen2 model."""
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"]
    narrow = kv * config.get("head_dim", hidden // config["num_attention_heads"])
    wide = narrow // kv * config["num_attention_heads"]
    yield "model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", "output_norm.weight", (hidden,)
    matrices = {
        "self_attn.q_proj": ("attn_q", wide, hidden), "self_attn.k_proj": ("attn_k", narrow, hidden),
        "self_attn.v_proj": ("attn_v", narrow, hidden), "self_attn.o_proj": ("attn_output", hidden, wide),
        "mlp.gate_proj": ("ffn_gate", inner, hidden), "mlp.up_proj": ("ffn_up", inner, hidden),
        "mlp.down_proj": ("ffn_down", hidden, inner),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        theirs, gguf = f"model.layers.{layer}.", f"blk.{layer}."
        yield theirs + "input_layernorm.weight", gguf + "attn_norm.weight", (hidden,)
        yield theirs + "post_attention_layernorm.weight", gguf + "ffn_norm.weight", (hidden,)
        for name, (short, rows, columns) in matrices.items():
            yield f"{theirs}{name}.weight", f"{gguf}{short}.weight", (rows, columns)
            if config["model_type"] == "qwen2" and short in ("attn_q", "attn_k", "attn_v"):
                yield f"{theirs}{name}.bias", f"{gguf}{short}.bias", (rows,)


def write_gguf(config: dict[str, Any], file: Path) -> None:
    """Q4_0 matrices, embedding and LM head among them; the tokens are made up."""
    import gguf

    kind, vocab, heads = config["model_type"], config["vocab_size"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, kind, use_temp_file=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if kind == "qwen2" else "llama-bpe")
    letters = [chr(byte + 256) if byte < 33 or 127 <= byte < 161 or byte == 173 else chr(byte) for byte in range(256)]
    writer.add_token_list([*letters, *(f"t{at}" for at in range(256, vocab))])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["t 2"])
    writer.add_bos_token_id(vocab - 2)
    writer.add_eos_token_id(vocab - 1)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim", config["hidden_size"] // heads))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-5))
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    for at, (_, name, shape) in enumerate(tensors(config)):
        if len(shape) == 1:
            writer.add_tensor(name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32))
            continue
        raw = np.empty((shape[0] * shape[1] // 32, 18), np.uint8)  # blocks of 32: a float16 scale, 16 bytes of pairs
        raw[:, :2] = np.full(len(raw), 1 / (4 * shape[1] ** 0.5), np.float16).view(np.uint8).reshape(-1, 2)
        # every matrix differs: runtimes keep one copy of those that are equal
        raw[:, 2:] = np.resize(np.roll(_BYTES, 7919 * at), len(raw) * 16).reshape(-1, 16)
        writer.add_tensor(name, raw.reshape(shape[0], -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(config: dict[str, Any], folder: Path) -> None:
    """config.json, a tokenizer and float16 weights, written one after the other."""
    folder.mkdir(parents=True)
    more = {"architectures": [_CLASSES[config["model_type"]]], "hidden_act": "silu", "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5, **config, **more}), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(resolve("builtin:shakespeare") / name, folder / name)
    header, at = {}, 0
    for name, _, shape in tensors(config):
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for at, (_, _, shape) in enumerate(tensors(config)):
            out.write((np.resize(np.roll(_NOISE, 7919 * at), shape) / shape[-1] ** 0.5).astype(np.float16).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=[name for name, one in SHAPES.items() if one["model_type"] in _CLASSES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, default=8448)
    parser.add_argument("--only", default="bundle,gguf,checkpoint")
    arguments = parser.parse_args()
    config, folder, only = SHAPES[arguments.shape], arguments.folder, arguments.only.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    if "bundle" in only:
        write_shape(config, folder / "bundle", context=arguments.context)
    if "gguf" in only:
        write_gguf(config, folder / "model.gguf")
    if "checkpoint" in only:
        write_checkpoint(config, folder / "checkpoint")


if __name__ == "__main__":
    main()
