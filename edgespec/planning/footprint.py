"""Bytes: what a bundle takes while it loads and while it runs, part by part.

The figures of a process without a model (Python, libraries, sessions, the tokenizer) were measured (docs/planning.md):
x86-64 Linux, Python 3.11, ONNX Runtime 1.31, numpy 2.4.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.drafters.registry import AR, METHODS, NGRAM
from edgespec.planning.budget import table_of
from edgespec.planning.encoders import encoder_weights, memory_bytes, source_rows, working_bytes
from edgespec.planning.weights import looked_up, needs, stock_weights, weight_parts
from edgespec.runtimes.audio.features import HOP, WINDOW_SAMPLES
from edgespec.runtimes.files.attention import default_attention, exact_attention, with_copy
from edgespec.runtimes.files.formats import KV_BLOCK
from edgespec.runtimes.files.kv import ATTENTION, KvFormat, checkpoint_bytes, padded_dim, state_width
from edgespec.runtimes.files.manifest import Manifest, ModelPart
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.files.sound import SoundPart, WhisperFront
from edgespec.runtimes.options import RunOptions
from edgespec.runtimes.slots.encoder import encoder_attention
from edgespec.runtimes.slots.slot import ROUND_CAPACITY

MIB = 1 << 20
READ = 3 * 4 + 2  # bytes of a number that a pass over given rows reads
MARGIN, LEAST_MARGIN = 0.01, 2 << 20  # of the private bytes that were added up


@dataclass(frozen=True)
class MemoryPart:
    """One part of the memory.

    Attributes:
        name: what it is, a stable key such as ``weights`` or ``kv``.
        private: bytes that only this process has, which count against every limit.
        file: bytes of mapped files, which the system may drop and read again.
        loading: bytes that are there only while loading.
        note: what it is made of, for people.
    """

    name: str
    private: int = 0
    file: int = 0
    loading: int = 0
    note: str = ""

    @property
    def all(self) -> int:
        """Resident bytes."""
        return self.private + self.file


# Python with all that a run imports, before a bundle is opened
PROCESS = MemoryPart("process", int(35.2 * MIB), int(34.2 * MIB), note="Python, ONNX Runtime and other libraries")
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
# of the index of method ngram
INDEX = 340
HUGE = 2 << 20  # numpy asks for huge pages for arrays of twice this: a page that is touched is as large
SPLIT = 4 * KV_BLOCK  # tokens that attention takes in one piece (native/attention.cpp)
TILE = 16
ACT = 40  # bytes of 32 quantized activations (native/layout.h)
QUERY = 48  # of what attention knows of a query beside its numbers (native/kernels.h)
TRIED = 384  # tokens that a new slot has room for
DRAWN = 7  # rows of float64 that drawing a token takes for a moment
PROBED = 5  # rows whose logits are compared to say whether rows are exact, and that control times

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

    Measured in a process of its own, so that it does not matter what this one has done; the default where that fails.
    """
    command = [sys.executable, "-c", _MEASURE]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return sum(int(part) for part in ran.stdout.split()[-2:]) or PROCESS.all
    except (OSError, ValueError, subprocess.SubprocessError):
        return PROCESS.all


@dataclass(frozen=True)
class Memory:
    """All of it.  ``after`` is resident memory once ``context`` tokens are held; ``peak`` the most at any time.

    Attributes:
        parts: what it is made of, the margin among them.
        loaded: resident bytes at the worst moment of ``load``.
        opened: the same of opening the draft, which happens when a method first needs it; 0 = none.
    """

    parts: tuple[MemoryPart, ...]
    loaded: int = 0
    opened: int = 0

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
    """Predict the memory of running a bundle in this way; from its manifest alone, no file is opened.

    Args:
        manifest: of the bundle.
        use: how it is run.
        process: resident bytes of a process before loading (``Profile.process_bytes``); None = as measured elsewhere.
    """
    target, base = manifest.target, PROCESS
    if process is not None:  # in the proportions of the default
        private = process * PROCESS.private // PROCESS.all
        base = replace(PROCESS, private=private, file=process - private)
    tokenizer = manifest.files["tokenizer.json"].size if "tokenizer.json" in manifest.files else 0
    method = METHODS.get(use.method)  # None: a proposer of the caller's own
    part = manifest.beside(method.needs if method else "")
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
        MemoryPart("text", use.batch * use.context * each, note=f"{each} bytes a token"),
    ]
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
    rows, held = min(use.chunk, use.context), use.batch * min(use.context, part.facts.context)
    if native:
        session, code, scratch = SESSION + int(SESSION_GRAPH * file), 0, native_scratch(part, use, rows, draft)
    else:
        session, code = STOCK_SESSION + int(STOCK_GRAPH * file), 0 if draft else STOCK_CODE
        scratch = stock_scratch(part, use, rows)
    weights = weight_parts(part, manifest.files)
    tables = looked_up(weights.table, weights.row, held)
    tables += min(weights.angles, min(use.context, part.facts.context) * weights.position)
    layers = []
    if native:
        matrices = MemoryPart(
            "weights", file=needs(weights, groups), note=f"{part.format}, mapped, as far as it is used"
        )
        if weights.layer_table:
            stays = f"their rows of {weights.layer_table / 1e9:.2f} GB that stay in the file"
            own = looked_up(weights.layer_table, weights.layer_row, held)
            layers = [MemoryPart("layer embeddings", file=own, note=stays)]
    else:
        stock = stock_weights(part, weights)
        tables += looked_up(stock.table, stock.row, held)
        note = f"{part.format}, packed by ONNX Runtime; scales stay mapped"
        matrices = MemoryPart("weights", stock.packed, stock.mapped, stock.loading, note)
    kv, kept = kv_bytes(part, use, native, draft)
    found = [
        matrices,
        MemoryPart("tables", file=tables, note="rows of the embedding, angles of positions"),
        *layers,
        MemoryPart("session", session, code, note="the graph as it is run"),
        MemoryPart("kv", kv, note=f"{use.batch} x {use.context} tokens, {kept}"),
        MemoryPart("scratch", scratch, note=f"of a pass over {rows} rows"),
        MemoryPart("logits", _logits(part, use, native, draft, groups), note="rows of logits that leave the LM head"),
    ]
    if part.source is not None:
        found += source_parts(manifest, part, use, draft)
    if part.tower is not None and native:
        found += tower_parts(manifest, part, part.tower, use)
    return [replace(one, name=f"{lead}{one.name}") for one in found]


