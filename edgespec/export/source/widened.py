"""A small Llama, T5 or LFM2-VL at the cost of a large one: wider, with the same logits up to rounding.

A folder with ``edgespec_widened.json`` (``{"source": "../shakespeare", "factor": 8}``) holds no weights: they are
computed when they are read.  With ``k`` the factor, ``D`` the source's hidden size and ``P`` [D, kD] orthonormal rows:

- the residual stream is ``x @ P``.  Weights of RMSNorms are folded into the matrices that follow, and become
  ``1/sqrt(k)``;
- queries and keys: pair ``i`` of a head moves to slot ``k * i``, of the same frequency; the other slots are zero;
- values: rotated within each head, and back in the output projection;
- MLP: every unit is repeated k times, and the copies share its output;
- T5, which has no rotation: every head is repeated k times instead, and the copies share its output;
- LFM2-VL, with attention in all layers: norms of queries and keys also have the fourth root of 1/k.  The vision encoder
  stays the same, and the projector's last matrix writes the wide stream.

``P`` and the rotations are rows of Hadamard matrices with signs.  All sums are of multiples of 2^-26, so they are
exact, and the weights are the same on every machine.  Widening adds no ability, and does not predict the quantization
error of a trained model of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.source.stored import Opened, Stored

FILE = "edgespec_widened.json"
GRAIN = 2.0**26  # folded weights are multiples of its inverse: sums of a few thousand are exact in float64
LAYER = "model.layers."

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Widened:
    """A tensor that is computed from the source's."""

    file: Path  # the folder's ``edgespec_widened.json``
    shape: tuple[int, ...]  # of the wide tensor
    compute: Callable[[], Doubles]  # gives all of it, float64

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        whole = self.compute()[rows]
        return (whole if columns is None else whole[:, columns]).astype(np.float32)


def is_widened(folder: Path) -> bool:
    return (folder / FILE).is_file()


def widen(folder: Path, config: dict[str, Any], source: Opened, factor: int) -> Opened:
    """Return the wide model.

    Args:
        source: the small model: Llama's tensors, tied or not, without biases or rotary scaling, T5's, tied, with a
            gated MLP, or LFM2-VL's.
        factor: how many times as wide; the wide hidden size and head size are powers of two.

    Raises:
        ExportError: the source is of another kind, or ``config`` is not its widening.
    """
    kind = {"llama": _Llama, "t5": _T5, "lfm2_vl": _Lfm2Vl}.get(source.config.get("model_type", ""))
    old, new = (one.get("text_config", one) for one in (source.config, config))
    plain = kind is not None and not any(name.endswith(".bias") and kind.text in name for name in source.tensors)
    scaled = kind is not None and any(new.get(name) != old.get(name, 0) * factor for name in kind.scaled)
    if kind is None or not plain or scaled or factor < 1 or factor & (factor - 1):
        raise ExportError(
            f"{folder / FILE}: expected a model without biases, and a config.json that is {factor} times as wide",
            "embedded models only are meant to be widened",
        )
    wide = kind(folder / FILE, old, source.tensors, factor)
    note = f"synthetic in size: {source.path.name} made {factor} times as wide, with the same text and weights repeated"
    return Opened(folder, config, wide.tensors(), [*source.notes, note])


class _Widening:
    """Base of the classes that compute wide tensors from small ones."""

    scaled: tuple[str, ...] = ()  # sizes of the configuration that are multiplied
    text = ""  # in the names of tensors that become wider
    width = "hidden_size"

    def __init__(self, file: Path, config: dict[str, Any], small: Mapping[str, Stored], factor: int) -> None:
        self.file, self.small, self.factor = file, small, factor
        self.hidden = config[self.width]
        self.rotation = _rows_of_hadamard(self.hidden, self.hidden * factor, 0)  # [D, kD], P
        self.norm = factor**-0.5  # the wide stream's mean square is the small one's / k

    def tensors(self) -> dict[str, Stored]:
        raise NotImplementedError

    def _stored(self, name: str, change: Callable[[Doubles], Doubles], times: tuple[int, ...]) -> Widened:
        small = self.small[name]
        shape = tuple(size * by for size, by in zip(small.shape, times, strict=True))
        return Widened(self.file, shape, lambda: change(self._read(name)))

    def _constant(self, name: str) -> Widened:
        """Give the weights of a norm whose own are folded into what follows."""
        return self._stored(name, lambda weight: np.full(len(weight) * self.factor, self.norm), (self.factor,))

    def _read(self, name: str) -> Doubles:
        return self.small[name].read(slice(None), None).astype(np.float64)

    def _spread(self, weight: Doubles, norm: str | None = None) -> Doubles:  # [n, D] -> [n, kD]
        """Return a matrix that reads the wide stream, with the norm before it folded in."""
        folded = weight if norm is None else weight * self._read(norm)
        return np.rint(folded * GRAIN) / GRAIN @ self.rotation

    def _shared(self, weight: Doubles, size: int) -> Doubles:  # [D, n] -> [kD, k * n]
        """Return a matrix that writes the wide stream, with each unit of ``size`` columns repeated k times."""
        units = weight.shape[1] // size
        shares = 0.5 + _mixed(np.arange(units * self.factor), 0).astype(np.float64).reshape(units, -1, 1) / 2**32
        shares /= shares.sum(1, keepdims=True)  # [units, k, 1]
        spread = (self.rotation.T @ (np.rint(weight * GRAIN) / GRAIN)).reshape(-1, units, 1, size)
        return (spread * shares).reshape(len(spread), -1)


