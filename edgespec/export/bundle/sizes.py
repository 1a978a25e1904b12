"""Sizes of a bundle's files before any is written.

They are exact for weights and for what is copied, else estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.model import ModelPlan
from edgespec.export.bundle.model_part import counted
from edgespec.export.drafters.heads import HeadPlan
from edgespec.export.emit.plans import index_text, storage_plans
from edgespec.export.quantization.coded_keys import TABLES
from edgespec.export.source.source import TOKENIZER_FILES
from edgespec.export.tokenizers.chat_data import CHAT_FILE
from edgespec.planning.vocab_pruning import TYPICAL, fastest_size
from edgespec.runtimes.files.formats import SPECS, Family, Format
from edgespec.runtimes.files.kv import table_shape
from edgespec.runtimes.files.manifest import FileEntry, Layout, ModelPart
from edgespec.runtimes.text.chat import TEMPLATE_FOLDER, find_templates
from edgespec.runtimes.text.special import SPECIAL_TOKENS_FILE, read_object

TOKENIZER = "tokenizer.json"
# bytes of tokenizer.json a token of the vocabulary: 67 and 71 in byte-level ones of 8,000 and 50,257 tokens with their
# merges; those that write a merge as one string need less
TOKENIZER_BYTES = 70
CHAT_BYTES = 700  # of chat.json: ChatML's with a default system message
# bytes of a graph a layer, without the vectors inside it, by graph and family of formats: about the mean of 8
# architectures (docs/bundle.md); all graphs together are less than a percent of the weights of any real model
GRAPH_BYTES: dict[str, Mapping[Family, int]] = {
    "native": {"blocks": 2400, "channels": 2450, "floats": 2400},
    "gated": {"blocks": 6200, "channels": 8600, "floats": 4400},
    "strict": {"blocks": 5000, "channels": 7500, "floats": 3700},
    "plain": {"blocks": 4700, "channels": 7000, "floats": 3300},
}
GRAPH_BYTES["standard"] = GRAPH_BYTES["plain"]
HEAD_BYTES = {"native": 900, "gated": 2000, "strict": 2000}  # of a group's nodes in a graph
MODEL, ADDED = "model", "heads"  # keys of ``model_bytes``
HEADS = ("medusa.", "blockwise.")  # whose biases a graph without heads has not
DEVICE_BYTES = 6000  # of a device's graph, a layer


def model_files(plan: ModelPlan, part: ModelPart) -> dict[str, int]:
    """Return the files of a planned model and their sizes; ``part``: its entry, with graphs for devices."""
    plans, files = plan.plans, {part.weights: plan.weight_bytes}
    for name, graph in part.graphs.items():
        if graph.device != "cpu":
            files[graph.file] = DEVICE_BYTES * part.facts.layers
            continue
        inline = plans[graph.operators].inline
        size = GRAPH_BYTES[name][SPECS[part.format].family] * part.facts.layers
        for vector, length in inline.items():
            size += length if graph.hidden or not vector.startswith(HEADS) else 0
        files[graph.file] = size + (HEAD_BYTES[name] * len(part.heads) if graph.hidden and part.heads else 0)
    for side, encoder in zip(part.sides, plan.encoders.values(), strict=True):
        files[side.weights] = encoder.end
        size = GRAPH_BYTES["native"][SPECS[part.format].family] * side.facts.layers
        files[side.graphs["native"].file] = size + sum(encoder.inline.values())
    if part.image is not None and (places := part.image.position_embedding) is not None:
        files[places.file] = 4 * places.rows * places.width
    if part.index is not None:
        files[part.index] = len(index_text(plans))
    if part.head_vocab is not None:
        files[part.head_vocab.file] = 4 * part.head_vocab.size
    if part.decoder is not None and (selector := part.decoder.selector) is not None:
        files[selector.file] = 2 * (part.facts.hidden + 2 * part.facts.vocab) * selector.rank
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
    """Make the manifest's entries of files that are only planned, without checksums."""
    return {name: FileEntry(size=size, sha256="") for name, size in sorted(files.items())}


def weight_bytes(
    arch: Architecture,
    form: Format,
    head: Format | None = None,
    layout: Layout = "native",
    plan: HeadPlan | None = None,
    fine: frozenset[str] = frozenset(),
) -> int:
    """Bytes of the weight file, exactly; with ``plan`` that of a checkpoint extended by its heads."""
    return storage_plans(arch, form, head, plan, fine, layout)[layout].end


def model_bytes(plan: ModelPlan) -> dict[str, int]:
    """Return bytes of a model's weight files by what they are: MODEL, what heads add to it, and encoders by name."""
    spec, heads = plan.spec, plan.spec.plan
    found = {MODEL: plan.weight_bytes}
    if heads is not None and not heads.only:
        alone = weight_bytes(plan.arch, spec.format, spec.head, spec.layout, None, spec.fine)
        found = {MODEL: alone, ADDED: plan.weight_bytes - alone}
    return found | {name: encoder.end for name, encoder in plan.encoders.items()}


def best_vocab_rows(
    target: Architecture, draft: Architecture, coverage: Callable[[int], float] = TYPICAL.__getitem__
) -> int | None:
    """As many rows of a draft's or drafter's LM head as are fastest (``fastest_size``)."""
    return fastest_size(
        counted(target), counted(draft), coverage, None if draft.drafter is None else draft.drafter.method
    )
