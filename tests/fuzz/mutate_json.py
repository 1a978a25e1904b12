"""Mutations of JSON files: values, types, keys, depth, size, and the bytes themselves."""

from __future__ import annotations

import json
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 64, 255, 4096, 65537, 2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), 10**40,
    0.5, -0.5, 1e-300, 1e308, float("nan"), float("inf"), "", "a", "\x00", "../x", "/etc/passwd", "x" * 5000, "\ud800",
    True, False, None, [], {}, [[]], [None], {"": 0}, [0] * 3000, ["a", 1, None],
)  # fmt: skip
Path = tuple[Any, ...]


def mutated_json(data: bytes, rng: Random) -> tuple[bytes, str]:
    """Other bytes, and what was done."""
    if rng.random() < 0.1:
        return _text(data, rng)
    try:
        value = json.loads(data)
    except ValueError:
        return _text(data, rng)
    said = [_change(value, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return json.dumps(value).encode("utf-8"), "; ".join(said)


def places(value: Any) -> list[Path]:
    """Give the path of everything inside."""
    found: list[Path] = []
    waiting: list[tuple[Path, Any]] = [((), value)]
    while waiting and len(found) < 20000:
        path, here = waiting.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, item in items:
            found.append((*path, key))
            waiting.append(((*path, key), item))
    return found


def _change(value: Any, rng: Random) -> str:
    # tokens and tensors have many names: every key on the way is as likely as its siblings
    path: Path = ()
    holder: Any = None
    here = value
    while isinstance(here, (dict, list)) and here:
        key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
        path, holder, here = (*path, key), here, here[key]
        if rng.random() < 0.15:
            break
    if not path:
        return "nothing to change"
    key, old = path[-1], holder[path[-1]]
    how = rng.choice(("odd", "odd", "odd", "near", "delete", "add", "copy", "deep"))
    if how == "near" and type(old) in (int, float):
        holder[key] = rng.choice(
            (old + 1, old - 1, -old, old * 2, old // 2, old * 1000, old << 33 if type(old) is int else old / 3)
        )
    elif how == "delete":
        del holder[key]
    elif how == "add":
        holder[rng.choice(("", "a", "layers"))] = old if isinstance(holder, dict) else 0
    elif how == "copy":
        other = rng.choice(places(value))
        found = value
        for step in other:
            found = found[step]
        text = json.dumps(found)
        holder[key] = json.loads(text) if len(text) < 1 << 22 else None  # copies of copies have no end
    elif how == "deep":
        made: Any = old
        for _ in range(rng.choice((3, 40, 100, 900))):
            made = [made] if rng.random() < 0.5 else {"a": made}
        holder[key] = made
    else:
        holder[key] = rng.choice(ODD)
    return f"{how} {'.'.join(map(str, path))[:80]}"


def _text(data: bytes, rng: Random) -> tuple[bytes, str]:
    how = rng.choice(("cut", "flip", "deep", "empty", "bytes", "twice", "long", "digits"))
    at = rng.randrange(len(data) + 1)
    if how == "cut":
        return data[:at], f"cut at {at}"
    if how == "flip":
        return flipped(data, rng), "bits"
    if how == "deep":
        return b"[" * 100_000, "100,000 brackets"
    if how == "empty":
        return b"", "empty"
    if how == "bytes":
        return data[:at] + b"\xff\xfe\x00\x80" + data[at:], "no UTF-8"
    if how == "twice":
        return data.replace(b'": ', b'": 1, "a": 2, "a": ', 1), "a key twice"
    if how == "long":
        return b'{"a": [' + b"[],[]," * 2_000_000 + b"0]}", "12 million lists"
    return data[:at] + b"9" * 6000 + data[at:], "6000 digits"


def flipped(data: bytes, rng: Random) -> bytes:
    """Change some bits, put bytes in or take them out."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        if not made:
            break
        at = rng.randrange(len(made))
        how = rng.random()
        if how < 0.6:
            made[at] ^= 1 << rng.randrange(8)
        elif how < 0.8:
            made[at : at + 1] = rng.choice((b"\x00\x00\x00\x00", b"\xff" * 8, b"\x7f\xff\xff\xff"))
        else:
            del made[at : at + rng.randrange(1, 9)]
    return bytes(made)
