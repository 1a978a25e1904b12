"""Write the constants that C++, Rust and TypeScript share with Python: ``python -m tools.generate_constants``.

The numbers are defined only in Python: in ``edgespec/runtimes/files/formats.py``, or where each is used.  A test checks
the files (``tests/tools/test_constants.py``).
"""

from __future__ import annotations

import json
from pathlib import Path

from edgespec.runtimes.files import formats
from edgespec.runtimes.files.formats import GGML, HALVES, KEYS, KINDS, NO_KEYS, FormatSpec, GgmlSpec
from edgespec.runtimes.text.control_tokens import OWN

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "edgespec" / "runtimes" / "native" / "constants.h"
RUST = ROOT / "edgespec" / "runtimes" / "tokenizer" / "src" / "own.rs"
TYPESCRIPT = ROOT / "web" / "src" / "own.ts"
NOTE = "// Written by `python -m tools.generate_constants` from Python's constants: not to be edited."
LOOKED_UP = ("r8", "r32")  # kinds of rows for lookups, never multiplied: int8 with a scale per row, float32


def header() -> str:
    """Return the C++ header."""
    *specs, floats = sorted(KINDS.values(), key=lambda spec: spec.number)
    multiplied = [*map(_kind, specs), *(_constant(name) for name in (*GGML, *HALVES)), _kind(floats)]
    kinds = [*multiplied, *(f"k{name.upper()}" for name in LOOKED_UP)]
    facts = [*map(_facts, specs),
             *(f'{{"{name}", {spec.low + spec.high}, 0, kQ4}}' for name, spec in GGML.items()),
             *(f'{{"{name}", 16, 0, {_kind(floats)}}}' for name in HALVES),
             _facts(floats),
             *(f'{{"{name}", {name[1:]}, 0, k{name.upper()}}}' for name in LOOKED_UP)]  # fmt: skip
    tables = dict.fromkeys(spec.table for spec in GGML.values())
    own = [_ggml(spec, list(tables).index(spec.table)) for spec in GGML.values()]
    sizes = ", ".join(f"{{{key.channel}, {key.scales}}}" for key in KEYS.values())
    keys = [f"kKv{name.title()}" for name in KEYS]
    numbers = {
        "kBlock": (formats.BLOCK, "weights along k that are stored together"),
        "kTile": (formats.TILE, "output columns of a tile"),
        "kMaxHeadDim": (formats.MOST_HEAD_DIM, ""),
        "kKvBlock": (formats.KV_BLOCK, "tokens whose keys and values are stored together"),
        "kStateRows": (formats.STATE_ROWS, "a pass of 128 rows and what the first of them looks back at"),
        "kHeldBytes": (formats.HELD_BYTES, "at the end of a delta rule's states: how many tokens they hold"),
        "kMaxTaps": (formats.MOST_TAPS, "tokens that a short convolution sees"),
        "kSinkRows": (formats.SINK_ROWS, "one tile; the first `sinks` of it are used"),
        "kLongestPass": (formats.LONGEST_PASS, "rows, of a model with states: a rollback stays within their rows"),
        "kCheckpoints": (formats.CHECKPOINTS, "of a slot's states, where memory allows"),
    }
    lines = [
        NOTE,
        "#pragma once",
        "#include <cstdint>",
        "",
        "// clang-format off",
        "namespace edgespec {",
        "",
        *(f"constexpr int {name} = {value};{'  // ' + why if why else ''}" for name, (value, why) in numbers.items()),
        "",
        "// Kinds of packed matrices, in the order of kKinds.",
        f"enum Kind : int {{ {', '.join(kinds)} }};",
        f"constexpr int kProducts = {len(multiplied)};  // kinds that are multiplied by",
        f"#define EDGESPEC_PRODUCTS(kernel) {', '.join(f'kernel<{kind}>' for kind in multiplied)}",
        "",
        "struct KindFacts {",
        "  const char* name;  // in programs",
        "  int bits;          // of a weight, in each of its planes",
        "  int size;          // weights of a row that share a scale, 0: all of it, or none has one",
        "  Kind acts;         // the kind whose activations it multiplies",
        "};",
        f"constexpr KindFacts kKinds[] = {{{', '.join(facts)}}};",
        "",
        "// Block types of files (layout.h), from kQ4_1 on.",
        "enum GgmlScale : int { kHalf, kTimes, kExponent, kZero };",
        "struct GgmlFacts {",
        "  int group;        // weights of a row that are stored together",
        "  int low, high;    // bits of a code; the upper ones are stored elsewhere",
        "  int share;        // weights of a row with the same scale",
        "  int zero;         // the code of 0",
        "  GgmlScale scale;  // float16, one times a small integer, a power of 2, or float16 with a zero point",
        "  bool minimum;     // whether there is one",
        "  int table;        // the row of kGgmlTables with the values of codes, 0: none",
        "};",
        f"constexpr GgmlFacts kGgml[] = {{{', '.join(own)}}};",
        f"constexpr uint8_t kGgmlTables[][16] = {{{', '.join(_numbers(table) for table in tables)}}};",
        "",
        "// Formats of keys and values: what a channel of a block takes, and its scales.",
        f"enum KvFormat : int {{ {', '.join(keys)}, kKvNone }};",
        f"static_assert(kKvNone == {NO_KEYS});",
        "struct KeyFacts {",
        "  int channel, scales;",
        "};",
        f"constexpr KeyFacts kKeys[] = {{{sizes}, {{0, 0}}}};",
        "",
        "}  // namespace edgespec",
    ]
    assert [key.number for key in KEYS.values()] == list(range(NO_KEYS))
    assert [spec.number for spec in specs] == list(range(len(specs)))
    return "\n".join(lines) + "\n"


def rust() -> str:
    """Return the Rust file."""
    about = "/// What a model itself writes around thoughts and calls: it stays as it is in messages of the assistant."
    words = [f'    r#"{word}"#,' for word in sorted(OWN)]
    return "\n".join([NOTE, "", about, f"pub const OWN: [&str; {len(words)}] = [", *words, "];", ""])


def typescript() -> str:
    """Return the TypeScript file."""
    about = "/** Markers of thoughts and calls, which stay as they are in messages of the assistant. */"
    words = [f"  {json.dumps(word)}," for word in sorted(OWN)]
    return "\n".join([NOTE, "", about, "export const OWN: readonly string[] = [", *words, "];", ""])


def _constant(kind: str) -> str:
    return f"k{kind.upper()}"


def _facts(spec: FormatSpec) -> str:
    return f'{{"{spec.kind}", {spec.bits // spec.planes}, {spec.size}, {_kind(KINDS[spec.acts])}}}'


def _ggml(spec: GgmlSpec, table: int) -> str:
    scale, minimum = f"k{spec.scale.title()}", "true" if spec.minimum else "false"
    return f"{{{spec.group}, {spec.low}, {spec.high}, {spec.share}, {spec.zero}, {scale}, {minimum}, {table}}}"


def _numbers(table: tuple[int, ...]) -> str:
    return f"{{{', '.join(map(str, table))}}}"


def _kind(spec: FormatSpec) -> str:
    return f"k{spec.kind[0].upper()}{spec.kind[1:]}"


def main() -> None:
    """Write all files."""
    HEADER.write_text(header(), "utf-8")
    RUST.write_text(rust(), "utf-8")
    TYPESCRIPT.write_text(typescript(), "utf-8")


if __name__ == "__main__":
    main()
