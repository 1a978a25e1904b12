"""Bytes: what a bundle takes while it loads and while it runs, part by part.

The figures of a process without a model (Python, libraries, sessions, tokenizer) were measured (docs/dev/planning.md):
x86-64 Linux, Python 3.11, ONNX Runtime 1.32, numpy 2.4.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.drafters.registry import METHODS, NGRAM
from edgespec.planning.budget import table_of
from edgespec.planning.buffers import (
    blocks,
    checkpoint_bytes_of,
    conformer_bytes,
    heard_bytes,
    kv_bytes,
    logits_bytes,
    model_kv,
    native_scratch,
    source_rows,
    stock_scratch,
    texts_bytes,
    working_bytes,
)
from edgespec.planning.weights import looked_up, matrix_bytes, needs, stock_weights, streamed_bytes, weight_parts
from edgespec.runtimes.audio.features import HOP, WINDOW_SAMPLES
from edgespec.runtimes.files.kv import memory_format
from edgespec.runtimes.files.manifest import ImagePart, Manifest, ModelPart, SoundPart
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.files.sound import ConformerFrontend
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.slots.encoder import encoder_attention
from edgespec.runtimes.slots.text_encoder import ROWS

MIB = 1 << 20
LEAST, SPOKEN = 64, 2048  # tokens of a text that must fit, and for which streamed weights leave room
LEAST_CHUNK = 16  # rows of a prefill's pass that takes the least memory
MARGIN, LEAST_MARGIN = 0.01, 2 << 20  # of the private bytes that were added up


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory."""

    name: str  # a stable key such as ``weights`` or ``kv``
    private: int = 0  # bytes that only this process has, which count against every limit
    file: int = 0  # bytes of mapped files, which the system may drop and read again
    loading: int = 0  # bytes only while loading
    note: str = ""  # human-readable parts

    @property
    def all(self) -> int:
        """Resident bytes."""
        return self.private + self.file


# Python with all that a run imports, before a bundle is opened
PROCESS = MemoryPart("process", int(43.0 * MIB), int(35.0 * MIB), note="Python, ONNX Runtime and other libraries")
# what opening a tiny bundle adds, and running it
LOADING = MemoryPart("libraries", int(1.4 * MIB), int(9.3 * MIB), note="their code for opening a bundle")
RUNNING = MemoryPart("runtime", int(1.9 * MIB), int(2.4 * MIB), note="thread pools, allocators, code that runs")
STOCK_CODE = int(2.0 * MIB)  # more code of ONNX Runtime's that stock operators run
# of a session: a node's kernel, its attributes and shapes; by the size of the graph's file
SESSION, SESSION_GRAPH = int(0.6 * MIB), 2.0
STOCK_SESSION, STOCK_GRAPH = int(2.9 * MIB), 12.5
# of a decoder of codes, measured on LlamaGen's VQ decoder of 256 x 256 pixels: its session, by the size of the graph's
# file (344 of 162 MiB), and what a decode leaves in the arena, by its largest array (112 of 32 MiB)
CODES_GRAPH, CODES_ARRAYS = 2.2, 4
# what a server adds: its libraries, connections, bodies, answers that wait to be read
SERVER = int(20.0 * MIB)
# of a tokenizer: its tables once they are made, and what making them takes, over the size of tokenizer.json
TOKENIZER, TOKENIZER_LOADING = 8.7, 2.9
# private bytes of a token of the text: the lists of the request, of the slot and of the loop, and their numbers
TEXT = 100
INDEX = 340  # of the index of method ngram
KEPT = 1  # cross-attention caches of earlier sources next to those in use

_MEASURE = """
import numpy, onnxruntime, tokenizers, edgespec.engine.loading
from edgespec.planning.footprint import resident_now
from edgespec.runtimes.ort.native_library import native_library
native_library()
print(*resident_now())
"""


