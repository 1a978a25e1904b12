"""Reading the native KV cache back into arrays: for tests and tools, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.files.formats import KV_BLOCK, STATE_ROWS, TILE
from edgespec.runtimes.files.kv import KvFormat, head_bytes, padded, state_bytes, state_width
from edgespec.runtimes.files.manifest import ModelFacts


def read_cache(
    cache: NDArray[np.uint8],  # [bytes]
    kv: KvFormat,
    facts: ModelFacts,
    tokens: int,
) -> dict[str, NDArray[np.float32]]:
    """Keys and values of the first tokens, [kv_heads, tokens, head_dim] by name, and states.

    The state of a convolution is its part in the last tokens that the next one sees, [1, at most taps - 1, width];
    those of a delta rule are [heads, key_dim, value_dim], of as many tokens as ``tokens_held`` says.

    Codes that need tables (int4, nomad) are returned as they are, [kv_heads, tokens, head_dim or sub-vectors].
    """
    blocks, header, size = max(1, -(-tokens // KV_BLOCK)), kv.header_bytes(facts), kv.block_bytes(facts)
    body = cache[header : header + blocks * size].reshape(blocks, size)
    at, found = 0, _states(cache, facts, tokens)
    for layer, head_dim in enumerate(facts.dims):
        dim, each = padded(head_dim), kv.layer_head_bytes(head_dim)
        heads = body[:, at : at + facts.kv_heads * each].reshape(blocks, facts.kv_heads, each)
        at, start = at + facts.kv_heads * each, 0
        for kind, name in (("key", kv.keys), ("code", kv.codes), ("value", kv.values)):
            if name is None:
                continue
            part = np.ascontiguousarray(heads[..., start : start + head_bytes(name, dim)])
            start += head_bytes(name, dim)
            whole = _values(part, name, dim) if kind == "value" else _keys(part, name, dim)  # [blocks, heads, 128, d]
            rows = whole.swapaxes(0, 1).reshape(facts.kv_heads, blocks * KV_BLOCK, -1)
            width = head_dim * rows.shape[-1] // dim  # sub-vectors of two dimensions are half as many
            found[f"past_key_values.{layer}.{kind}"] = rows[:, :tokens, :width].astype(np.float32)
    return found


def _states(cache: NDArray[np.uint8], facts: ModelFacts, tokens: int) -> dict[str, NDArray[np.float32]]:
    if not facts.convolutions:
        return {}
    width, last = state_width(facts), np.arange(max(0, tokens - facts.taps + 1), tokens) % STATE_ROWS
    found: dict[str, NDArray[np.float32]] = {}
    for at, layer in enumerate(cache[: state_bytes(facts)].view("<f4").reshape(len(facts.convolutions), -1)):
        found[f"convolution.{at}"] = layer[: STATE_ROWS * width].reshape(1, STATE_ROWS, width)[:, last]
        if heads := facts.delta:
            shape = heads.values, heads.value_dim // TILE, heads.key_dim, TILE
            tiles = layer[STATE_ROWS * width : -16].reshape(shape).transpose(0, 2, 1, 3)
            found[f"delta.{at}"] = tiles.reshape(heads.values, heads.key_dim, heads.value_dim)
    return found


def tokens_held(cache: NDArray[np.uint8], facts: ModelFacts) -> NDArray[np.int64]:  # [bytes] -> [layers]
    """How many tokens the states of each layer with a delta rule hold; a view."""
    layers = len(facts.convolutions) if facts.delta else 0
    rows = cache[: state_bytes(facts) if layers else 0].reshape(layers, -1 if layers else 64)
    return rows[:, -64:-56].view(np.int64)[:, 0]


def _keys(part: NDArray[np.uint8], name: str, dim: int) -> NDArray[np.float32]:
    """[..., bytes] -> [..., 128, dim]."""
    lead = part.shape[:-1]
    if name in ("f32", "f16"):
        tiles = part.view("<f4" if name == "f32" else "<f2").reshape(*lead, KV_BLOCK // TILE, dim, TILE)
        return np.swapaxes(tiles, -1, -2).reshape(*lead, KV_BLOCK, dim).astype(np.float32)
    if name == "int8":
        tiles = part[..., : KV_BLOCK * dim].reshape(*lead, KV_BLOCK // TILE, dim // 4, TILE, 4)
        keys = np.swapaxes(tiles, -2, -3).reshape(*lead, KV_BLOCK, dim).astype(np.float32) - 128
        return keys * np.ascontiguousarray(part[..., KV_BLOCK * dim :]).view("<f4")[..., None]
    if name == "int4":
        tiles = part.reshape(*lead, KV_BLOCK // TILE, dim // 8, 1, TILE, 4)
        both = np.concatenate([tiles & 15, tiles >> 4], -3)  # [.., tiles, dim / 8, 2, 16, 4]
        return np.moveaxis(both, -2, -4).reshape(*lead, KV_BLOCK, dim).astype(np.float32)
    codes = part.reshape(*lead, -1, KV_BLOCK // 4, 2)  # byte b: token (b & 1) * 32 + b / 2
    half = np.concatenate([codes[..., 0], codes[..., 1]], -1)  # [.., subs, 64]
    return np.swapaxes(np.concatenate([half & 15, half >> 4], -1), -1, -2).astype(np.float32)


def _values(part: NDArray[np.uint8], name: str, dim: int) -> NDArray[np.float32]:
    """[..., bytes] -> [..., 128, dim]."""
    lead = part.shape[:-1]
    if name != "int8":
        return part.view("<f4" if name == "f32" else "<f2").reshape(*lead, KV_BLOCK, dim).astype(np.float32)
    levels = part[..., : KV_BLOCK * dim].reshape(*lead, KV_BLOCK // 4, dim, 4).view(np.int8)
    levels = np.swapaxes(levels, -1, -2).reshape(*lead, KV_BLOCK, dim).astype(np.float32)
    return levels * np.ascontiguousarray(part[..., KV_BLOCK * dim :]).view("<f4")[..., None]
