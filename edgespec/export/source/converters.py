"""Checkpoints that others have quantized: converted to float32 when read, or refused by name.

Checkpoints in float8 (E4M3): one scale for each block, row or matrix.

Layouts: DeepSeek-V3 and Qwen3-FP8 (``weight_scale_inv``, blocks of 128 by 128, https://arxiv.org/abs/2412.19437,
3.3), and fbgemm and older fp8 checkpoints (``weight_scale``, one a row or one a matrix). Both scales are multiplied.

Checkpoints of compressed-tensors (llm-compressor): float8, int8, and integers packed in 32-bit words.

Layout: https://github.com/vllm-project/compressed-tensors. ``weight_scale`` has one value for the matrix, each row,
each block or each group of inputs; ``weight_packed`` int32 [n, k / (32 / bits)] holds level + 2^(bits - 1);
``weight_zero_point`` is packed the same way, but down the outputs; ``weight_g_idx`` [k] says the group of each input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.mxfp4 import mxfp4
from edgespec.export.source.packed import PackedMatrix, Scaled, awq, expect_shape, gptq
from edgespec.export.source.stored import NONSENSE, UNQUANTIZED, Plain, Stored
from edgespec.runtimes.files.json_file import read_json

ASIDE = tuple(
    f".{name}"
    for name in ("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "activation_scale",
                 "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")
)  # fmt: skip
"""Scales of activations and of the KV cache: float weights do not need them."""


def float8(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a float8 checkpoint, ``settings`` being its quantization_config."""
    block = settings.get("weight_block_size")
    found: dict[str, Stored] = {name: tensor for name, tensor in stored.items() if not name.endswith(ASIDE)}
    for name, tensor in stored.items():
        if not tensor.dtype.startswith("F8") or name.endswith(("_scale", "_scale_inv")):
            continue
        scale = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in stored), None)
        if scale is None:
            raise ExportError(
                f"{tensor.file}: {name} is float8, but there is no {name}_scale_inv and no {name}_scale",
                "download the checkpoint again",
            )
        found[name] = scaled(tensor, stored[scale], None, tuple(block) if block else None)
        del found[scale]
    return found


