"""Options of loading a bundle, and their resolution for a given bundle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypedDict, get_args

from edgespec.declared import copy_with
from edgespec.errors import BundleError, ExportError, InvalidRequest
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.attention import choose_attention
from edgespec.runtimes.files.draft_adapter import DRAFT
from edgespec.runtimes.files.formats import CHECKPOINTS, Attention, listed
from edgespec.runtimes.files.lora import adapter_bytes
from edgespec.runtimes.files.manifest import Manifest, Operators, Precision
from edgespec.runtimes.files.operators import WantedOperators, choose_operators
from edgespec.runtimes.images.limits import limited
from edgespec.runtimes.ort.session import check_threads, default_threads
from edgespec.runtimes.slots.slot import PREFILL_CHUNK
from edgespec.signatures import takes

WeightPrecision = Literal["full", "high"]  # of int8 weights: both planes, or the high one
LONGEST_ON_DEVICE = 4096  # tokens of a slot on a device where no context is asked for: its buffers do not grow
GAMMA = 8  # maximum draft tokens per round of adaptive control


class LoadChanges(TypedDict, total=False):
    """Fields of ``LoadOptions`` by name, for editors."""

    threads: int | None
    context: int | None
    strict: bool
    check: bool
    operators: WantedOperators
    precision: WeightPrecision
    device: DeviceName
    device_precision: Precision | None
    attention: Attention | None
    draft_attention: Attention | None
    ngram_store: str | os.PathLike[str] | None
    prompt_cache: bool
    image_rows: int | None
    budget: str | int | None
    adapters: Mapping[str, str | os.PathLike[str]] | None
    draft_adapter: str | os.PathLike[str] | None


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a bundle.

    Attributes:
        threads: of ONNX Runtime; None = all processors this process may use.
        context: maximum tokens of a sequence; None = the limit of the export.  Memory grows with use.
        strict: use the graph whose rows have the same bits in every pass; on stock operators it costs about 4 % of a
            step, on native ones nothing.
        check: compare the SHA-256 of every file first.
        operators: auto, stock or native.
        precision: full, or high: for int8 weights in two planes only the high one is read.  That is a model of 4 bits,
            with a different text and less memory; native operators only.
        device: cpu, or webgpu if the bundle has graphs for it (``edgespec export --device webgpu``) and this machine
            has a GPU; its first use of a bundle is compared with the CPU.
        device_precision: fp16 or fp32: which of its graphs for the device; None = fp16 if the bundle has such graphs
            and the device has float16 shaders, else fp32.
        attention: KV-cache format of native operators: f32, f16, int8, int4, nomad or nomad2 (the last three need
            tables:  ``edgespec export --attention``); None = the export's default.
        draft_attention: int4, nomad or nomad2: self-drafts read such keys, verification those of ``attention``, so the
            text stays that of plain decoding.
        ngram_store: a file of ``edgespec ngram build``, which method ngram also searches.  It is only read: no part of
            a request is ever stored in it.
        prompt_cache: whether prompts that take long to read are cached on the disk for later processes; the variable
            ``EDGESPEC_PROMPT_CACHE=0`` turns the cache off for all.
        image_rows: maximum rows of an image, each as a token of the context; None = the bundle's maximum.
        budget: maximum memory of this process, such as "1.5GiB", mapped files included; a request that would exceed it
            gets a cheaper method, with the reason, or is refused.  None = the private memory that is free when loading;
            "off" = memory is not checked.
        adapters: folders of LoRA adapters by name, as PEFT saves them.  A request chooses one by its setting
            ``adapter``; native operators only.
        draft_adapter: folder of the LoRA adapter that method uno drafts with (``edgespec train selfdraft``, or SGLang's
            layout); native operators only.
    """

    threads: int | None = None
    context: int | None = None
    strict: bool = True
    check: bool = True
    operators: WantedOperators = "auto"
    precision: WeightPrecision = "full"
    device: DeviceName = "cpu"
    device_precision: Precision | None = None
    attention: Attention | None = None
    draft_attention: Attention | None = None
    ngram_store: str | os.PathLike[str] | None = None
    prompt_cache: bool = True
    image_rows: int | None = None
    budget: str | int | None = None
    adapters: Mapping[str, str | os.PathLike[str]] | None = None
    draft_adapter: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("threads", "context", "image_rows"):
            number = getattr(self, name)
            if not (number is None or isinstance(number, SupportsIndex)):
                raise InvalidRequest(f"{name} is {number!r}: expected a whole number")
        for name in ("strict", "check", "prompt_cache"):
            if not isinstance(switch := getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {switch!r}: expected True or False")
        for name, known in (("operators", get_args(WantedOperators)), ("precision", get_args(WeightPrecision))):
            if (given := getattr(self, name)) not in known:
                raise InvalidRequest(f"{name} {given!r}: expected {listed(known)}")
        if not isinstance(self.device, str):
            raise InvalidRequest(f"device is {self.device!r}: expected a name", "`edgespec devices` shows them")
        self._check_paths()

    def _check_paths(self) -> None:
        for name, what in (("ngram_store", "file"), ("draft_adapter", "folder")):
            if not ((given := getattr(self, name)) is None or isinstance(given, (str, os.PathLike))):
                raise InvalidRequest(f"{name} is {given!r}: expected a {what}")
        if not (self.adapters is None or isinstance(self.adapters, Mapping)):
            raise InvalidRequest(f"adapters is {self.adapters!r}: expected folders by name")
        for name, folder in (self.adapters or {}).items():
            if not isinstance(name, str) or not name or ":" in name or not isinstance(folder, (str, os.PathLike)):
                raise InvalidRequest(f"adapter {name!r} in {folder!r}: expected a name without a colon, and a folder")

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The folders of ``adapters`` as paths, and of ``draft_adapter`` by the name ``DRAFT``."""
        own = {} if self.draft_adapter is None else {DRAFT: self.draft_adapter}
        return {name: Path(folder).expanduser() for name, folder in {**(self.adapters or {}), **own}.items()}

    def changed(self, **changes: Any) -> LoadOptions:
        """Copy with changes on top.

        Args:
            **changes: fields by name.

        Raises:
            InvalidRequest: an unknown name.
        """
        return copy_with(self, "load option", changes)

    def seen(self, manifest: Manifest) -> Manifest:
        """Describe the same bundle with fewer rows an image, where that is asked for.

        Args:
            manifest: of the bundle.

        Raises:
            InvalidRequest: it reads no images, or they have more rows at least.
        """
        parts = {"target": manifest.target}
        if manifest.draft is not None and manifest.draft.image is not None:
            parts["draft"] = manifest.draft
        return manifest.model_copy(
            update={
                name: part.model_copy(update={"image": limited(part.image, self.image_rows)})
                for name, part in parts.items()
            }
        )

    def resolve(self, manifest: Manifest) -> RunOptions:
        """Resolve the options for a bundle on this machine; no file is opened.

        Args:
            manifest: of the bundle.

        Raises:
            BundleError: operators that cannot run.
            InvalidRequest: a context or an attention that the bundle does not have, no threads, or too many.
        """
        most, on_cpu = manifest.target.facts.context, self.device == "cpu"
        if self.context is not None and not 1 < self.context <= most:
            raise InvalidRequest(f"context {self.context}: expected 2 to {most}, what the bundle was exported for")
        check_threads(self.threads)
        if on_cpu and self.device_precision is not None:
            raise InvalidRequest(f"device precision {self.device_precision}: device cpu has none", "leave it out")
        kind = choose_operators(self.operators if on_cpu else "stock", manifest.target).kind
        if self.precision == "high":
            _check_planes(manifest, kind)
        return RunOptions(
            operators=kind,
            context=self.context or (most if on_cpu else min(most, LONGEST_ON_DEVICE)),
            attention=choose_attention(manifest.target, kind, self.attention, self.draft_attention).name,
            draft_attention=self.draft_attention,
            threads=self.threads or default_threads(),
            strict=self.strict or kind == "native",
            device=self.device,
            adapters=sum(map(_adapter_bytes, self.adapter_folders.values())),
        )


takes(LoadChanges, LoadOptions)(LoadOptions.changed)


def _adapter_bytes(folder: Path) -> int:
    try:
        return adapter_bytes(folder)
    except ExportError as error:
        raise BundleError(error.message, error.hint) from error


def _check_planes(manifest: Manifest, kind: Operators) -> None:
    """Refuse high precision for weights without planes."""
    part = manifest.target
    if kind != "native" or part.layout != "native":
        raise InvalidRequest("precision high reads planes of native operators, and this is stock's", "leave it out")
    if not part.planes:
        older = (
            " in one plane, of an older export"
            if "int8" in (part.format, part.head_format) or part.int8_fraction
            else ""
        )
        raise InvalidRequest(
            f"precision high: this bundle's weights are {part.format}{older}, expected int8 in two planes",
            "export with `--format int8`",
        )


@dataclass(frozen=True)
class RunOptions:
    """One way to run a bundle, nothing left open: what memory and speed are predicted for."""

    method: str = "ar"  # plain decoding
    operators: Operators = "native"
    context: int = 512  # tokens held at once, prompt and answer
    # native operators: how keys and values are kept; None = what the bundle was exported for
    attention: Attention | None = None
    gamma: int = GAMMA  # maximum draft tokens per round; nodes of a tree
    batch: int = 1  # sequences decoded together
    threads: int = 2  # of ONNX Runtime
    chunk: int = PREFILL_CHUNK  # rows of a prefill's pass
    greedy: bool = True  # whether only the likeliest token of a row is needed; False = whole rows of logits
    strict: bool = True  # whether a row has the same bits in every pass: always with native operators
    device: DeviceName = "cpu"  # where passes run
    checkpoints: int = CHECKPOINTS  # copies of a model's states that each sequence keeps
    # the coarser keys that self-drafts read, a second copy; None = there is none
    draft_attention: Attention | None = None
    expert_cache: int | None = None  # bytes for weights that are read when a pass needs them; None = they are mapped
    adapters: int = 0  # bytes of LoRA adapters that are loaded with it
