"""Bundles of random weights in the shapes of published models, for figures of speed and of sizes.

    python -m benchmarks.shapes qwen3.5-0.8b OUT [--format int4] [--context 8448]
    python -m benchmarks.shapes t5-large OUT --draft t5-small --context 512
    python -m benchmarks.rows OUT --rows 1,4,8 --depths 200,512,8192

No checkpoint is written: random numbers are quantized as the export reads them.  A bundle says what decoding costs, and
nothing about text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_described
from edgespec.export.bundle.sizes import best_vocab_rows
from edgespec.export.bundle.writer import write_manifest
from edgespec.export.drafters.head_choice import cut_draft, head_vocab, write_tokens
from edgespec.export.measuring.reading import shares_encoder
from edgespec.export.options import ExportOptions
from edgespec.export.plan_manifest import plan_bundle
from edgespec.export.source.derived import ExtendedCheckpoint, Extra, exponential
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import FORMATS

_DELTA = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
_LFM2 = {
    "model_type": "lfm2", "vocab_size": 65536, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 128000, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip
_GEMMA = {
    "model_type": "gemma4_text", "vocab_size": 262144, "num_attention_heads": 8, "head_dim": 256,
    "global_head_dim": 512, "hidden_size_per_layer_input": 256, "sliding_window": 512,
    "max_position_embeddings": 131072, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
_GRANITE = {
    "model_type": "granitemoehybrid", "vocab_size": 100352, "num_key_value_heads": 4, "num_local_experts": 0,
    "num_experts_per_tok": 0, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "vocab_size": 32128, "d_kv": 64, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0, "is_encoder_decoder": True,
}  # fmt: skip
_SPACES = ["attention" if at in (10, 13, 17, 27) else "mamba" for at in range(32)]

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "qwen3.5-0.8b": {**_DELTA, "hidden_size": 1024, "intermediate_size": 3584},
    "qwen3.5-2b": {**_DELTA, "hidden_size": 2048, "intermediate_size": 6144},
    "lfm2-350m": {**_LFM2, "hidden_size": 1024, "num_attention_heads": 16, "block_ff_dim": 6656},
    "lfm2-1.2b": {**_LFM2, "hidden_size": 2048, "num_attention_heads": 32, "block_ff_dim": 12288},
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
        "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4,
        "num_dense_layers": 2, "rope_theta": 1e6,
        "layer_types": ["full_attention" if at in (2, 6, 10, 14, 18, 21) else "conv" for at in range(24)],
    },
    "lfm3-1.7b": {
        "model_type": "lfm3", "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "conv_L_cache": 7, "sliding_window": 256, "max_position_embeddings": 128000,
    },
    "gemma-4-e2b": {
        **_GEMMA, "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
        "layer_types": ["full_attention" if at % 5 == 4 else "sliding_attention" for at in range(35)],
    },
    "gemma-4-e4b": {
        **_GEMMA, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "layer_types": ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(42)],
    },
    "granite-4.0-350m": {
        **_GRANITE, "hidden_size": 1024, "intermediate_size": 2048, "shared_intermediate_size": 2048,
        "num_hidden_layers": 28, "num_attention_heads": 16, "layer_types": ["attention"] * 28,
        "position_embedding_type": "rope",
    },
    "granite-4.0-h-350m": {
        **_GRANITE, "hidden_size": 768, "intermediate_size": 2048, "shared_intermediate_size": 2048,
        "num_hidden_layers": 32, "num_attention_heads": 12, "layer_types": _SPACES, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
        "position_embedding_type": "nope",
    },
    "granite-3.1-1b-a400m": {
        "model_type": "granitemoe", "vocab_size": 49155, "hidden_size": 1024, "intermediate_size": 512,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8, "num_local_experts": 32,
        "num_experts_per_tok": 8, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 262144, "tie_word_embeddings": False,
    },
    "olmo-hybrid-7b": {
        "model_type": "olmo_hybrid", "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 30, "num_key_value_heads": 30,
        "max_position_embeddings": 65536, "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "tie_word_embeddings": False,
    },
    "smollm3-3b": {
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 65536, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What config.json of published models says of their text part, where it differs from the defaults."""


