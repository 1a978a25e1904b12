"""Write the constants that C++, Kotlin and Rust share with Python: ``python -m tools.generate_constants``.

The numbers are defined only in Python: in ``edgespec/runtimes/files/formats.py``, or where each is used.  A test checks
the files (``tests/tools/test_constants.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill

from edgespec.drafters.draft_cache import FIRST_ROWS
from edgespec.drafters.registry import METHODS
from edgespec.engine.methods import LEAST_GAMMA
from edgespec.engine.pool import MOST_IDLE
from edgespec.engine.sessions import VERIFY_SIZES
from edgespec.planning.traffic import weight_size
from edgespec.runtimes.files import formats
from edgespec.runtimes.files.formats import GGML, HALVES, KEYS, KINDS, NO_KEYS, SPECS, FormatSpec, GgmlSpec
from edgespec.runtimes.files.kv import ATTENTION
from edgespec.runtimes.files.migration import RENAMED
from edgespec.runtimes.options import GAMMA
from edgespec.runtimes.slots.slot import PREFILL_CHUNK
from edgespec.runtimes.text.control_tokens import OWN
from edgespec.runtimes.text.languages import LISTED, MEMBERS

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "edgespec" / "runtimes" / "native" / "constants.h"
KOTLIN = ROOT / "android_demo/edgespec/src/main/kotlin/dev/edgespec/runtimes/Constants.kt"
RUST = ROOT / "edgespec" / "runtimes" / "tokenizer" / "src" / "own.rs"
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


def kotlin() -> str:
    """Return the Kotlin file."""
    weights = [f'"{spec.name}" to FormatSpec({spec.level_bytes}, {spec.stock_scale_bytes}, {spec.stock_packed_bytes}, '
               f'"{spec.family}", {weight_size(spec.name, "native")}),' for spec in SPECS.values()]  # fmt: skip
    keys = [f'"{name}" to KeySpec({key.number}, {key.channel}, {key.scales}, "{key.title or name}"),'
            for name, key in KEYS.items()]  # fmt: skip
    attention = [
        f'"{name}" to KvFormat("{kv.keys}", "{kv.values}", window = {kv.window}, sinks = {kv.sinks}),'
        for name, kv in ATTENTION.items()
    ]
    renamed = [f'"{place}" to mapOf({", ".join(_pairs(names))}),' for place, names in RENAMED.items()]
    gammas = {name: method.gamma for name, method in METHODS.items() if method.gamma}
    lines = [
        NOTE,
        "package dev.edgespec.runtimes",
        "",
        f"const val BLOCK = {formats.BLOCK} // weights of a row that are stored together",
        f"const val TILE = {formats.TILE}",
        f"const val KV_BLOCK = {formats.KV_BLOCK} // tokens that are stored together",
        f"const val SINK_ROWS = {formats.SINK_ROWS}",
        f"const val STATE_ROWS = {formats.STATE_ROWS} // tokens whose part in a convolution is kept",
        f"const val HELD_BYTES = {formats.HELD_BYTES} // of a delta rule's states: how many tokens they hold",
        f"const val CHECKPOINTS = {formats.CHECKPOINTS} // of a slot's states, where memory allows",
        f"const val LONGEST_PASS = {formats.LONGEST_PASS} // rows: what the ring must hold beyond its window",
        f"const val CENTROIDS = {formats.CENTROIDS} // of a sub-vector of nomad's codes",
        f"const val EXACT_SINKS = {formats.SINKS} // first tokens whose keys are exact where others are coded",
        f"const val NO_KEYS = {NO_KEYS}",
        f"const val GAMMA = {GAMMA} // maximum draft tokens per round of adaptive control",
        f"const val LEAST_GAMMA = {LEAST_GAMMA} // of a method without its own",
        f"const val FIRST_ROWS = {FIRST_ROWS} // of a drafter's first step: the pending token and two guesses",
        f"const val MOST_IDLE = {MOST_IDLE} // finished conversations whose KV is kept",
        f"const val PREFILL_CHUNK = {PREFILL_CHUNK}",
        f"val VERIFY_SIZES = {_list(map(str, VERIFY_SIZES))} // rows of the passes that are timed",
        f"val LEARNT = {_list(_quoted(formats.LEARNT))}",
        f"val DRAFT_ATTENTION = {_list(_quoted(formats.DRAFT_ATTENTIONS))}",
        f"val GAMMAS = mapOf({', '.join(f'{_quoted([name])[0]} to {gamma}' for name, gamma in gammas.items())})",
        "",
        "/** A weight format: bytes of a level, of its scale, of both as ONNX Runtime packs them, of both [read]. */",
        "class FormatSpec(val level: Double, val scale: Double, val packed: Double, val family: String,",
        "    val read: Double)",
        "",
        *_map("SPECS", weights),
        "val FORMATS = SPECS.keys.toList()",
        "",
        "/** A format of keys or values: its number, bytes of a channel of 128 tokens and of scales, its name. */",
        "class KeySpec(val number: Long, val channel: Int, val scales: Int, val title: String)",
        "",
        *_map("KEYS", keys),
        "",
        *_map("ATTENTION", attention),
        "",
        "// keys of manifests up to schema 5 and their names since, by the place of their object",
        "internal val RENAMED = mapOf(",
        *(part for line in renamed for part in _wrapped(line)),
        ")",
        "",
        "// languages by codes of ISO 639-1 and 639-3 and by name; members of macrolanguages that models have instead",
        'internal const val LANGUAGES = """',
        *LISTED.strip().splitlines(),
        '"""',
        "internal val MEMBERS = mapOf(",
        *_wrapped(", ".join(_pairs(MEMBERS)) + ","),
        ")",
    ]
    return "\n".join(lines) + "\n"


def rust() -> str:
    """Return the Rust file."""
    about = "/// What a model itself writes around thoughts and calls: it stays as it is in messages of the assistant."
    words = [f'    r#"{word}"#,' for word in sorted(OWN)]
    return "\n".join([NOTE, "", about, f"pub const OWN: [&str; {len(words)}] = [", *words, "];", ""])


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


def _wrapped(line: str) -> list[str]:
    whole = line.replace(" to ", "\xa0to\xa0")  # pairs stay on a line
    return fill(whole, 120, initial_indent="    ", subsequent_indent="    ").replace("\xa0", " ").splitlines()


def _pairs(names: Mapping[str, str]) -> list[str]:
    return [f'"{one}" to "{other}"' for one, other in names.items()]


def _quoted(names: Iterable[str]) -> list[str]:
    return [f'"{name}"' for name in names]


def _list(values: Iterable[str]) -> str:
    return f"listOf({', '.join(values)})"


def _map(name: str, lines: list[str]) -> list[str]:
    return [f"val {name} = mapOf(", *(f"    {line}" for line in lines), ")"]


def main() -> None:
    """Write both files."""
    HEADER.write_text(header(), "utf-8")
    KOTLIN.write_text(kotlin(), "utf-8")
    RUST.write_text(rust(), "utf-8")


if __name__ == "__main__":
    main()
