"""Opening a source model: a Hugging Face folder, a GGUF file, a folder of CTranslate2, an adapter with its base."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from edgespec.errors import ExportError
from edgespec.export.source.converters import converted
from edgespec.export.source.ct2_files import spec_of
from edgespec.export.source.ct2_models import open_ct2
from edgespec.export.source.gguf_files import TOKENIZER, is_projector, open_gguf, parts_of
from edgespec.export.source.lora import is_adapter, merged
from edgespec.export.source.stored import LOSS, NONSENSE, Opened, Temporary, read_object, safetensors_in
from edgespec.export.source.widened import FILE as WIDENED
from edgespec.export.source.widened import is_widened, widen
from edgespec.runtimes.files.lora import CONFIG, WEIGHTS, adapter_settings

BESIDE = ("config.json", "generation_config.json", "calibration.txt")  # what else is read from a model's folder


def open_source(path: Path, tokenizer: bool = True) -> Opened:
    """Open a folder or a .gguf file.

    Args:
        tokenizer: whether the tokenizer of a .gguf file is needed.

    Raises:
        ExportError: nothing that can be read; the message says why.
    """
    if path.suffix == ".gguf" and path.is_file():
        return open_gguf(path, tokenizer)
    if is_adapter(path) and ((path / WEIGHTS).is_file() or not (path / "config.json").is_file()):
        return open_adapter(_base(path), path)
    if file := _only_gguf(path):
        return open_gguf(file, tokenizer)
    return _open_folder(path)


def _open_folder(path: Path) -> Opened:
    if (spec := spec_of(path)) is not None and not any(path.glob("*.safetensors")):
        return open_ct2(path, spec)
    config = read_object(path / "config.json", "give a Hugging Face model folder or a .gguf file")
    if is_widened(path):
        return _open_widened(path, config)
    tensors, quantized = converted(path, config, safetensors_in(path))
    notes = [f"the checkpoint is quantized ({quantized}): {LOSS}"] if quantized else []
    return Opened(path, config, tensors, notes)


def _open_widened(path: Path, config: dict[str, Any]) -> Opened:
    said = read_object(path / WIDENED, "")
    source, factor = said.get("source"), said.get("factor")
    if not isinstance(source, str) or not isinstance(factor, int) or is_widened(path / source):
        raise ExportError(f'{path / WIDENED}: expected {{"source": FOLDER, "factor": NUMBER}}, got {said}')
    return widen(path, config, _open_folder(path / source), factor)


def open_adapter(base: Opened, folder: Path) -> Opened:
    """Open a model with an adapter; the adapter's tokenizer, if it has one, replaces the base's."""
    try:
        tensors, config = merged(base, folder)
    except NONSENSE as error:
        raise ExportError(f"{folder}: its {CONFIG} cannot be understood: {error!r}", "download it again") from error
    notes = [*base.notes, f"the adapter {folder.name} is merged into the weights"]
    if not (folder / TOKENIZER[0]).is_file():
        return Opened(base.path, config, tensors, notes, base.temporary)
    temporary = base.temporary or Temporary()
    view = Path(tempfile.mkdtemp(dir=temporary.path)) / folder.resolve().name
    view.mkdir(parents=True)
    for source, names in ((base.path, BESIDE), (folder, TOKENIZER)):
        for name in names:
            if (source / name).is_file():
                shutil.copyfile(source / name, view / name)
    return Opened(view, config, tensors, notes, temporary)


def _base(folder: Path) -> Opened:
    """Return the base model of an adapter's folder: in the folder itself, or the local one that it names."""
    if (folder / "config.json").is_file():
        return _open_folder(folder)
    named = adapter_settings(folder).get("base_model_name_or_path")
    if isinstance(named, str) and named:
        for path in (Path(named).expanduser(), folder / named):
            if path.exists() and path.resolve() != folder.resolve():
                return open_source(path)
    raise ExportError(
        f"{folder}: is an adapter, and its base model {named!r} ({CONFIG}) is not a local folder",
        f"name the base too: edgespec export BASE --adapter {folder}",
    )


def _only_gguf(path: Path) -> Path | None:
    every = sorted(path.glob("*.gguf"))
    files = [file for file in every if not is_projector(file)] or every
    if not files or any(path.glob("*.safetensors")):
        return None
    if files != parts_of(files[0]) and len(files) > 1:
        raise ExportError(
            f"{path}: holds {len(files)} GGUF files ({files[0].name}, {files[1].name}, ...); expected one",
            "give the file itself",
        )
    return files[0]