def _sides(width: int, layers: int, inner: int) -> dict[str, Any]:
    """Sizes of BART's kin; both sides are alike."""
    sizes = {"layers": layers, "attention_heads": width // 64, "ffn_dim": inner}
    both = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    return {"d_model": width, "scale_embedding": True, "eos_token_id": 2, "decoder_start_token_id": 2, **both}


_NLLB = {"model_type": "m2m_100", "vocab_size": 256206, "max_position_embeddings": 1024, "pad_token_id": 1}
_WHISPER = {
    "model_type": "whisper", "vocab_size": 51865, "num_mel_bins": 80, "max_source_positions": 1500,
    "max_target_positions": 448, "pad_token_id": 50257,
}  # fmt: skip
TRANSLATORS: dict[str, dict[str, Any]] = {
    "opus-mt": {
        **_sides(512, 6, 2048), "model_type": "marian", "vocab_size": 58101, "max_position_embeddings": 512,
        "activation_function": "swish", "pad_token_id": 58100,
    },
    "nllb-600m": {**_NLLB, **_sides(1024, 12, 4096)},
    "nllb-1.3b": {**_NLLB, **_sides(1024, 24, 8192)},
    "whisper-small": {**_WHISPER, **_sides(768, 12, 3072), "scale_embedding": False},
    "whisper-medium": {**_WHISPER, **_sides(1024, 24, 4096), "scale_embedding": False},
    "distil-medium": {**_WHISPER, **_sides(1024, 24, 4096), "scale_embedding": False, "decoder_layers": 2},
    "whisper-large-v3-turbo": {
        **_WHISPER, **_sides(1280, 32, 5120), "scale_embedding": False, "decoder_layers": 4, "vocab_size": 51866,
        "num_mel_bins": 128,
    },
    "t5-small": {**_T5, "d_model": 512, "num_heads": 8, "num_layers": 6, "d_ff": 2048},
    "t5-large": {**_T5, "d_model": 1024, "num_heads": 16, "num_layers": 24, "d_ff": 4096},
    "flan-t5-base": {
        **_T5, "d_model": 768, "num_heads": 12, "num_layers": 12, "d_ff": 2048, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The same of encoder-decoders: OPUS-MT en-de, NLLB-200, Whisper, distil-whisper, T5 1.0, Flan-T5."""


def noise(shape: tuple[int, ...]) -> Extra:
    """Make a tensor of random numbers, the same ones again and again: quantizing them takes as long as any."""

    def read(rows: slice, columns: slice | None) -> NDArray[np.float32]:
        start, stop, _ = rows.indices(shape[0])
        part = (stop - start, *shape[1:])
        found = np.resize(_NOISE, prod(part)).reshape(part) / np.float32(shape[-1] ** 0.5)
        return found if columns is None else found[:, columns]

    return Extra(lambda: shape, read)


_NOISE = np.random.default_rng(0).standard_normal(65521).astype(np.float32)  # a prime, so that rows differ


def write_shape(
    config: dict[str, Any],
    folder: Path,
    form: Any = "int4",
    context: int | None = None,
    draft: dict[str, Any] | None = None,
) -> None:
    """Write a bundle of random weights.

    Args:
        config: config.json of the model.
        folder: a new one.
        form: of the weights.
        context: maximum tokens; None = the model's limit.
        draft: config.json of a draft model.
    """
    with tempfile.TemporaryDirectory() as temporary:
        sources = {name: _described(Path(temporary) / name, one) for name, one in (("target", config), ("draft", draft))
                   if one is not None}  # fmt: skip
        archs = {name: _made_up(open_described(source, context)) for name, source in sources.items()}
        folder.mkdir(parents=True)
        parts = {"target": write_model(folder, archs["target"], ModelSpec(form)).part}
        methods = []
        if draft is not None:
            arch, tokens = archs["draft"], None
            methods.append("speculative")
            inner = folder / "draft"
            inner.mkdir()
            if (rows := best_vocab_rows(archs["target"], arch)) is not None:
                tokens = np.arange(rows)
            plan = None if tokens is None else cut_draft(arch, tokens)
            cut = head_vocab("draft/", tokens)
            write_tokens(inner, tokens)
            shared = shares_encoder(archs["target"], arch)  # numbers of one shape are the same
            spec = ModelSpec(form, draft=True, prefix="draft/", plan=plan, head_vocab=cut, shares_encoder=shared)
            parts["draft"] = write_model(inner, arch, spec).part
        for name in ("config.json", *_TOKENIZER):
            shutil.copyfile(sources["target"] / name, folder / name)
        options = ExportOptions(str(sources["target"]), format=form, context=context, methods=methods,
                                draft=str(sources["draft"]) if draft else None)  # fmt: skip
        planned = plan_bundle(options)
    write_manifest(folder, planned.model_copy(update=parts))


_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def _described(folder: Path, config: dict[str, Any]) -> Path:
    """Write what a folder says of a model without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    small = resolve("builtin:shakespeare")
    for name in _TOKENIZER:
        shutil.copyfile(small / name, folder / name)
    return folder


def _made_up(arch: Architecture) -> Architecture:
    """Make numbers for all tensors of a model, and of its encoder."""
    for side in filter(None, (arch, arch.encoder)):
        made = {name: noise(shape) for name, shape in side.tensors.items()}
        # rates of decay are positive: with others the states of a long text are infinite
        made |= {name: exponential(extra) for name, extra in made.items() if name.endswith(".rate")}
        side.source = ExtendedCheckpoint(side.source, made)
    return arch


def main() -> None:
    every = SHAPES | TRANSLATORS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(every))
    parser.add_argument("output", type=Path)
    parser.add_argument("--format", choices=FORMATS, default="int4")
    parser.add_argument("--context", type=int, default=8448)
    parser.add_argument("--draft", choices=sorted(every), help="a draft model, likewise")
    arguments = parser.parse_args()
    draft = every[arguments.draft] if arguments.draft else None
    write_shape(every[arguments.shape], arguments.output, arguments.format, arguments.context, draft)


if __name__ == "__main__":
    main()