def resident_now(status: Path = Path("/proc/self/status")) -> tuple[int, int]:
    """Private and file-backed resident bytes of this process; zeros where the system does not tell."""
    found = table_of(status)
    return found.get("RssAnon", 0), found.get("RssFile", 0) + found.get("RssShmem", 0)


def process_bytes() -> int:
    """Resident bytes of a process on this machine once all that a run needs is imported, before a bundle is opened.

    Measured in a separate process, independent of this one; the default where that fails.
    """
    command = [sys.executable, "-c", _MEASURE]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return sum(int(part) for part in ran.stdout.split()[-2:]) or PROCESS.all
    except (OSError, ValueError, subprocess.SubprocessError):
        return PROCESS.all


@dataclass(frozen=True)
class Memory:
    """All of it.  ``after`` is resident memory once ``context`` tokens are held; ``peak`` the most at any time."""

    parts: tuple[MemoryPart, ...]  # its parts, with the margin
    loaded: int = 0  # resident bytes at the worst moment of ``load``
    opened: int = 0  # the same of opening the draft, which happens when a method first needs it; 0 = none

    @property
    def private(self) -> int:
        """Private bytes after loading, with the context full."""
        return sum(part.private for part in self.parts)

    @property
    def file(self) -> int:
        """Resident bytes of mapped files."""
        return sum(part.file for part in self.parts)

    @property
    def after(self) -> int:
        """Resident bytes after loading, with the context full."""
        return self.private + self.file

    @property
    def peak(self) -> int:
        """The most resident bytes at any time."""
        return max(self.after, self.loaded, self.opened)

    def part(self, name: str) -> MemoryPart:
        """Find the part of that name; an empty one if there is none."""
        return next((part for part in self.parts if part.name == name), MemoryPart(name))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        names = ("peak", "after", "private", "file", "loaded", "opened")
        return {name: getattr(self, name) for name in names} | {"parts": [asdict(part) for part in self.parts]}


def memory_of(manifest: Manifest, use: RunOptions, process: int | None = None) -> Memory:
    """Predict the memory of running a bundle in this way; only from its manifest, no file is opened.

    ``process``: resident bytes of a process before loading (``Profile.process_bytes``); None = as measured elsewhere.
    """
    target, base = manifest.target, PROCESS
    if process is not None:  # in the proportions of the default
        private = process * PROCESS.private // PROCESS.all
        base = replace(PROCESS, private=private, file=process - private)
    method = METHODS.get(use.method)  # None: the caller's proposer
    part = manifest.beside(method.needs if method else "")
    both = part is not None and part is manifest.draft and manifest.translation is not None
    tokenizers = ("tokenizer.json", *(("draft/tokenizer.json",) if both else ()))
    tokenizer = sum(manifest.files[name].size for name in tokenizers if name in manifest.files)
    draft = [] if part is None else _model(manifest, part, use, "draft ")
    kept = use.batch * use.checkpoints * checkpoint_bytes_of(target, use)
    copies = f"{use.batch} x {use.checkpoints} copies of states, to which a text can go back"
    each = TEXT + (INDEX if use.method == NGRAM else 0)
    parts = [
        base,
        LOADING,
        RUNNING,
        MemoryPart(
            "tokenizer",
            int(TOKENIZER * tokenizer),
            loading=int(TOKENIZER_LOADING * tokenizer),
            note=f"{target.facts.vocab} tokens at most",
        ),
        *_model(manifest, target, use, ""),
        *draft,
        *([MemoryPart("checkpoints", kept, note=copies)] if kept else []),
        MemoryPart("text", use.batch * use.context * each, note=f"{each} bytes per token"),
    ]
    if use.adapters:
        parts.append(MemoryPart("adapters", use.adapters, note="as they are stored"))
    if codes := manifest.codes:
        graph = manifest.files[codes.graph].size if codes.graph in manifest.files else 0
        there = int(CODES_GRAPH * graph) + CODES_ARRAYS * codes.working
        parts.append(MemoryPart("codes", there, note="their decoder, and a decode"))
    loaded, opened = _opening(parts, ""), _opening(parts, "draft ") if draft else 0
    known = sum(part.private for part in parts)
    parts.append(MemoryPart("margin", max(LEAST_MARGIN, int(known * MARGIN)), note="what is not known to the byte"))
    return Memory(tuple(parts), loaded, opened)


