"""Bounds of numbers in a manifest: every one becomes a size, a count, an offset or a time."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

MOST_LAYERS, MOST_WIDTH, MOST_VOCAB, MOST_CONTEXT = 1 << 10, 1 << 20, 1 << 24, 1 << 24
MOST_GUESSES = 64  # of a round: exported graphs have this much room beyond the context

Layer = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Layers = Annotated[list[Layer], Field(max_length=MOST_LAYERS)]
Width = Annotated[int, Field(gt=0, le=MOST_WIDTH)]
Vocab = Annotated[int, Field(gt=0, le=MOST_VOCAB)]
Token = Annotated[int, Field(ge=0, lt=MOST_VOCAB)]
Tokens = Annotated[list[Token], Field(max_length=MOST_CONTEXT)]
Context = Annotated[int, Field(gt=0, le=MOST_CONTEXT)]
Guesses = Annotated[int, Field(gt=0, le=MOST_GUESSES)]
Count = Annotated[int, Field(ge=0, le=1 << 50)]  # of bytes, of parameters, of positions
Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[list[Share], Field(max_length=1 << 10)]
Ratio = Annotated[float, Field(ge=0, le=1e6)]


def _times(cost: dict[str, Any]) -> dict[str, Any]:
    for name, value in cost.items():
        curve = name == "verify_ms"
        if not isinstance(value, dict if curve else (int, float)):
            raise ValueError(f"{name}: expected {'an object of times by rows' if curve else 'a number'}")
        for key, ms in value.items() if isinstance(value, dict) else [("1", value)]:
            if not (key.isascii() and key.isdigit() and 0 < int(key[:5]) <= 1 << 10):
                raise ValueError(f"{name}: {key[:20]!r} is no number of rows")
            if type(ms) not in (int, float) or not (ms > 0 if curve else ms >= 0) or ms > 1e9:
                raise ValueError(f"{name}: {ms!r} is no number of milliseconds")
    return cost


def _figures(parity: dict[str, Any]) -> dict[str, Any]:
    for name in ("top1_agreement", "positions", "perplexity", "perplexity_source") if parity else ():
        if type(parity.get(name)) not in (int, float):
            raise ValueError(f"{name}: expected a number, got {parity.get(name)!r}")
    try:
        held = [own for text in parity.get("held_out", {}).values() for own in text.values()]
        known = all(type(own[name]) in (int, float) for own in held for name in ("kl", "top1_agreement"))
    except (AttributeError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError("held_out: expected kl and top1_agreement, numbers, by text and model")
    return parity


def _sizes(memory: dict[str, Any]) -> dict[str, Any]:
    by_part = memory.get("weight_bytes", {})
    if not isinstance(by_part, dict) or not all(type(size) is int and size >= 0 for size in by_part.values()):
        raise ValueError("weight_bytes: expected an object of bytes by part")
    return memory


def _texts(provenance: dict[str, Any]) -> dict[str, Any]:
    for name in ("notes", "traits", "assumed", "approximations"):
        lines = provenance.get(name, [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"{name}: expected a list of texts")
    golden = provenance.get("golden", {})
    if not isinstance(golden, dict) or not all(isinstance(value, str) for value in golden.values()):
        raise ValueError("golden: expected an object of texts")
    for name in ("model", "draft", "drafter"):
        if not isinstance(provenance.get(name, ""), str):
            raise ValueError(f"{name}: expected a text")
    return provenance


def _rotary(rope: dict[str, Any]) -> dict[str, Any]:
    for name in ("dims", "other_dims"):
        found = rope.get(name, [])
        for size in found if isinstance(found, list) else [found]:
            if type(size) not in (int, float) or size != int(size) or not 0 <= size <= MOST_WIDTH:
                raise ValueError(f"{name}: {str(size)[:20]!r} is no number of channels")
    return rope


Rotary = Annotated[dict[str, float | int | str | list[float]], AfterValidator(_rotary)]
Times = Annotated[dict[str, Any], AfterValidator(_times)]
Parity = Annotated[dict[str, Any], AfterValidator(_figures)]
Memory = Annotated[dict[str, Any], AfterValidator(_sizes)]
Provenance = Annotated[dict[str, Any], AfterValidator(_texts)]
