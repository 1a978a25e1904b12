"""LoRA adapters that are loaded with a model of native operators, and chosen by each row of a pass (adapters.h)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from edgespec.errors import BundleError, ExportError, UnsupportedModel, unknown_name
from edgespec.runtimes.files.draft_adapter import DRAFT, DraftAdapter
from edgespec.runtimes.files.lora import AT_EXPORT, LowRankPair, digest, read_pairs
from edgespec.runtimes.slots.handles import ADDRESS, NUMBER, Functions

AS_STORED = (
    "apertus", "exaone4", "gemma", "gemma2", "gemma3_text", "hunyuan_v1_dense", "lfm2", "llama", "ministral3",
    "mistral", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2",
)  # fmt: skip
"""Architectures whose matrices of attention and MLP are, under their own names, those of the checkpoint."""
ROW = 1 << 32  # times the number of an adapter, in the line of a plan that names slots


@cache
def _functions() -> Functions:
    signatures = {
        "close": (None,),
        "use": (ctypes.c_int,),
        "begin": (NUMBER,),
        "add": (NUMBER, ctypes.c_char_p, *[NUMBER] * 3, ADDRESS, ADDRESS, ctypes.c_double, NUMBER),
        "bytes": (NUMBER,),
    }
    return Functions("adapters", signatures, (ctypes.c_char_p,), slow=True)


class AdapterStore:
    """The adapters of one graph of native operators.

    Args:
        graph: its file.
        folders: of the adapters, by name; ``DRAFT`` is the one that the model drafts for itself with.
        architecture: of the model.

    Attributes:
        numbers: of the adapters by name, from 1 on; 0 is the model without one.
        digests: of what each computes, by number.
        draft: number of that one, and its description; None = there is none.
        nbytes: bytes of all of them.
        draft_bytes: bytes of that one.

    Raises:
        BundleError: an adapter is damaged, of another model, or of a kind that cannot be added to rows.
    """

    def __init__(self, graph: Path, folders: Mapping[str, Path], architecture: str) -> None:
        if architecture not in AS_STORED:
            raise BundleError(
                f"adapters of {architecture} models cannot be added when a bundle runs: an export reorders or scales "
                "matrices of such models",
                AT_EXPORT,
            )
        self._functions, self._graph = _functions(), graph
        self._of = self._functions.of
        self.digests: dict[int, str] = {}
        self._handle = self._functions.try_open(os.fsencode(graph))
        if self._handle is None:
            raise BundleError(f"{graph}: takes no adapters: {self._functions.why}", "export the bundle again")
        self.numbers = {name: self._begin(folder) for name, folder in folders.items() if name != DRAFT}
        others = int(self._of["bytes"](self._handle))
        self.draft = None
        if DRAFT in folders:
            self.draft = self._begin(folders[DRAFT]), DraftAdapter.read(folders[DRAFT])
        self.nbytes = int(self._of["bytes"](self._handle))
        self.draft_bytes = self.nbytes - others

    def _begin(self, folder: Path) -> int:
        """Add the adapter of a folder -> its number."""
        number = int(self._of["begin"](self._handle))
        if number < 0:
            raise BundleError(f"{folder}: {self._functions.why}")
        try:
            for pair in read_pairs(folder):
                self._add(folder, pair)
            self.digests[number] = digest(folder)
        except ExportError as error:
            raise BundleError(error.message, error.hint) from error
        return number

    def _add(self, folder: Path, pair: LowRankPair) -> None:
        a, b = np.ascontiguousarray(pair.a), np.ascontiguousarray(pair.b)
        (rank, inputs), outputs = a.shape, len(b)
        # a base model saved without its head lacks the first part of the name
        for module in dict.fromkeys((pair.module, pair.module.partition(".")[2])):
            name = f"{module}.weight".encode()
            if self._of["add"](
                self._handle, name, rank, inputs, outputs, a.ctypes.data, b.ctypes.data, pair.scale, pair.bits
            ) >= 0:  # fmt: skip
                return
            why = self._functions.why
            if "no such matrix" not in why:
                break
            why = f"{pair.module}.weight: this model has no such matrix that rows can be added to"
        hint = "give the model that the adapter was trained on (base_model_name_or_path in adapter_config.json), or "
        raise UnsupportedModel(f"{folder}: {why}", hint + AT_EXPORT)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the session of the graph that is opened inside, by this thread, add these adapters.

        Raises:
            BundleError: no session took them.
        """
        self._of["use"](self._handle)
        try:
            yield
        finally:
            left = self._of["use"](None)
        if left:
            raise BundleError(f"{self._graph}: its session takes no adapters", "export the bundle again")

    def number(self, name: str | None) -> int:
        """Find the number of an adapter; 0 for None, and an ``InvalidRequest`` for one that is not loaded."""
        if name is None:
            return 0
        if name not in self.numbers:
            raise unknown_name("adapter", name, self.numbers)
        return self.numbers[name]

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._of["close"](self._handle)
            self._handle = None
