"""Small LoRA adapters, written as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support import hf

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
    """An adapter of a model of ``hf``; returns lora_A [r, k] and lora_B [n, r] by module.

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
