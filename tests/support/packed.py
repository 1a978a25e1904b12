"""Quantized checkpoints of every layout that is read, packed level by level straight from the layout's definition.

Each function takes the float tensors of a checkpoint and gives what such a checkpoint would hold, and the float32
matrices that it means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Tensors = dict[str, NDArray[Any]]
Packer = Callable[[str, NDArray[np.float32]], tuple[Tensors, NDArray[np.float32]]]
"""Module and matrix [n, k] -> its packed tensors, and the matrix they mean."""


def pack_checkpoint(folder: Path, packer: Packer, settings: Mapping[str, Any] | None) -> dict[str, NDArray[np.float32]]:
    """Pack every projection of a folder of `hf.write_checkpoint`; returns all tensors as they must be read."""
    file = folder / "model.safetensors"
    stored: Tensors = {}
    truth: dict[str, NDArray[np.float32]] = {}
    for name, value in load_file(file).items():
        if name.endswith("_proj.weight"):
            parts, truth[name] = packer(name.removesuffix(".weight"), value)
            stored |= parts
        else:
            stored[name] = truth[name] = value
    save_file(stored, file, {"format": "pt"})
    if settings is not None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config["quantization_config"] = settings
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return truth


def word(levels: list[int], bits: int) -> np.int32:
    """Levels as one 32-bit word, the first in the lowest bits."""
    value = 0
    for place, level in enumerate(levels):
        assert 0 <= level < 1 << bits
        value |= level << (bits * place)
    return np.uint32(value).astype(np.int32)


def words(levels: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Levels [rows, columns] -> words [rows, columns * bits / 32]; `order`: which level comes at which place."""
    many = 32 // bits
    places = order or tuple(range(many))
    rows = [
        [word([int(row[start + place]) for place in places], bits) for start in range(0, len(row), many)]
        for row in levels
    ]
    return np.array(rows, np.int32)


def choose(
    value: NDArray[np.float32], group: NDArray[np.int64], bits: int, symmetric: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float16]]:
    """Levels [n, k], zero points [n, groups] and scales [n, groups] of a matrix whose columns are grouped."""
    n, top = len(value), (1 << bits) - 1
    groups = int(group.max()) + 1
    levels = np.zeros(value.shape, np.int64)
    zeros, scales = np.zeros((n, groups), np.int64), np.zeros((n, groups), np.float16)
    for at in range(groups):
        part = value[:, group == at]
        low, high = part.min(1), part.max(1)
        if symmetric:
            high = np.maximum(np.abs(low), np.abs(high))
            low = -high
        scale = ((high - low) / top).astype(np.float16)
        zero = np.full(n, 1 << (bits - 1)) if symmetric else np.rint(-low / scale.astype(np.float32)).astype(np.int64)
        zeros[:, at], scales[:, at] = np.clip(zero, 0, top), scale
        raw = np.rint(part / scale[:, None].astype(np.float32)) + zeros[:, at, None]
        levels[:, group == at] = np.clip(raw, 0, top).astype(np.int64)
    return levels, zeros, scales


def meaning(levels: Any, zeros: Any, scales: Any, group: NDArray[np.int64]) -> NDArray[np.float32]:
    """Give what levels mean, one column at a time."""
    columns = [
        (levels[:, at] - zeros[:, its]).astype(np.float32) * scales[:, its].astype(np.float32)
        for at, its in enumerate(group)
    ]
    return np.stack(columns, 1)


