"""How a model embeds or scores texts: the files of sentence-transformers, and heads of transformers.

Files: https://github.com/UKPLab/sentence-transformers, ``modules.json`` and the folders that it names,
``config_sentence_transformers.json``, ``sentence_bert_config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, UnsupportedModel
from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import read_object
from edgespec.export.tokenizers.facts import read_if_sound
from edgespec.runtimes.files.embedding import EmbeddingPart, Pooling, VectorActivation, VectorStep

MODULES, PROMPTS, LENGTH = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
STEPS_FILE = "embedding.bin"
MODES: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weighted",
}
NAMES: Mapping[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last",
                                "weightedmean": "weighted"}  # fmt: skip
ACTIVATIONS: Mapping[str, VectorActivation] = {
    "identity": "none", "none": "none", "tanh": "tanh", "relu": "relu", "gelu": "gelu", "silu": "silu",
    "sigmoid": "sigmoid", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
Array = NDArray[np.float32]


class Step(NamedTuple):
    """A step after pooling, with the tensors of its weights in the order of the file."""

    step: VectorStep
    tensors: list[Array]


@dataclass
class Sentences:
    """How a model embeds or scores texts.

    Attributes:
        pooling: None = its files do not say it.
        steps: after pooling.
        normalize: whether vectors have length one.
        scores: it scores pairs of texts.
        prompts, default_prompt, include_prompt: see ``EmbeddingPart``.
        longest: tokens that it reads of a text; None = all that its positions allow.
    """

    pooling: Pooling | None = None
    steps: list[Step] = field(default_factory=list)
    normalize: bool = True
    scores: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    longest: int | None = None

    def part(self, encoder: bool = False, second_text: int | None = None) -> EmbeddingPart | None:
        """Return the manifest's entry; None = there is nothing to say."""
        found = EmbeddingPart(
            encoder=encoder,
            scores=self.scores,
            normalize=self.normalize,
            prompts=self.prompts,
            default_prompt=self.default_prompt,
            include_prompt=self.include_prompt,
            steps=[step.step for step in self.steps],
            file=STEPS_FILE if self.steps else None,
            second_text=second_text,
        )
        return None if found == EmbeddingPart() else found

    def write(self, folder: Path) -> None:
        """Write the weights of the steps."""
        if self.steps:
            flat = [np.ravel(tensor) for step in self.steps for tensor in step.tensors]
            np.concatenate(flat).astype("<f4").tofile(folder / STEPS_FILE)


