"""Coded attention in numpy, written only from the layout: the reference for native attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.architectures.rules import AttentionRule
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.quantization.coded_keys import TABLES, store
from edgespec.export.quantization.key_tables import learn_tables
from edgespec.export.quantization.reference import NumpyOps
from edgespec.runtimes.files.formats import LEARNT
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.files.manifest import AttentionPart, ModelPart
from edgespec.runtimes.slots.native import NativeSlot
from edgespec.runtimes.slots.shared import Model
from tests.support import hf

Array = NDArray[np.float64]
SPLIT, GROUP = 256, 32  # tokens with separate sums; tokens whose weights share a step

CONFIGS: dict[str, dict[str, Any]] = {
    "padded": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24},
    "whole": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
}


@dataclass(frozen=True)
class Prepared:
    """A float32 model with tables for every coded format."""

    folder: Path
    arch: Architecture
    part: ModelPart
    tables: dict[str, NDArray[np.float32]]

    def slot(self, kv: KvFormat, threads: int = 1) -> NativeSlot:
        return NativeSlot(Model(self.folder, self.part, "native", threads, kv), reserve=1)


def prepare(folder: Path, name: str) -> Prepared:
    """Make a small random model whose heads are those of ``CONFIGS``."""
    config = hf.CONFIGS["llama_tied_gqa"] | CONFIGS[name] | {"max_position_embeddings": 768}
    source = hf.write_checkpoint(folder / "source", config, 5)
    arch = open_model(source, None)
    part = write_model(folder, arch, ModelSpec("fp32")).part
    slot = NativeSlot(Model(folder, part, "native", 1, ATTENTION["f32"]))
    tables = learn_tables(slot, random_tokens(arch.facts.vocab, 300, 9), LEARNT, lambda done, of: None)
    store(folder, tables)
    attention = AttentionPart(default="f32", tables=TABLES, learnt=list(LEARNT))
    return Prepared(folder, arch, part.model_copy(update={"attention": attention}), tables)


def random_tokens(vocab: int, count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, vocab, count).tolist()
    return tokens


def expected_logits(
    made: Prepared, kv: KvFormat, tokens: Sequence[int], stored: dict[str, NDArray[np.float32]]
) -> NDArray[np.float32]:
    """[T, vocab]: what the model says where keys and values are those ``stored``."""
    logits: NDArray[np.float32] = _CodedOps(made, kv, tokens, stored).run(made.arch.trace())[0]
    return logits


class _CodedOps(NumpyOps):
    """The numpy decoder with attention over what a cache holds."""

    def __init__(
        self, made: Prepared, kv: KvFormat, tokens: Sequence[int], stored: dict[str, NDArray[np.float32]]
    ) -> None:
        super().__init__(made.arch, tokens)
        self.kv, self.stored, self.tables = kv, stored, made.tables

    def attention(self, q: Any, k: Any, v: Any, rule: AttentionRule) -> Any:
        facts, kv, layer = self.arch.facts, self.kv, rule.layer
        q = self._rotate(self._heads(q, facts.heads), rule.rotary)
        k = self._rotate(self._heads(k, facts.kv_heads), rule.rotary)
        v = self._heads(v, facts.kv_heads)
        length, group = q.shape[1], facts.heads // facts.kv_heads
        keys = self.stored[f"past_key_values.{layer}.key"]
        values = self.stored[f"past_key_values.{layer}.value"]
        assert np.median(np.abs(values - v)) < {"f32": 1e-5, "f16": 1e-3, "int8": 1e-2}[kv.values] * np.abs(v).max()
        rows, columns = np.arange(length)[:, None], np.arange(length)[None]
        exact = (columns > rows - kv.window) | (columns < kv.sinks) if kv.window else np.zeros((length, length), bool)
        out = np.empty_like(q)
        for head in range(facts.heads):
            shared = head // group
            query = q[head].astype(np.float64) * facts.head_dim**-0.5
            table = self.tables[kv.keys][layer, shared] if kv.keys in self.tables else None
            if table is not None:
                same = encode(k[shared], kv.keys, table) == keys[shared]
                assert same.mean() > 0.999, f"{1 - same.mean():.2%} of the codes differ"
            scores = coded_scores(query, keys[shared], kv.keys, table)
            if kv.keys not in ("f32", "f16"):
                scores = np.where(exact, query @ k[shared].astype(np.float16).astype(np.float64).T, scores)
            scores[columns > rows] = -np.inf
            out[head] = weigh(scores, values[shared].astype(np.float64), kv.values == "int8")
        return out.transpose(1, 0, 2).reshape(1, length, -1)


def encode(keys: NDArray[np.float32], name: str, table: NDArray[np.float32]) -> NDArray[np.int64]:
    """Codes of keys [n, head_dim] -> [n, head_dim / d_sub]."""
    size = keys.shape[1]
    if name == "int4":
        scale, zero = table[:, :size]
        return np.clip(np.rint((keys - zero) / np.where(scale > 0, scale, 1)), 0, 15).astype(np.int64)
    sub = table.shape[1]
    parts = keys.reshape(len(keys), size // sub, sub, 1)
    return np.square(parts - table[: size // sub]).sum(2).argmin(-1)


def decoded(codes: NDArray[Any], name: str, table: NDArray[np.float32]) -> Array:
    """Keys [n, head_dim] that codes stand for."""
    if name == "int4":
        scale, zero = table[:, : codes.shape[1]].astype(np.float64)
        return zero + scale * codes
    chosen = codes.astype(np.int64)
    books = table[: codes.shape[1]].astype(np.float64)  # [subs, sub, 16]
    found = books[np.arange(codes.shape[1])[None], :, chosen]  # [n, subs, sub]
    return found.reshape(len(codes), -1)


def coded_scores(query: Array, keys: NDArray[np.float32], name: str, table: NDArray[np.float32] | None) -> Array:
    """[rows, n]: queries [rows, head_dim] against stored keys, with the roundings of the integer kernels."""
    if name in ("f32", "f16"):
        return query @ keys.T.astype(np.float64)
    if name == "int8":
        return rounded(query) @ keys.T.astype(np.float64)
    assert table is not None
    if name == "int4":
        scale, zero = table[:, : query.shape[1]].astype(np.float64)
        return rounded(query * scale) @ keys.T.astype(np.float64) + (query @ zero)[:, None]
    subs, sub = keys.shape[1], table.shape[1]
    lut = np.einsum("rms,msc->rmc", query.reshape(len(query), subs, sub), table[:subs].astype(np.float64))
    low = lut.min(-1)
    step = np.maximum((lut.max(-1) - low).max(-1), 1e-30) / 127  # [rows]
    levels = np.rint((lut - low[..., None]) / step[:, None, None])  # [rows, subs, 16]
    sums = sum(levels[:, m][:, keys[:, m].astype(np.int64)] for m in range(subs))
    return np.asarray(sums * step[:, None] + low.sum(-1)[:, None])


def rounded(x: Array) -> Array:
    """Round rows to 8 bits, each with its own step."""
    step = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(step > 0, step, 1)) * step


def weigh(scores: Array, values: Array, coded: bool) -> Array:
    """[rows, head_dim]: softmax of scores [rows, n] over values [n, head_dim], stretch by stretch."""
    largest = scores.max(-1, keepdims=True)
    total, out = np.zeros((len(scores), 1)), np.zeros((len(scores), values.shape[1]))
    for start in range(0, scores.shape[1], SPLIT):
        part = scores[:, start : start + SPLIT]
        peak = part.max(-1, keepdims=True)
        seen = np.isfinite(peak)
        weights = np.exp(part - np.where(seen, peak, 0))
        share = np.where(seen, np.exp(np.where(seen, peak, 0) - largest), 0)
        total += share * weights.sum(-1, keepdims=True)
        if not coded:
            out += share * (weights @ values[start : start + SPLIT])
            continue
        scale = np.abs(values[start : start + SPLIT]).max(-1) / 127  # scale of the stored levels
        levels = np.rint(values[start : start + SPLIT] / np.where(scale > 0, scale, 1)[:, None])
        for at in range(0, part.shape[1], GROUP):
            folded = weights[:, at : at + GROUP] * scale[at : at + GROUP]
            out += share * (rounded(folded) @ levels[at : at + GROUP])
    return out / total
