"""A LoRA adapter as PEFT saves it (https://arxiv.org/abs/2106.09685): its description, its matrices, and its scale."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.runtimes.files import json_file
from edgespec.runtimes.files.formats import TILE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
ALTERED = (  # options that make an adapter more than W + scale * B @ A
    "use_dora", "lora_bias", "use_qalora", "use_bdlora", "arrow_config", "alora_invocation_tokens", "layer_replication",
    "target_parameters", "trainable_token_indices", "kasa_config", "monteclora_config",
)  # fmt: skip
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # initializations that leave W as it was
MERGE = "merge it once with PEFT: `model.merge_and_unload().save_pretrained(folder)`, and export that folder"
AT_EXPORT = "merge it at export: `edgespec export MODEL --adapter FOLDER`"
AGAIN = "download the adapter again"
BITS = {"F32": 32, "F16": 16, "BF16": 15}  # of a number, as native/adapters.cpp names the kinds
MOST_BYTES = 1 << 34  # of an adapter


@dataclass(frozen=True)
class LowRankPair:
    """Two matrices that an adapter adds to one of the model: ``scale * B @ A``."""

    module: str  # of the checkpoint, such as model.layers.0.self_attn.q_proj
    a: NDArray[np.float32]  # [rank, inputs]
    b: NDArray[np.float32]  # [outputs, rank]
    scale: float
    bits: int  # of a number in the file, see ``BITS``


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json, of an adapter that is ``scale * B @ A`` and nothing else.

    Raises:
        ExportError: not there or broken.
        UnsupportedModel: of another kind.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise ExportError(f"{folder}: has no {CONFIG}", "give the folder of a LoRA adapter saved by PEFT")
    settings = json_file.read_object(file, ExportError, infinite=True)
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


def weights_file(folder: Path) -> Path:
    """Find the file of an adapter's matrices; an ``ExportError`` if it is missing, or only a pickle."""
    if not folder.is_dir():
        raise ExportError(f"{folder}: no such folder", "give the folder of a LoRA adapter saved by PEFT")
    if not (folder / WEIGHTS).is_file():
        if (folder / "adapter_model.bin").is_file():
            raise ExportError(
                f"{folder}: weights only as pickle (adapter_model.bin), which can run code when opened",
                "convert it once with `PeftModel.save_pretrained(folder, safe_serialization=True)`",
            )
        raise ExportError(f"{folder}: has no {WEIGHTS}", "download the adapter's weights too")
    return folder / WEIGHTS


def scale_of(folder: Path, settings: Mapping[str, Any], module: str, a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Return the factor of ``B @ A`` of a module, whose shapes must be of the rank that the description says.

    Args:
        folder: of the adapter, for messages.
        settings: of the adapter.
        module: name of the module.
        a, b: shapes of its matrices.
    """
    if len(a) != 2 or len(b) != 2:
        raise ExportError(f"{folder}: {module} needs two matrices, lora_A and lora_B", AGAIN)
    rank, alpha = (_number(folder, settings, key, module) for key in ("r", "lora_alpha"))
    if not a[0] == b[1] == rank:
        raise ExportError(
            f"{folder}: {module} has lora_A {list(a)} and lora_B {list(b)}, but {CONFIG} says rank {rank:g}",
            "the adapter's files do not belong together: download it again",
        )
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _number(folder: Path, settings: Mapping[str, Any], key: str, module: str) -> float:
    """Find the rank or alpha of a module: of the pattern that its name ends with, else of all."""
    patterns = settings.get("rank_pattern" if key == "r" else "alpha_pattern") or {}
    value = settings.get(key, 8)
    for pattern, own in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                value = own
                break
        except re.error as error:
            raise ExportError(f"{folder / CONFIG}: {pattern!r} is no regular expression: {error}") from error
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ExportError(f"{folder / CONFIG}: expected a positive number {key}, got {value!r}")
    return float(value)


def digest(folder: Path) -> str:
    """Digest what an adapter computes: SHA-256 of its two files."""
    made = hashlib.sha256()
    for file in (folder / CONFIG, weights_file(folder)):
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                made.update(piece)
        made.update(b"\0")
    return made.hexdigest()


def adapter_bytes(folder: Path) -> int:
    """Count the bytes of an adapter in memory: its numbers as they are stored, its ranks rounded up to whole tiles.

    Raises:
        ExportError: it is missing or damaged.
    """
    total = 0
    for name, entry in _header(weights_file(folder)).entries.items():
        match, shape = FACTOR.fullmatch(name.removeprefix(PREFIX)), entry["shape"]
        if match and len(shape) == 2:
            rows = -(-shape[0] // TILE) * TILE
            total += rows * shape[1] * (4 if entry["dtype"] == "F32" else 2)
    return total


def read_pairs(folder: Path) -> Iterator[LowRankPair]:
    """Read an adapter, matrix by matrix.

    Raises:
        ExportError: it is missing, damaged, or holds numbers that are not finite.
        UnsupportedModel: it changes more than matrices of layers; the change is named.
    """
    settings, found = adapter_settings(folder), _header(weights_file(folder))
    pairs: dict[str, dict[str, str]] = {}
    for name in found.entries:
        inside = name.removeprefix(PREFIX)
        if match := FACTOR.fullmatch(inside):
            pairs.setdefault(match["module"], {})[match["which"]] = name
        else:
            what = "LoRA on embeddings" if "lora_embedding" in inside else "a tensor that is no lora_A or lora_B"
            raise UnsupportedModel(f"{folder}: {what} ({name}) is not supported when a bundle runs", AT_EXPORT)
    for module, names in sorted(pairs.items()):
        if set(names) != {"A", "B"}:
            raise ExportError(f"{folder}: {module} needs two matrices, lora_A and lora_B", AGAIN)
        (a, bits), (b, other) = (found.read(names[which]) for which in "AB")
        scale = scale_of(folder, settings, module, a.shape, b.shape)
        yield LowRankPair(module, a, b, scale, bits if bits == other else 32)


@dataclass(frozen=True)
class _Header:
    """The tensors of a safetensors file."""

    file: Path
    entries: dict[str, Any]
    start: int  # of the first byte of all tensors

    def read(self, name: str) -> tuple[NDArray[np.float32], int]:
        """Read a tensor -> it, and the bits of its numbers in the file."""
        entry = self.entries[name]
        kind, shape, (first, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if kind not in BITS:
            raise ExportError(
                f"{self.file}: tensor {name} is stored as {kind}; expected float32, float16 or bfloat16", AGAIN
            )
        with self.file.open("rb") as stream:
            stream.seek(self.start + first)
            data = stream.read(end - first)
        stored = np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind])
        if stored.size != prod(shape):
            raise ExportError(f"{self.file}: the file ends before {name} does", AGAIN)
        values = (stored.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else stored.astype(np.float32)
        if not np.isfinite(values).all():
            raise ExportError(f"{self.file}: tensor {name} holds numbers that are not finite", AGAIN)
        return values.reshape(shape), BITS[kind]


def _header(file: Path) -> _Header:
    """Read the names, shapes and places of a safetensors file's tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):  # checks that header and file fit together
            pass
        with json_file.open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ExportError(f"{file}: not a readable safetensors file: {error}", AGAIN) from error
    header.pop("__metadata__", None)
    if not header:
        raise ExportError(f"{file}: holds no tensors", AGAIN)
    return _Header(file, header, 8 + length)
