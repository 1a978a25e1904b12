"""EAGLE-3 drafters for tests: random checkpoints in the published layouts, and the arithmetic again in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.export.architectures import Architecture
from tests.support.any_drafter import Array, attend, random_tensors, rms, rotated, swiglu

HEADS, KEYS, DIM, INNER, EPS = 4, 2, 16, 96, 1e-5


def write_random(
    folder: Path, target: Architecture, config: dict[str, Any], tokens: Sequence[int] | None = None, layers: int = 1
) -> Path:
    """Write a checkpoint with random weights for a target.

    Args:
        folder: to make.
        target: the model that it is for.
        config: config.json without sizes.
        tokens: what the rows of its LM head score; None = all tokens.
        layers: how many it has.
    """
    folder.mkdir(parents=True)
    hidden = target.facts.hidden
    ids = list(range(target.facts.vocab)) if tokens is None else list(tokens)
    tapped = len(config["eagle_aux_hidden_state_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, tapped * hidden), "norm.weight": (hidden,),
                                          "lm_head.weight": (len(ids), hidden)}  # fmt: skip
    for layer in range(layers):
        name, width = f"layers.{layer}" if layers > 1 else "midlayer", hidden if layer else 2 * hidden
        for part, rows, columns in (("self_attn.q", HEADS * DIM, width), ("self_attn.k", KEYS * DIM, width),
                                    ("self_attn.v", KEYS * DIM, width), ("self_attn.o", hidden, HEADS * DIM),
                                    ("mlp.gate", INNER, hidden), ("mlp.up", INNER, hidden),
                                    ("mlp.down", hidden, INNER)):  # fmt: skip
            shapes[f"{name}.{part}_proj.weight"] = rows, columns
        for norm in ("input_layernorm", "post_attention_layernorm", *(() if layer else ("hidden_norm",))):
            shapes[f"{name}.{norm}.weight"] = (hidden,)
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (tapped * hidden,)
    tensors: dict[str, NDArray[Any]] = {**random_tensors(shapes, 1)}
    if tokens is not None:
        tensors["d2t"] = np.array(ids, np.int64) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(target.facts.vocab), ids)
    sizes = {"hidden_size": hidden, "intermediate_size": INNER, "num_attention_heads": HEADS,
             "num_hidden_layers": layers, "num_key_value_heads": KEYS, "rms_norm_eps": EPS, "rope_theta": 10000.0,
             "draft_vocab_size": len(ids), "vocab_size": target.facts.vocab}  # fmt: skip
    if config.get("speculators_model_type"):
        config = {**config, "transformer_layer_config": sizes}
        sizes = {}
    else:
        config = {"architectures": ["LlamaForCausalLMEagle3"], **config}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**sizes, **config}), "utf-8")
    return folder


@dataclass
class Reference:
    """The arithmetic of a checkpoint; ``swapped``, ``late`` and ``as_ids`` are mistakes that others have made.

    Attributes:
        folder: the checkpoint.
        swapped: the hidden state before the embedding.
        late: entry i of token i, not i + 1.
        as_ids: d2t as tokens, not as offsets.
        flags: options of config.json, which may be other ones.
    """

    folder: Path
    swapped: bool = False
    late: bool = False
    as_ids: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = json.loads((self.folder / "config.json").read_text("utf-8"))
        self.flags = {**config, **config.get("transformer_layer_config", {}), **self.flags}
        self.tensors = {
            name.replace("midlayer", "layers.0"): value if value.dtype == np.int64 else value.astype(np.float64)
            for name, value in load_file(self.folder / "model.safetensors").items()
        }
        rows = len(self.tensors["lm_head.weight"])
        offsets = self.tensors.get("d2t", np.zeros(rows, np.int64))
        self.ids = offsets if self.as_ids else np.arange(rows) + offsets
        self.heads = self.flags["num_attention_heads"]
        self.keys = self.flags["num_key_value_heads"]
        self.dim = len(self.tensors["layers.0.self_attn.q_proj.weight"]) // self.heads

    def logits(self, embedded: Array, taps: Array, guesses: Array) -> Array:
        """[guesses + 1, rows]: of each guess and the one after, of embeddings [n, H], taps [n - 1, k * H] and
        embeddings of guesses [g, H]."""
        tensors, flags = self.tensors, self.flags
        if flags.get("norm_before_fc"):
            taps = self._norm(taps, "input_norm")
        own: Array = taps @ tensors["fc.weight"].T  # input of each row
        tokens, positions = embedded[:-1] if self.late else embedded[1:], np.arange(len(taps))
        found = []
        for step in range(len(guesses) + 1):
            y = self._layers(np.asarray(tokens), own, positions)
            found.append(tensors["lm_head.weight"] @ self._norm(y[-1:], "norm")[0])
            if step < len(guesses):
                state = self._norm(y[-1:], "norm") if flags.get("norm_output") else y[-1:]
                own = np.concatenate((own, state))
                tokens = np.concatenate((tokens, guesses[step : step + 1]))
                positions = np.append(positions, positions[-1] + 1)
        return np.array(found)

    def _layers(self, tokens: Array, own: Array, positions: NDArray[np.int64]) -> Array:
        before, x = self.flags.get("norm_before_residual"), own
        for layer in range(self.flags["num_hidden_layers"]):
            name = f"layers.{layer}"
            if layer:
                given = self._norm(x, f"{name}.input_layernorm")
            else:
                hidden = self._norm(own, f"{name}.hidden_norm")
                halves = [self._norm(tokens, f"{name}.input_layernorm"), hidden]
                given, x = np.concatenate(halves[::-1] if self.swapped else halves, -1), hidden if before else own
            x = x + self._attention(given, name, positions)
            b = self._norm(x, f"{name}.post_attention_layernorm")
            x = x + swiglu(b, partial(self._mlp, name))
        return x

    def _attention(self, given: Array, name: str, positions: NDArray[np.int64]) -> Array:
        pairs = self.dim // 2
        angles = positions[:, None] * self.flags["rope_theta"] ** (-np.arange(pairs) / pairs)
        q, k, v = (
            (given @ self.tensors[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(given), heads, self.dim)
            for part, heads in (("q", self.heads), ("k", self.keys), ("v", self.keys))
        )
        later = np.triu(np.ones((len(given), len(given)), bool), 1)
        out = attend(rotated(q, angles), rotated(k, angles), v, later)
        y: Array = out @ self.tensors[f"{name}.self_attn.o_proj.weight"].T
        return y

    def _mlp(self, name: str, part: str) -> Array:
        return np.asarray(self.tensors[f"{name}.mlp.{part}_proj.weight"])

    def _norm(self, x: Array, name: str) -> Array:
        return rms(x, self.tensors[f"{name}.weight"], self.flags["rms_norm_eps"])
