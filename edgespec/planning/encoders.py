"""Memory of what an encoder-decoder reads: its encoder, and what the decoder keeps of a source."""

from __future__ import annotations

from edgespec.planning.weights import looked_up, matrix_bytes
from edgespec.runtimes.files.formats import KV_BLOCK
from edgespec.runtimes.files.kv import KvFormat, memory_format
from edgespec.runtimes.files.manifest import Manifest, ModelPart

KEPT = 1  # memories of earlier sources beside those in use


def source_rows(part: ModelPart, context: int) -> int:
    """Rows of a source that is planned for: a recording is as long as the model hears, a text as the context."""
    assert part.source is not None
    return part.source.most if part.source.kind == "features" else min(part.source.most, context)


def memory_bytes(part: ModelPart, kv: KvFormat, rows: int, count: int) -> int:
    """Bytes of keys and values of so many sources."""
    return (count + KEPT) * memory_format(kv).nbytes(part.facts, -(-rows // KV_BLOCK) * KV_BLOCK)


def encoder_weights(manifest: Manifest, encoder: ModelPart, rows: int) -> tuple[int, int]:
    """Resident bytes of an encoder's matrices, and of the rows of its embedding that a source looks up."""
    entry = manifest.files.get(encoder.weights)
    size, hidden = entry.size if entry else 0, encoder.facts.hidden
    row = 4 * hidden if encoder.format == "fp32" else matrix_bytes(encoder.format, 16, hidden, True) // 16
    table = row * encoder.facts.vocab
    return max(size - table, 0), looked_up(table, row, rows)


def working_bytes(encoder: ModelPart, kv: KvFormat, rows: int) -> int:
    """Bytes of keys and values of one layer of a pass over a source, and of the rows that it gives, twice."""
    one = encoder.facts.model_copy(update={"layers": 1, "head_dims": []})
    return kv.nbytes(one, -(-rows // KV_BLOCK) * KV_BLOCK) + 2 * 4 * rows * encoder.facts.hidden