def read_sentences(folder: Path, width: int) -> Sentences:
    """Read the files of sentence-transformers; without them only defaults.

    Args:
        folder: of the model.
        width: of its rows.

    Raises:
        ExportError: damaged files, or modules that are not supported.
    """
    found = Sentences()
    _read_prompts(folder, found)
    longest = read_if_sound(folder / LENGTH).get("max_seq_length")
    found.longest = longest if type(longest) is int and longest > 0 else None
    modules = _modules(folder)
    if modules is None:
        found.pooling, found.include_prompt = _pooling(folder, "1_Pooling", False)
        return found
    found.normalize, done = False, False
    for kind, path in modules:
        if done and kind != "Normalize":
            raise UnsupportedModel(f"{folder / MODULES}: {kind} after Normalize is not supported")
        if kind == "Pooling":
            found.pooling, found.include_prompt = _pooling(folder, path, True)
        elif kind == "Dense":
            width, step = _dense(folder, path, width)
            found.steps.append(step)
        elif kind == "Normalize":
            found.normalize = done = True
        elif kind not in ("Transformer", "Dropout", "Router"):
            supported = "Transformer, Pooling, Dense, Normalize"
            raise UnsupportedModel(
                f"{folder / MODULES}: the module {kind} is not supported; supported: {supported}", "take another model"
            )
    return found


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """List the modules, each its kind and its folder; None = there is no such file."""
    file = folder / MODULES
    if not file.is_file():
        return None
    try:
        listed = json.loads(file.read_text("utf-8"))
        if not isinstance(listed, list) or not listed:
            raise ValueError
        found = [(str(one["type"]).rpartition(".")[2], str(one.get("path", ""))) for one in listed]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ExportError(f"{file}: expected a list of modules with their types", "download it again") from error
    for _, path in found:
        parts = PurePosixPath(path.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts or ":" in path:
            raise ExportError(f"{file}: the path {path!r} leaves the folder", "download it again")
    return found


def _pooling(folder: Path, path: str, needed: bool) -> tuple[Pooling | None, bool]:
    """Read how rows are pooled, and whether those of a prompt count."""
    file = folder / path / "config.json"
    given = read_object(file, "download it again") if needed else read_if_sound(file)
    modes = [name for name, on in given.items() if name.startswith("pooling_mode_") and on]
    found = [MODES.get(name) for name in modes]
    if isinstance(named := given.get("pooling_mode"), (str, list)):
        found = [NAMES.get(str(name)) for name in ([named] if isinstance(named, str) else named)]
    pooling = found[0] if len(found) == 1 else None
    if needed and pooling is None:
        what = ", ".join(modes) or repr(named)
        raise UnsupportedModel(f"{file}: pooling {what} is not supported; supported: one of {', '.join(NAMES)}")
    return pooling, bool(given.get("include_prompt", True))


def _read_prompts(folder: Path, found: Sentences) -> None:
    given = read_if_sound(folder / PROMPTS)
    prompts, default = given.get("prompts"), given.get("default_prompt_name")
    if isinstance(prompts, dict):
        found.prompts = {str(name): text for name, text in prompts.items() if isinstance(text, str) and text}
    found.default_prompt = default if isinstance(default, str) and default in found.prompts else None


def _dense(folder: Path, path: str, width: int) -> tuple[int, Step]:
    """Read a matrix after pooling -> its outputs, and the step."""
    source = Checkpoint.open(folder / path, tokenizer=False)
    config, file = source.config, folder / path / "config.json"
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if inputs != width or type(outputs) is not int or outputs < 1:
        raise ExportError(f"{file}: a matrix from {inputs!r} to {outputs!r} numbers: expected {width} to some")
    name = str(config.get("activation_function") or "Tanh").rpartition(".")[2]
    return outputs, _step(source, "linear", width, outputs, _activation(file, name), bool(config.get("bias", True)))


def _step(source: Checkpoint, module: str, width: int, outputs: int, activation: VectorActivation, bias: bool) -> Step:
    shape = (outputs, width)
    if (got := source.shape(f"{module}.weight")) != shape:
        raise ExportError(f"{source.path}: {module}.weight has shape {list(got)}: expected {list(shape)}")
    tensors = [source.read(f"{module}.weight"), *([source.read(f"{module}.bias")] if bias else [])]
    return Step(VectorStep(outputs=outputs, bias=bias, activation=activation), tensors)


def _activation(file: Path, name: str) -> VectorActivation:
    if (found := ACTIVATIONS.get(name.lower())) is None:
        raise UnsupportedModel(f"{file}: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return found


def read_classifier(
    source: Checkpoint, modules: tuple[tuple[str, str], ...], pooling: str, width: int, eps: float
) -> Sentences:
    """Read the head of a model that scores pairs of texts (``*ForSequenceClassification``).

    Args:
        source: with the tensors of the head.
        modules: of the head, each with its activation; "norm": a layer norm.
        pooling: ``cls`` or ``mean``.
        width: of a row.
        eps: of norms.

    Raises:
        ExportError: a head that is not there.
        UnsupportedModel: it has several labels, or an unknown activation.
    """
    if pooling not in ("cls", "mean"):
        raise UnsupportedModel(f"{source.path}: classifier_pooling {pooling!r}: expected cls or mean")
    found = Sentences(pooling="cls" if pooling == "cls" else "mean", normalize=False, scores=True)
    file = source.path / "config.json"
    for module, kind in modules:
        bias = source.has(f"{module}.bias")
        if kind == "norm":
            step = VectorStep(kind="norm", outputs=width, bias=bias, eps=eps)
            tensors = [source.read(f"{module}.weight"), *([source.read(f"{module}.bias")] if bias else [])]
            found.steps.append(Step(step, tensors))
            continue
        outputs = source.shape(f"{module}.weight")[0]
        found.steps.append(_step(source, module, width, outputs, _activation(file, kind), bias))
        width = outputs
    if width != 1:
        raise UnsupportedModel(
            f"{source.path}: a classifier of {width} labels: expected one, the score of a pair of texts",
            "take a reranker",
        )
    last = found.steps[-1]
    said = source.config.get("sentence_transformers")
    name = said.get("activation_fn") if isinstance(said, dict) else None
    name = name or source.config.get("sbert_ce_default_activation_function") or "Sigmoid"
    activation = _activation(file, str(name).rpartition(".")[2])
    found.steps[-1] = Step(last.step.model_copy(update={"activation": activation}), last.tensors)
    return found


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint scores texts."""
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith("ForSequenceClassification")