def _opening(parts: list[MemoryPart], lead: str) -> int:
    """Resident bytes at the worst moment of opening the target (``lead`` "") or the draft.

    Pages of weights that are used where they are mapped are not read yet; packed ones are there, and what is packed.
    """
    names = {"process", "libraries", "tokenizer"} | {
        f"{at}{name}" for at in ("", lead) for name in ("weights", "session")
    }
    there = {part.name: part for part in parts if part.name in names}
    return sum(part.all if part.private else 0 for part in there.values()) + there[f"{lead}weights"].loading


def _model(manifest: Manifest, part: ModelPart, use: RunOptions, lead: str) -> list[MemoryPart]:
    """Weights, session, keys and values, and scratch space of the target (``lead`` "") or the draft."""
    native = use.operators == "native" and use.device == "cpu" and NATIVE in part.graphs
    draft, method = bool(lead), manifest.methods.get(use.method)
    groups = list(method.heads) if method and not draft else []
    graph = part.graphs[NATIVE] if native else part.graphs.get(part.main)
    file = manifest.files[graph.file].size if graph and graph.file in manifest.files else 0
    encodes, tokens = manifest.is_encoder, min(use.context, part.facts.context)
    rows, held = max(ROWS, tokens) if encodes else min(use.chunk, use.context), use.batch * tokens
    weights, layers = weight_parts(part, manifest.files), list[MemoryPart]()
    tables = looked_up(weights.table, weights.row, held)
    tables += min(weights.angles, tokens * weights.position)
    if native:
        session, code, scratch = SESSION + int(SESSION_GRAPH * file), 0, native_scratch(part, use, rows, draft)
        note, there = f"{part.format}, mapped, as far as it is used", needs(weights, groups)
        if use.expert_cache is not None and not draft:
            streamed, name = streamed_bytes(part, manifest.files), "experts" if part.facts.experts else "layers"
            there, note = max(0, there - streamed), f"{note}, without {name}"
            stays = f"a cache; all of them, {streamed / 1e9:.2f} GB, stay in the file"
            layers = [MemoryPart(name, use.expert_cache, note=stays)]
        matrices = MemoryPart("weights", file=there, note=note)
        if weights.layer_table:
            stays = f"their rows of {weights.layer_table / 1e9:.2f} GB that stay in the file"
            own = looked_up(weights.layer_table, weights.layer_row, held)
            layers.append(MemoryPart("layer embeddings", file=own, note=stays))
        if part.decoder is not None and (chosen := part.decoder.selector) is not None:
            row = 2 * chosen.rank
            table = row * part.facts.vocab
            own = looked_up(table, row, held) + looked_up(table, row, held * chosen.candidates)
            layers.append(MemoryPart("selector", 2 * row * part.facts.hidden, own, note="rows of tokens, mapped"))
    else:
        session, code = STOCK_SESSION + int(STOCK_GRAPH * file), 0 if draft else STOCK_CODE
        stock, scratch = stock_weights(part, weights), stock_scratch(part, use, rows)
        tables += looked_up(stock.table, stock.row, held)
        note = f"{part.format}, packed by ONNX Runtime; scales stay mapped"
        matrices = MemoryPart("weights", stock.packed, stock.mapped, stock.loading, note)
    logits = logits_bytes(part, use, native, draft, groups)
    kv, kept = texts_bytes(part, use) if encodes else kv_bytes(part, use, native, draft)
    found = [
        matrices,
        MemoryPart("tables", file=tables, note="rows of the embedding, angles of positions"),
        *layers,
        MemoryPart("session", session, code, note="the graph as it is run"),
        MemoryPart("kv", kv, note=f"{use.batch} x {use.context} tokens, {kept}"),
        MemoryPart("scratch", scratch, note=f"of a pass over {rows} rows"),
        MemoryPart("logits", logits, note="rows of logits that leave the LM head"),
    ]
    if part.source is not None:
        found += source_parts(manifest, part, use, draft)
    if part.tower is not None and native:
        if not part.senses:  # captions
            found += sense_parts(manifest, part, None, part.front, use)
        for number, sense in enumerate(part.senses):
            found += sense_parts(manifest, part, sense.part, sense.front, use, "audio " if number else "")
    return [replace(one, name=f"{lead}{one.name}") for one in found]


