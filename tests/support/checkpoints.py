"""Small untrained heads, models that write a known text, and LoRA adapters, on disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from edgespec.export.bundle.model_part import open_model
from edgespec.export.drafters.heads import DESCRIPTION, TENSORS, HeadsFile
from edgespec.export.source.source import resolve
from tests.support import hf


def make_heads(folder: Path, kind: str, model: str, *, count: int = 3, own: bool = False, seed: int = 0) -> Path:
    """Make a folder of heads of a kind for a model.

    Medusa heads start as the paper's do, near the LM head's own guess; exits are near the identity.
    """
    facts = open_model(resolve(model), None).facts
    hidden, vocab, layers = facts.hidden, facts.vocab, facts.layers
    rng = np.random.default_rng(seed)

    def noise(*shape: int, scale: float = 0.05) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    exits = sorted({max(1, layers // 2), layers - 1}) if kind == "paradecode" else []
    inner = 2 * hidden if kind == "blockwise" else 0
    tensors: dict[str, np.ndarray] = {}
    if kind == "medusa":
        for i in range(count):
            tensors |= {f"medusa.{i}.weight": noise(hidden, hidden), f"medusa.{i}.bias": noise(hidden)}
            if own:
                tensors[f"medusa.{i}.lm_head.weight"] = noise(vocab, hidden)
    elif kind == "blockwise":
        tensors = {
            "blockwise.inner.weight": noise(inner, hidden),
            "blockwise.inner.bias": noise(inner),
            "blockwise.outer.weight": noise(count * hidden, inner),
            "blockwise.outer.bias": noise(count * hidden),
        }
    for layer in exits:
        tensors[f"exit.{layer}.weight"] = np.eye(hidden, dtype=np.float32) + noise(hidden, hidden, scale=0.005)
    file = HeadsFile(
        kind=kind,
        count=len(exits) or count,
        hidden=hidden,
        vocab=vocab,
        inner=inner,
        exits=exits,
        own=own,
    )
    folder.mkdir(parents=True)
    (folder / DESCRIPTION).write_text(json.dumps(file.model_dump()), "utf-8")
    save_file(tensors, folder / TENSORS)
    return folder


def write_chain(
    folder: Path, tokenizer: Tokenizer, vocab: int, chain: Sequence[str], described: dict[str, Any], eos: Any
) -> Path:
    """Write a llama checkpoint whose layers add nothing, so that only the last token decides.

    Args:
        folder: where to write.
        tokenizer: saved as tokenizer.json.
        vocab: rows of the embedding.
        chain: each token is followed by the next.
        described: tokenizer_config.json.
        eos: of generation_config.json.
    """
    config = hf.CONFIGS["llama_tied_gqa"] | {"vocab_size": vocab, "tie_word_embeddings": False, "eos_token_id": eos}
    hf.write_checkpoint(folder, config, 1)
    made = hf.weights(config, 1)
    for name in made:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] = np.zeros_like(made[name])
    made["model.norm.weight"] = np.ones_like(made["model.norm.weight"])
    random = np.random.default_rng(0)
    rows = random.standard_normal((vocab, config["hidden_size"]))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    head = 0.01 * random.standard_normal(rows.shape)
    ids = [tokenizer.token_to_id(token) for token in chain]
    for before, after in itertools.pairwise(ids):
        head[after] += rows[before]
    made["model.embed_tokens.weight"] = rows.astype(np.float32)
    made["lm_head.weight"] = head.astype(np.float32)
    save_file(made, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    hf._write_json(folder / "tokenizer_config.json", described)
    return folder


Floats = NDArray[np.float32]
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    config: hf.Config,
    modules: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"),
    rank: int | Mapping[str, int] = 4,
    saved: Mapping[str, Floats] | None = None,
    base: Path | str | None = None,
    **settings: Any,
) -> dict[str, tuple[Floats, Floats]]:
    """Write an adapter of a model of ``hf``; give lora_A [r, k] and lora_B [n, r] by module.

    Args:
        folder: to write.
        config: of the base model.
        modules: last words of the modules that it changes.
        rank: of all, or by last word.
        saved: tensors that it replaces.
        base: ``base_model_name_or_path``.
        settings: more of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    made: dict[str, tuple[Floats, Floats]] = {}
    tensors: dict[str, np.ndarray] = {PREFIX + name: value for name, value in (saved or {}).items()}
    for name, shape in hf.shapes(config).items():
        module = name.removesuffix(".weight")
        last = module.rsplit(".", 1)[-1]
        if last not in modules or not name.endswith(".weight"):
            continue
        r = rank if isinstance(rank, int) else rank[last]
        n, k = shape if config["model_type"] != "gpt2" else shape[::-1]
        a = (generator.standard_normal((r, k)) / 8).astype(np.float32)
        b = (generator.standard_normal((n, r)) / 8).astype(np.float32)
        made[module] = a, b
        tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = a, b
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": rank if isinstance(rank, int) else 4,
        "lora_alpha": 8,
        "bias": "none",
        "fan_in_fan_out": config["model_type"] == "gpt2",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": list(modules),
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), "utf-8")
    return made
