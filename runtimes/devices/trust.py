"""Opening a bundle on a device, and trusting it: its numbers are compared with the CPU's before it is used."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edgespec.errors import DeviceError
from edgespec.runtimes.devices.golden import GoldenStep
from edgespec.runtimes.devices.model import NARROW, WIDE, DeviceModel, have_precisions
from edgespec.runtimes.devices.trial import try_apart
from edgespec.runtimes.devices.webgpu import DeviceName, driver
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.cache import cache_folder
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import Precision
from edgespec.runtimes.files.sealed import read_sealed, write_sealed

SEALED = "devices"  # what the record of them is sealed for
LONGEST = 4096  # tokens of a slot on a device, where no context was asked for: its buffers do not grow
WIDE_PROBE = 72  # tokens: more than the kernels for few rows take
Kind = tuple[Precision, Format]  # of activations, of weights
# root mean square of the difference over that of the logits; int4 and int8 products quantize activations, each provider
# in its own way, and float16 products may be summed in float16 (docs/devices.md has what was measured)
MOST_DIFFERENCE: dict[Kind, float] = {
    ("fp32", "fp32"): 1e-3,
    ("fp32", "int4"): 0.03,
    ("fp32", "int8"): 0.03,
    ("fp16", "fp32"): 0.03,
    ("fp16", "int4"): 0.05,
    ("fp16", "int8"): 0.05,
}
# the same of the worst row, between passes on one device: float16 sums of scores depend on what else a pass has
MOST_PASSES: dict[Kind, float] = {
    ("fp32", "fp32"): 1e-3,
    ("fp32", "int4"): 0.02,
    ("fp32", "int8"): 0.02,
    ("fp16", "fp32"): 0.02,
    ("fp16", "int4"): 0.03,
    ("fp16", "int8"): 0.03,
}
# the same between passes of few and of many rows, where only last bits differ, and what levels those flip
MOST_BETWEEN: dict[Kind, float] = {
    ("fp32", "fp32"): 1e-4,
    ("fp32", "int4"): 5e-3,
    ("fp32", "int8"): 5e-3,
    ("fp16", "fp32"): 5e-3,
    ("fp16", "int4"): 5e-3,
    ("fp16", "int8"): 5e-3,
}


def open_on_device(
    bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool, threads: int | None
) -> DeviceModel:
    """The target on a device, after a golden step where this driver has not made one for this bundle yet.

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
        rows = WIDE if trial.wide <= MOST_BETWEEN[trial.precision, target.format] else NARROW
        known[key] = trial._asdict() | {"rows": rows, "driver": driver(device)}
        _remember(known)
    model = DeviceModel(bundle.path, target, device, strict, known[key]["precision"], bundle.checked)
    model.most_rows = int(known[key]["rows"])
    return model


def check_trial(device: DeviceName, form: Format, found: GoldenStep) -> None:
    """Refuse wrong numbers; NaN is wrong, too.

    Raises:
        DeviceError: with what differs.
    """
    wrong = ""
    most, between = MOST_DIFFERENCE[found.precision, form], MOST_PASSES[found.precision, form]
    if not found.cpu <= most:
        wrong = f"its logits differ from the CPU's by {found.cpu:.1%}, expected at most {most:.1%}"
    elif not found.passes <= between:
        wrong = f"rows of one text differ by {found.passes:.1%} between its passes, expected at most {between:.1%}"
    if wrong:
        other = "load with device precision fp32, or " if found.precision == "fp16" else ""
        raise DeviceError(
            f"device {device} gives wrong numbers here: {wrong} ({driver(device)})",
            f"{other}use device cpu; a newer driver may help",
        )


def _key(bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool) -> str:
    part, files = bundle.manifest.target, bundle.manifest.files
    graphs = [
        files[part.graphs[name].file].sha256 for name in sorted(part.graphs) if part.graphs[name].device == device
    ]
    facts = [driver(device), precision, strict, files[part.weights].sha256, graphs]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _file() -> Path:
    return cache_folder() / "devices.json"


def _known() -> dict[str, Any]:
    try:
        return read_sealed(_file(), SEALED)
    except (OSError, ValueError):  # absent, damaged or somebody else's: the step is made again
        return {}


def _remember(known: dict[str, Any]) -> None:
    try:
        write_sealed(_file(), SEALED, known)
    except OSError:  # no cache: the step is made again next time
        return
