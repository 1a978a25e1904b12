"""Define all formats of weights, and of keys and values, in one table.

``python -m tools.generate_constants`` writes the parts for C++ into ``native/constants.h``; a test checks that it is
current.  CONTRIBUTING says how to add a format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

Format = Literal["fp32", "int4", "int8", "w8a8", "file"]
GgmlKind = Literal[
    "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"
]  # fmt: skip
GroupKind = Literal["u4x32", "u4x64", "u4x128", "u8x32", "u8x128"]
HalfKind = Literal["f16", "bf16"]
Kind = Literal["q4", "q8", "p8", "c8", "f32"] | GgmlKind | GroupKind | HalfKind
Family = Literal["blocks", "channels", "floats"]
BLOCK, TILE = 32, 16  # weights of a row per block, and of MatMulNBits; rows per tile
MOST_HEAD_DIM, MOST_TAPS = 512, 16  # of a head; tokens that a short convolution sees


@dataclass(frozen=True)
class FormatSpec:
    """A weight format."""

    name: Format  # in manifests and options
    kind: Kind  # of its matrices in programs and indices (native/layout.h)
    number: int  # of ``kind`` in C++; that of float32 stays the largest
    bits: int  # of a weight
    size: int  # weights of a row that share a scale; 0 = the whole row, or no scale
    devices: bool = False  # whether graphs for devices have it

    @property
    def family(self) -> Family:
        """Name the storage: blocks with a scale each, rows with a scale each, or float32."""
        return "blocks" if self.size or self.name == "file" else "channels" if self.bits == 8 else "floats"

    @property
    def acts(self) -> Kind:
        """Name the first kind that multiplies the same activations, scaled by blocks of 32, or by row."""
        return "q4" if self.size else self.kind

    @property
    def planes(self) -> int:
        """Count the planes of a matrix: with two, a level is 16 times the high plane's value plus the low plane's."""
        return 2 if self.kind == "p8" else 1

    @property
    def level_bytes(self) -> float:
        """Return bytes of a weight's level."""
        return self.bits / 8

    @property
    def stock_scale_bytes(self) -> float:
        """Return bytes of a weight's share of float32 scales, as MatMulNBits has them: a block of 32."""
        return 4 / BLOCK if self.size else 0.0

    @property
    def stock_packed_bytes(self) -> float:
        """Return bytes of a weight as ONNX Runtime packs it: level, scale, and the sum of its block."""
        return self.level_bytes + 2 * self.stock_scale_bytes

    @property
    def native_bits(self) -> float:
        """Return bits of a weight as native operators have it, with its share of a float16 scale."""
        if self.kind in GGML:
            return GGML[self.kind].bytes * 8 / GGML[self.kind].group
        return self.bits + (16 / self.size if self.size else 0)


