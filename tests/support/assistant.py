"""Assistants of Gemma 4 for tests: random checkpoints in the published layout, and the arithmetic again in float64.

The reference is given the target's keys and values as arrays, of the tokens before the pending one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.export.architectures import Architecture
from edgespec.runtimes.slots.slot import Slot
from tests.support import hf
from tests.support.any_drafter import Array, Recorder, attend, check_chains, random_tensors, rms, rotated
from tests.support.passes import run_layers

TARGET = "gemma4_shared"
STEP = Path(__file__).parents[1] / "data" / "reference" / "gemma4_assistant.npz"
"""Results of transformers for ``step_inputs`` (tools/make_assistant_reference.py)."""
SIZE, INNER, HEADS, EPS = 32, 48, 4, 1e-6
KINDS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
SETTINGS: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": len(KINDS),
                            "num_attention_heads": HEADS, "layer_types": KINDS, "rms_norm_eps": EPS,
                            "num_kv_shared_layers": len(KINDS), "model_type": "gemma4_text",
                            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}  # fmt: skip
SAME = ("vocab_size", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window", "rope_parameters",
        "max_position_embeddings")  # fmt: skip


def write_target(folder: Path) -> Path:
    """Write a model with layers that share keys and values, which mostly writes what its last token makes likely."""
    hf.write_reference_checkpoint(folder, TARGET)
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")):
            tensors[name] = (value.astype(np.float32) * 0.4).astype(value.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def assistant_config(target: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the config.json of an assistant."""
    text = {**SETTINGS, **{key: target[key] for key in SAME}}
    return {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "text_config": text,
            "backbone_hidden_size": target["hidden_size"], **more}  # fmt: skip


def assistant_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Give the tensors of an assistant with such a configuration."""
    text, backbone = config["text_config"], config["backbone_hidden_size"]
    size, inner = text["hidden_size"], text["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"pre_projection.weight": (size, 2 * backbone), "model.norm.weight": (size,),
                                          "post_projection.weight": (backbone, size),
                                          "model.embed_tokens.weight": (text["vocab_size"], size)}  # fmt: skip
    for layer, kind in enumerate(text["layer_types"]):
        at = f"model.layers.{layer}"
        dim = text["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        heads = text["num_attention_heads"] * dim
        for part, rows, columns in (
            ("self_attn.q", heads, size),
            ("self_attn.o", size, heads),
            ("mlp.gate", inner, size),
            ("mlp.up", inner, size),
            ("mlp.down", size, inner),
        ):
            shapes[f"{at}.{part}_proj.weight"] = rows, columns
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{at}.{norm}_layernorm.weight"] = (size,)
        shapes |= {f"{at}.self_attn.q_norm.weight": (dim,), f"{at}.layer_scalar": (1,)}
    return shapes


def write_assistant(folder: Path, target: Architecture, agrees: bool = False, **more: Any) -> Path:
    """Write a checkpoint with random weights for a target.

    Args:
        folder: to make.
        target: the model that it is for.
        agrees: as wide as the target, and drafts what only the last token makes likely.
        more: of config.json.
    """
    folder.mkdir(parents=True)
    config = assistant_config(hf.CONFIGS[TARGET], **more)
    if agrees:
        config["text_config"]["hidden_size"] = target.facts.hidden
    tensors = random_tensors(assistant_shapes(config), 4)
    for name in tensors:
        if agrees and name.endswith("layernorm.weight") and "post" in name:
            tensors[name] *= np.float32(0.1)
        if name.endswith("layer_scalar"):
            tensors[name] = np.ones(1, np.float32) if agrees else np.abs(tensors[name])
    if agrees:
        same = np.eye(target.facts.hidden, dtype=np.float32)
        tensors["pre_projection.weight"] = np.concatenate((same, 0 * same), 1)
        tensors["model.embed_tokens.weight"] = target.source.read(target.head.weight)
        tensors["model.norm.weight"] = target.source.read(target.final_norm.weight)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def step_inputs(hidden: int) -> tuple[Array, Array, dict[str, tuple[Array, Array]]]:
    """Make a token's embedding and a hidden state, and keys and values of nine tokens by kind of layer, all random."""
    random = np.random.default_rng(1)
    token, state = random.standard_normal((2, hidden))
    sizes = {"sliding_attention": 16, "full_attention": 32}
    kv = {kind: random.standard_normal((2, 2, 9, dim)) for kind, dim in sizes.items()}
    return token, state, {kind: (pair[0], pair[1]) for kind, pair in kv.items()}


