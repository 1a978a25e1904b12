"""Checkpoints in float8 (E4M3): one scale for each block, row or matrix.

Layouts: DeepSeek-V3 and Qwen3-FP8 (``weight_scale_inv``, blocks of 128 by 128, https://arxiv.org/abs/2412.19437, 3.3),
and fbgemm and older fp8 checkpoints (``weight_scale``, one a row or one a matrix). Both scales are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.quantized.packing import Scaled
from edgespec.export.source.tensors.stored import Plain, Stored

ASIDE = tuple(
    f".{name}"
    for name in ("input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "activation_scale",
                 "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")
)  # fmt: skip
"""Scales of activations and of the KV cache: float weights do not need them."""


def float8(stored: Mapping[str, Plain], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of a float8 checkpoint, ``settings`` being its quantization_config."""
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
    """A matrix with its scales; without a block size, how many there are says what each is for.

    Raises:
        ExportError: a count that fits neither the block size nor rows nor the whole matrix.
    """
    if levels.dtype not in ("F8_E4M3", "I8") or len(levels.shape) != 2:
        raise UnsupportedModel(
            f"{levels.file}: {levels.name} is {levels.dtype} of shape {list(levels.shape)}; expected a matrix of "
            "F8_E4M3 or I8",
            "export from the unquantized checkpoint",
        )
    if scale.dtype not in ("F32", "F16", "BF16"):
        raise UnsupportedModel(
            f"{scale.file}: {scale.name} is stored as {scale.dtype}; expected float32, float16 or bfloat16 scales",
            "export from the unquantized checkpoint",
        )
    n, k = levels.shape
    count = _count(scale)
    if block is None:
        choices = {1: (n, k), n: (1, k)}  # n = 1: both mean the same
    else:
        choices = {-(-n // block[0]) * -(-k // block[1]): (block[0], block[1])}
    if count not in choices or (zero is not None and _count(zero) != count):
        expected = " or ".join(map(str, choices))
        raise ExportError(
            f"{scale.file}: {scale.name} has shape {list(scale.shape)}, but {levels.name} of shape "
            f"{list(levels.shape)} needs {expected} scales" + ("" if zero is None else ", and as many zero points"),
            "config.json and the weights belong to different models",
        )
    return Scaled(levels, scale, zero, choices[count])


def _count(tensor: Plain) -> int:
    count = 1
    for length in tensor.shape:
        count *= length
    return count
