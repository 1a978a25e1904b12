"""Reading trained heads: our own folders (heads.py), and published Medusa checkpoints (arXiv 2401.10774).

The latter have ``config.json`` and ``medusa_lm_head.safetensors`` or ``.pt``; the number of heads is taken from the
tensors, because some configurations are wrong about it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.heads.description import DESCRIPTION, SCHEMA, TENSORS, HeadsFile, TrainedHeads, group_matrices
from edgespec.export.source.extended import Extra, Held
from edgespec.runtimes.files.json_file import read_json, read_object, validated

FLOATS = ("F16", "BF16", "F32", "F64")
PUBLISHED = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_heads.safetensors")


def read_heads(folder: Path) -> TrainedHeads:
    """Heads from a folder of ours or a published Medusa checkpoint.

    Raises:
        ExportError: no heads there, or tensors that are not what the description says.
    """
    if not folder.is_dir():
        raise ExportError(f"{folder}: expected a folder with trained heads", "make one with `edgespec train`")
    if (folder / DESCRIPTION).is_file():
        return _read_own(folder)
    found = next((folder / name for name in PUBLISHED if (folder / name).is_file()), None)
    if found is None:
        raise ExportError(
            f"{folder}: has neither {DESCRIPTION} nor {', '.join(PUBLISHED)}", "make heads with `edgespec train`"
        )
    return _published(found, _tensors(found))


def read_description(folder: Path) -> HeadsFile:
    """What a folder of ours says of its heads; no tensor is read.

    Raises:
        ExportError: not such a description.
    """
    path = folder / DESCRIPTION
    again = "train the heads again"
    file = validated(HeadsFile, read_json(path, ExportError, again), path, ExportError, again)
    if file.schema_version > SCHEMA:
        raise ExportError(f"{path}: schema {file.schema_version} is newer than this edgespec, which reads {SCHEMA}")
    return file


def _read_own(folder: Path) -> TrainedHeads:
    file = read_description(folder)
    heads = TrainedHeads(file, {name: Held(value) for name, value in _tensors(folder / TENSORS).items()})
    _check_shapes(heads, folder)
    return heads


def _published(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> TrainedHeads:
    """Names of the Medusa repository: ``K.0.linear.weight``, ``K.0.linear.bias``; ``K.1.weight``: own LM heads."""
    layouts = (
        r"(?:medusa_head\.)?(\d+)\.(?:0\.linear\.(?P<part>weight|bias)|(?P<own>1\.weight))",
        r"heads\.(\d+)\.(?:linear\.(?P<part>weight|bias)|(?P<own>lm_head\.weight))",
    )
    found: dict[str, Extra] = {}
    numbers: set[int] = set()
    for name, value in tensors.items():
        match = next((m for layout in layouts if (m := re.fullmatch(layout, name))), None)
        if match is None:
            if re.match(r"(medusa_head\.)?\d+\.\d+\.", name):
                raise ExportError(
                    f"{path}: tensor {name}: heads of more than one layer are not supported; expected one residual "
                    "block a head",
                    "train heads with `edgespec train medusa`",
                )
            continue  # a full checkpoint has the model's own tensors too
        numbers.add(int(match[1]))
        found[f"medusa.{match[1]}." + ("lm_head.weight" if match["own"] else str(match["part"]))] = Held(value)
    if not numbers:
        raise ExportError(f"{path}: holds no Medusa heads; expected tensors like 0.0.linear.weight")
    weight = found.get("medusa.0.weight")
    if weight is None or numbers != set(range(len(numbers))):
        raise ExportError(f"{path}: expected heads 0, 1, ..., got {sorted(numbers)}", "download it again")
    own = found.get("medusa.0.lm_head.weight")
    described = {
        "kind": "medusa",
        "count": len(numbers),
        "hidden": (*weight.shape, 0)[0],
        "vocab": (*own.shape, 0)[0] if own else _configuration(path).get("vocab_size") or 0,
        "own": own is not None,
        "training": {"published": path.name},
    }
    file = validated(HeadsFile, described, path, ExportError, "download it again")
    heads = TrainedHeads(file, found)
    _check_shapes(heads, path)
    return heads


def _configuration(path: Path) -> dict[str, Any]:
    file = path.parent / "config.json"
    return read_object(file, ExportError) if file.is_file() else {}


def _check_shapes(heads: TrainedHeads, where: Path) -> None:
    file, hidden = heads.file, heads.file.hidden
    wide = file.count * hidden
    expected: dict[str, tuple[int, ...]] = {}
    for group in heads.groups:
        matrices = group_matrices(group)
        sizes = {"medusa": (hidden, hidden), "blockwise": (file.inner, hidden), "exit": (hidden, hidden)}[group.kind]
        for part in matrices.first:
            expected[part.weight] = sizes
            if part.bias:
                expected[part.bias] = sizes[:1]
        if matrices.second is not None:
            expected[matrices.second.weight] = wide, file.inner
            expected[str(matrices.second.bias)] = (wide,)
        expected |= {part.weight: (file.vocab, hidden) for part in matrices.heads}
    for name, shape in expected.items():
        tensor = heads.tensors.get(name)
        if tensor is None:
            raise ExportError(f"{where}: tensor {name} is missing", "train the heads again, or download them again")
        if tensor.shape != shape:
            raise ExportError(f"{where}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")


def _tensors(path: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a file as float32; pickles are opened for their numbers alone."""
    if path.suffix == ".pt":
        return _pickled(path)
    from safetensors import SafetensorError, safe_open

    try:
        import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs

        with safe_open(path, "np") as opened:
            names = list(opened.keys())
            for name in names:
                if (kind := opened.get_slice(name).get_dtype()) not in FLOATS:
                    raise ExportError(
                        f"{path}: tensor {name} is of type {kind}, expected one of {', '.join(FLOATS)}",
                        "train the heads again, or download them again",
                    )
            found = {name: np.asarray(opened.get_tensor(name), np.float32) for name in names}
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path}: not a readable safetensors file: {error}", "train or download it again") from error
    return _finite(path, found)


def _pickled(path: Path) -> dict[str, NDArray[np.float32]]:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ExportError(
            f"{path}: is a torch file, and torch is not installed",
            "pip install 'edgespec[train]', or convert it to safetensors",
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or unsafe file
        raise ExportError(f"{path}: not a torch file of plain tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ExportError(f"{path}: expected a state dict, got {type(state).__name__}")
    return _finite(path, {str(name): value.float().numpy() for name, value in state.items()})


def _finite(path: Path, tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    for name, value in tensors.items():
        if not np.isfinite(value).all():
            raise ExportError(f"{path}: tensor {name} holds NaN or infinity", "train the heads again")
    return tensors
