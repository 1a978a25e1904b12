"""Bytes: what a bundle takes while it loads and while it runs, part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgespec.drafters.registry import METHODS, NGRAM
from edgespec.planning.memory import passes
from edgespec.planning.memory import process as fixed
from edgespec.planning.memory import weights as stored
from edgespec.runtimes.files.manifest import Manifest, ModelPart
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.options import RunOptions

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
        """The part of that name; an empty one if there is none."""
        return next((part for part in self.parts if part.name == name), MemoryPart(name))

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        figures = {"peak": self.peak, "after": self.after, "private": self.private, "file": self.file}
        figures |= {"loaded": self.loaded, "opened": self.opened}
        return figures | {"parts": [asdict(part) for part in self.parts]}


def memory_of(manifest: Manifest, use: RunOptions, process: int | None = None) -> Memory:
    """What running a bundle in this way takes; from its manifest alone, no file is opened.

    Args:
        manifest: of the bundle.
        use: how it is run.
        process: resident bytes of a process before loading (``Profile.process_bytes``); None = as measured elsewhere.
    """
    base = fixed.split_process(process)
    target, draft = _model(manifest, manifest.target, use, ""), []
    method = METHODS.get(use.method)  # None: a proposer of the caller's own
    part = manifest.beside(method.needs if method else "")
    if part is not None:
        draft = _model(manifest, part, use, "draft ")
    parts = [
        MemoryPart("process", base.private, base.file, note="Python, ONNX Runtime and other libraries"),
        MemoryPart("libraries", fixed.LOADING.private, fixed.LOADING.file, note="their code for opening a bundle"),
        MemoryPart(
            "runtime", fixed.RUNNING.private, fixed.RUNNING.file, note="thread pools, allocators, code that runs"
        ),
        _tokenizer(manifest),
        *target,
        *draft,
        *_checkpoints(manifest.target, use),
        _text(use),
    ]
    loaded = _opening(parts, "")
    opened = _opening(parts, "draft ") if draft else 0
    known = sum(part.private for part in parts)
    parts.append(MemoryPart("margin", max(LEAST_MARGIN, int(known * MARGIN)), note="what is not known to the byte"))
    return Memory(tuple(parts), loaded, opened)


def is_native(part: ModelPart, use: RunOptions) -> bool:
    """Whether a model's passes are native operators'."""
    return use.operators == "native" and use.device == "cpu" and NATIVE in part.graphs


def _tokenizer(manifest: Manifest) -> MemoryPart:
    entry = manifest.files.get("tokenizer.json")
    kept, loading = fixed.tokenizer_bytes(entry.size if entry else 0)
    return MemoryPart("tokenizer", kept, loading=loading, note=f"{manifest.target.facts.vocab} tokens at most")


def _text(use: RunOptions) -> MemoryPart:
    """Tokens as Python keeps them, and the index of method ngram."""
    each = fixed.TEXT + (fixed.NGRAM if use.method == NGRAM else 0)
    return MemoryPart("text", use.batch * use.context * each, note=f"{each} bytes a token")


def _checkpoints(part: ModelPart, use: RunOptions) -> list[MemoryPart]:
    """Copies of the target's states at earlier lengths of a text."""
    kept = use.batch * use.checkpoints * passes.checkpoint_bytes_of(part, use)
    note = f"{use.batch} x {use.checkpoints} copies of states, to which a text can go back"
    return [MemoryPart("checkpoints", kept, note=note)] if kept else []


def _model(manifest: Manifest, part: ModelPart, use: RunOptions, lead: str) -> list[MemoryPart]:
    """Weights, session, keys and values, and scratch space of the target (``lead`` "") or the draft."""
    native, draft = is_native(part, use), bool(lead)
    method = manifest.methods.get(use.method)
    groups = list(method.heads) if method and not draft else []
    graph = part.graphs[NATIVE] if native else part.graphs.get(part.main)
    file = manifest.files[graph.file].size if graph and graph.file in manifest.files else 0
    weights = stored.weight_parts(part, manifest.files)
    kv = passes.kv_bytes(part, use, native, draft)
    rows = min(use.chunk, use.context)
    if native:
        scratch = passes.native_scratch(part, use, rows, draft)
    else:
        scratch = passes.stock_scratch(part, use, rows)
    logits = passes.logits_bytes(part, use, native, draft) + passes.head_logits(part, use, native, groups)
    return [
        *_weights(part, weights, use, native, groups, lead),
        MemoryPart(
            f"{lead}session",
            fixed.session_bytes(file, not native),
            0 if native or draft else fixed.STOCK_CODE,
            note="the graph as it is run",
        ),
        MemoryPart(f"{lead}kv", kv.bytes, note=f"{use.batch} x {use.context} tokens, {kv.note}"),
        MemoryPart(f"{lead}scratch", scratch, note=f"of a pass over {rows} rows"),
        MemoryPart(f"{lead}logits", logits, note="rows of logits that leave the LM head"),
    ]


def _weights(
    part: ModelPart, weights: stored.WeightParts, use: RunOptions, native: bool, groups: list[str], lead: str
) -> list[MemoryPart]:
    """Matrices, mapped and used in place by native operators, packed into memory by stock ones; and tables."""
    context = min(use.context, part.facts.context)
    tokens = use.batch * context
    angles = min(weights.angles, context * weights.position)
    looked_up = stored.looked_up(weights.table, weights.row, tokens) + angles
    what = "rows of the embedding, angles of positions"
    own = stored.looked_up(weights.layer_table, weights.layer_row, tokens)
    stays = f"their rows of {weights.layer_table / 1e9:.2f} GB that stay in the file"
    embeddings = [MemoryPart(f"{lead}layer embeddings", file=own, note=stays)] if weights.layer_table else []
    if native:
        used, note = stored.needs(part, weights, groups), f"{part.format}, mapped, as far as it is used"
        return [
            MemoryPart(f"{lead}weights", file=used, note=note),
            MemoryPart(f"{lead}tables", file=looked_up, note=what),
            *embeddings,
        ]
    stock = stored.stock_weights(part, weights)
    looked_up += stored.looked_up(stock.table, stock.row, tokens)
    note = f"{part.format}, packed by ONNX Runtime; scales stay mapped"
    matrices = MemoryPart(f"{lead}weights", stock.packed, stock.mapped, stock.loading, note)
    return [matrices, MemoryPart(f"{lead}tables", file=looked_up, note=what)]


def _opening(parts: list[MemoryPart], lead: str) -> int:
    """Resident bytes at the worst moment of opening the target (``lead`` "") or the draft.

    Pages of weights that are used where they are mapped are not read yet; packed ones are there, and what is packed.
    """
    models = ("", lead) if lead else ("",)
    names = {"process", "libraries", "tokenizer"} | {
        f"{model}{part}" for model in models for part in ("weights", "session")
    }
    there = [part for part in parts if part.name in names]
    held = sum(part.private for part in there)
    held += sum(part.file for part in there if part.private)
    return held + max(part.loading for part in there if part.name == f"{lead}weights")