SPECS: dict[Format, FormatSpec] = {
    spec.name: spec
    for spec in (
        FormatSpec("int4", "q4", 0, 4, 32, devices=True),
        FormatSpec("int8", "p8", 3, 8, 32, devices=True),
        FormatSpec("w8a8", "c8", 2, 8, 0),
        FormatSpec("fp32", "f32", 22, 32, 0, devices=True),
    )
}
FORMATS: tuple[Format, ...] = tuple(SPECS)  # that weights can be rounded to
BLOCK_FORMATS: tuple[Format, ...] = tuple(name for name, spec in SPECS.items() if spec.size)
FOUR_BITS: tuple[Format, ...] = tuple(name for name, spec in SPECS.items() if spec.bits == 4)
DEVICE_FORMATS: tuple[Format, ...] = tuple(name for name, spec in SPECS.items() if spec.devices)
# q8: int8 in one plane, as bundles up to schema 3 have it
KINDS: dict[Kind, FormatSpec] = {
    spec.kind: spec for spec in (*SPECS.values(), replace(SPECS["int8"], kind="q8", number=1))
}
# the weights of a quantized model as they are: each matrix has its own kind (``GGML``, ``HALVES``, q4, p8), or is int8
# where there is none.  Figures are those of Q4_K, of which most GGUF files consist
FILE: Format = "file"
SPECS[FILE] = FormatSpec(FILE, "q4_k", 9, 4, 0)
FORMER: Final = frozenset({"int4-64"})  # formats of older bundles that nothing reads any more
# of exports only: 4 bits in blocks as GGUF files have them, the important matrices in 6; stored as format ``file``
MIXED: Final = "int4-k"
ExportFormat = Format | Literal["int4-k"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = (*FORMATS, MIXED, FILE)  # that people may ask for


@dataclass(frozen=True)
class GgmlSpec:
    """A block type in native layout: the same numbers, with the words of 16 rows interleaved.

    A weight is scale * (code - zero), less or plus a minimum.  Q4_0 and Q8_0 are ``q4`` and ``p8``.  Types of scale
    "zero" are those of GPTQ, AWQ and compressed-tensors: a group has a zero point, which is stored less ``zero``, and
    the minimum is minus scale times that.  Their rows are groups of a float16 scale, a byte and the codes, in the order
    of Q4_0 or of Q8_0.
    """

    kind: GgmlKind | GroupKind  # ggml's name in small letters, or bits and weights of a group
    number: int  # of ``kind`` in C++
    group: int  # weights of a row that are kept together
    low: int  # bits of a code that are stored together
    high: int  # and of its upper bits, which are stored elsewhere
    share: int  # weights of a row with the same scale
    zero: int  # the code of 0; of types with a table, how much larger its numbers are
    # float16, one times a small integer, a power of 2, or float16 with a zero point
    scale: Literal["half", "times", "exponent", "zero"]
    minimum: bool = False  # whether one is added, or of "times" and "zero", one times a small integer is taken away
    table: tuple[int, ...] = ()  # what codes stand for, ``zero`` more

    @property
    def bytes(self) -> int:
        """Bytes of a group of one row: its codes, and its scales as whole bytes."""
        codes, shared = self.group * (self.low + self.high) // 8, self.group // self.share
        if self.scale in ("exponent", "zero"):
            return codes + (1 if self.scale == "exponent" else 3)
        halves = 4 if self.minimum else 2
        if self.scale == "half":
            return codes + halves
        return codes + halves + shared * (2 if self.minimum and self.share == BLOCK else 1)


# https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h: kvalues_iq4nl and kvalues_mxfp4
_IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
_MXFP4 = 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
GGML: dict[Kind, GgmlSpec] = {
    spec.kind: spec
    for spec in (
        GgmlSpec("q4_1", 4, 32, 4, 0, 32, 0, "half", minimum=True),
        GgmlSpec("q5_0", 5, 32, 4, 1, 32, 16, "half"),
        GgmlSpec("q5_1", 6, 32, 4, 1, 32, 0, "half", minimum=True),
        GgmlSpec("q2_k", 7, 256, 2, 0, 16, 0, "times", minimum=True),
        GgmlSpec("q3_k", 8, 256, 2, 1, 16, 4, "times"),
        GgmlSpec("q4_k", 9, 256, 4, 0, 32, 0, "times", minimum=True),
        GgmlSpec("q5_k", 10, 256, 4, 1, 32, 0, "times", minimum=True),
        GgmlSpec("q6_k", 11, 256, 4, 2, 16, 32, "times"),
        GgmlSpec("iq4_nl", 12, 32, 4, 0, 32, 128, "half", table=tuple(level + 128 for level in _IQ4)),
        GgmlSpec("iq4_xs", 13, 256, 4, 0, 32, 128, "times", table=tuple(level + 128 for level in _IQ4)),
        GgmlSpec("mxfp4", 14, 32, 4, 0, 32, 16, "exponent", table=tuple(level + 16 for level in _MXFP4)),
        GgmlSpec("u4x32", 15, 32, 4, 0, 32, 8, "zero", minimum=True),
        GgmlSpec("u4x64", 16, 64, 4, 0, 32, 8, "zero", minimum=True),
        GgmlSpec("u4x128", 17, 128, 4, 0, 32, 8, "zero", minimum=True),
        GgmlSpec("u8x32", 18, 32, 8, 0, 32, 128, "zero", minimum=True),
        GgmlSpec("u8x128", 19, 128, 8, 0, 32, 128, "zero", minimum=True),
    )
}  # fmt: skip
HALVES: dict[Kind, int] = {"f16": 20, "bf16": 21}  # numbers in C++; weights of 16 bits, multiplied as float32
# types of files by their names, and what matrices of them become
FILE_KINDS: dict[str, Kind] = {
    "Q4_0": "q4", "Q8_0": "p8", "F32": "f32", "F16": "f16", "BF16": "bf16", **{name.upper(): name for name in GGML},
}  # fmt: skip


@dataclass(frozen=True)
class StockBlocks:
    """How MatMulNBits holds a matrix of a file with the file's own values: ``scale * (level - zero)``."""

    bits: int  # of a level
    size: int = BLOCK  # weights of a row that share a scale
    zeros: bool = False  # whether zero points are stored; else they are the middle of the range


# kinds whose weights are a scale times an integer; others become int8 on stock operators
STOCK_BLOCKS: dict[Kind, StockBlocks] = {
    "q4": StockBlocks(4), "p8": StockBlocks(8), "q5_0": StockBlocks(8), "iq4_nl": StockBlocks(8),
    "iq4_xs": StockBlocks(8), "mxfp4": StockBlocks(8), "q3_k": StockBlocks(4, 16), "q6_k": StockBlocks(8, 16),
    "u4x32": StockBlocks(4, zeros=True), "u4x64": StockBlocks(4, zeros=True), "u4x128": StockBlocks(4, zeros=True),
    "u8x32": StockBlocks(8, zeros=True), "u8x128": StockBlocks(8, zeros=True),
}  # fmt: skip


def acts_of(kind: Kind) -> Kind:
    """Name the first kind that multiplies the same activations: by blocks of 32, by row, or as float32."""
    return "q4" if kind in GGML else "f32" if kind in HALVES else KINDS[kind].acts


def listed(names: Iterable[str], word: str = "or") -> str:
    """Join names: "int4, int8 or fp32"."""
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last


# -- keys and values -----------------------------------------------------------------------------------------------

KeyFormat = Literal["f32", "f16", "int8", "int4", "nomad1", "nomad2"]
ValueFormat = Literal["f32", "f16", "int8"]
Learnt = Literal["int4", "nomad1", "nomad2"]
Attention = Literal["f32", "f16", "int8", "int4", "nomad", "nomad2"]
KV_BLOCK = 128  # tokens per block
SINK_ROWS = 16  # the first tokens, whose keys may be kept exactly
STATE_ROWS = 144  # tokens whose part in a convolution is kept: a pass, and what its first row looks back at
HELD_BYTES = 64  # at the end of a delta rule's states: how many tokens they hold
LONGEST_PASS = 128  # rows: what the ring must hold beyond its window, so that a rollback stays a smaller past
CHECKPOINTS = 4  # of a slot's states, where memory allows
CENTROIDS = 16  # of a sub-vector of nomad's codes
WINDOW, SINKS = 64, 4  # newest and first tokens whose keys are exact, where others are coded


@dataclass(frozen=True)
class KeySpec:
    """A format of keys, or of values."""

    number: int  # in C++, and in the operator's controls
    channel: int  # bytes of one channel of 128 tokens of a head
    scales: int = 0  # bytes of their scales
    title: str = ""  # in results


KEYS: dict[KeyFormat, KeySpec] = {
    "f32": KeySpec(0, 4 * KV_BLOCK),
    "f16": KeySpec(1, 2 * KV_BLOCK, title="float16"),
    "int8": KeySpec(2, KV_BLOCK, 4 * KV_BLOCK),
    "int4": KeySpec(3, KV_BLOCK // 2),
    "nomad1": KeySpec(4, KV_BLOCK // 2, title="nomad (d_sub 1)"),
    "nomad2": KeySpec(5, KV_BLOCK // 4, title="nomad (d_sub 2)"),
}
LEARNT: tuple[Learnt, ...] = get_args(Learnt)  # from text, at export
NO_KEYS = 6  # the number of no format
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
DRAFT_ATTENTIONS: tuple[Attention, ...] = ("int4", "nomad", "nomad2")
