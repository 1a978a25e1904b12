"""A small gpt_oss whose weights are chosen: it thinks, and then calls a tool that the prompt has, or answers.

Every token's embedding is one channel, and the LM head says what follows each.  Where that depends on the text, heads
of a full layer look for one token each, a sink takes their weight where it is not there, and what they find decides:
whether it has thought, whether there are tools, and whether one has answered.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
THOUGHT, ANSWER, ARGUMENTS = ["They ask ", "the time."], ["It is ", "late ", "in Bonn."], ['{"zone": ', '"UTC"', " }"]
TOOLS, ANSWERED = "# Tools", " to=assistant"  # in prompts
HEAD = ["commentary", " to=functions.clock ", "<|constrain|>", "json", "<|message|>"]
WORDS = ["assistant", "analysis", "final", *HEAD[:2], HEAD[3], *THOUGHT, *ANSWER, *ARGUMENTS, TOOLS, ANSWERED]
LINES = [
    ["assistant", "<|channel|>"], ["analysis", "<|message|>"], ["final", "<|message|>"], HEAD,
    [*THOUGHT, "<|end|>", "<|start|>", "assistant"], [*ANSWER, "<|return|>"], [*ARGUMENTS, "<|call|>"],
]  # fmt: skip
"""What follows what."""
FLAGS = [THOUGHT[0], TOOLS, ANSWERED]  # tokens that heads look for
CHOICES = [  # after either of two tokens: what, and by how much more than nothing; with each flag
    (["analysis", THOUGHT[0]], 100, (0, 0, 0)),
    (["final", ANSWER[0]], 90, (30, 0, 0)),
    (["commentary", ARGUMENTS[0]], 75, (30, 20, -100)),
]
HIDDEN, LAYERS, HEADS, DIM, INNER, EXPERTS = 288, 2, 4, 32, 32, 2
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|># Tools\n{% for t in tools %}{{ t.function | tojson }}\n{% endfor %}"
    "<|end|>{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.clock to=assistant<|channel|>"
    "commentary<|message|>{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}<|start|>assistant<|channel|>"
    "commentary to=functions.clock <|constrain|>json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}"
    "<|call|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
Tensors = dict[str, NDArray[Any]]


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer of bytes, markers and words -> ids of the last two."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    made.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), "utf-8")
    ids = made.get_vocab()
    return {word: ids[word] for word in (*MARKERS, *WORDS)}


def write_model(folder: Path) -> Path:
    """Write the checkpoint, with its experts in MXFP4."""
    folder.mkdir()
    ids = write_tokenizer(folder)
    vocab = max(ids.values()) + 1
    found = HIDDEN - len(FLAGS)  # channels of what heads find
    assert vocab <= found
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": HIDDEN, "vocab_size": vocab,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM,
        "intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 1024, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9}, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "eos_token_id": [ids["<|return|>"], ids["<|call|>"]], "bos_token_id": None,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    head = np.zeros((vocab, HIDDEN), np.float32)
    for line in LINES:
        for before, after in pairwise(line):
            head[ids[after], ids[before]] = 100
    for words, base, by_flag in CHOICES:
        for before, word in zip(("<|channel|>", "<|message|>"), words, strict=True):
            head[ids[word], ids[before]] = base
            head[ids[word], found:] = by_flag
    tensors: Tensors = {"model.embed_tokens.weight": np.eye(vocab, HIDDEN, dtype=np.float32), "lm_head.weight": head,
                        "model.norm.weight": np.ones(HIDDEN, np.float32)}  # fmt: skip
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}": value for name, value in of_layer().items()}
    at = f"model.layers.{LAYERS - 1}.self_attn"
    last = DIM // 2 - 1  # a channel that hardly turns
    root = HIDDEN**0.5  # what the norm makes of an embedding's one
    for number, flag in enumerate(FLAGS):
        row = number * DIM + last
        tensors[f"{at}.q_proj.bias"][row] = 40 * DIM**0.5
        tensors[f"{at}.k_proj.weight"][row, ids[flag]] = 1 / root  # a score of 40
        tensors[f"{at}.v_proj.weight"][row, ids[flag]] = 1 / root
        tensors[f"{at}.o_proj.weight"][found + number, row] = 1
    tensors[f"{at}.sinks"][:] = 20  # more than all scores of 0 together
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_layer() -> Tensors:
    """Make a layer that adds nothing."""
    made: Tensors = {f"{name}_layernorm.weight": np.ones(HIDDEN, np.float32) for name in ("input", "post_attention")}
    wide = HEADS * DIM
    for name, rows, columns in (("q", wide, HIDDEN), ("k", wide, HIDDEN), ("v", wide, HIDDEN), ("o", HIDDEN, wide)):
        made[f"self_attn.{name}_proj.weight"] = np.zeros((rows, columns), np.float32)
        made[f"self_attn.{name}_proj.bias"] = np.zeros(rows, np.float32)
    made["self_attn.sinks"] = np.zeros(HEADS, np.float32)
    made["mlp.router.weight"], made["mlp.router.bias"] = (
        np.zeros((EXPERTS, HIDDEN), np.float32),
        np.zeros(EXPERTS, np.float32),
    )
    for name, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
        made[f"mlp.experts.{name}_proj_blocks"] = np.zeros((EXPERTS, rows, columns // 32, 16), np.uint8)
        made[f"mlp.experts.{name}_proj_scales"] = np.full((EXPERTS, rows, columns // 32), 127, np.uint8)
        made[f"mlp.experts.{name}_proj_bias"] = np.zeros((EXPERTS, rows), np.float32)
    return made
