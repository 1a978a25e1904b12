"""A model whose graph optimum or transformers exports: its location, and its facts from config.json and the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError, ExportError, UnsupportedModel, install_hint
from edgespec.export.architectures import ADDING, Architecture, describe, refusal, text_kind
from edgespec.export.architectures.refused import modalities, refuse_encoder, refuse_senses
from edgespec.export.architectures.settings import part_of
from edgespec.export.architectures.sights import READ
from edgespec.export.bundle.progress import Progress
from edgespec.export.bundle.sizes import MODEL
from edgespec.export.bundle.source_model import Writing, WrittenModel
from edgespec.export.drafters.head_choice import HeadChoice
from edgespec.export.foreign.graph import ForeignGraph, choose_strict
from edgespec.export.foreign.write import (
    HEADROOM,
    WORK,
    capture_graph,
    check_native,
    exporter_missing,
    foreign_parity,
    write_foreign,
)
from edgespec.export.measuring.reading import Reading
from edgespec.export.quantization.levels import BLOCKS
from edgespec.export.quantization.quantizer import QUANTIZERS
from edgespec.export.quantization.weights import DEFAULT_QUANTIZER, WeightChoice
from edgespec.export.source.ct2_files import spec_of
from edgespec.export.source.source import Checkpoint
from edgespec.export.source.stored import read_object
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.manifest import ModelFacts, ModelPart, Origin, Precision, SkipSetPart
from edgespec.runtimes.files.operators import WantedOperators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.cpu import rows_exact
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.translation import Translation

GRAPH = "model.onnx"
# the same fact by the names that architectures give it
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim",),
    "intermediate": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx"),
}


@dataclass(frozen=True)
class Folder:
    """Source of a model; ``notes``: messages for the user."""

    path: Path
    notes: tuple[str, ...] = ()


@dataclass
class ForeignModel:
    """A decoder whose graph is not edgespec's."""

    arch: ClassVar[None] = None  # edgespec does not know the architecture of its graph
    source: Folder  # the folder of config.json and the tokenizer's files
    config: dict[str, Any]  # the parsed config.json
    facts: ModelFacts  # sizes; by config.json until the graph is opened, which knows better
    file: Path | None  # the graph; None = transformers is to make it
    translation: Translation | None = None  # it is a draft with another tokenizer
    origin: Origin = "optimum"  # who made the graph

    @classmethod
    def open(cls, path: Path, context: int | None) -> ForeignModel:
        """Open a folder that holds an export of optimum's, or a checkpoint that transformers can export here.

        Raises:
            UnsupportedModel: no graph is there, and no exporter either.
            ExportError: unreadable, incomplete, or a context beyond the model's.
        """
        file = find_graph(path)
        home = next((at for at in (path, path / "onnx") if (at / "config.json").is_file()), path)
        config = read_object(home / "config.json", "copy the whole export, or give a model folder")
        if what := modalities(config):
            raise refuse_senses(path, what, text_kind(config), READ)
        refuse_encoder(path, describe(config), config)
        if file is None:
            if missing := exporter_missing():
                raise unsupported(path, config, missing)
            Checkpoint.open(path)  # weights are there, and no pickles
        facts = _facts(home / "config.json", config, context)
        model = cls(Folder(home), config, facts, file, origin="transformers" if file is None else "optimum")
        if file is not None:
            model.open_graph()
        limit = model.facts.context
        if context is not None and not 1 < context <= limit:
            raise ExportError(
                f"--context {context}: expected 2 to {limit}, the model's own limit less {HEADROOM} rows to measure "
                "with"
            )
        model.facts = model.facts.model_copy(update={"context": context or limit})
        return model

    def weight_bytes(self, choice: WeightChoice, operators: WantedOperators) -> dict[str, int]:
        """Return the bytes of the weight file, without alignment; without the graph they are estimated from shapes."""
        if self.file is not None:
            graph = ForeignGraph(self.file)
            sizes = {name: tuple(tensor.dims) for name, tensor in graph.initializers.items()}
            matrices = {matrix.weight: (matrix.n, matrix.k) for matrix in graph.matrices()}
        else:
            source = Checkpoint.open(self.source.path)
            sizes = {name: source.shape(name) for name in source.index}
            matrices = {name: (shape[0], shape[1]) for name, shape in sizes.items() if len(shape) == 2}
        total = 0
        for name, shape in sizes.items():
            # stays float32, even if the tied LM head does not
            looked_up = shape[:1] == (self.facts.vocab,) and len(shape) == 2
            if choice.format in BLOCKS and name in matrices:
                n, k = matrices[name]
                form = BLOCKS[choice.head if choice.head and n == self.facts.vocab else choice.stored]
                _, blocks, width = form.stock_shape(n, k)
                total += n * blocks * (width + 4)
                if not looked_up:
                    continue
            total += 4 * int(np.prod(shape))
        return {MODEL: total}

    @property
    def remedies(self) -> list[str]:
        return []

    def limit(self, context: int) -> None:
        self.facts = self.facts.model_copy(update={"context": min(context, self.facts.context)})

    @property
    def reformats(self) -> bool:
        """Whether it can be written in several formats."""
        return False

    def share_encoder(self, target: Architecture | None) -> None:
        """Do nothing: it has no encoder."""

    def equip(self, heads: HeadChoice) -> None:
        assert not heads.trained, "refused by ``refuse_target``"

    def cut(self, tokens: NDArray[np.int64]) -> None:  # [size]
        raise AssertionError("refused by ``refuse_draft``")

    def write(self, writing: Writing) -> WrittenModel:
        """Write a part whose graph is not edgespec's; it is captured now unless it exists."""
        what, choice = writing.what, writing.choice
        if self.file is None:
            writing.progress("transformers", 0, 1, f"{what}: transformers makes the graph")
        graph = self.open_graph(writing.folder / WORK / what)
        if choice.quantizer is not None and choice.quantizer.calibrated:  # a draft: its inputs are not known here
            choice = replace(choice, quantizer=QUANTIZERS[DEFAULT_QUANTIZER])
        writing.progress("weights", 0, 1, what)
        folder = writing.folder / writing.prefix

        def quantized(done: int, of: int) -> None:
            writing.progress("quantize", done, of, what)

        written = write_foreign(
            folder,
            graph,
            self.facts,
            choice,
            draft=writing.draft,
            prefix=writing.prefix,
            progress=quantized,
        )
        written = replace(written, part=check_native(writing.folder, written.part, writing.threads))
        if writing.draft or graph.ports.single:
            return written

        def exact(part: ModelPart) -> bool:
            try:
                model = Model(folder, part, "strict", writing.threads)
                model.pairs = False  # the graph itself is to see to it
                return rows_exact(open_slot(model))
            except BundleError:  # a graph that cannot be changed so
                return False

        return replace(written, part=choose_strict(folder, written.part, exact))

    def parity(
        self, written: WrittenModel, slot: Slot, tokens: Sequence[int], progress: Progress, read: Reading | None = None
    ) -> dict[str, Any]:
        assert self.file is not None, "the graph has been written"
        progress("parity", 0, 1, "the float32 graph")
        return foreign_parity(self.file, written.part, written.errors, slot, tokens)

    def for_device(
        self, writing: Writing, part: ModelPart, device: DeviceName, precision: Precision, skip: SkipSetPart | None
    ) -> ModelPart:
        """Return a draft's part as it is: it stays on the CPU."""
        return part

    def provenance(self) -> dict[str, Any]:
        graph = self.open_graph().proto
        return {"traits": [], "graph": f"{graph.producer_name} {graph.producer_version}".strip() or "unknown"}

    def open_graph(self, work: Path | None = None) -> ForeignGraph:
        """Open the graph; without one transformers exports it into the new folder ``work``."""
        if self.file is None:
            assert work is not None
            capture_graph(self.source.path, work)
            self.file = work / GRAPH
        graph = ForeignGraph(self.file)
        self.origin, ports = graph.origin, graph.ports
        kv_heads, head_dim = ports.heads or (1, max(1, -(-ports.values_per_token // (2 * self.facts.layers))))
        known = {"kv_heads": kv_heads, "head_dim": head_dim}
        if ports.heads:
            known["layers"] = len(ports.cache) // 2
        if ports.vocab is not None:
            known["vocab"] = ports.vocab
        if self.facts.heads % kv_heads:
            raise ExportError(
                f"{self.file}: has {kv_heads} KV heads, and config.json {self.facts.heads} heads: expected a multiple",
                "give the config.json that the graph was exported with",
            )
        self.facts = self.facts.model_copy(update=known)
        return graph


def is_foreign(path: Path) -> bool:
    """Whether a model goes through another exporter: edgespec does not emit it, or only a graph is there."""
    if not path.is_dir() or spec_of(path) is not None:
        return False
    config = next((at / "config.json" for at in (path, path / "onnx") if (at / "config.json").is_file()), None)
    if config is None or (path / "adapter_config.json").is_file():
        return find_graph(path) is not None
    own = text_kind(read_object(config, "copy the whole export, or give a model folder")) is not None
    return find_graph(path) is not None and not any(path.glob("*.safetensors")) if own else True


def find_graph(path: Path) -> Path | None:
    """Return the graph of an export by optimum in a folder or its sub-folder ``onnx``; None = without graphs.

    Raises:
        ExportError: there are other graphs, but not that one.
    """
    for folder in (path, path / "onnx"):
        if (folder / GRAPH).is_file():
            return folder / GRAPH
    others = sorted(file.name for folder in (path, path / "onnx") for file in folder.glob("*.onnx"))
    if others and not any(path.glob("*.safetensors")):
        raise ExportError(
            f"{path}: has {others[0]}, but no {GRAPH}: expected one graph with a cache, in float32",
            "export it with `optimum-cli export onnx --task text-generation-with-past`",
        )
    return None


def _facts(file: Path, config: dict[str, Any], context: int | None) -> ModelFacts:
    """Return the facts by config.json; values that decoding needs must exist, others may be derived."""

    def read(fact: str, default: int | None = None) -> int:
        found = [(name, config[name]) for name in _NAMES[fact] if config.get(name) is not None]
        name, value = found[0] if found else (_NAMES[fact][0], default)
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):  # a size for each layer
            value = max(value)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            hint = "say how many tokens it was made for: --context N" if fact == "context" else None
            raise ExportError(f"{file}: expected a positive integer {name}, got {value!r}", hint)
        return value

    kinds = config.get("layers_block_type", config.get("layer_types"))  # of its layers; some do not count them
    hidden, heads = read("hidden"), read("heads", 1)  # without attention: one
    return part_of(
        ModelFacts,
        file,
        architecture=describe(config),
        layers=read("layers", len(kinds) if isinstance(kinds, list) else None),
        hidden=hidden,
        intermediate=read("intermediate", 4 * hidden),
        heads=heads,
        kv_heads=read("kv_heads", heads),
        head_dim=read("head_dim", max(1, hidden // heads)),
        vocab=read("vocab"),
        # positions may be unbounded (ALiBi): then the limit is what was asked for
        context=max(2, read("context", context and context + HEADROOM) - HEADROOM),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def unsupported(path: Path, config: dict[str, Any], missing: str) -> UnsupportedModel:
    """Return the error for an architecture that is not emitted; ``missing`` says why transformers cannot help."""
    return UnsupportedModel(
        f"{path}: {refusal(describe(config))}; others go through transformers, but {missing}",
        f"{install_hint('transformers')}, or give the folder that `optimum-cli export onnx --model MODEL --task "
        f"text-generation-with-past DIR` wrote elsewhere; {ADDING}",
    )