def scaled(levels: Plain, scale: Plain, zero: Plain | None, block: tuple[int, ...] | None) -> Scaled:
    """Return a matrix with its scales; without a block size, how many there are says what each is for.

    Raises:
        ExportError: a count that fits neither the block size nor rows nor the whole matrix.
    """
    if levels.dtype not in ("F8_E4M3", "I8") or len(levels.shape) != 2:
        raise UnsupportedModel(
            f"{levels.file}: {levels.name} is {levels.dtype} of shape {list(levels.shape)}; expected a matrix of "
            "F8_E4M3 or I8",
            UNQUANTIZED,
        )
    if scale.dtype not in ("F32", "F16", "BF16"):
        raise UnsupportedModel(
            f"{scale.file}: {scale.name} is stored as {scale.dtype}; expected float32, float16 or bfloat16 scales",
            UNQUANTIZED,
        )
    n, k = levels.shape
    count = prod(scale.shape)
    if block is None:
        choices = {1: (n, k), n: (1, k)}  # n = 1: both mean the same
    else:
        choices = {-(-n // block[0]) * -(-k // block[1]): (block[0], block[1])}
    if count not in choices or (zero is not None and prod(zero.shape) != count):
        expected = " or ".join(map(str, choices))
        raise ExportError(
            f"{scale.file}: {scale.name} has shape {list(scale.shape)}, but {levels.name} of shape "
            f"{list(levels.shape)} needs {expected} scales" + ("" if zero is None else ", and as many zero points"),
            "config.json and the weights belong to different models",
        )
    return Scaled(levels, scale, zero, choices[count])


FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense")
PARTS = ("scale", "zero_point", "packed", "shape", "g_idx")


def compressed(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a compressed-tensors checkpoint, ``settings`` being its quantization_config."""
    groups = settings.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    forms = {settings.get("format", "dense")} | {group["format"] for group in groups.values() if group.get("format")}
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if unknown := sorted(str(form) for form in (forms - {"mixed-precision"}) | {sparsity} if form not in FORMATS):
        raise UnsupportedModel(
            f"compressed-tensors format {unknown[0]!r} is not supported; supported: {', '.join(FORMATS)}", UNQUANTIZED
        )
    if settings.get("transform_config"):
        raise UnsupportedModel(
            "compressed-tensors with rotated weights (transform_config) is not supported", UNQUANTIZED
        )
    blocks = {tuple(group["block_structure"]) for group in weights if group.get("block_structure")}
    aside = (*ASIDE, *(f".weight_{part}" for part in PARTS))
    found: dict[str, Stored] = {name: tensor for name, tensor in stored.items() if not name.endswith(aside)}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            found[name.removesuffix("_packed")] = _packed(stored, name.removesuffix("_packed"), weights)
        elif name.endswith(".weight") and tensor.dtype in ("F8_E4M3", "I8"):
            found[name] = _levels(stored, name, blocks)
    return found


def _levels(stored: Mapping[str, Plain], name: str, blocks: set[tuple[int, ...]]) -> Stored:
    scale, zero = stored.get(f"{name}_scale"), stored.get(f"{name}_zero_point")
    if scale is None:
        raise ExportError(f"tensor {name}_scale is missing from the checkpoint", "download it again")
    levels = stored[name]
    rows, columns = (*scale.shape, 1, 1)[:2]
    n, k = (*levels.shape, 1, 1)[:2]
    for block in blocks:
        if (-(-n // block[0]), -(-k // block[1])) == (rows, columns):
            return scaled(levels, scale, zero, block)
    if columns > 1 and rows == n and k % columns == 0:  # one a group of inputs
        return scaled(levels, scale, zero, (1, k // columns))
    return scaled(levels, scale, zero, None)  # one for the matrix, or one a row


def _packed(stored: Mapping[str, Plain], name: str, weights: list[Mapping[str, Any]]) -> Stored:
    parts = {part: stored.get(f"{name}_{part}") for part in PARTS}
    words, scales, shape, zeros = parts["packed"], parts["scale"], parts["shape"], parts["zero_point"]
    if words is None or scales is None or shape is None:
        missing = next(part for part in PARTS if part in ("scale", "packed", "shape") and parts[part] is None)
        raise ExportError(f"tensor {name}_{missing} is missing from the checkpoint", "download it again")
    n, k = (int(length) for length in shape.raw())
    fitting = [bits for bits in (4, 8) if words.shape == (n, -(-k * bits // 32))]
    bits = fitting[0] if fitting else 0
    if words.dtype != "I32" or not bits or all(group.get("num_bits", bits) != bits for group in weights):
        asked = ", ".join(str(group.get("num_bits")) for group in weights)
        raise UnsupportedModel(
            f"{words.file}: {words.name} is {words.dtype} of shape {list(words.shape)} for a matrix of {[n, k]} and "
            f"num_bits {asked}; supported: 4 and 8 bits in int32",
            UNQUANTIZED,
        )
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    expect_shape(scales, (n, groups), "one scale a row and group")
    if zeros is not None:
        expect_shape(zeros, (-(-n * bits // 32), groups), "one zero point a row and group")
    return PackedMatrix(words, zeros, scales, _groups(parts["g_idx"], k, groups, weights), bits, (1, 0), turned=False)


def _groups(index: Plain | None, k: int, groups: int, weights: list[Mapping[str, Any]]) -> NDArray[np.int64]:
    """Return the group of each input, [k]."""
    if index is not None:
        expect_shape(index, (k,), "one group an input")
        group = index.raw().astype(np.int64)
        if not 0 <= group.min() <= group.max() < groups:
            raise ExportError(f"{index.file}: {index.name} names groups beyond the {groups} there are")
        return group
    sizes = {group["group_size"] for group in weights if group.get("group_size") and group["group_size"] > 0}
    size = next((size for size in sorted(sizes) if -(-k // size) == groups), k if groups == 1 else 0)
    if size == 0:
        raise ExportError(
            f"{groups} groups of scales for {k} inputs fit no group_size of the configuration ({sorted(sizes)})",
            "quantization_config and the weights do not belong together",
        )
    return np.arange(k, dtype=np.int64) // size


Settings = Mapping[str, Any]
CONVERTERS: dict[str, Callable[[Mapping[str, Plain], Settings], dict[str, Stored]]] = {
    "awq": awq,
    "compressed-tensors": compressed,
    "fbgemm_fp8": float8,
    "fp8": float8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # where older tools wrote the settings
MARKS = {  # names that only packed weights have
    ".qweight": "gptq or awq",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".q_weight": "exl2",
    ".trellis": "exl3",
    ".W_q": "hqq",
    "_blocks": "mxfp4",
    "._data": "quanto",
}


def converted(folder: Path, config: Mapping[str, Any], stored: Mapping[str, Plain]) -> tuple[dict[str, Stored], str]:
    """Return the tensors of a folder under the names of float weights, and how they are quantized ("" = they are not).

    Raises:
        UnsupportedModel: a kind that is not converted; the message names it.
        ExportError: packed tensors that do not fit each other or the settings.
    """
    settings = quantization(folder, config, stored)
    if settings is None:
        marked = {mark: name for name in stored for mark in MARKS if name.endswith(mark)}
        if marked:
            mark, name = next(iter(marked.items()))
            raise _refused(folder, MARKS[mark], f"holds {name}, but config.json has no quantization_config")
        return dict(stored), ""
    method = str(settings.get("quant_method", "unknown"))
    if method not in CONVERTERS:
        raise _refused(folder, method, f"supported: {', '.join(CONVERTERS)}")
    try:
        tensors = CONVERTERS[method](stored, settings)
    except ExportError as error:
        raise type(error)(f"{folder}: {error.message}", error.hint) from error
    except NONSENSE as error:
        raise ExportError(f"{folder}: its quantization_config cannot be understood: {error!r}") from error
    if method != "compressed-tensors" and not set(stored) - set(tensors):
        raise _refused(folder, method, f"config.json says so, but there are no tensors of {method}")
    bits = settings.get("bits", settings.get("w_bit"))
    return tensors, method + (f", {bits} bits" if bits else "")


def quantization(folder: Path, config: Mapping[str, Any], stored: Mapping[str, Plain]) -> Settings | None:
    """Return a model's quantization settings, from config.json or from the separate files of older tools."""
    text = config.get("text_config")  # of a model for images and text
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    settings = config.get("quantization_config") or config.get("compression_config") or inner
    if settings is not None:
        if not isinstance(settings, dict):
            raise _refused(folder, str(settings), "expected an object quantization_config")
        return settings
    if isinstance(config.get("quantization"), dict):  # {"group_size": 64, "bits": 4}
        raise _refused(folder, "MLX", f"supported: {', '.join(CONVERTERS)}")
    if not any(name.endswith(".qweight") for name in stored):
        return None
    for name, method in BESIDE.items():
        if (folder / name).is_file():
            data = read_json(folder / name, ExportError)
            return {"quant_method": method} | data if isinstance(data, dict) else None
    return None


def _refused(folder: Path, kind: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{folder}: the checkpoint is already quantized ({kind}); {why}",
        "export from the unquantized checkpoint, usually the model that this one was quantized from",
    )