@dataclass
class AssistantReference:
    """The arithmetic of a checkpoint; other options are known mistakes of other implementations.

    Attributes:
        folder: the checkpoint.
        target_norm: weight [H] of the target's final norm.
        raw: the target's hidden state before its final norm.
        swapped: the hidden state before the embedding.
        advances: each step has the next position.
        stale: one row of keys too few is seen.
        short: a window that is one too narrow.
        scored: queries are divided by the root of their size.
        unscaled: without the layers' scalars.
        unnormed: its own hidden state before its norm.
        halves: the channels of full layers turn as those of sliding ones.
    """

    folder: Path
    target_norm: Array
    raw: bool = False
    swapped: bool = False
    advances: bool = False
    stale: bool = False
    short: bool = False
    scored: bool = False
    unscaled: bool = False
    unnormed: bool = False
    halves: bool = False

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text("utf-8"))["text_config"]
        read = load_file(self.folder / "model.safetensors").items()
        self.tensors = {name: value.astype(np.float64) for name, value in read}

    def logits(self, embedded: Array, last: Array, kv: Mapping[str, tuple[Array, Array]], guesses: Array) -> Array:
        """[guesses + 1, vocab]: of each guess and the one after.

        Args:
            embedded: [H], of the pending token.
            last: [H], the target's residual stream after the last layer, at the token before.
            kv: by kind of layer, keys and values [kv_heads, n - 1, dim] of the tokens before.
            guesses: [g, H], embeddings of guesses.
        """
        state = last if self.raw else self._norm(last, self.target_norm)
        found, token = [], embedded
        for step in range(len(guesses) + 1):
            stream, y = self.step(token, state, kv, step * self.advances)
            found.append(self.tensors["model.embed_tokens.weight"] @ y)
            if step < len(guesses):
                token, state = guesses[step], self.tensors["post_projection.weight"] @ (stream if self.unnormed else y)
        return np.array(found)

    def step(self, token: Array, state: Array, kv: Mapping[str, tuple[Array, Array]], ahead: int = 0) -> Any:
        """Return the residual stream [size] before and after the last norm."""
        halves = (state, token) if self.swapped else (token, state)
        x = self.tensors["pre_projection.weight"] @ np.concatenate(halves)
        for layer, kind in enumerate(self.config["layer_types"]):

            def read(name: str, layer: int = layer) -> Array:
                return self.tensors[f"model.layers.{layer}.{name}"]

            a = self._attention(self._norm(x, read("input_layernorm.weight")), read, kind, *kv[kind], ahead)
            x = x + self._norm(a, read("post_attention_layernorm.weight"))
            b = self._norm(x, read("pre_feedforward_layernorm.weight"))
            gate, up = (read(f"mlp.{part}_proj.weight") @ b for part in ("gate", "up"))
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            m = read("mlp.down_proj.weight") @ (gate * up)
            x = x + self._norm(m, read("post_feedforward_layernorm.weight"))
            x = x if self.unscaled else x * read("layer_scalar")
        return x, self._norm(x, self.tensors["model.norm.weight"])

    def _attention(self, h: Array, read: Any, kind: str, keys: Array, values: Array, ahead: int) -> Array:
        n, dim, heads = keys.shape[1], keys.shape[2], self.config["num_attention_heads"]
        q = self._norm((read("self_attn.q_proj.weight") @ h).reshape(heads, dim), read("self_attn.q_norm.weight"))
        q = self._turned(q, n + ahead, kind)
        first = 0 if kind == "full_attention" else max(0, n - self.config["sliding_window"] + 1 + self.short)
        k, v = (each[:, first : n - self.stale].transpose(1, 0, 2) for each in (keys, values))
        out = attend(q[None], k, v, np.zeros((1, len(k)), bool), None if self.scored else 1.0)
        y: Array = read("self_attn.o_proj.weight") @ out[0]
        return y

    def _turned(self, q: Array, position: int, kind: str) -> Array:
        rope, dim = self.config["rope_parameters"][kind], q.shape[-1]
        share = 1.0 if self.halves else rope.get("partial_rotary_factor", 1.0)
        steps = rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        return rotated(q[None], position * np.where(np.arange(dim // 2) < int(share * dim // 2), steps, 0)[None])[0]

    def _norm(self, x: Array, weight: Array) -> Array:
        return rms(x, weight, EPS)


def check_assistant(
    made: Recorder, reference: AssistantReference, fresh: Slot, target: Architecture, ids: NDArray[np.int64], least: int
) -> None:
    """See ``check_chains``."""

    def logits(slot: Slot, tokens: list[int], guesses: list[int]) -> Array:
        slot.prefill(tokens[:-1])
        kv = keys_and_values(slot, target)
        slot.follow([])
        last = run_layers(slot, np.array(tokens[:-1], np.int64), 0, 0, target.facts.layers)[-1].astype(np.float64)
        embedded = slot.embed(np.array([tokens[-1], *guesses], np.int64)).astype(np.float64)
        return reference.logits(embedded[0], last, kv, embedded[1:-1])[:, ids]

    check_chains(made, logits, fresh, ids.tolist(), least)


def keys_and_values(slot: Slot, target: Architecture) -> dict[str, tuple[Array, Array]]:
    """Return those of the last layer of each kind, [kv_heads, tokens, dim], channels in the checkpoint's order."""
    held, found = slot.snapshot(), dict[str, tuple[Array, Array]]()
    kinds, owners = target.settings.values["layer_types"], target.facts.kv_layers
    for layer in range(owners):
        keys, values = (held[f"past_key_values.{layer}.{part}"].astype(np.float64) for part in ("key", "value"))
        if kinds[layer] == "full_attention":  # rotated channels come first
            half = keys.shape[-1] // 2
            turned = target.rotaries["rope_full"].dims // 2
            each = np.arange(2 * half).reshape(2, half)
            order = np.concatenate((each[:, :turned].ravel(), each[:, turned:].ravel()))
            keys = keys[..., np.argsort(order)]
        found[kinds[layer]] = keys, values
    return found
