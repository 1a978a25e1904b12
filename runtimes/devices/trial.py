"""A device is tried in a process of its own: a driver that crashes, or never returns, must not take this one along."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from edgespec import errors
from edgespec.errors import DeviceError, EdgespecError
from edgespec.runtimes.devices.golden import GoldenStep, try_here
from edgespec.runtimes.devices.webgpu import DeviceName, require_device
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.manifest import Precision

SECONDS = 900.0  # software adapters take a minute for a small model
COMMAND = (sys.executable, "-m", "edgespec.runtimes.devices.trial")


def try_apart(
    bundle: Bundle, device: DeviceName, precision: Precision | None, strict: bool, threads: int | None
) -> GoldenStep:
    """``golden.try_here`` in another process.

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
    """How a process ended that gave no answer, and the last that it said."""
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
    """In the other process: make the trial, write down what it gave."""
    request = json.loads(asked.read_text("utf-8"))
    try:
        found: dict[str, Any] = try_here(Bundle.open(request["bundle"], check=False), **request["how"])._asdict()
    except EdgespecError as error:
        found = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    partial = answered.with_suffix(".partial")
    partial.write_text(json.dumps(found), "utf-8")
    partial.replace(answered)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
