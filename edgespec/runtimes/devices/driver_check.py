"""Open a bundle on a device, after comparing its results with the CPU's.

The golden step is a few passes of the bundle on the device, compared with the CPU's and with each other.  It runs in a
separate process, because a driver may crash or never return.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec import errors
from edgespec.errors import DeviceError, EdgespecError
from edgespec.runtimes.devices.model import NARROW, WIDE, DeviceModel, have_precisions
from edgespec.runtimes.devices.slot import DeviceSlot
from edgespec.runtimes.devices.webgpu import DeviceName, driver, require_device
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import ModelPart, Precision
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.files.sealed import read_sealed, write_sealed
from edgespec.runtimes.files.staged import write_staged
from edgespec.runtimes.slots.cpu import cpu_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

SEALED = "devices"  # what the record of golden steps is sealed for
WIDE_PROBE = 72  # tokens: more than the kernels for few rows take
PARENTS = np.array([-1, 0, 0, 1])
SECONDS = 900.0  # software adapters take a minute for a small model
COMMAND = (sys.executable, "-m", "edgespec.runtimes.devices.driver_check")


class Tolerances(NamedTuple):
    """Largest differences that are not a fault, for a precision of activations and a format of weights."""

    # from the CPU: int4 and int8 products quantize activations, each provider in its own way, and float16 products
    # may be summed in float16 (docs/devices.md has what was measured)
    cpu: float
    passes: float  # of the worst row between passes: float16 sums of scores depend on what else a pass has
    wide: float  # between passes of few and of many rows, where only last bits differ, and what levels those flip


MOST: dict[tuple[Precision, Format], Tolerances] = {
    ("fp32", "fp32"): Tolerances(1e-3, 1e-3, 1e-4),
    ("fp32", "int4"): Tolerances(0.03, 0.02, 5e-3),
    ("fp32", "int8"): Tolerances(0.03, 0.02, 5e-3),
    ("fp16", "fp32"): Tolerances(0.03, 0.02, 5e-3),
    ("fp16", "int4"): Tolerances(0.05, 0.03, 5e-3),
    ("fp16", "int8"): Tolerances(0.05, 0.03, 5e-3),
}


class GoldenStep(NamedTuple):
    """Error of a device's logits: root mean squares of differences over that of the logits."""

    precision: Precision  # of the graphs that were taken
    cpu: float  # the device from the CPU, in narrow passes
    # the worst row of several passes, of a tree and of the cache that it leaves, from the same row in a pass over
    # the whole text, both on the device: its kernels round both in the same way
    passes: float
    # a pass of many rows from passes of few, on the device: attention has another kernel for many rows, and on
    # software Vulkan that one is wrong
    wide: float


def open_on_device(
    bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool, threads: int | None
) -> DeviceModel:
    """Open the target on a device, after a golden step if none was made for this driver and bundle yet.

    Raises:
        BundleError: the bundle has no graphs for the device, or not in this precision.
        DeviceError: the device is not there, its numbers are wrong, or the trial of it crashed.
    """
    target = bundle.manifest.target
    have_precisions(target, device, precision)
    key, known = _key(bundle, device, precision, strict), _known()
    if key not in known:
        trial = try_apart(bundle, device, precision, strict, threads)
        check_trial(device, target.format, trial)
        rows = WIDE if trial.wide <= MOST[trial.precision, target.format].wide else NARROW
        known[key] = trial._asdict() | {"rows": rows, "driver": driver()}
        with suppress(OSError):  # no cache: the step runs again next time
            write_sealed(cache_folder() / "devices.json", SEALED, known)
    model = DeviceModel(bundle.path, target, device, strict, known[key]["precision"], bundle.checked)
    model.most_rows = int(known[key]["rows"])
    return model


def check_trial(device: DeviceName, form: Format, found: GoldenStep) -> None:
    """Check that the numbers are right and not NaN.

    Raises:
        DeviceError: with what differs.
    """
    wrong = ""
    most = MOST[found.precision, form]
    if not found.cpu <= most.cpu:
        wrong = f"its logits differ from the CPU's by {found.cpu:.1%}, expected at most {most.cpu:.1%}"
    elif not found.passes <= most.passes:
        wrong = f"rows of one text differ by {found.passes:.1%} between its passes, expected at most {most.passes:.1%}"
    if wrong:
        other = "load with device precision fp32, or " if found.precision == "fp16" else ""
        raise DeviceError(
            f"device {device} gives wrong numbers here: {wrong} ({driver()})",
            f"{other}use device cpu; a newer driver may help",
        )


