"""``genai_config.json``, by which onnxruntime-genai opens a bundle's standard graph.

What it may hold: https://github.com/microsoft/onnxruntime-genai/blob/main/src/config.h
"""

from __future__ import annotations

import json
from typing import Any

from edgespec.export.bundle.model_part import STANDARD
from edgespec.runtimes.files.manifest import ModelPart, SamplingPart, TokenizerFacts

GENAI = "genai_config.json"
KIND = "decoder"  # any decoder, whatever its architecture is called there


def genai_config(part: ModelPart, tokenizer: TokenizerFacts, sampling: SamplingPart | None) -> str | None:
    """Describe a target to onnxruntime-genai -> JSON; None = it has no standard graph.

    Args:
        part: the target.
        tokenizer: whose tokens begin and end a text.  Without any that ends one, the last of the vocabulary does: there
            must be one.
        sampling: the model's own settings; None or no temperature = greedy.
    """
    if STANDARD not in part.graphs:
        return None
    facts, names = part.facts, ("key", "value")
    inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": part.graphs[STANDARD].file,
        "head_size": facts.head_dim,
        "hidden_size": facts.hidden,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "num_hidden_layers": facts.layers,
        "inputs": inputs | {f"past_{name}_names": f"past_key_values.%d.{name}" for name in names},
        "outputs": {"logits": "logits"} | {f"present_{name}_names": f"present.%d.{name}" for name in names},
    }
    ends = tokenizer.eos or [facts.vocab - 1]
    model = {
        "type": KIND,
        "vocab_size": facts.vocab,
        "context_length": facts.context,
        "bos_token_id": ends[0] if tokenizer.bos is None else tokenizer.bos,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
        "decoder": decoder,
    }
    search: dict[str, Any] = {"max_length": facts.context, "past_present_share_buffer": True, "do_sample": False}
    if sampling and sampling.temperature:
        search |= {"do_sample": True, "temperature": sampling.temperature, "top_k": min(sampling.top_k, facts.vocab),
                   "top_p": sampling.top_p, "repetition_penalty": sampling.repetition_penalty}  # fmt: skip
    return json.dumps({"model": model, "search": search}, indent=1)