def source_parts(manifest: Manifest, part: ModelPart, use: RunOptions, draft: bool) -> list[MemoryPart]:
    """List what reading sources takes: the encoder, its pass, and a memory for each sequence."""
    rows, kv = source_rows(part, use.context), model_kv(part, use, draft)
    kept = (use.batch + KEPT) * memory_format(kv).nbytes(part.facts, blocks(rows))
    found = [MemoryPart("memories", kept, note=f"{use.batch} sources of {rows} rows, and the last one")]
    encoder = part.encoder
    if encoder is None:
        return found
    entry, graph = manifest.files.get(encoder.weights), manifest.files.get(encoder.graphs[NATIVE].file)
    hidden = encoder.facts.hidden
    row = 4 * hidden if encoder.format == "fp32" else matrix_bytes(encoder.format, 16, hidden) // 16
    table = row * encoder.facts.vocab
    there = max((entry.size if entry else 0) - table, 0) + looked_up(table, row, rows)
    scratch = native_scratch(encoder, replace(use, context=rows), rows) + working_bytes(encoder, kv, rows)
    return [
        *found,
        MemoryPart("encoder", file=there, note=f"{encoder.format}, mapped, as far as it is used"),
        MemoryPart("encoder session", SESSION + int(SESSION_GRAPH * (graph.size if graph else 0))),
        MemoryPart("encoder scratch", scratch, note=f"of a pass over {rows} rows"),
    ]


def sense_parts(
    manifest: Manifest,
    part: ModelPart,
    how: ImagePart | SoundPart | None,
    sides: list[ModelPart],
    use: RunOptions,
    lead: str = "",
) -> list[MemoryPart]:
    """List the memory of images or sound: an encoder and its projectors, a pass over one piece, and rows of one each.

    A recording is planned for as long as a transcript's windows are, 30 s.
    """
    tower, image = sides[0], how if isinstance(how, ImagePart) else None
    rows, sound = tower.facts.context, how if isinstance(how, SoundPart) else None
    graphs = sum(manifest.files[one.graphs[NATIVE].file].size for one in sides)
    working = native_scratch(tower, replace(use, context=rows), rows)
    working += working_bytes(tower, encoder_attention(tower), rows)
    columns, name = part.facts.hidden * (1 + (len(image.deepstack_layers) if image else 0)), "images"
    most = image.max_rows if image else 0
    if sound is not None:
        convolutions = sides[-getattr(sound.front, "convolutions", 0) or len(sides) :]
        working += heard_bytes(sound, convolutions, rows)
        if isinstance(sound.front, ConformerFrontend):
            working += conformer_bytes(sound.front, tower, rows)
        most, name = min(sound.max_rows, sound.front.rows(WINDOW_SAMPLES // HOP)), "recordings"
    weights = sum(manifest.files[one.weights].size for one in sides)
    note = f"{tower.format}, and its projectors, mapped, as far as they are used"
    return [
        MemoryPart(f"{lead}tower", file=weights, note=note),
        MemoryPart(f"{lead}tower sessions", len(sides) * SESSION + int(SESSION_GRAPH * graphs)),
        MemoryPart(f"{lead}tower scratch", working, note=f"of a pass over {rows} rows"),
        MemoryPart(name, use.batch * 4 * most * columns, note=f"{use.batch} x {most} rows of {columns}"),
    ]