def _key(bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool) -> str:
    part, files = bundle.manifest.target, bundle.manifest.files
    graphs = [
        files[part.graphs[name].file].sha256 for name in sorted(part.graphs) if part.graphs[name].device == device
    ]
    facts = [driver(), precision, strict, files[part.weights].sha256, graphs]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _known() -> dict[str, Any]:
    try:
        return read_sealed(cache_folder() / "devices.json", SEALED)
    except (OSError, ValueError):  # absent, damaged or invalid: run the step again
        return {}


# -- the golden step ---------------------------------------------------------------------------------------------------


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


def _in_passes(slot: Slot, text: NDArray[np.int64]) -> NDArray[np.float32]:
    """Run a prefill, two rows, a tree of which row 0 and its second child are kept, and a row -> logits [7, vocab]."""
    slot.follow([])
    slot.prefill(text[:6].tolist())
    logits = [slot.forward(text[6:8]).logits.copy()]
    slot.keep([0, 1])
    logits.append(slot.forward(text[8:12], PARENTS).logits.copy())
    slot.keep([0, 2])
    logits.append(slot.forward(text[:1]).logits.copy())
    return np.concatenate(logits)


def _at_once(slot: Slot, text: NDArray[np.int64]) -> NDArray[np.float32]:
    """Compute the same logits of two whole texts, one along each branch of the tree."""
    found = []
    for path in ([8, 9, 11], [8, 10, 0]):
        slot.follow([])
        found.append(slot.forward(np.concatenate([text[:8], text[path]])).logits.copy())
    first, second = found
    return np.stack([first[6], first[7], first[8], first[9], second[9], first[10], second[10]])


def _by(slot: Slot, text: NDArray[np.int64], rows: int) -> NDArray[np.float32]:
    """Run the text in passes of ``rows`` rows -> logits [tokens, vocab]."""
    text, logits = text[: min(len(text), slot.context - 1)], []
    slot.follow([])
    for at in range(0, len(text), rows):
        piece = text[at : at + rows]
        logits.append(slot.forward(piece).logits.copy())
        slot.keep(range(len(piece)))
    return np.concatenate(logits)


def _worst_row(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Find the largest difference of a row; NaN if there is one."""
    return float(np.max([_difference(our[None], their[None]) for our, their in zip(ours, theirs, strict=True)]))


def _difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Divide the root mean square of the difference by that of the logits around their mean; [rows, vocab] each."""
    scale = float(np.sqrt(np.mean(np.square(theirs - theirs.mean(-1, keepdims=True)))))
    return float(np.sqrt(np.mean(np.square(ours - theirs)))) / max(scale, 1e-9)


# -- the separate process ----------------------------------------------------------------------------------------------


def try_apart(
    bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool, threads: int | None
) -> GoldenStep:
    """Run ``try_here`` in another process.

    Raises:
        BundleError, DeviceError: what it raised there.
        DeviceError: the process crashed or took too long.
    """
    require_device(device)
    if not sys.executable:  # Python inside another program
        return try_here(bundle, device, precision, strict, threads)
    with tempfile.TemporaryDirectory(prefix="edgespec-trial-") as folder:
        asked, answered = Path(folder, "asked.json"), Path(folder, "answered.json")
        how = {"device": device, "precision": precision, "strict": strict, "threads": threads}
        asked.write_text(json.dumps({"bundle": str(bundle.path.resolve()), "how": how}), "utf-8")
        try:
            done = subprocess.run(
                [*COMMAND, str(asked), str(answered)], capture_output=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise DeviceError(
                f"device {device}: a trial pass of this bundle was not done after {SECONDS:.0f} seconds",
                "use device cpu; a newer driver may help",
            ) from error
        if not answered.is_file():
            raise DeviceError(
                f"device {device}: a trial of this bundle, in a process of its own, {_ended(done)}",
                "use device cpu; a newer driver may help",
            )
        return _answer(json.loads(answered.read_text("utf-8")))


def _ended(done: subprocess.CompletedProcess[bytes]) -> str:
    """Describe how a process ended without an answer, and its last output."""
    code = done.returncode
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        how = f"was killed by {known.get(-code, f'signal {-code}')}"
    else:
        how = f"ended with status {code}"
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{how}: {said[-1]}" if said else how


def _answer(found: dict[str, Any]) -> GoldenStep:
    if "error" in found:
        kind: type[EdgespecError] = getattr(errors, found["error"])
        raise kind(found["message"], found["hint"])
    return GoldenStep(**found)


def main(asked: Path, answered: Path) -> None:
    """Make the trial in the other process, and write its result."""
    request = json.loads(asked.read_text("utf-8"))
    try:
        found: dict[str, Any] = try_here(Bundle.open(request["bundle"], check=False), **request["how"])._asdict()
    except EdgespecError as error:
        found = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    write_staged(answered, json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
