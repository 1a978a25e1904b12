"""Bytes of weights in memory: what a bundle's file holds, and which of its pages a run touches or copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgespec.runtimes.files.formats import BLOCK, BLOCK_FORMATS, FILE, SPECS, Format
from edgespec.runtimes.files.manifest import FileEntry, HeadGroup, ModelPart
from edgespec.runtimes.files.packing import Packed

# Linux maps this much around a page that is touched, about: 64 KiB to a MiB, by how large the pieces are in which the
# page cache has the file (docs/dev/planning.md)
WINDOW = 256 << 10
_ZIPF, _SHIFT = 1.15, 2.7  # how often the token of a rank is in a text; fitted to one (docs/dev/planning.md)


@dataclass(frozen=True)
class WeightParts:
    """Bytes of the parts of a weight file."""

    matrices: int  # of the layers
    lm_head: int  # that all rows go through: the model's, or the cut one of a draft
    table: int  # an embedding that is only looked up; 0 = the LM head's matrix, or none
    row: int  # of a token in the embedding
    heads: Mapping[str, int]  # matrices by group of heads
    cut: int  # a cut LM head next to the model's, for heads
    angles: int  # of all positions, or learned positions
    position: int  # of a position in them
    layer_table: int = 0  # embeddings of all layers, which are also read by rows
    layer_row: int = 0  # of a token in them


def matrix_bytes(form: Format, n: int, k: int, native: bool = True) -> int:
    """Bytes of a matrix [n, k] in a weight file."""
    spec = SPECS[form]
    if native:
        packed = Packed(spec.kind, n, k)
        return packed.nbytes + packed.low_nbytes
    padded = -(-k // BLOCK) * BLOCK if spec.size else k
    size = int(n * padded * (spec.level_bytes + spec.stock_scale_bytes))
    return size + (4 * n if spec.family == "channels" else 0)


def expert_bytes(part: ModelPart) -> int:
    """Bytes of an expert's three matrices in native operators' layout; 0 = the model is not a mixture."""
    facts, mixed = part.facts, part.facts.experts
    if mixed is None:
        return 0
    if part.bytes_per_weight is not None:
        return round(part.bytes_per_weight.layers * 3 * facts.hidden * mixed.inner)

    def size(form: Format) -> int:
        return 2 * matrix_bytes(form, mixed.inner, facts.hidden) + matrix_bytes(form, facts.hidden, mixed.inner)

    fine = part.int8_fraction or 0.0
    return round((1 - fine) * size(part.format) + fine * size("int8")) if fine else size(part.format)


def all_expert_bytes(part: ModelPart) -> int:
    """Bytes of all experts of all layers."""
    mixed = part.facts.experts
    return 0 if mixed is None else expert_bytes(part) * mixed.count * len(mixed.layers)


def streamed_bytes(part: ModelPart, files: Mapping[str, FileEntry]) -> int:
    """Bytes of the weights that may stay in the file until a pass needs them: experts, else the layers' matrices."""
    return all_expert_bytes(part) or weight_parts(part, files).matrices


def weight_parts(part: ModelPart, files: Mapping[str, FileEntry]) -> WeightParts:
    """Split the size of a weight file by the model's facts; layers are the rest."""
    facts, native, form, head = part.facts, part.layout == "native", part.format, part.head_format or part.format
    hidden, vocab, blocks = facts.hidden, facts.vocab, form in BLOCK_FORMATS and facts.hidden % BLOCK == 0
    size = files[part.weights].size if part.weights in files else 0
    position = 0
    if part.origin == "edgespec":  # of a table of angles the channels that turn; Gemma has one more for windowed layers
        others = facts.rope.get("other_dims", [])
        dims = [facts.rope.get("dims", facts.head_dim), *(others if isinstance(others, list) else [])]
        position = 4 * sum(int(float(str(each))) for each in dims) if facts.rope else 4 * hidden
    angles = (facts.context + part.extra_rows) * position
    cut = matrix_bytes(head, part.head_vocab.size, hidden, native) if part.head_vocab else 0
    own = (
        matrix_bytes(head, vocab, hidden, native)
        if part.bytes_per_weight is None
        else int(part.bytes_per_weight.head * vocab * hidden)
    )
    tied = facts.tied and (blocks or form not in BLOCK_FORMATS)
    if tied:
        row = own // vocab
    elif part.bytes_per_weight is not None:
        row = int(part.bytes_per_weight.embedding * hidden)
    elif form == "fp32":
        row = 4 * hidden
    else:
        row = matrix_bytes(part.embedding_format or form, 16, hidden, native) // 16 if blocks else hidden + 4
    # a draft with a cut LM head multiplies only by that one, and only reads rows of its embedding; a drafter has none:
    # the target looks it up
    table = 0 if part.decoder or (tied and not part.cut) else row * vocab
    lm_head, beside = (cut, 0) if part.cut else (own, cut)
    heads = {group.name: group_bytes(part, group, native) for group in part.heads}
    # a scale for each layer's part of a row, unless it is float32
    layer_row = facts.layers * (4 * facts.layer_embedding if form == "fp32" else facts.layer_embedding + 4)
    layer_row = layer_row if facts.layer_embedding else 0
    rest = size - angles - table - lm_head - beside - sum(heads.values()) - layer_row * vocab
    return WeightParts(max(0, rest), lm_head, table, row, heads, beside, angles, position, layer_row * vocab, layer_row)


