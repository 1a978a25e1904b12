"""The front door: load a bundle."""

from __future__ import annotations

import os
from pathlib import Path

from edgespec.drafters.ngram_store.store import NGramStore
from edgespec.engine.engine import Engine
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import Precision
from edgespec.runtimes.files.operators import WantedOperators


def load(
    bundle: str | os.PathLike[str] | Path,
    *,
    threads: int | None = None,
    context: int | None = None,
    strict: bool = True,
    check: bool = True,
    operators: WantedOperators = "auto",
    device: DeviceName = "cpu",
    device_precision: Precision | None = None,
    attention: str | None = None,
    draft_attention: str | None = None,
    ngram_store: str | os.PathLike[str] | None = None,
    budget: str | int | None = None,
) -> Engine:
    """Load a bundle.

    Args:
        bundle: its folder.
        threads: of ONNX Runtime; None = all processors this process may use.
        context: most tokens of a sequence; None = what the bundle was exported for.  Memory grows with use.
        strict: use the graph whose rows have the same bits in every pass; on stock operators it costs about 4 % of a
            step, on native ones nothing.
        check: compare the SHA-256 of every file first.
        operators: auto, stock or native.
        device: cpu, or webgpu where the bundle has graphs for it (``edgespec export --device webgpu``) and this machine
            a GPU; its first use of a bundle is compared with the CPU.
        device_precision: fp16 or fp32: which of its graphs for the device; None = fp16 where it has them and the
            device float16 shaders, else fp32.
        attention: how native operators keep keys and values: f32, f16, int8, int4, nomad or nomad2 (the last three
            need tables: ``edgespec export --attention``); None = what the bundle was exported for.
        draft_attention: int4, nomad or nomad2: self-drafts read such keys, verification those of ``attention``, so the
            text stays that of plain decoding.
        ngram_store: a file of ``edgespec ngram build``, where method ngram looks too.  It is only read: nothing of a
            request is ever kept.
        budget: the most memory that this process may take, as in "1.5GiB", mapped files included; requests get a
            cheaper method, with the reason, or are refused where they would pass it.  None = what is free when loading,
            of private memory; "off" = nothing is counted.

    Raises:
        BudgetError: the bundle, or the context asked for, does not fit.
        BundleError: something is missing, short, altered or newer than this version, or cannot run here.
        DeviceError: the device is not there, or gives wrong numbers.
        InvalidRequest: a context or an attention that this bundle does not have.
        StoreError: the store is damaged, newer than this version, or of another tokenizer.
    """
    opened = Bundle.open(bundle, check=check)
    return Engine(
        opened,
        threads=threads,
        context=context,
        strict=strict,
        operators=operators,
        device=device,
        device_precision=device_precision,
        attention=attention,
        draft_attention=draft_attention,
        ngram_store=None if ngram_store is None else NGramStore(Path(ngram_store), check=check),
        budget=budget,
    )
