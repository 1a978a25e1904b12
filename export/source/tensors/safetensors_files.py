"""The safetensors files of a model folder, and which of them holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.source.tensors.stored import Plain
from edgespec.runtimes.files.json_file import read_object

SINGLE, LISTING = "model.safetensors", "model.safetensors.index.json"
STRAY = ("adapter_", "optimizer", "scheduler", "training_args")  # beside a model, but not of it
MISTRAL = "consolidated"  # mistral's own files, with names of their own


def safetensors_in(folder: Path) -> dict[str, Plain]:
    """All tensors of a folder: of model.safetensors, else of the shards of its index, else of every other file.

    Raises:
        ExportError: no weights, only pickles, a missing or damaged file, or a tensor that is in two files.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if (folder / LISTING).is_file():
        return _indexed(folder / LISTING)
    found: dict[str, Plain] = {}
    for file in _unlisted(folder):
        for name, tensor in read_header(file).items():
            if name in found:
                raise ExportError(
                    f"{folder}: tensor {name} is in {found[name].file.name} and in {file.name}",
                    "keep the files of one model in the folder, or its model.safetensors.index.json",
                )
            found[name] = tensor
    return found


def _indexed(listing: Path) -> dict[str, Plain]:
    """The tensors of an index, each from the shard it names."""
    try:
        names = read_object(listing, ExportError)["weight_map"]
        shards = {str(name): listing.parent / file for name, file in names.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{listing}: expected a weight_map of file names: {error!r}") from error
    if outside := [str(file) for file in names.values() if Path(file).name != file]:
        raise ExportError(f"{listing}: names {outside[0]!r}, which is not a file of this folder")
    held: dict[Path, dict[str, Plain]] = {}
    for file in sorted(set(shards.values())):
        if not file.is_file():
            raise ExportError(f"{file}: named in {listing.name} but missing", "download all shards")
        held[file] = read_header(file)
    for name, file in shards.items():
        if name not in held[file]:
            raise ExportError(
                f"{file}: has no tensor {name}, which {listing.name} says it holds",
                "the files belong to different models, or one is old: download the shards and the index again",
            )
    return {name: held[file][name] for name, file in shards.items()}


def _unlisted(folder: Path) -> list[Path]:
    """The files to read where there is neither model.safetensors nor an index."""
    named = sorted(folder.glob("*.safetensors"))
    files = [file for file in named if file.is_file() and not file.name.startswith(STRAY)]  # a pipe would never end
    if shards := [file for file in files if file.name.startswith("model-")]:
        return shards
    if plain := [file for file in files if not file.name.startswith(MISTRAL)]:
        return plain
    if files:
        raise ExportError(
            f"{folder}: has only {files[0].name}, in mistral's own format; expected model.safetensors",
            "download the model-*.safetensors of the same repository",
        )
    pickles = sorted(
        file.name
        for kind in ("*.bin", "*.pt", "*.pth")
        for file in folder.glob(kind)
        if not file.name.startswith(STRAY)
    )
    if pickles:
        raise ExportError(
            f"{folder}: weights only as pickle ({pickles[0]}), which can run code when opened",
            "convert it once with `model.save_pretrained(folder, safe_serialization=True)`",
        )
    raise ExportError(f"{folder}: has no *.safetensors", "give a folder with safetensors weights, or a .gguf file")


def read_header(file: Path) -> dict[str, Plain]:
    """The tensors of one safetensors file, by name.

    Raises:
        ExportError: truncated, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):  # checks that header and file fit together
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ExportError(f"{file}: not a readable safetensors file: {error}", "download it again") from error
    header.pop("__metadata__", None)
    return {
        name: Plain(file, name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }
