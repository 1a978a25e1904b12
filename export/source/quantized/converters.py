"""Which kind of quantized checkpoint a folder holds: converted to float32 when read, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.quantized.awq import awq
from edgespec.export.source.quantized.compressed import compressed
from edgespec.export.source.quantized.float8 import float8
from edgespec.export.source.quantized.gptq import gptq
from edgespec.export.source.tensors.stored import NONSENSE, Plain, Stored
from edgespec.runtimes.files.json_file import read_json

Settings = Mapping[str, Any]
CONVERTERS: dict[str, Callable[[Mapping[str, Plain], Settings], dict[str, Stored]]] = {
    "awq": awq,
    "compressed-tensors": compressed,
    "fbgemm_fp8": float8,
    "fp8": float8,
    "gptq": gptq,
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
    """The tensors of a folder under the names of float weights, and how they are quantized ("" = they are not).

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
    """The quantization settings of a model: of config.json, or of the files that older tools wrote beside it."""
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
