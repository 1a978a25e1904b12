"""What an export will do and how large it will be, before anything is written (``--dry-run``).

Sizes are exact for weights, as they are for what is copied, else estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import encoder_plans
from edgespec.export.bundle.model_part import ENCODER, ModelSpec, counted, model_part
from edgespec.export.drafters.head_choice import HEAD_TOKENS, HeadChoice, check_size, cut_draft
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.device import with_device_graphs
from edgespec.export.emit.plans import Plans, index_text, storage_plans
from edgespec.export.emit.program import NativePlan
from edgespec.export.quantization.coded_keys import TABLES
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import TOKENIZER_FILES
from edgespec.export.tokenizers.chat_data import CHAT_FILE
from edgespec.planning.cut import TYPICAL, fastest_size
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import SPECS, Family, Format
from edgespec.runtimes.files.kv import table_shape
from edgespec.runtimes.files.manifest import FileEntry, HeadVocab, Layout, ModelPart, SkipSetPart
from edgespec.runtimes.text.chat import TEMPLATE_FOLDER, find_templates
from edgespec.runtimes.text.special import SPECIAL_TOKENS_FILE, read_object

TOKENIZER = "tokenizer.json"
# bytes of tokenizer.json a token of the vocabulary: 67 and 71 in byte-level ones of 8,000 and 50,257 tokens with their
# merges; those that write a merge as one string need less
TOKENIZER_BYTES = 70
CHAT_BYTES = 700  # of chat.json: ChatML's with a default system message
# bytes of a graph a layer, beside the vectors inside it, by graph and family of formats: about the mean of 8
# architectures (docs/bundle.md); all graphs together are less than a percent of the weights of any real model
GRAPH_BYTES: dict[str, Mapping[Family, int]] = {
    "native": {"blocks": 2400, "channels": 2450, "floats": 2400},
    "gated": {"blocks": 6200, "channels": 8600, "floats": 4400},
    "strict": {"blocks": 5000, "channels": 7500, "floats": 3700},
    "plain": {"blocks": 4700, "channels": 7000, "floats": 3300},
}
GRAPH_BYTES["standard"] = GRAPH_BYTES["plain"]
HEAD_BYTES = {"native": 900, "gated": 2000, "strict": 2000}  # of a group's nodes in a graph
HEADS = ("medusa.", "blockwise.")  # whose biases a graph without heads has not
DEVICE_BYTES = 6000  # of a device's graph, a layer


def model_files(part: ModelPart, plans: Plans, encoders: Sequence[NativePlan] = ()) -> dict[str, int]:
    """Files of a model, and their sizes; ``plans``: of its weights, and ``encoders``: of its encoders'."""
    files = {part.weights: plans[part.layout].end}
    for name, graph in part.graphs.items():
        if graph.device != "cpu":
            files[graph.file] = DEVICE_BYTES * part.facts.layers
            continue
        inline = plans[graph.operators].inline
        size = GRAPH_BYTES[name][SPECS[part.format].family] * part.facts.layers
        for vector, length in inline.items():
            size += length if graph.hidden or not vector.startswith(HEADS) else 0
        files[graph.file] = size + (HEAD_BYTES[name] * len(part.heads) if graph.hidden and part.heads else 0)
    for side, encoder in zip(part.sides, encoders, strict=True):
        files[side.weights] = encoder.end
        size = GRAPH_BYTES["native"][SPECS[part.format].family] * side.facts.layers
        files[side.graphs["native"].file] = size + sum(encoder.inline.values())
    if part.image is not None and (places := part.image.places) is not None:
        files[places.file] = 4 * places.side**2 * places.width
    if part.index is not None:
        files[part.index] = len(index_text(plans))
    if part.head_vocab is not None:
        files[part.head_vocab.file] = 4 * part.head_vocab.size
    if part.final_norm is not None:
        files[part.final_norm.file] = 4 * part.facts.hidden * (1 + part.final_norm.biased)
    if part.attention is not None and part.attention.tables is not None:
        files[TABLES] = sum(4 * prod(table_shape(name, part.facts)) + 100 for name in part.attention.learnt)
    return files


def copied_files(folder: Path, vocab: int, tokenizer: int = 0) -> tuple[dict[str, int], bool]:
    """Return what an export copies, and whether the size of tokenizer.json is an estimate.

    Args:
        folder: of the model.
        vocab: tokens that it has.
        tokenizer: about the size of a tokenizer.json that is not there; 0 = guessed by the vocabulary.
    """
    names = [*TOKENIZER_FILES, SPECIAL_TOKENS_FILE]
    names += [f"{TEMPLATE_FOLDER}/{file.name}" for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))]
    files = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
    if find_templates(folder, read_object(folder / "tokenizer_config.json")):
        files[CHAT_FILE] = CHAT_BYTES
    assumed = TOKENIZER not in files
    return ({TOKENIZER: tokenizer or TOKENIZER_BYTES * vocab} if assumed else {}) | files, assumed


