"""Ports of graphs that optimum exported: what a slot can drive, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.runtimes.slots.concat import FLOAT, INTEGER, ConcatPorts, Port

PAIRS = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]


def ports(**changes: Port | None) -> tuple[list[Port], list[Port]]:
    """Inputs and outputs of two layers, with some of them changed (name -> port) or left out."""
    given = {
        "input_ids": Port("input_ids", INTEGER, ("b", "s")),
        "attention_mask": Port("attention_mask", INTEGER, ("b", "t")),
    }
    given |= {f"past_key_values.{pair}": Port(f"past_key_values.{pair}", FLOAT, ("b", 2, "p", 16)) for pair in PAIRS}
    made = {"logits": Port("logits", FLOAT, ("b", "s", 160))}
    made |= {f"present.{pair}": Port(f"present.{pair}", FLOAT, ("b", 2, "t", 16)) for pair in PAIRS}
    for name, port in changes.items():
        where = made if name in made else given
        if port is None:
            del where[name]
        else:
            where[name] = port
    return list(given.values()), list(made.values())


def test_ports_are_found_whatever_their_order() -> None:
    given, made = ports()
    found = ConcatPorts.match(given[::-1], made[::-1])
    assert found == ConcatPorts.match(given, made)
    assert (found.layers, found.kv_heads, found.head_dim, found.vocab) == (2, 2, 16, 160)
    assert found.fed == ("input_ids", "attention_mask")
    assert found.cache[1] == ("past_key_values.0.value", "present.0.value")
    renamed = [replace(port, name=port.name.replace("present.", "present_key_values.")) for port in made]
    assert ConcatPorts.match(given, renamed).cache[0] == ("past_key_values.0.key", "present_key_values.0.key")


KEY = "past_key_values.1.key"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"use_cache_branch": Port("use_cache_branch", "tensor(bool)", (1,))}, "has an input 'use_cache_branch'"),
        ({"input_ids": None}, "no input input_ids"),
        ({"input_ids": Port("input_ids", "tensor(int32)", ("b", "s"))}, "expected tensor\\(int64\\)"),
        ({f"past_key_values.{pair}": None for pair in PAIRS}, "without a cache"),
        ({"present.1.key": None}, "4 past keys and values, but 3 present"),
        ({KEY: Port(KEY, "tensor(float16)", ("b", 2, "p", 16))}, "export it in float32"),
        ({KEY: Port(KEY, FLOAT, ("b", "p", 2, 16))}, "expected \\[batch, heads, tokens, head size\\]"),
        ({KEY: Port(KEY, FLOAT, ("b", "p", 32))}, "expected \\[batch, heads, tokens, head size\\]"),
        ({KEY: Port(KEY, FLOAT, ("b", 4, "p", 16))}, "several shapes"),
        ({"logits": Port("logits", "tensor(float16)", ("b", "s", 160))}, "output logits"),
        ({"logits": None}, "got nothing"),
    ],
)  # fmt: skip
def test_other_graphs_are_refused(changes: dict[str, Port | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConcatPorts.match(*ports(**changes))
