"""What really ran, with its digests taken again: files of the bundle, converted weights, native operators."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import onnxruntime

from edgespec import __version__
from edgespec.engine.loaded import LoadedBundle
from edgespec.errors import BundleError
from edgespec.runtimes.files.bundle import sha256
from edgespec.runtimes.ort.native_library import native_library


@dataclass(frozen=True)
class Running:
    """What was checked.

    Attributes:
        files: whose digests were taken and compared, those in the cache among them.
        bytes: of them.
        onnxruntime: its version.
        native: version, instruction set, and SHA-256 of the native operators; None = stock ones ran.
        unproven: what could not be checked, a sentence each.
    """

    files: int
    bytes: int
    onnxruntime: str
    native: dict[str, str] | None
    unproven: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return asdict(self)


def check_running(engine: LoadedBundle) -> Running:
    """Take the digests of all that an engine runs, whatever is remembered of them.

    Raises:
        BundleError: something is not what the manifest, or the record of a conversion, says; or the native operators
            are of another version than this program.
    """
    files, size = engine.bundle.checked.retake()
    native, library = None, native_library()
    if engine.operators.kind == "native" and library.path is not None:
        if library.version != __version__:
            raise BundleError(
                f"{library.path}: native operators of version {library.version or 'unknown'}: expected {__version__}",
                "install edgespec again, so that they are built again",
            )
        native = {"version": library.version, "isa": library.isa, "sha256": sha256(library.path)}
    return Running(files, size, onnxruntime.__version__, native, engine.unproven())