def entries(files: Mapping[str, int]) -> dict[str, FileEntry]:
    """For a manifest; nothing is written yet, so there are no sums."""
    return {name: FileEntry(size=size, sha256="") for name, size in sorted(files.items())}


class PlannedModel:
    """A model of a planned bundle.

    Args:
        heads: of a target; None = it is a draft or a drafter.
        rows: of a cut LM head that takes the place of a draft's own; None = there is none.
        gated: sub-layers of a target can be left out.

    Attributes:
        part: its entry in the manifest.
    """

    def __init__(
        self,
        arch: Architecture,
        choice: WeightChoice,
        layout: Layout,
        prefix: str = "",
        *,
        heads: HeadChoice | None = None,
        rows: int | None = None,
        gated: bool = False,
    ) -> None:
        self.arch, self.choice, self.layout, self.prefix = arch, choice, layout, prefix
        self.plan: HeadPlan | None = None
        if heads is not None:
            heads.extend(arch)
            self.plan = heads.plan
            rows = None if heads.tokens is None else len(heads.tokens)
        elif rows is not None:
            self.plan = cut_draft(arch, first_tokens(rows, arch, "--draft-vocab"))
        tokens = None if rows is None else HeadVocab(file=prefix + HEAD_TOKENS, size=rows)
        spec = ModelSpec(choice.format, head=choice.head, gated=gated, draft=heads is None, prefix=prefix,
                         layout=layout, plan=self.plan, head_vocab=tokens)  # fmt: skip
        self._plans = storage_plans(arch, choice.format, choice.head, self.plan)
        self._alone: int | None = None  # bytes of the model without its heads, where it has some
        quantizer = choice.quantizer.name if choice.quantizer else None
        self._encoders = encoder_plans(arch, spec)
        low = self._encoders[ENCODER].low_bytes if ENCODER in self._encoders else 0
        native = self._plans["native"]
        self.part = model_part(arch, spec, quantizer, native.low_bytes, encoder_low_bytes=low, kept=native.kept)

    def for_devices(self, devices: Sequence[DeviceName], skip: SkipSetPart | None) -> None:
        """Add graphs for devices."""
        for device in devices:
            self.part = with_device_graphs(self.part, device, skip, self.prefix)

    def files(self) -> dict[str, int]:
        """Its files and their sizes."""
        return model_files(self.part, self._plans, [*self._encoders.values()])

    def weights(self) -> tuple[int, int]:
        """Bytes of the model and of its heads."""
        whole = self._plans[self.layout].end
        if self.plan is None or self.plan.only:
            return whole, 0
        if self._alone is None:
            self._alone = weight_bytes(self.arch, self.choice.format, self.choice.head, self.layout)
        return self._alone, whole - self._alone


def first_tokens(rows: int, arch: Architecture, option: str) -> NDArray[np.int64]:  # [rows]
    """Stand for the tokens of a cut LM head, which are not chosen yet."""
    check_size(rows, arch.facts.vocab, option)
    return np.arange(rows)


def weight_bytes(
    arch: Architecture,
    form: Format,
    head: Format | None = None,
    layout: Layout = "native",
    plan: HeadPlan | None = None,
    fine: frozenset[str] = frozenset(),
) -> int:
    """Bytes of the weight file, exactly; with ``plan`` that of a checkpoint extended by its heads."""
    return storage_plans(arch, form, head, plan, fine)[layout].end


def model_bytes(arch: Architecture, choice: WeightChoice, layout: Layout, plan: HeadPlan | None) -> tuple[int, int]:
    """Bytes of the model itself, and those that heads or a cut LM head for them add."""

    def size(plan: HeadPlan | None) -> int:
        return weight_bytes(arch, choice.format, choice.head, layout, plan, choice.fine)

    if plan is None or plan.only:
        return size(plan), 0
    return (alone := size(None)), size(plan) - alone


def encoder_bytes(arch: Architecture, choice: WeightChoice) -> dict[str, int]:
    """Bytes of the weight files of a model's encoders, by name."""
    return {name: plan.end for name, plan in encoder_plans(arch, ModelSpec(choice.format, choice.head)).items()}


def best_vocab_rows(
    target: Architecture, draft: Architecture, coverage: Callable[[int], float] = TYPICAL.__getitem__
) -> int | None:
    """As many rows of a draft's or drafter's LM head as are fastest (``fastest_size``)."""
    return fastest_size(counted(target), counted(draft), coverage, draft.drafts)
