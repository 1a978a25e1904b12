"""The finished files: trained heads, or a draft as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgespec.errors import TrainingError
from edgespec.export.heads.description import DESCRIPTION, TENSORS, HeadsFile
from edgespec.export.source.source import TOKENIZER_FILES
from edgespec.export.training.learners import Learner
from edgespec.export.training.state import DRAFT_REPORT
from edgespec.export.training.target import Source

Writers = dict[str, Callable[[Path], None]]  # name -> how the file is written; the last one says that all are there


def finished_files(learner: Learner, source: Source, report: Mapping[str, Any], method: str) -> Writers:
    """What a finished training leaves in its folder.

    Args:
        learner: trained.
        source: the target.
        report: ``training``, and ``ranks`` or ``acceptance``.
        method: of the training.

    Raises:
        TrainingError: weights beyond float16.
    """
    tensors = {name: _half(name, value.detach().cpu().numpy()) for name, value in learner.tensors().items()}
    if method == "draft":
        return _draft(tensors, learner.described(), source, report)
    if method == "eagle":
        return _described(tensors, learner.described(), source, report)
    facts = source.arch.facts
    fields = {"hidden": facts.hidden, "vocab": facts.vocab, **source.fingerprints, **learner.described(), **report}
    file = HeadsFile.model_validate(fields)
    text = json.dumps(file.model_dump(mode="json"), indent=1) + "\n"
    return {TENSORS: _safetensors(tensors), DESCRIPTION: _text(text)}


def _draft(
    tensors: dict[str, NDArray[np.float16]], config: Mapping[str, Any], source: Source, report: Mapping[str, Any]
) -> Writers:
    files: Writers = {}
    for name in TOKENIZER_FILES:
        if name != "config.json" and (source.path / name).is_file():
            files[name] = _copy(source.path / name)
    if source.codec.converted:
        files["tokenizer.json"] = _text(source.codec.tokenizer.to_str())
    return files | _described(tensors, config, source, report)


def _described(
    tensors: dict[str, NDArray[np.float16]], config: Mapping[str, Any], source: Source, report: Mapping[str, Any]
) -> Writers:
    """Weights, how they were trained, and at last config.json."""
    files: Writers = {"model.safetensors": _safetensors(tensors)}
    about = {"schema_version": 1, **source.fingerprints, **report}
    files[DRAFT_REPORT] = _text(json.dumps(about, indent=1) + "\n")
    files["config.json"] = _text(json.dumps(config, indent=2) + "\n")
    return files


def _half(name: str, value: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(value, np.float16)
    if not np.isfinite(found).all():
        raise TrainingError(f"tensor {name} has values beyond float16: the training went astray", "use a smaller --lr")
    return found


def _safetensors(tensors: Mapping[str, NDArray[np.float16]]) -> Callable[[Path], None]:
    return lambda part: save_file(dict(tensors), part, {"format": "pt"})


def _text(content: str) -> Callable[[Path], None]:
    def write(part: Path) -> None:
        part.write_text(content, "utf-8")

    return write


def _copy(file: Path) -> Callable[[Path], None]:
    def write(part: Path) -> None:
        shutil.copyfile(file, part)

    return write
