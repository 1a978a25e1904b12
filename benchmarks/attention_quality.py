"""Quality of attention formats: teacher-forced, against float16 keys and values of the same bundle.

Tables are learnt from the beginning of a text, scores taken on its end.  The window is that of ``--attention``: 64
newest tokens and 4 first ones with exact keys (128 for nomad2).

    python -m benchmarks.attention_quality                                    # builtin:shakespeare on its own text
    python -m benchmarks.attention_quality MODEL --text FILE [--format int4] [--tokens 4096] [--markdown]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import conditions, show
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.quantization.coded_keys import TABLES, score, store
from edgespec.export.quantization.key_tables import BUDGET, learn_tables
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.formats import FORMATS, LEARNT, SINKS, WINDOW, KeyFormat, ValueFormat
from edgespec.runtimes.files.kv import ATTENTION, KvFormat
from edgespec.runtimes.files.manifest import AttentionPart, ModelPart
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec

KEYS: tuple[KeyFormat, ...] = ("f32", "f16", "int8", "int4", "nomad1", "nomad2")
VALUES: tuple[ValueFormat, ...] = ("f32", "f16", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin:shakespeare")
    parser.add_argument("--text", type=Path, help="[default: the model's calibration text]")
    parser.add_argument("--own-text", action="store_true", help="a text that the model writes itself, at temperature 1")
    parser.add_argument("--format", choices=FORMATS, default="fp32", help="of the weights")
    parser.add_argument("--tokens", type=int, default=4096, help="scored")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="a table instead of JSON")
    arguments = parser.parse_args()
    source = resolve(arguments.model)
    file = arguments.text or source / "calibration.txt"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part = write_model(folder, open_model(source, None), ModelSpec(arguments.format)).part
        if arguments.own_text:
            first = json.loads((source / "config.json").read_text("utf-8")).get("bos_token_id", 0)
            slot = _slot(folder, part, ATTENTION["f32"], arguments.threads)
            tokens = _written(slot, first, BUDGET + arguments.tokens)
        else:
            tokens = TextCodec(source).encode(file.read_text("utf-8"))
        middle = max(len(tokens) // 2, len(tokens) - arguments.tokens)
        learning, held_out = tokens[:middle][: 2 * BUDGET], tokens[middle:]
        part = _with_tables(folder, part, learning, arguments.threads)
        rows = _measure(folder, part, held_out, arguments.threads)
    if arguments.markdown:
        _table(rows)
        return
    show(
        conditions(
            model=arguments.model.rsplit("/", 1)[-1],
            weights=arguments.format,
            text="its own, temperature 1" if arguments.own_text else file.name,
            learnt_from=len(learning),
            scored=rows[0]["positions"],
            context=part.facts.context,
            head_dim=part.facts.head_dim,
        )
        | {"formats": rows}
    )


def _slot(folder: Path, part: ModelPart, kv: KvFormat, threads: int) -> Slot:
    return open_slot(Model(folder, part, NATIVE, threads, kv))


def _written(slot: Slot, first: int, count: int) -> list[int]:
    """Make a text of ``count`` tokens, begun anew where the context is full."""
    random, tokens = np.random.default_rng(0), list[int]()
    while len(tokens) < count:
        slot.follow([])
        tokens.append(first)
        for _ in range(slot.context - 1):
            logits = slot.forward(np.array(tokens[-1:], np.int64)).logits[0]
            slot.keep([0])
            tokens.append(int((logits + random.gumbel(size=len(logits))).argmax()))
    return tokens[:count]


def _with_tables(folder: Path, part: ModelPart, learning: list[int], threads: int) -> ModelPart:
    tables = learn_tables(_slot(folder, part, ATTENTION["f32"], threads), learning, LEARNT, lambda done, of: None)
    store(folder, tables)
    attention = AttentionPart(default="f16", tables=TABLES, learnt=list(LEARNT))
    return part.model_copy(update={"attention": attention})


def _measure(folder: Path, part: ModelPart, held_out: list[int], threads: int) -> list[dict[str, Any]]:
    exact = score(_slot(folder, part, ATTENTION["f16"], threads), held_out)
    rows = []
    for keys in KEYS:
        window = 2 * WINDOW if keys == "nomad2" else WINDOW
        for values in VALUES:
            for kv in (KvFormat(keys, values), KvFormat(keys, values, window=window, sinks=SINKS)):
                if kv.window and keys in ("f32", "f16"):
                    continue  # exact anyway
                gate = score(_slot(folder, part, kv, threads), held_out).gate(exact)
                rows.append(
                    {
                        "keys": keys,
                        "values": values,
                        "window": kv.window,
                        "perplexity_change": round(gate.perplexity_change, 5),
                        "agreement": round(gate.agreement, 4),
                        "bytes_per_token": kv.block_bytes(part.facts) / 128,
                        "positions": len(exact.best),
                    }
                )
    return rows


def _table(rows: list[dict[str, Any]]) -> None:
    """Keys down, values and window across: change of perplexity / top-1 agreement."""
    columns = [(values, window) for window in (False, True) for values in VALUES]
    print("| keys | " + " | ".join(f"{values}{', window' if window else ''}" for values, window in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for keys in KEYS:
        cells = []
        for values, window in columns:
            found = [r for r in rows if (r["keys"], r["values"], r["window"] > 0) == (keys, values, window)]
            cells += [f"{100 * r['perplexity_change']:+.2f}% {r['agreement']:.3f}" for r in found] or [""]
        print(f"| {keys} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