def gptq(
    bits: int, group_size: int, act: bool = False, symmetric: bool = True, first: bool = True, each: bool = False
) -> Packer:
    """GPTQ; `act`: groups follow a permutation of the inputs, `each`: another one each; `first`: zeros less one."""

    def pack(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
        k = value.shape[1]
        group = np.arange(k) // (k if group_size == -1 else group_size)
        if act:
            seed = sum(module.encode()) if each else k
            group = group[np.random.default_rng(seed).permutation(k)]
        levels, zeros, scales = choose(value, group, bits, symmetric)
        if first and not symmetric:
            zeros = np.maximum(zeros, 1)  # packing -1 spoils its neighbours: no real checkpoint can mean 0
        kept = zeros - 1 if first else zeros
        parts: Tensors = {
            "qweight": np.ascontiguousarray(words(levels, bits).T),  # [k / many, n]
            "qzeros": words(np.ascontiguousarray(kept.T), bits),  # [groups, n / many]
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": group.astype(np.int32),
        }
        return {f"{module}.{part}": array for part, array in parts.items()}, meaning(levels, zeros, scales, group)

    return pack


def awq(group_size: int) -> Packer:
    """AWQ, version gemm."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
        k = value.shape[1]
        group = np.arange(k) // (k if group_size == -1 else group_size)
        levels, zeros, scales = choose(value, group, 4, symmetric=False)
        parts: Tensors = {
            "qweight": words(np.ascontiguousarray(levels.T), 4, order),  # [k, n / 8]
            "qzeros": words(np.ascontiguousarray(zeros.T), 4, order),  # [groups, n / 8]
            "scales": np.ascontiguousarray(scales.T),
        }
        return {f"{module}.{part}": array for part, array in parts.items()}, meaning(levels, zeros, scales, group)

    return pack


def float8(block: tuple[int, int] | None, suffix: str, dtype: Any = np.float32) -> Packer:
    """float8 with a scale for each block; without a block, for each row."""

    def pack(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
        n, k = value.shape
        rows, columns = block or (1, k)
        scales = np.zeros((-(-n // rows), -(-k // columns)), dtype)
        levels, truth = np.zeros(value.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(value)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = np.abs(value[at]).max() / 448
                levels[at] = (value[at] / np.float32(scales[i, j])).astype(ml_dtypes.float8_e4m3fn)
                truth[at] = levels[at].astype(np.float32) * np.float32(scales[i, j])
        return {f"{module}.weight": levels, f"{module}.weight{suffix}": scales}, truth

    return pack


def float8_whole(suffix: str, shape: tuple[int, ...]) -> Packer:
    """float8 with one scale for the matrix, and one for the activations."""

    def pack(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
        scale = np.float32(np.abs(value).max() / 448)
        levels = (value / scale).astype(ml_dtypes.float8_e4m3fn)
        aside = {f"{module}.weight{suffix}": np.full(shape, scale), f"{module}.input_scale": np.ones((), np.float32)}
        return {f"{module}.weight": levels, **aside}, levels.astype(np.float32) * scale

    return pack


def int8_rows(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
    """compressed-tensors, int-quantized: int8 with a scale for each row."""
    scale = (np.abs(value).max(1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
    levels = np.clip(np.rint(value / scale.astype(np.float32)), -128, 127).astype(np.int8)
    parts: Tensors = {f"{module}.weight": levels, f"{module}.weight_scale": scale}
    return parts, levels.astype(np.float32) * scale.astype(np.float32)


def int8_zeros(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
    """compressed-tensors, int-quantized: int8 with a scale and a zero point for each row."""
    low, high = value.min(1, keepdims=True), value.max(1, keepdims=True)
    scale = ((high - low) / 255).astype(ml_dtypes.bfloat16)
    step = scale.astype(np.float32)
    zero = np.clip(np.rint(-128 - low / step), -128, 127).astype(np.int8)
    levels = np.clip(np.rint(value / step) + zero, -128, 127).astype(np.int8)
    parts: Tensors = {
        f"{module}.weight": levels, f"{module}.weight_scale": scale, f"{module}.weight_zero_point": zero
    }  # fmt: skip
    return parts, (levels.astype(np.float32) - zero) * step


def rescaled(packer: Packer, times: float, dtype: Any) -> Packer:
    """Pack with scales of another type, times a number."""

    def pack(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
        parts, meant = packer(module, value)
        name = f"{module}.weight_scale"
        scale = (parts[name].astype(np.float32) * times).astype(dtype)
        return parts | {name: scale}, meant

    return pack


def packed_int(bits: int, group_size: int, symmetric: bool = True, act: bool = False) -> Packer:
    """compressed-tensors, pack-quantized."""

    def pack(module: str, value: NDArray[np.float32]) -> tuple[Tensors, NDArray[np.float32]]:
        n, k = value.shape
        many = 32 // bits
        group = np.arange(k) // (k if group_size == -1 else group_size)
        if act:
            group = group[np.random.default_rng(k).permutation(k)]
        levels, zeros, scales = choose(value, group, bits, symmetric)
        padded = np.pad(levels, ((0, 0), (0, -k % many)))
        parts: Tensors = {
            "packed": words(padded, bits),
            "scale": scales,
            "shape": np.array([n, k], np.int64),
        }
        if not symmetric:
            down = np.pad(zeros, ((0, -n % many), (0, 0)))
            parts["zero_point"] = np.ascontiguousarray(words(np.ascontiguousarray(down.T), bits).T)
        if act:
            parts["g_idx"] = group.astype(np.int32)
        named = {f"{module}.weight_{part}": array for part, array in parts.items()}
        return named, meaning(levels, zeros, scales, group)

    return pack


def of_compressed(form: str, **weights: Any) -> dict[str, Any]:
    """Give the quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq4": (gptq(4, 32), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "gptq4_act_asym": (
        gptq(4, 32, act=True, symmetric=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    ),
    "gptq4_v2_asym": (
        gptq(4, 16, symmetric=False, first=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq8_one_group": (gptq(8, -1), {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}),
    "gptq2": (gptq(2, 32, symmetric=False), {"quant_method": "gptq", "bits": 2, "group_size": 32, "sym": False}),
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "awq_one_group": (awq(-1), {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"}),
    "fp8_blocks": (
        float8((32, 32), "_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    ),
    "fp8_whole": (float8_whole("_scale", ()), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm_fp8": (float8(None, "_scale"), {"quant_method": "fbgemm_fp8"}),
    "compressed_fp8_rows": (
        float8(None, "_scale", ml_dtypes.bfloat16),
        of_compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "compressed_fp8_whole": (
        float8_whole("_scale", (1,)),
        of_compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "compressed_fp8_blocks": (
        float8((16, 32), "_scale"),
        of_compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    ),
    "compressed_fp8_wide_blocks": (
        float8((16, 128), "_scale"),
        of_compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 128]),
    ),
    "compressed_fp8_groups": (
        float8((1, 8), "_scale"),
        of_compressed("float-quantized", num_bits=8, type="float", strategy="group", group_size=8),
    ),
    "compressed_int8": (int8_rows, of_compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "compressed_int4": (
        packed_int(4, 32),
        of_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    ),
    "compressed_int4_act_asym": (
        packed_int(4, 32, symmetric=False, act=True),
        of_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    ),
    "compressed_packed_int8": (
        packed_int(8, -1),
        of_compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    ),
}
"""Every layout that is converted, with its quantization_config."""
