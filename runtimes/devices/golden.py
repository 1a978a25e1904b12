"""The golden step: passes of a bundle on a device, compared with the CPU's and with each other."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.runtimes.devices.model import NARROW, WIDE, DeviceModel
from edgespec.runtimes.devices.slot import DeviceSlot
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import ModelPart, Precision
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.slots.cpu import cpu_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

WIDE_PROBE = 72  # tokens: more than the kernels for few rows take


class GoldenStep(NamedTuple):
    """How far a device's logits are from what they should be: root mean squares of differences over that of the logits.

    Attributes:
        precision: of the graphs that were taken.
        cpu: the device from the CPU, in narrow passes.
        passes: the worst row of several passes, of a tree and of what it leaves in the cache, from the same row in a
            pass over the whole text, both on the device: whatever its kernels round, these round it alike.
        wide: a pass of many rows from passes of few, on the device: attention has another kernel for many rows, and on
            software Vulkan that one is wrong.
    """

    precision: Precision
    cpu: float
    passes: float
    wide: float


def try_here(
    bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool, threads: int | None
) -> GoldenStep:
    """Make the golden step in this process.

    Raises:
        BundleError, DeviceError: see ``DeviceModel``; also a device that fails in a pass.
    """
    target = bundle.manifest.target
    model = DeviceModel(bundle.path, target, device, strict, precision)
    return golden_step(bundle.path, target, model, threads)


def golden_step(folder: Path, part: ModelPart, model: DeviceModel, threads: int | None) -> GoldenStep:
    """Compare the device with the CPU, and with itself."""
    operators = choose_operators("auto", part)
    reference = cpu_slot(Model(folder, part, operators.graph(part, strict=False), threads), context=128)
    text = np.random.default_rng(11).integers(0, part.facts.vocab, WIDE_PROBE)
    before, model.most_rows = model.most_rows, WIDE
    try:
        slot = DeviceSlot(model, context=128)
        slot.chunk = NARROW
        logits = _in_passes(slot, text)
        return GoldenStep(
            model.precision,
            _difference(logits, _in_passes(reference, text)),
            _worst_row(logits, _at_once(slot, text)),
            _difference(_by(slot, text, WIDE), _by(slot, text, NARROW)),
        )
    finally:
        model.most_rows = before


PARENTS = np.array([-1, 0, 0, 1])


def _in_passes(slot: Slot, text: NDArray[np.int64]) -> NDArray[np.float32]:
    """A prefill, two rows, a tree of which row 0 and its second child are kept, and a row: logits [7, vocab]."""
    slot.follow([])
    slot.prefill(text[:6].tolist())
    logits = [slot.forward(text[6:8]).logits.copy()]
    slot.keep([0, 1])
    logits.append(slot.forward(text[8:12], PARENTS).logits.copy())
    slot.keep([0, 2])
    logits.append(slot.forward(text[:1]).logits.copy())
    return np.concatenate(logits)


def _at_once(slot: Slot, text: NDArray[np.int64]) -> NDArray[np.float32]:
    """The same logits of two whole texts, one along each branch of the tree."""
    found = []
    for path in ([8, 9, 11], [8, 10, 0]):
        slot.follow([])
        found.append(slot.forward(np.concatenate([text[:8], text[path]])).logits.copy())
    first, second = found
    return np.stack([first[6], first[7], first[8], first[9], second[9], first[10], second[10]])


def _by(slot: Slot, text: NDArray[np.int64], rows: int) -> NDArray[np.float32]:
    """The text in passes of so many rows: logits [tokens, vocab]."""
    text, logits = text[: min(len(text), slot.context - 1)], []
    slot.follow([])
    for at in range(0, len(text), rows):
        piece = text[at : at + rows]
        logits.append(slot.forward(piece).logits.copy())
        slot.keep(range(len(piece)))
    return np.concatenate(logits)


def _worst_row(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """The largest difference of a row; NaN if there is one."""
    return float(np.max([_difference(our[None], their[None]) for our, their in zip(ours, theirs, strict=True)]))


def _difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Root mean square of the difference, over that of the logits around their mean; [rows, vocab] each."""
    scale = float(np.sqrt(np.mean(np.square(theirs - theirs.mean(-1, keepdims=True)))))
    return float(np.sqrt(np.mean(np.square(ours - theirs)))) / max(scale, 1e-9)
