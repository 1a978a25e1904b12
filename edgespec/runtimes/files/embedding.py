"""How the rows of a text become its vector, or the score of a pair: the manifest's entry, and its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edgespec.errors import BundleError
from edgespec.runtimes.files.bounds import Context, Count, Share, Width
from edgespec.runtimes.files.facts import Part
from edgespec.runtimes.files.manifest_parts import InsidePath

Pooling = Literal["mean", "last", "cls", "weighted", "max"]
VectorActivation = Literal["none", "tanh", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"]
MOST_STEPS, MOST_PROMPTS, LONGEST_PROMPT = 8, 64, 4096


class VectorStep(Part):
    """A step after pooling: ``activation(W x + b)``, or a layer norm of as many numbers as come in.

    Weights follow each other in the file, float32: W [outputs, inputs] and b [outputs], or the norm's factors
    [outputs] and b.
    """

    kind: Literal["dense", "norm"] = "dense"
    outputs: Width
    bias: bool = True
    activation: VectorActivation = "none"
    eps: Share = 0.0


class EmbeddingQuality(Part):
    """How near an encoder is to its source in float32, on some texts: mean and least cosine, or error of scores."""

    texts: Count
    weight_error: Share = Field(description="root of the ratio of squares, of all matrices")
    cosine: float | None = Field(default=None, ge=-1.01, le=1.01)
    cosine_min: float | None = Field(default=None, ge=-1.01, le=1.01)
    score_max_error: float | None = Field(default=None, ge=0)


class EmbeddingPart(Part):
    """Embeddings and scores of a bundle, next to its ``pooling``.

    ``encoder``: the target is an encoder, which writes no text.  ``scores``: it gives one number of a pair of texts
    instead of a vector of one.  ``second_text``: the row of learned positions at which the second text of a pair
    begins.
    """

    encoder: bool = False
    scores: bool = False
    normalize: bool = True
    prompts: dict[str, str] = Field(default_factory=dict, description="what is put before texts, by name")
    default_prompt: str | None = None
    include_prompt: bool = Field(default=True, description="whether pooling counts the tokens of the prompt")
    steps: list[VectorStep] = Field(default_factory=list, max_length=MOST_STEPS)
    file: InsidePath | None = Field(default=None, description="weights of the steps")
    second_text: Context | None = None
    quality: EmbeddingQuality | None = Field(default=None, description="of an encoder")

    @model_validator(mode="after")
    def _fits(self) -> EmbeddingPart:
        if len(self.prompts) > MOST_PROMPTS or max(map(len, self.prompts.values()), default=0) > LONGEST_PROMPT:
            raise ValueError(f"prompts: expected at most {MOST_PROMPTS} of at most {LONGEST_PROMPT} characters")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"default_prompt: {self.default_prompt!r} is not among the prompts")
        if bool(self.steps) != (self.file is not None):
            raise ValueError("steps: expected a file with their weights, and no file without them")
        if self.scores and (not self.encoder or not self.steps or self.steps[-1].outputs != 1):
            raise ValueError("scores: expected an encoder whose last step has one output")
        return self


class StepWeights(NamedTuple):
    """A step with its weights."""

    step: VectorStep
    weight: NDArray[np.float32]  # [outputs, inputs], of a norm [outputs]
    bias: NDArray[np.float32] | None  # [outputs]


def read_steps(folder: Path, part: EmbeddingPart, width: int) -> list[StepWeights]:
    """Read the weights of the steps after pooling; ``width``: numbers of a pooled row.

    Raises:
        BundleError: a norm of another width, or a file of another size.
    """
    if part.file is None:
        return []
    file, found, at = folder / part.file, list[StepWeights](), 0
    numbers = np.fromfile(file, "<f4")
    for step in part.steps:
        if step.kind == "norm" and step.outputs != width:
            raise BundleError(f"{file}: a norm of {step.outputs} numbers over {width}", "export the bundle again")
        size = step.outputs * (width if step.kind == "dense" else 1)
        weight = numbers[at : at + size]
        bias = numbers[at + size : at + size + step.outputs] if step.bias else None
        at += size + (step.outputs if step.bias else 0)
        if at > len(numbers):
            break
        found.append(StepWeights(step, weight.reshape(step.outputs, -1) if step.kind == "dense" else weight, bias))
        width = step.outputs
    if at != len(numbers):
        raise BundleError(f"{file}: {len(numbers)} numbers, and its steps have {at}", "export the bundle again")
    return found
