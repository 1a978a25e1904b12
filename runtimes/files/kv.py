"""How native operators keep keys and values (native/layout.h): sizes, and the numbers the operator is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.runtimes.files.manifest import Attention, Learnt, ModelFacts

KeyFormat = Literal["f32", "f16", "int8", "int4", "nomad1", "nomad2"]
ValueFormat = Literal["f32", "f16", "int8"]
CODES: dict[str, int] = {"f32": 0, "f16": 1, "int8": 2, "int4": 3, "nomad1": 4, "nomad2": 5, "none": 6}
NAMES = {"f16": "float16", "nomad1": "nomad (d_sub 1)", "nomad2": "nomad (d_sub 2)"}
BLOCK, TILE = 128, 16
SINK_ROWS = 16
STATE_ROWS = 144  # tokens whose part in a convolution is kept
CHECKPOINTS = 4  # of a slot's states, where memory allows
LONGEST_PASS = 128  # rows: what the ring must hold beyond its window, so that a rollback stays a smaller past


@dataclass(frozen=True)
class KvFormat:
    """Formats of one model's cache.

    Attributes:
        keys: of all keys.
        values: of all values.
        codes: a second, coarser copy of the keys, which draft passes may read; None = no copy.
        window: newest tokens whose keys are read exactly (float16) although keys are coded; 0 = none.
        sinks: first tokens whose keys are read exactly as well, at most 16.
        draft_window: the same as ``window`` where ``codes`` are read: drafts must not change how all others read.
    """

    keys: KeyFormat = "f16"
    values: ValueFormat = "f16"
    codes: KeyFormat | None = None
    window: int = 0
    sinks: int = 0
    draft_window: int = 0

    @property
    def ring(self) -> int:
        """Rows of the ring of exact keys."""
        window = max(self.window, self.draft_window)
        return -(-(window + LONGEST_PASS) // TILE) * TILE if window else 0

    def header_bytes(self, facts: ModelFacts) -> int:
        """Bytes of states and exact keys, all layers."""
        rows = self.ring + SINK_ROWS if self.ring else 0
        return state_bytes(facts) + facts.kv_heads * rows * sum(map(padded, facts.dims)) * 2

    def block_bytes(self, facts: ModelFacts) -> int:
        """Bytes of 128 tokens, all layers."""
        return facts.kv_heads * sum(self.layer_head_bytes(dim) for dim in facts.dims)

    def layer_head_bytes(self, dim: int) -> int:
        """Bytes of 128 tokens of one head of ``dim``."""
        return sum(head_bytes(name, padded(dim)) for name in (self.keys, self.values, self.codes) if name)

    def nbytes(self, facts: ModelFacts, tokens: int) -> int:
        """Bytes of a cache of at least this many tokens."""
        return self.header_bytes(facts) + -(-tokens // BLOCK) * self.block_bytes(facts)

    def controls(self) -> list[int]:
        """Controls 1 to 7 of the operator: keys, values, codes, whether to read those, window, sinks, ring."""
        names = CODES[self.keys], CODES[self.values], CODES[self.codes or "none"]
        return [*names, 0, self.window, self.sinks if self.window else 0, self.ring]

    @property
    def approximations(self) -> list[str]:
        """What differs from float32 attention, for results."""
        coded = self.keys not in ("f32", "f16")
        exact = f", float16 for the newest {self.window}" if self.window and coded else ""
        found = [] if self.keys == "f32" else [f"{NAMES.get(self.keys, self.keys)} keys{exact}"]
        return found if self.values == "f32" else [*found, f"{NAMES.get(self.values, self.values)} values"]


WINDOW, SINKS = 64, 4
ATTENTION: dict[Attention, KvFormat] = {
    "f32": KvFormat("f32", "f32"),
    "f16": KvFormat("f16", "f16"),
    "int8": KvFormat("int8", "int8"),
    "int4": KvFormat("int4", "int8", window=WINDOW, sinks=SINKS),
    "nomad": KvFormat("nomad1", "int8", window=WINDOW, sinks=SINKS),
    "nomad2": KvFormat("nomad2", "int8", window=2 * WINDOW, sinks=SINKS),
}
"""What ``--attention`` means.  Only the first three need nothing learnt at export."""
LEARNT: tuple[Learnt, ...] = ("int4", "nomad1", "nomad2")
CENTROIDS = 16


def table_shape(name: KeyFormat, facts: ModelFacts) -> tuple[int, ...]:
    """Of what a format's codes were learnt with, [layers, kv_heads, ...]: int4 scale and zero point of each channel,
    [2, dim]; nomad centroids, [dim / d_sub, d_sub, 16].  Channels beyond head_dim are zeros."""
    dim, lead = padded_dim(facts), (facts.kv_layers, facts.kv_heads)
    sub = 2 if name == "nomad2" else 1
    return (*lead, 2, dim) if name == "int4" else (*lead, dim // sub, sub, CENTROIDS)


def state_bytes(facts: ModelFacts) -> int:
    """Bytes of what layers without attention keep, all of them: the same for every length of text.

    A layer: what a convolution reads of the last tokens, [144, width] float32; of a delta rule also its states and, in
    64 bytes of their own, how many tokens they hold.
    """
    matrices = 4 * matrix_numbers(facts) + 64 if facts.delta else 0
    return len(facts.convolutions) * (4 * STATE_ROWS * state_width(facts) + matrices)


def checkpoint_bytes(facts: ModelFacts) -> int:
    """Bytes of a checkpoint of all states: their matrices, and what the next token's convolutions see."""
    matrices = 4 * matrix_numbers(facts) + 64 if facts.delta else 0
    return len(facts.convolutions) * (4 * (facts.taps - 1) * state_width(facts) + matrices)


def state_width(facts: ModelFacts) -> int:
    """Numbers that a layer without attention keeps of a token; of a delta rule also decays and changes."""
    if facts.delta is None:
        return facts.hidden
    return facts.delta.mixed + 2 * -(-facts.delta.values // TILE) * TILE


def matrix_numbers(facts: ModelFacts) -> int:
    """Numbers of the states of a layer with a delta rule."""
    heads = facts.delta
    return heads.values * heads.key_dim * heads.value_dim if heads else 0


def padded(dim: int) -> int:
    """A head's size rounded up to vectors."""
    return -(-dim // TILE) * TILE


def padded_dim(facts: ModelFacts) -> int:
    """The same of the largest head."""
    return padded(max(facts.dims, default=facts.head_dim))


def head_bytes(name: str, dim: int) -> int:
    """Bytes of 128 keys or values of one head."""
    return {
        "f32": BLOCK * dim * 4,
        "f16": BLOCK * dim * 2,
        "int8": BLOCK * dim + BLOCK * 4,
        "int4": BLOCK * dim // 2,
        "nomad1": dim * 64,
        "nomad2": dim * 32,
    }[name]
