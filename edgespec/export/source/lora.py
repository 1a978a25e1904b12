"""A LoRA adapter of PEFT (https://arxiv.org/abs/2106.09685) merged into a model: W + scale * B @ A, when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.stored import Opened, Plain, Stored, read_header
from edgespec.runtimes.files.lora import AGAIN, CONFIG, FACTOR, MERGE, PREFIX, adapter_settings, scale_of, weights_file

HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
TRANSPOSED = ("gpt2", "openai-gpt")  # model types whose matrices are stored [inputs, outputs]


@dataclass(frozen=True)
class Merged:
    """A matrix with its adapter."""

    base: Stored  # W, [n, k]; [k, n] if ``transposed``
    a: Plain  # [r, k]. b: [n, r]
    b: Plain
    scale: float  # of B @ A
    transposed: bool = False  # W is stored [inputs, outputs]

    @property
    def file(self) -> Path:
        return self.a.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def read(self, rows: slice, columns: slice | None) -> NDArray[np.float32]:
        columns = slice(None) if columns is None else columns
        outputs, inputs = (columns, rows) if self.transposed else (rows, columns)
        added = np.float32(self.scale) * (self.b.read(outputs, None) @ self.a.read(slice(None), inputs))
        return self.base.read(rows, columns) + (added.T if self.transposed else added)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def merged(base: Opened, folder: Path) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the tensors and the configuration of a model with an adapter.

    Raises:
        ExportError: the adapter is damaged, of another model, or of a kind that cannot be merged.
    """
    settings = adapter_settings(folder)
    factors: dict[str, dict[str, Plain]] = {}  # by module: lora_A and lora_B
    whole: dict[str, Plain] = {}
    for name, tensor in _weights(folder).items():
        inside = name.removeprefix(PREFIX).replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
        if match := FACTOR.fullmatch(inside):
            factors.setdefault(match["module"], {})[match["which"]] = tensor
        elif "lora_" in inside:
            kind = "embeddings" if "lora_embedding" in inside else inside.rsplit(".", 1)[-1]
            raise UnsupportedModel(f"{folder}: LoRA on {kind} ({name}) is not supported", MERGE)
        else:
            whole[inside.replace(".base_layer.", ".")] = tensor
    transposed = base.config.get("model_type") in TRANSPOSED
    tensors: dict[str, Stored] = dict(base.tensors)
    for name, tensor in whole.items():
        known = _known(name, tensors)
        tied = next((other for other in tensors if other.endswith(EMBEDDINGS)), None) if name == HEAD else None
        _check(folder, name, tensor.shape, tensors.get(known) or (tensors[tied] if tied else None))
        tensors[known] = tensor
    for module, pair in factors.items():
        name = _known(f"{module}.weight", tensors)
        tensors[name] = _merged(folder, settings, module, pair, tensors.get(name), transposed)
    config = base.config | ({"tie_word_embeddings": False} if HEAD in whole else {})
    return tensors, config


def _known(name: str, tensors: Mapping[str, Stored]) -> str:
    """Return the base's name of a tensor: a base model saved without its head lacks the first part of the name."""
    bare = name.split(".", 1)[1]
    return bare if name not in tensors and bare in tensors else name


def _merged(
    folder: Path,
    settings: Mapping[str, Any],
    module: str,
    pair: Mapping[str, Plain],
    found: Stored | None,
    transposed: bool,
) -> Merged:
    if set(pair) != {"A", "B"}:
        raise ExportError(f"{folder}: {module} needs two matrices, lora_A and lora_B", AGAIN)
    a, b = pair["A"], pair["B"]
    scale = scale_of(folder, settings, module, a.shape, b.shape)
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    base = _check(folder, f"{module}.weight", shape, found)
    return Merged(base, a, b, scale, transposed)


def _check(folder: Path, name: str, shape: tuple[int, ...], base: Stored | None) -> Stored:
    """Return the base's tensor that an adapter changes, which must be there and of the same shape."""
    hint = "give the model that the adapter was trained on (base_model_name_or_path in adapter_config.json)"
    if base is None:
        raise ExportError(f"{folder}: the adapter changes {name}, which the base model does not have", hint)
    if base.shape != shape:
        what = f"for {name} of shape {list(shape)}, but the base model's is {list(base.shape)}"
        raise ExportError(f"{folder}: the adapter is {what}", hint)
    return base


def _weights(folder: Path) -> dict[str, Plain]:
    tensors = read_header(file := weights_file(folder))
    if not tensors:
        raise ExportError(f"{file}: holds no tensors", AGAIN)
    return tensors
