"""Opening a bundle on a device, and trusting it: its numbers are compared with the CPU's before it is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import DeviceError
from edgespec.runtimes.bundle import Bundle
from edgespec.runtimes.device_model import NARROW, WIDE, DeviceModel
from edgespec.runtimes.devices import DeviceName, driver
from edgespec.runtimes.manifest import ModelPart, Precision
from edgespec.runtimes.operators import choose_operators
from edgespec.runtimes.repack import cache_folder
from edgespec.runtimes.session import Model
from edgespec.runtimes.slot import Slot, open_slot

LONGEST = 4096  # tokens of a slot on a device, where no context was asked for: its buffers do not grow
WIDE_PROBE = 72  # tokens: more than the kernels for few rows take
# root mean square of the difference over that of the logits; int4 and int8 products quantize activations, each provider
# in its own way
MOST_DIFFERENCE = {
    "fp32": {"fp32": 1e-3, "int4": 0.03, "int8": 0.03},
    "fp16": {"fp32": 0.01, "int4": 0.03, "int8": 0.03},
}
# the same between passes of few and of many rows on one device, where only last bits differ, and what levels those flip
MOST_BETWEEN = {
    "fp32": {"fp32": 1e-4, "int4": 5e-3, "int8": 5e-3},
    "fp16": {"fp32": 5e-3, "int4": 5e-3, "int8": 5e-3},
}


def open_on_device(
    bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool, threads: int | None
) -> DeviceModel:
    """The target on a device, after a golden step where this driver has not made one for this bundle yet.

    Raises:
        BundleError: the bundle has no graphs for the device, or not in this precision.
        DeviceError: the device is not there, or its numbers are wrong.
    """
    model = DeviceModel(bundle.path, bundle.manifest.target, device, strict, precision)
    key, known = _key(bundle, model), _known()
    if key not in known:
        narrow, wide = golden_step(bundle.path, bundle.manifest.target, model, threads)
        limit = MOST_DIFFERENCE[model.precision][bundle.manifest.target.format]
        if not narrow <= limit:  # NaN is no agreement either
            raise DeviceError(
                f"device {device} gives wrong numbers here: its logits differ from the CPU's by {narrow:.1%}, "
                f"expected at most {limit:.1%} ({driver(device)})",
                ("load with device precision fp32, or " if model.precision == "fp16" else "")
                + "use device cpu; a newer driver may help",
            )
        rows = WIDE if wide <= MOST_BETWEEN[model.precision][bundle.manifest.target.format] else NARROW
        known[key] = {"difference": narrow, "wide": wide, "rows": rows, "driver": driver(device)}
        _remember(known)
    model.most_rows = int(known[key]["rows"])
    return model


def golden_step(folder: Path, part: ModelPart, model: DeviceModel, threads: int | None) -> tuple[float, float]:
    """Relative differences of logits.

    Returns that between the device and the CPU in narrow passes (a prefill, several rows, a tree, and what it leaves in
    the cache), and that between a wide pass and narrow ones on the device: attention has another kernel for many rows,
    and on software Vulkan that one is wrong.
    """
    operators = choose_operators("auto", part)
    reference = open_slot(Model(folder, part, operators.graph(part, strict=False), threads), context=128)
    tokens = np.random.default_rng(11).integers(0, part.facts.vocab, WIDE_PROBE)
    parents = np.array([-1, 0, 0, 1])

    def narrow(slot: Slot) -> NDArray[np.float32]:
        slot.follow([])
        slot.prefill(tokens[:6].tolist())
        logits = [slot.forward(tokens[6:8]).logits.copy()]
        slot.keep([0, 1])
        logits.append(slot.forward(tokens[8:12], parents).logits.copy())
        slot.keep([0, 2])
        logits.append(slot.forward(tokens[:1]).logits.copy())
        return np.concatenate(logits)

    def whole(slot: Slot, rows: int) -> NDArray[np.float32]:
        text, logits = tokens[: min(WIDE_PROBE, part.facts.context - 1)], []
        slot.follow([])
        for at in range(0, len(text), rows):
            piece = text[at : at + rows]
            logits.append(slot.forward(piece).logits.copy())
            slot.keep(range(len(piece)))
        return np.concatenate(logits)

    before, model.most_rows = model.most_rows, WIDE
    try:
        slot = open_slot(model, context=128)
        slot.chunk = NARROW
        difference = _difference(narrow(slot), narrow(reference))
        return difference, _difference(whole(slot, WIDE), whole(slot, NARROW))
    finally:
        model.most_rows = before


def _difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Root mean square of the difference, over that of the logits around their mean; [rows, vocab] each."""
    scale = float(np.sqrt(np.mean(np.square(theirs - theirs.mean(-1, keepdims=True)))))
    return float(np.sqrt(np.mean(np.square(ours - theirs)))) / max(scale, 1e-9)


def _key(bundle: Bundle, model: DeviceModel) -> str:
    part = bundle.manifest.target
    weights = bundle.manifest.files[part.weights].sha256
    graph = bundle.manifest.files[model.graph.file].sha256
    return hashlib.sha256(f"{driver(model.device)} {weights} {graph}".encode()).hexdigest()


def _file() -> Path:
    return cache_folder() / "devices.json"


def _known() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError):  # absent, or half written by a process that was killed: the step is made again
        return {}
    return found if isinstance(found, dict) else {}


def _remember(known: dict[str, Any]) -> None:
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(json.dumps(known), "utf-8")
    except OSError:  # no cache: the step is made again next time
        return
