"""How native operators keep keys and values (native/layout.h): sizes, and the numbers for the operator."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.runtimes.files.facts import ModelFacts
from edgespec.runtimes.files.formats import (
    CENTROIDS,
    HELD_BYTES,
    KEYS,
    KV_BLOCK,
    LONGEST_PASS,
    NO_KEYS,
    SINK_ROWS,
    SINKS,
    STATE_ROWS,
    TILE,
    WINDOW,
    Attention,
    KeyFormat,
    ValueFormat,
)


@dataclass(frozen=True)
class KvFormat:
    """Formats of one model's cache."""

    keys: KeyFormat = "f16"  # of all keys
    values: ValueFormat = "f16"  # of all values
    codes: KeyFormat | None = None  # a second, coarser copy of the keys, which draft passes may read; None = no copy
    window: int = 0  # newest tokens whose keys are read exactly (float16) although keys are coded; 0 = none
    sinks: int = 0  # first tokens whose keys are read exactly as well, at most 16
    draft_window: int = 0  # the same as ``window`` where ``codes`` are read: drafts must not change how all others read

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
        return self.header_bytes(facts) + -(-tokens // KV_BLOCK) * self.block_bytes(facts)

    def controls(self) -> list[int]:
        """List controls 1 to 7 of the operator: keys, values, codes, whether to read those, window, sinks, ring."""
        numbers = [KEYS[name].number if name else NO_KEYS for name in (self.keys, self.values, self.codes)]
        return [*numbers, 0, self.window, self.sinks if self.window else 0, self.ring]

    @property
    def approximations(self) -> list[str]:
        """Differences from float32 attention, for results."""
        coded = self.keys not in ("f32", "f16")
        exact = f", float16 for the newest {self.window}" if self.window and coded else ""
        found = [] if self.keys == "f32" else [f"{KEYS[self.keys].title or self.keys} keys{exact}"]
        return found if self.values == "f32" else [*found, f"{KEYS[self.values].title or self.values} values"]


ATTENTION: dict[Attention, KvFormat] = {
    "f32": KvFormat("f32", "f32"),
    "f16": KvFormat("f16", "f16"),
    "int8": KvFormat("int8", "int8"),
    "int4": KvFormat("int4", "int8", window=WINDOW, sinks=SINKS),
    "nomad": KvFormat("nomad1", "int8", window=WINDOW, sinks=SINKS),
    "nomad2": KvFormat("nomad2", "int8", window=2 * WINDOW, sinks=SINKS),
}
"""Formats of ``--attention``.  Only the first three need no learned tables."""


def memory_format(kv: KvFormat) -> KvFormat:
    """Return the formats of a cross-attention cache next to a KV cache of these formats: coded keys become int8."""
    return KvFormat(kv.keys if kv.keys in ("f32", "f16") else "int8", kv.values)


def table_shape(name: KeyFormat, facts: ModelFacts) -> tuple[int, ...]:
    """Return the shape of a format's learnt tables, [layers, kv_heads, ...].

    int4: scale and zero point of each channel, [2, dim]; nomad: centroids, [dim / d_sub, d_sub, 16].  Channels beyond
    head_dim are zeros.
    """
    dim, lead = padded_dim(facts), (facts.kv_layers, facts.kv_heads)
    sub = 2 if name == "nomad2" else 1
    return (*lead, 2, dim) if name == "int4" else (*lead, dim // sub, sub, CENTROIDS)


def state_bytes(facts: ModelFacts) -> int:
    """Bytes of the states of all layers without attention: the same for every length of text.

    A layer: a convolution's inputs of the last tokens, [144, width] float32; of a delta rule also its states and, in
    64 bytes, the number of tokens that they hold.
    """
    return _state_bytes(facts, STATE_ROWS)


def checkpoint_bytes(facts: ModelFacts) -> int:
    """Bytes of a checkpoint of all states: their matrices, and the inputs of the next token's convolutions."""
    return _state_bytes(facts, facts.taps - 1)


def _state_bytes(facts: ModelFacts, rows: int) -> int:
    heads = facts.delta
    matrices = 4 * heads.values * heads.key_dim * heads.value_dim + HELD_BYTES if heads else 0
    return len(facts.convolutions) * (4 * rows * state_width(facts) + matrices)


def state_width(facts: ModelFacts) -> int:
    """Numbers that a layer without attention keeps of a token; of a delta rule also decays and changes."""
    if facts.delta is None:
        return facts.hidden
    return facts.delta.mixed + 2 * -(-facts.delta.values // TILE) * TILE


def padded(dim: int) -> int:
    """Round the head size ``dim`` up to whole vectors."""
    return -(-dim // TILE) * TILE


def padded_dim(facts: ModelFacts) -> int:
    """Round the size of the largest head of a model with ``facts`` up to whole vectors."""
    return padded(max(facts.dims, default=facts.head_dim))


def head_bytes(name: KeyFormat, dim: int) -> int:
    """Return bytes of 128 keys or values of one head."""
    return KEYS[name].channel * dim + KEYS[name].scales
