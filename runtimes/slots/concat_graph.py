"""Inputs and outputs of a decoder that optimum exported: what they are called, and whether a slot can drive them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

INTEGER, FLOAT = "tensor(int64)", "tensor(float)"
_PAST = re.compile(r"past(?:_key_values)?[._](\d+)[._](key|value)")
_PRESENT = re.compile(r"present(?:_key_values)?[._](\d+)[._](key|value)")
_FED = ("input_ids", "attention_mask", "position_ids")  # [1, n], [1, past + n], [1, n]


@dataclass(frozen=True)
class Port:
    """An input or output of a graph.

    Attributes:
        name: as in the graph.
        kind: its type as ONNX Runtime writes it, such as ``tensor(float)``.
        shape: its dimensions; a name or None = any size.
    """

    name: str
    kind: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class ConcatPorts:
    """The ports of a graph whose present keys and values are its past ones with the new rows behind them.

    Attributes:
        fed: which of input_ids, attention_mask and position_ids there are.
        cache: (past, present) of every key and value, by layer.
        kv_heads: of each.
        head_dim: of each.
        vocab: columns of the logits; None = the graph does not say.
    """

    fed: tuple[str, ...]
    cache: tuple[tuple[str, str], ...]
    kv_heads: int
    head_dim: int
    vocab: int | None

    @property
    def layers(self) -> int:
        """Layers with a cache."""
        return len(self.cache) // 2

    @classmethod
    def match(cls, inputs: Sequence[Port], outputs: Sequence[Port]) -> ConcatPorts:
        """Read a graph's ports.

        Raises:
            ValueError: not such a graph; the message says what was expected and what came.
        """
        past, present = _by_layer(inputs, _PAST), _by_layer(outputs, _PRESENT)
        fed = {port.name: port for port in inputs if port not in past.values()}
        if unknown := [name for name in fed if name not in _FED]:
            raise ValueError(f"has an input {unknown[0]!r}; expected {', '.join(_FED)} and past_key_values alone")
        if "input_ids" not in fed:
            raise ValueError("has no input input_ids")
        if odd := [port for port in fed.values() if port.kind != INTEGER or len(port.shape) != 2]:
            raise ValueError(f"input {odd[0].name} is {_described(odd[0])}; expected {INTEGER} of two dimensions")
        if not past:
            raise ValueError("has no past_key_values: it was exported without a cache")
        if past.keys() != present.keys() or len(past) % 2:
            raise ValueError(f"has {len(past)} past keys and values, but {len(present)} present ones that match")
        sizes = {_cache_size(port) for port in (*past.values(), *present.values())}
        if len(sizes) > 1:
            raise ValueError(f"has keys and values of several shapes: {sorted(sizes)}; expected one [heads, head size]")
        logits = next((port for port in outputs if port.name == "logits"), None)
        if logits is None or logits.kind != FLOAT or len(logits.shape) != 3:
            got = "nothing" if logits is None else _described(logits)
            raise ValueError(f"output logits: expected {FLOAT} [batch, rows, vocabulary], got {got}")
        ((kv_heads, head_dim),) = sizes
        columns = logits.shape[2]
        pairs = tuple((past[key].name, present[key].name) for key in sorted(past))
        named = tuple(name for name in _FED if name in fed)
        return cls(named, pairs, kv_heads, head_dim, columns if isinstance(columns, int) else None)

    @classmethod
    def of_session(cls, session: Any) -> ConcatPorts:
        """Read the ports of an ONNX Runtime session; errors as for ``match``."""

        def ports(arguments: Iterable[Any]) -> list[Port]:
            return [Port(one.name, one.type, tuple(one.shape)) for one in arguments]

        return cls.match(ports(session.get_inputs()), ports(session.get_outputs()))


def _by_layer(ports: Sequence[Port], pattern: re.Pattern[str]) -> dict[tuple[int, str], Port]:
    found = {}
    for port in ports:
        if hit := pattern.fullmatch(port.name):
            found[int(hit[1]), hit[2]] = port
    return found


def _cache_size(port: Port) -> tuple[int, int]:
    """(heads, head size) of a key or value [1, heads, tokens, head size]."""
    shape = port.shape
    if port.kind != FLOAT:
        raise ValueError(f"{port.name} is {port.kind}; expected {FLOAT}: export it in float32")
    fixed = len(shape) == 4 and isinstance(shape[1], int) and isinstance(shape[3], int)
    if not fixed or isinstance(shape[2], int):
        raise ValueError(f"{port.name} is {_described(port)}; expected [batch, heads, tokens, head size]")
    return int(shape[1] or 0), int(shape[3] or 0)


def _described(port: Port) -> str:
    return f"{port.kind} {[size if size is not None else '?' for size in port.shape]}"