def group_bytes(part: ModelPart, group: HeadGroup, native: bool) -> int:
    """Bytes of the matrices of a group of heads, without the LM head that they may share."""
    hidden, form, head = part.facts.hidden, part.format, part.head_format or part.format
    shapes = {
        "medusa": [(group.count * hidden, hidden)],
        "blockwise": [(group.inner, hidden), (group.count * hidden, group.inner)],
        "exit": [(hidden, hidden)],
        "markov": [(part.facts.vocab, group.inner)],
        "embedding": [(part.facts.vocab, hidden)],
    }[group.kind]
    rows = part.head_vocab.size if part.cut and part.head_vocab else part.facts.vocab
    width = group.inner if group.kind == "markov" else hidden
    own = group.count * matrix_bytes(head, rows, width, native) if group.own else 0
    return own + sum(matrix_bytes(form, n, k, native) for n, k in shapes)


def looked_up(table: int, row: int, tokens: int) -> int:
    """Resident bytes of a table of which only the rows of a text's tokens are read.

    Frequent tokens have low numbers in all tokenizers made by merging pairs, so rows in use are close together; ranks
    follow Zipf's law.
    """
    if table <= 0 or row <= 0 or tokens <= 0:
        return 0
    vocab, windows = table // row, -(-table // WINDOW)
    chance = 1 / (np.arange(vocab) + _SHIFT) ** _ZIPF  # [vocab]
    share = np.bincount(np.arange(vocab) * row // WINDOW, chance / chance.sum(), windows)  # [windows]
    return min(table, int((1 - (1 - share) ** tokens).sum() * WINDOW))


def needs(weights: WeightParts, groups: list[str]) -> int:
    """Bytes of the matrices that passes of a method multiply by: layers, LM head, these groups of heads."""
    cut = weights.cut if groups else 0
    return weights.matrices + weights.lm_head + cut + sum(weights.heads.get(name, 0) for name in groups)


class StockWeights(NamedTuple):
    """Weights as ONNX Runtime's operators keep them, in bytes."""

    packed: int  # private
    mapped: int  # of the file, for good
    loading: int  # of the file, while it is packed
    table: int  # levels that serve as LM head and as embedding, of which the rows in use stay mapped
    row: int  # of a token in them


def stock_weights(part: ModelPart, weights: WeightParts) -> StockWeights:
    """All matrices of a graph are packed when its session is made, whether a method needs them or not."""
    native, form, head = part.layout == "native", part.format, part.head_format or part.format
    hidden, inner, vocab = part.facts.hidden, part.facts.intermediate, part.facts.vocab
    sizes = ((form, weights.matrices + sum(weights.heads.values())), (head, weights.lm_head + weights.cut))
    packed = mapped = 0
    levels = [SPECS[kind].level_bytes for kind in (form, head)]  # of layers, of the LM head
    scales = [SPECS[kind].stock_scale_bytes for kind in (form, head)]
    if (own := part.bytes_per_weight) is not None:  # all of it is in blocks
        scales = [4 / BLOCK] * 2
        levels = [own.layers - scales[0], own.head - scales[1]]
    for (kind, size), level, scale in zip(sizes, levels, scales, strict=True):
        each = matrix_bytes(kind, 4096, 4096) / 4096**2 if native else level + scale
        packed += int(size / each * (level + 2 * scale))  # with the sum of each block
        mapped += int(size / each * scale)
    columns = part.head_vocab.size if part.cut and part.head_vocab else vocab
    headed = int(columns * hidden * levels[1])
    tied = not weights.table and not part.decoder  # one matrix for both
    whole = tied and head not in (*BLOCK_FORMATS, FILE)  # read in place: all of it stays
    loading = max(int(hidden * inner * levels[0]), 0 if whole else headed)
    row = headed // vocab if tied and not whole else 0
    return StockWeights(packed, mapped + (headed if whole else 0), loading, row * vocab, row)