class _Llama(_Widening):
    scaled: tuple[str, ...] = ("hidden_size", "intermediate_size", "head_dim")

    def __init__(self, file: Path, config: dict[str, Any], small: Mapping[str, Stored], factor: int) -> None:
        super().__init__(file, config, small, factor)
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head = config.get("head_dim") or self.hidden // self.heads
        half = np.arange(self.head // 2)
        self.slots = np.concatenate([factor * half, factor * half + self.head * factor // 2])  # [head]

    def tensors(self) -> dict[str, Stored]:
        made: dict[str, Stored] = {}
        head = "lm_head.weight" if "lm_head.weight" in self.small else "model.embed_tokens.weight"
        made["model.embed_tokens.weight"] = self._stored("model.embed_tokens.weight", self._spread, (1, self.factor))
        made["lm_head.weight"] = self._stored(head, lambda w: self._spread(w, "model.norm.weight"), (1, self.factor))
        for name in self.small:
            if name.endswith("norm.weight"):
                made[name] = self._constant(name)
            elif name.startswith(LAYER):
                made[name] = self._stored(name, self._projection(name), (self.factor, self.factor))
        return made

    def _projection(self, name: str) -> Callable[[Doubles], Doubles]:
        layer, block, which = name.removesuffix(".weight").rsplit(".", 2)
        norm = f"{layer}.{'input' if block == 'self_attn' else 'post_attention'}_layernorm.weight"
        return self._wide(which, norm)

    def _wide(self, which: str, norm: str) -> Callable[[Doubles], Doubles]:
        if which == "q_proj":
            return lambda w: self._rotary(self._spread(w, norm), self.heads) * self.factor**0.5
        if which == "k_proj":
            return lambda w: self._rotary(self._spread(w, norm), self.kv_heads)
        if which == "v_proj":
            return lambda w: self._values(self._spread(w, norm))
        if which == "o_proj":
            return self._output
        if which == "down_proj":
            return lambda w: self._shared(w, 1)
        return lambda w: self._spread(w, norm).repeat(self.factor, 0)

    def _rotary(self, weight: Doubles, heads: int) -> Doubles:  # [heads * head, kD] -> [heads * k * head, kD]
        made = np.zeros((heads, self.head * self.factor, weight.shape[1]))
        made[:, self.slots] = weight.reshape(heads, self.head, -1)
        return made.reshape(-1, weight.shape[1])

    def _turn(self, kv_head: int) -> Doubles:  # [head, k * head]
        return _rows_of_hadamard(self.head, self.head * self.factor, kv_head + 1)

    def _values(self, weight: Doubles) -> Doubles:  # [kv * head, kD] -> [kv * k * head, kD]
        parts = weight.reshape(self.kv_heads, self.head, -1)
        return np.concatenate([self._turn(h).T @ parts[h] for h in range(self.kv_heads)])

    def _output(self, weight: Doubles) -> Doubles:  # [D, heads * head] -> [kD, heads * k * head]
        parts = (np.rint(weight * GRAIN) / GRAIN).reshape(self.hidden, self.heads, self.head)
        group = self.heads // self.kv_heads
        turned = [parts[:, h] @ self._turn(h // group) for h in range(self.heads)]
        return self.rotation.T @ np.concatenate(turned, 1)


class _Lfm2Vl(_Llama):
    scaled = ("hidden_size", "intermediate_size")
    text = "model.language_model."

    def tensors(self) -> dict[str, Stored]:
        made = dict(self.small)  # the tower stays as it is
        embedding, last = f"{self.text}embed_tokens.weight", "model.multi_modal_projector.linear_2"
        made[embedding] = self._stored(embedding, self._spread, (1, self.factor))
        head = f"{self.text}embedding_norm.weight"
        made["lm_head.weight"] = self._stored(embedding, lambda w: self._spread(w, head), (1, self.factor))
        made[f"{last}.weight"] = self._stored(f"{last}.weight", lambda w: self._spread(w.T).T, (self.factor, 1))
        made[f"{last}.bias"] = self._stored(f"{last}.bias", lambda b: self._spread(b[None])[0], (self.factor,))
        for name in self.small:
            if name.startswith(self.text) and name.endswith("_norm.weight"):
                made[name] = self._constant(name)
            elif name.startswith(self.text) and "layernorm" in name:
                made[name] = self._stored(name, self._head_norm, (self.factor,))
            elif name.startswith(f"{self.text}layers."):
                made[name] = self._stored(name, self._projection(name), (self.factor, self.factor))
        return made

    def _projection(self, name: str) -> Callable[[Doubles], Doubles]:
        layer, block, which = name.removesuffix(".weight").rsplit(".", 2)
        norm = f"{layer}.{'operator' if block == 'self_attn' else 'ffn'}_norm.weight"
        if which == "q_proj":  # its norm takes every factor away
            return lambda w: self._rotary(self._spread(w, norm), self.heads)
        return self._wide(
            {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "out_proj": "o_proj"}.get(which, which), norm
        )

    def _head_norm(self, weight: Doubles) -> Doubles:  # [head] -> [k * head]
        made = np.full(self.head * self.factor, self.factor**-0.25)
        made[self.slots] = weight * self.factor**-0.25
        return made


class _T5(_Widening):
    scaled = ("d_model", "d_ff", "num_heads")
    width = "d_model"

    def __init__(self, file: Path, config: dict[str, Any], small: Mapping[str, Stored], factor: int) -> None:
        super().__init__(file, config, small, factor)
        self.head = config["d_kv"]

    def tensors(self) -> dict[str, Stored]:
        made: dict[str, Stored] = {"shared.weight": self._stored("shared.weight", self._spread, (1, self.factor))}
        made["lm_head.weight"] = self._stored("shared.weight", self._logits, (1, self.factor))
        for name in self.small:
            if name.endswith("layer_norm.weight"):
                made[name] = self._constant(name)
            elif "relative_attention_bias" in name:
                made[name] = self._stored(name, lambda table: table.repeat(self.factor, 1), (1, self.factor))
            elif ".block." in name:
                made[name] = self._stored(name, self._projection(name), (self.factor, self.factor))
        return made

    def _logits(self, weight: Doubles) -> Doubles:
        """Return an LM head, with the factor that T5's tied head has."""
        return self._spread(weight * self.hidden**-0.5, "decoder.final_layer_norm.weight")

    def _projection(self, name: str) -> Callable[[Doubles], Doubles]:
        layer, block, which = name.removesuffix(".weight").rsplit(".", 2)
        if which in ("o", "wo"):
            return lambda w: self._shared(w, self.head if which == "o" else 1)
        memory = block == "EncDecAttention" and which in ("k", "v")  # they read what the encoder ends in
        norm = "encoder.final_layer_norm.weight" if memory else f"{layer}.layer_norm.weight"
        size = 1 if which.startswith("wi") else self.head
        return lambda w: self._repeated(self._spread(w, norm), size)

    def _repeated(self, weight: Doubles, size: int) -> Doubles:  # [n, kD] -> [k * n, kD]
        """Repeat every unit of ``size`` rows k times."""
        return weight.reshape(-1, size, weight.shape[1]).repeat(self.factor, 0).reshape(-1, weight.shape[1])


def _rows_of_hadamard(count: int, size: int, seed: int) -> Doubles:  # [count, size]
    """Orthonormal rows of a Hadamard matrix (Sylvester's), in a mixed order and with mixed signs of its columns."""
    places = np.arange(size)
    rows = np.argsort(_mixed(places, 2 * seed), kind="stable")[:count]
    parity = np.zeros((count, size), np.int64)
    both = rows[:, None] & places
    while both.any():
        parity ^= both & 1
        both >>= 1
    signs = 1 - 2 * (_mixed(places, 2 * seed + 1).astype(np.int64) >> 31)
    scale = size**-0.5
    return (1 - 2 * parity) * signs * scale


def _mixed(values: NDArray[np.int64], seed: int) -> NDArray[np.uint32]:
    """Well-mixed 32 bits of each number (the finalizer of MurmurHash3)."""
    bits = (values + seed * 0x9E3779B9 & 0xFFFFFFFF).astype(np.uint32)
    bits = (bits ^ bits >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    bits = (bits ^ bits >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return bits ^ bits >> np.uint32(16)
