"""Checkpoints with a layer for multi-token prediction, and its arithmetic again in float64."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.support import hf
from tests.support.any_drafter import Array, attend, rms, rotated, swiglu

QWEN = {"fc": "fc", "embedding": "pre_fc_norm_embedding", "state": "pre_fc_norm_hidden", "norm": "norm"}
MIMO = {"fc": "input_proj", "embedding": "token_layernorm", "state": "hidden_layernorm", "norm": "final_layernorm"}
WEAK = 0.4  # what layers add, of an ordinary test model's


def write_mtp(folder: Path, name: str, mimo: bool = False, agrees: bool = False) -> Path:
    """Write a checkpoint of ``hf.CONFIGS`` in float32, and a layer of its kind with random weights.

    Args:
        folder: to make.
        name: of the configuration; Qwen3.5's is written as the text part of a model for images.
        mimo: the layer is stored as MiMo's.
        agrees: the layer drafts what only the last token makes likely, and the model mostly generates that.
    """
    config = hf.CONFIGS[name]
    hf.write_checkpoint(folder, config, hf.SEEDS[name])
    tensors, random = load_file(folder / "model.safetensors"), np.random.default_rng(5)
    offset = config["model_type"].startswith("qwen3_5")
    kinds, hidden = config.get("layer_types") or ["linear_attention"] * 3 + ["full_attention"], config["hidden_size"]
    like = f"model.layers.{kinds.index('full_attention') if offset else 0}."
    own, at = (MIMO, "model.mtp_layers.0.") if mimo else (QWEN, "mtp.")
    added: dict[str, NDArray[Any]] = {
        f"{at}{own['fc']}.weight": random.standard_normal((hidden, 2 * hidden)) * (2 * hidden) ** -0.5
    }
    for norm in ("embedding", "state", "norm"):
        added[f"{at}{own[norm]}.weight"] = np.asarray(0.2 * random.standard_normal(hidden) + (not offset))
    for theirs, value in tensors.items():
        if theirs.startswith(like):
            kept = value if value.ndim < 2 else value[:, random.permutation(value.shape[1])]
            added[f"{at}{'' if mimo else 'layers.0.'}{theirs.removeprefix(like)}"] = kept
    if agrees:
        for theirs in [*tensors, *added]:
            if theirs.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight", "out_proj.weight")):
                (added if theirs in added else tensors)[theirs] *= np.float32(0.1 if theirs in added else WEAK)
        straight = np.concatenate((np.eye(hidden), np.zeros((hidden, hidden))), 1)
        added[f"{at}{own['fc']}.weight"] = np.roll(straight, hidden, 1) if mimo else straight
        added[f"{at}{own['embedding']}.weight"] = np.full(hidden, float(not offset))
        added[f"{at}{own['norm']}.weight"] = tensors["model.norm.weight"]
    tensors |= {theirs: np.ascontiguousarray(value, np.float32) for theirs, value in added.items()}
    if offset:
        tensors = {re.sub("^model", "model.language_model", theirs): value for theirs, value in tensors.items()}
    described = json.loads((folder / "config.json").read_text("utf-8"))
    described["mtp_num_hidden_layers" if offset else "num_nextn_predict_layers" if mimo else "num_mtp_layers"] = 1
    outer = {"model_type": "qwen3_5", "text_config": described} if offset else described
    (folder / "config.json").write_text(json.dumps(outer), "utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass
class MtpReference:
    """The arithmetic of a checkpoint's layer; other options are known mistakes of other implementations.

    Attributes:
        folder: the checkpoint.
        tokens: what its LM head scores; None = all.
        swapped: the other order of embedding and hidden state.
        late: entry i of token i, not i + 1.
        raw: the target's hidden state before its final norm.
        unnormed: its own hidden state before its norm.
        closed: without the gate on what attention gives.
        turned: share of a head that is rotated; None = as it should be.
        plain: norms multiply by only their weights.
    """

    folder: Path
    tokens: NDArray[np.int64] | None = None
    swapped: bool = False
    late: bool = False
    raw: bool = False
    unnormed: bool = False
    closed: bool = False
    turned: float | None = None
    plain: bool = False
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        config = json.loads((self.folder / "config.json").read_text("utf-8"))
        self.config = config = config.get("text_config", config)
        self.offset = 1.0 if config["model_type"].startswith("qwen3_5") and not self.plain else 0.0
        found = {name.replace("language_model.", ""): value.astype(np.float64)
                 for name, value in load_file(self.folder / "model.safetensors").items()}  # fmt: skip
        self.mimo = "mtp.fc.weight" not in found
        own, at = (MIMO, "model.mtp_layers.0.") if self.mimo else (QWEN, "mtp.")
        layer = at if self.mimo else f"{at}layers.0."
        self.layer = {name.removeprefix(layer): value for name, value in found.items() if name.startswith(layer)}
        self.own = {ours: found[f"{at}{theirs}.weight"] for ours, theirs in own.items()}
        self.target_norm = found["model.norm.weight"]
        self.head = found.get("lm_head.weight", found["model.embed_tokens.weight"])
        self.ids = np.arange(len(self.head)) if self.tokens is None else self.tokens
        self.heads, self.keys = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = len(self.layer["self_attn.k_proj.weight"]) // self.keys

    def logits(self, embedded: Array, taps: Array, guesses: Array) -> Array:
        """[guesses + 1, rows]: of each guess and the one after, of embeddings [n, H], residual streams after the last
        layer [n - 1, H] and embeddings of guesses [g, H]."""
        states = taps if self.raw else self._norm(taps, self.target_norm)
        tokens, found = np.asarray(embedded[:-1] if self.late else embedded[1:]), []
        for step in range(len(guesses) + 1):
            stream = self._layer(tokens, states)[-1:]
            normed = self._norm(stream, self.own["norm"])
            found.append(self.head[self.ids] @ normed[0])
            if step < len(guesses):
                states = np.concatenate((states, stream if self.unnormed else normed))
                tokens = np.concatenate((tokens, guesses[step : step + 1]))
        return np.array(found)

    def _layer(self, tokens: Array, states: Array) -> Array:
        halves = [self._norm(tokens, self.own["embedding"]), self._norm(states, self.own["state"])]
        x = np.concatenate(halves[::-1] if self.mimo != self.swapped else halves, -1) @ self.own["fc"].T
        x = x + self._attention(self._norm(x, self.layer["input_layernorm.weight"]))
        b = self._norm(x, self.layer["post_attention_layernorm.weight"])
        return x + swiglu(b, lambda part: np.asarray(self.layer[f"mlp.{part}_proj.weight"]))

    def _attention(self, given: Array) -> Array:
        n, dim, rope = len(given), self.dim, self.config.get("rope_parameters") or self.config
        gated = self.config["model_type"].startswith("qwen3_5")
        share = rope.get("partial_rotary_factor", 0.25 if gated else 1.0) if self.turned is None else self.turned
        turned = int(dim * share)
        angles = np.arange(n)[:, None] * rope["rope_theta"] ** (-np.arange(0, turned, 2) / turned)

        def project(part: str, heads: int) -> Array:
            found: Array = given @ self.layer[f"self_attn.{part}_proj.weight"].T
            return (found + self.layer.get(f"self_attn.{part}_proj.bias", 0.0)).reshape(n, heads, -1)

        def turned_heads(x: Array, part: str) -> Array:
            weight = self.layer.get(f"self_attn.{part}_norm.weight")
            return rotated(x if weight is None else self._norm(x, weight), angles)

        q, k, v = project("q", self.heads), project("k", self.keys), project("v", self.keys)
        q, gate = (q[..., :dim], q[..., dim:].reshape(n, -1)) if gated else (q, None)
        out = attend(turned_heads(q, "q"), turned_heads(k, "k"), v, np.triu(np.ones((n, n), bool), 1))
        if gate is not None and not self.closed:
            out = out / (1 + np.exp(-gate))
        y: Array = out @ self.layer["self_attn.o_proj.weight"].T
        return y + self.layer.get("self_attn.o_proj.bias", 0.0)

    def _norm(self, x: Array, weight: Array) -> Array:
        return rms(x, weight + self.offset, self.config.get("rms_norm_eps", 1e-6))
