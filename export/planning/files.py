"""The files of a planned bundle and their sizes: exact for weights, as they are for what is copied, else estimates."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import prod
from pathlib import Path

from edgespec.export.emit.plan import StoragePlan, index_text
from edgespec.export.heads.vocab import HEAD_TOKENS
from edgespec.export.quantization.coded_keys import TABLES
from edgespec.export.source.source import TOKENIZER_FILES
from edgespec.export.tokenizers.chat_data import CHAT_FILE
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import SPECS, Family
from edgespec.runtimes.files.kv import table_shape
from edgespec.runtimes.files.manifest import FileEntry, Graph, Layout, ModelPart, SkipSetPart
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


def model_files(part: ModelPart, plans: Mapping[Layout, StoragePlan]) -> dict[str, int]:
    """Files of a model, and their sizes; ``plans``: of its weights."""
    files = {part.weights: plans[part.layout].end}
    for name, graph in part.graphs.items():
        if graph.device != "cpu":
            files[graph.file] = DEVICE_BYTES * part.facts.layers
            continue
        inline = plans[graph.operators].inline
        size = GRAPH_BYTES[name][SPECS[part.format].family] * part.facts.layers
        for vector, length in inline.items():
            size += length if graph.hidden or not vector.startswith(HEADS) else 0
        files[graph.file] = size + (HEAD_BYTES[name] * len(part.heads) if graph.hidden else 0)
    if part.index is not None:
        files[part.index] = len(index_text(plans))
    if part.head_vocab is not None:
        files[part.head_vocab.file] = 4 * part.head_vocab.size
    if part.attention is not None and part.attention.tables is not None:
        files[TABLES] = sum(4 * prod(table_shape(name, part.facts)) + 100 for name in part.attention.learnt)
    return files


def copied_files(folder: Path, vocab: int) -> tuple[dict[str, int], bool]:
    """What an export copies, and whether the size of tokenizer.json is an estimate."""
    names = [*TOKENIZER_FILES, SPECIAL_TOKENS_FILE]
    names += [f"{TEMPLATE_FOLDER}/{file.name}" for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))]
    files = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
    if find_templates(folder, read_object(folder / "tokenizer_config.json")):
        files[CHAT_FILE] = CHAT_BYTES
    assumed = TOKENIZER not in files
    return ({TOKENIZER: TOKENIZER_BYTES * vocab} if assumed else {}) | files, assumed


def entries(files: Mapping[str, int]) -> dict[str, FileEntry]:
    """For a manifest; nothing is written yet, so there are no sums."""
    return {name: FileEntry(size=size, sha256="") for name, size in sorted(files.items())}


def head_tokens(prefix: str) -> str:
    """Where the tokens of a cut LM head are."""
    return prefix + HEAD_TOKENS


def device_graphs(part: ModelPart, device: DeviceName, skip: SkipSetPart | None, prefix: str) -> ModelPart:
    """The entry of a model with the graphs that ``add_device_graphs`` writes."""
    found = dict(part.graphs)

    def add(which: str, hidden: bool = False, skip: SkipSetPart | None = None) -> None:
        name = f"{device}/{which}" if which else device
        file = f"{prefix}model.{name.replace('/', '.')}.onnx"
        found[name] = Graph(file=file, device=device, hidden=hidden, skip=skip)

    add("", hidden=True)
    add("move")
    add("rows")
    if skip is not None:
        add("skip", skip=skip)
    for group in part.heads:
        add(f"heads/{group.name}")
    edges = [0, *sorted(group.layer for group in part.heads if group.kind == "exit")]
    for first, last in combinations(edges, 2):
        add(f"layers/{first}-{last}")
    for layer in edges[1:]:
        add(f"from/{layer}", hidden=True)
    return part.model_copy(update={"graphs": found})
