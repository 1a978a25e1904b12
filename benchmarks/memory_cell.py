"""Run one cell of ``benchmarks.memory`` in a separate process, and print the memory that it used.

    python -m benchmarks.memory_cell BUNDLE METHOD CONTEXT [--operators native] [--gamma 8] [--prefill] [--maps]

The context is filled without a prefill, which would take minutes.  All of the cache is written.  A row is run at every
128th position, so that the angles of all positions are read.  The passes of a prefill are run wherever attention would
need another split.  ``--prefill`` runs a real one.  An encoder-decoder reads a source as long as the context, or its
longest one, and every sequence another one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # noqa: F401  what a run imports later is part of the process
import tokenizers  # noqa: F401
from numpy.typing import NDArray

from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import Pass
from edgespec.engine.encoding import Source
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.errors import InvalidRequest
from edgespec.planning.buffers import source_rows
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.native_runner import NativeRunner
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import PREFILL_CHUNK, Slot
from edgespec.runtimes.slots.stock import StockSlot

STEP = 128  # positions whose angles a page or its neighbours hold
SPLIT = 512  # tokens that attention processes in one piece
LEFT = 32  # tokens that are decoded after the prefill


def status() -> dict[str, int]:
    """Resident bytes now: all, private, of files; and the most so far."""
    text = Path("/proc/self/status").read_text()
    wanted = {"resident": "VmRSS", "private": "RssAnon", "file": "RssFile", "peak": "VmHWM"}
    return {name: 1024 * int(re.findall(rf"{key}:\s+(\d+)", text)[0]) for name, key in wanted.items()}


def maps() -> dict[str, int]:
    """Resident bytes by what is mapped: weights, libraries, everything else."""
    found: dict[str, int] = {}
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            path = fields[5] if len(fields) > 5 else "anonymous"
            weights = path.endswith((".data", ".onnx_data"))
            name = "/".join(Path(path).parts[-2:]) if weights else "libraries" if path[0] == "/" else path
        elif fields[0] == "Rss:":
            found[name] = found.get(name, 0) + 1024 * int(fields[1])
    return {name: size for name, size in found.items() if size}


def write_cache(slot: Slot, tokens: int) -> None:
    """Write into the cache of ``tokens`` tokens: pages that were never written take no memory."""
    slot.reserve(tokens)
    if isinstance(slot, NativeRunner):
        slot._own(0, tokens)
        for array in slot._arrays(tokens):
            array[:] = 0
    elif isinstance(slot, StockSlot):
        for bound in slot._kv.values():
            bound.array[:, :, :tokens] = 0


def zipf_text(vocab: int, tokens: int) -> NDArray[np.int64]:  # [tokens]
    """Tokens of which the one of rank r is as frequent as in a text."""
    chance = 1 / (np.arange(vocab) + 2.7) ** 1.15
    return np.random.default_rng(0).choice(vocab, tokens, p=chance / chance.sum())


def hold(slot: Slot, text: NDArray[np.int64]) -> None:
    """Let the slot hold a text."""
    slot.tokens[:] = text.tolist()
    if isinstance(slot, NativeRunner):
        slot._hold(slot.tokens, len(text))


def fill(slot: Slot, text: NDArray[np.int64], chunk: int) -> None:
    """Fill a slot as a prefill of a text would; [tokens]."""
    tokens = len(text)
    write_cache(slot, tokens)
    for depth in range(0, tokens, STEP):
        look_up(slot, text[depth : depth + STEP])
        hold(slot, text[:depth])
        slot.forward(text[depth : depth + 1])
        if (depth + STEP) % SPLIT == 0 and depth + chunk <= tokens:
            hold(slot, text[: depth + STEP - chunk])
            slot.prefill(text[-chunk:].tolist())
    hold(slot, text[: max(0, tokens - chunk)])
    slot.prefill(text[-chunk:].tolist())


def look_up(slot: Slot, text: NDArray[np.int64]) -> None:
    """Read the rows of the embedding."""
    hold(slot, text[:0])
    try:
        slot.run(Pass(text, hidden=True, scored=0, layers=(0, 0)))
    except InvalidRequest:  # this graph cannot run a part of itself
        slot.prefill(text.tolist())


def sourced(engine: Engine, prompt: list[int], number: int = 0) -> list[int] | Source:
    """Return the input of a request with this prompt: for an encoder-decoder a source, then the prompt."""
    part = engine.bundle.manifest.target
    if part.source is None:
        return prompt
    rows = source_rows(part, engine.context)
    if part.source.kind == "text":
        vocab = part.encoder.facts.vocab if part.encoder else part.facts.vocab
        return Source.of(np.roll(zipf_text(vocab, rows), number), prompt)
    assert part.encoder is not None
    columns = Model(engine.bundle.path, part.encoder, NATIVE, 1).given["hidden_in"]
    return Source.of(np.random.default_rng(number).standard_normal((rows, columns), np.float32), prompt)


def slots_of(engine: Engine) -> Iterator[Slot]:
    """Yield the slots that requests have left: of the target, and of the draft if there is one."""
    batches = list(engine._batches._idle.values())
    sessions = [session for batch in batches for session in batch.pool._idle] if batches else engine.sessions._idle
    for number, session in enumerate(sessions):
        if isinstance(source := sourced(engine, [0], number), Source):
            session.attend(source)
        yield session.target
        yield from (slot for slot, _ in session._drafts.values())


def decode(engine: Engine, prompt: list[int], arguments: argparse.Namespace, rounds: int | None = None) -> Stats:
    """Complete a prompt, or as many copies of it as the batch has; ``rounds``: of a single one, to stop after."""
    settings = Settings(method=arguments.method, gamma=arguments.gamma, adaptive=False, ignore_eos=True,
                        max_new_tokens=arguments.context - len(prompt), batch=arguments.batch)  # fmt: skip
    settings = settings.changed(temperature=1.0 if arguments.sampled else 0.0)
    if arguments.batch > 1:
        few = settings.changed(max_new_tokens=LEFT)
        each = [sourced(engine, prompt, number) for number in range(arguments.batch)]
        return engine.generate_batch(each, few)[0].stats
    with engine.stream(sourced(engine, prompt), settings) as stream:
        for _ in islice(stream, rounds):
            pass
    return stream.result.stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("method")
    parser.add_argument("context", type=int)
    parser.add_argument("--operators", default="native")
    parser.add_argument("--attention")
    parser.add_argument("--precision", default="full", help="high: the high planes of int8 weights alone")
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--maps", action="store_true")
    arguments = parser.parse_args()
    if arguments.operators == "native":
        native_library()
    figures: dict[str, Any] = {"process": status()}
    context = arguments.context
    engine = load(arguments.bundle, operators=arguments.operators, context=context, threads=arguments.threads,
                  attention=arguments.attention, precision=arguments.precision)  # fmt: skip
    figures["loaded"] = status()
    text = zipf_text(engine.bundle.manifest.target.facts.vocab, context - LEFT)
    prompt = text[: None if arguments.prefill else 64].tolist()
    decode(engine, prompt, arguments, LEFT // 2)
    figures["decoded"] = status()
    for slot in slots_of(engine):
        if not arguments.prefill:
            fill(slot, text, PREFILL_CHUNK)
        figures.setdefault("kv", []).append(slot.kv_bytes)
    stats = decode(engine, text.tolist(), arguments)
    figures |= {"end": status(), "drafted": stats.drafted, "reused": stats.reused_tokens}
    if arguments.maps:
        figures["maps"] = maps()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
