"""How tensors lie in a weight file: what an export writes by, and what a plan counts by."""

from __future__ import annotations

from edgespec.runtimes.files.manifest import Format
from edgespec.runtimes.files.packing import Kind

INLINE_BYTES = 1024  # smaller tensors sit inside the .onnx file
SMALL_ALIGN, LARGE_ALIGN = 1 << 12, 1 << 16  # page sizes of Linux and, for large tensors, of Windows mappings
HEADROOM = 66  # rows beyond the context: the largest tree (64 nodes) and two for padding
TABLES = "kv/tables.safetensors"  # of a bundle: what coded keys were learnt with
PACKED_KINDS: dict[Format, Kind] = {"int4": "q4", "int8": "q8", "w8a8": "c8", "fp32": "f32"}


def aligned(end: int, length: int) -> int:
    """Where a tensor of ``length`` bytes begins, behind one that ends at ``end``."""
    align = LARGE_ALIGN if length >= 1 << 20 else SMALL_ALIGN
    return -(-end // align) * align
