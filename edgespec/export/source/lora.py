"""A LoRA adapter of PEFT (https://arxiv.org/abs/2106.09685) merged into a model: W + scale * B @ A, when it is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.stored import Opened, Plain, Stored, read_header, read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
TRANSPOSED = ("gpt2", "openai-gpt")  # model types whose matrices are stored [inputs, outputs]
ALTERED = (  # options that make an adapter more than W + scale * B @ A
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "arrow_config", "alora_invocation_tokens", "layer_replication",
    "target_parameters", "trainable_token_indices", "kasa_config", "monteclora_config",
)  # fmt: skip
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # initializations that leave W as it was
MERGE = "merge it once with PEFT: `model.merge_and_unload().save_pretrained(folder)`, and export that folder"


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


def adapter_settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json, of an adapter that can be merged.

    Raises:
        ExportError: not there or broken. UnsupportedModel: of a kind that cannot be merged.
    """
    file = folder / CONFIG
    settings = read_object(file, "give the folder of a LoRA adapter saved by PEFT")
    if (kind := settings.get("peft_type")) != "LORA":
        raise UnsupportedModel(f"{folder}: an adapter of type {kind} is not supported; supported: LORA", MERGE)
    for name in ALTERED:
        if settings.get(name):
            raise UnsupportedModel(f"{folder}: LoRA with {name} = {settings[name]!r} is not supported", MERGE)
    if (bias := settings.get("bias", "none")) != "none":
        raise UnsupportedModel(f"{folder}: LoRA with bias = {bias!r} is not supported; supported: none", MERGE)
    if (start := settings.get("init_lora_weights")) not in PLAIN_STARTS:
        raise UnsupportedModel(
            f"{folder}: LoRA with init_lora_weights = {start!r}, which changes the base model, is not supported", MERGE
        )
    return settings


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
    if set(pair) != {"A", "B"} or any(len(part.shape) != 2 for part in pair.values()):
        raise ExportError(f"{folder}: {module} needs two matrices, lora_A and lora_B", "download the adapter again")
    a, b = pair["A"], pair["B"]
    rank, alpha = (_number(folder, settings, key, module) for key in ("r", "lora_alpha"))
    if not a.shape[0] == b.shape[1] == rank:
        raise ExportError(
            f"{folder}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, but {CONFIG} says rank "
            f"{rank:g}",
            "the adapter's files do not belong together: download it again",
        )
    shape = (a.shape[1], b.shape[0]) if transposed else (b.shape[0], a.shape[1])
    base = _check(folder, f"{module}.weight", shape, found)
    return Merged(base, a, b, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank), transposed)


def _number(folder: Path, settings: Mapping[str, Any], key: str, module: str) -> float:
    """Rank or alpha of a module: of the pattern that its name ends with, else of all."""
    patterns = settings.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    value = settings.get(key, 8)
    for pattern, own in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                value = own
                break
        except re.error as error:
            raise ExportError(f"{folder / CONFIG}: {pattern!r} is no regular expression: {error}") from error
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ExportError(f"{folder / CONFIG}: expected a positive number {key}, got {value!r}")
    return float(value)


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
    if not (folder / WEIGHTS).is_file():
        if (folder / "adapter_model.bin").is_file():
            raise ExportError(
                f"{folder}: weights only as pickle (adapter_model.bin), which can run code when opened",
                "convert it once with `PeftModel.save_pretrained(folder, safe_serialization=True)`",
            )
        raise ExportError(f"{folder}: has no {WEIGHTS}", "download the adapter's weights too")
    tensors = read_header(folder / WEIGHTS)
    if not tensors:
        raise ExportError(f"{folder / WEIGHTS}: holds no tensors", "download the adapter again")
    return tensors