def source_parts(manifest: Manifest, part: ModelPart, use: RunOptions, draft: bool) -> list[MemoryPart]:
    """List what reading sources takes: the encoder, its pass, and a memory for each sequence."""
    rows, kv = source_rows(part, use.context), model_kv(part, use, draft)
    kept = memory_bytes(part, kv, rows, use.batch)
    found = [MemoryPart("memories", kept, note=f"{use.batch} sources of {rows} rows, and the last one")]
    encoder = part.encoder
    if encoder is None:
        return found
    matrices, table = encoder_weights(manifest, encoder, rows)
    graph = manifest.files.get(encoder.graphs[NATIVE].file)
    scratch = native_scratch(encoder, replace(use, context=rows), rows) + working_bytes(encoder, kv, rows)
    return [
        *found,
        MemoryPart("encoder", file=matrices + table, note=f"{encoder.format}, mapped, as far as it is used"),
        MemoryPart("encoder session", SESSION + int(SESSION_GRAPH * (graph.size if graph else 0))),
        MemoryPart("encoder scratch", scratch, note=f"of a pass over {rows} rows"),
    ]


def tower_parts(manifest: Manifest, part: ModelPart, tower: ModelPart, use: RunOptions) -> list[MemoryPart]:
    """List what images or sound take: a tower and what stands around it, a pass over one piece, and rows of one each.

    A recording is planned for as long as a transcript's windows are, 30 s.
    """
    sides, rows = part.front, tower.facts.context
    graphs = sum(manifest.files[one.graphs[NATIVE].file].size for one in sides)
    working = native_scratch(tower, replace(use, context=rows), rows)
    working += working_bytes(tower, encoder_attention(tower), rows)
    if part.sound is not None:
        working += heard_bytes(part.sound, part, rows)
    columns, name = part.facts.hidden * (1 + (part.image.deepstack if part.image else 0)), "images"
    most = part.image.most if part.image else 0
    if part.sound is not None:
        most, name = min(part.sound.most, part.sound.front.rows(WINDOW_SAMPLES // HOP)), "recordings"
    weights = sum(manifest.files[one.weights].size for one in sides)
    note = f"{tower.format}, and its projectors, mapped, as far as they are used"
    return [
        MemoryPart("tower", file=weights, note=note),
        MemoryPart("tower sessions", len(sides) * SESSION + int(SESSION_GRAPH * graphs)),
        MemoryPart("tower scratch", working, note=f"of a pass over {rows} rows"),
        MemoryPart(name, use.batch * 4 * most * columns, note=f"{use.batch} x {most} rows of {columns}"),
    ]


def heard_bytes(sound: SoundPart, part: ModelPart, rows: int) -> int:
    """Bytes of what a tower over sound and convolutions before it read, and of what the latter give.

    A row that is read lies in an array, in the buffer of the pass, in its scratch, and in the form that is multiplied.
    """
    convolutions, front = part.convolutions or [], sound.front
    if isinstance(front, WhisperFront):
        return READ * rows * 3 * front.features.columns
    found = READ * rows * front.halved(front.bands) * convolutions[-1].facts.hidden
    for at, one in enumerate(convolutions):
        width = one.facts.hidden
        found += one.facts.context * (READ * 9 * (width if at else 1) + 2 * 4 * width)
    return found


def model_kv(part: ModelPart, use: RunOptions, draft: bool) -> KvFormat:
    """How a model's native cache is kept; a draft's as exactly as its weights allow."""
    if draft:
        return ATTENTION[exact_attention(part)]
    return with_copy(ATTENTION[use.attention or default_attention(part)], use.draft_attention)


def kv_bytes(part: ModelPart, use: RunOptions, native: bool, draft: bool = False) -> tuple[int, str]:
    """(resident bytes of keys and values when the contexts of a batch are full, what they are made of)."""
    facts, tokens = part.facts, min(use.context, part.facts.context)
    room = tokens + part.headroom
    if native:
        kv = model_kv(part, use, draft)
        there = use.batch * kv.nbytes(facts, -(-room // KV_BLOCK) * KV_BLOCK)
        # the slots of a batch lie in one array, each with room of its own behind its tokens
        used = use.batch * kv.nbytes(facts, tokens)
        # whether rows are exact is tried on a slot of its own where all others are a batch's
        tried = kv.nbytes(facts, min(room, TRIED)) if use.batch > 1 and use.method != AR and not draft else 0
        return _touched(used, there, use.batch) + tried, f"keys {kv.keys}, values {kv.values}"
    capacity = -(-room // ROUND_CAPACITY) * ROUND_CAPACITY
    row = facts.kv_heads * facts.head_dim * 4
    arrays = 2 * facts.layers * use.batch
    return arrays * _touched(row * tokens, row * capacity, facts.kv_heads), "float32"


def _touched(used: int, there: int, pieces: int) -> int:
    """Resident bytes of an array of which some were written, in so many pieces."""
    return used if there < 2 * HUGE else min(there, used + pieces * HUGE // 2)


def checkpoint_bytes_of(part: ModelPart, use: RunOptions) -> int:
    """Of a checkpoint of the target's states; 0 = none are taken: there are no states, or coded keys beside them."""
    return 0 if model_kv(part, use, False).ring else checkpoint_bytes(part.facts)


def native_scratch(part: ModelPart, use: RunOptions, rows: int, draft: bool = False) -> int:
    """Of the largest pass of native operators (native/pass.h, Scratch): the prefill's."""
    facts, form = part.facts, part.format
    tokens = min(use.context, facts.context)
    attended, dim = facts.heads * max(facts.dims, default=facts.head_dim), padded_dim(facts)
    floats = facts.hidden + attended + (facts.intermediate if form == "w8a8" else 0)
    if heads := facts.delta:  # what the rule reads and gives, and what is behind its convolution, of the last pass too
        inner = max(heads.values * heads.value_dim, attended)
        floats += heads.mixed + 2 * inner + 2 * heads.values + 2 * state_width(facts)
    elif facts.convolutions:
        floats += 4 * facts.hidden
    floats += facts.hidden + 2 * facts.layer_embedding if facts.layer_embedding else 0
    if mixed := facts.experts:  # rows among those sent to experts: what goes in, between, and out
        floats += mixed.chosen * (facts.hidden + mixed.inner) + mixed.count
        floats += mixed.chosen * (_act_bytes(part, facts.hidden) + _act_bytes(part, mixed.inner)) // 4
    acts = sum(_act_bytes(part, width) for width in (facts.hidden, attended, facts.intermediate))
    coded = model_kv(part, use, draft).keys in ("nomad1", "nomad2")
    query = facts.heads * (QUERY + dim * (4 + 1 + (16 if coded else 0)))
    splits = -(-tokens // SPLIT)
    partial = facts.heads * splits * (dim + TILE) * 4 if splits else 0
    return rows * (4 * floats + acts + query + partial)


def _act_bytes(part: ModelPart, width: int) -> int:
    """Of a row of activations, in the form that matrices multiply."""
    return 4 * width if part.format == "fp32" else -(-width // 64) * 2 * ACT


def stock_scratch(part: ModelPart, use: RunOptions, rows: int) -> int:
    """Of the largest pass of stock operators, in ONNX Runtime's arena: the activations of a layer.

    Attention adds nothing that grows with the text, which ONNX Runtime 1.31 computes in tiles, unless heads are wide:
    then it keeps the scores of all heads (docs/runtime.md).
    """
    facts = part.facts
    attended = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
    activations = 4 * facts.hidden + 3 * attended + 3 * facts.intermediate
    whole = any(graph.least_length for graph in part.graphs.values())
    scores = facts.heads * min(use.context, facts.context) if whole else 0
    return 4 * (rows + 1) * (activations + scores)  # and the dummy row of a gated graph


def _logits(part: ModelPart, use: RunOptions, native: bool, draft: bool, groups: list[str]) -> int:
    """Of rows of logits that leave the LM head, and what sampling makes of the target's; and of a group of heads.

    Of heads native operators give only the best.
    """
    facts, cut = part.facts, part.head_vocab.size if part.head_vocab else part.facts.vocab
    drafts = use.method != AR
    rows = PROBED if drafts else 0
    if not (native and use.greedy):
        rows = max(rows, use.gamma + 1 if drafts else 1)
    # float64: what the distribution of a row is made from, and the drafter's distribution of every guess
    drawn = 0 if use.greedy or draft else DRAWN + (use.gamma if drafts else 0)
    heads = 0 if native else max((group.count for group in part.heads if group.name in groups), default=0)
    return 4 * rows * (cut if part.cut else facts.vocab) + 8 * drawn * facts.vocab + 4 * heads * cut
