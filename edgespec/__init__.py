"""edgespec: lossless accelerated decoding of language models on devices.

import edgespec
engine = edgespec.load("my-bundle")
print(engine.generate("Once upon a time", max_new_tokens=64).text)
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Nothing leaves the device.  ONNX Runtime 1.29 and later report how they are used, and write an identifier of the
# device into the user's cache, unless the first variable is set before the import.  The hub's client reads the other.
_SILENT = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
if "onnxruntime" in sys.modules and os.environ.get("ORT_DISABLE_TELEMETRY", "0") in ("", "0", "false"):
    import warnings

    warnings.warn(
        "onnxruntime was imported before edgespec, so its telemetry may have started: import edgespec first, or set "
        "ORT_DISABLE_TELEMETRY=1",
        stacklevel=2,
    )
os.environ.update(_SILENT)

from edgespec.version import __version__  # noqa: E402 (after the environment is set)

__all__ = [
    "Audio",
    "EdgespecError",
    "Engine",
    "ExportOptions",
    "Grammar",
    "Image",
    "LoadOptions",
    "Result",
    "SamplingParams",
    "Settings",
    "__version__",
    "export",
    "load",
]

if TYPE_CHECKING:
    from edgespec.decoding.sampling import SamplingParams
    from edgespec.decoding.settings import Grammar, Settings
    from edgespec.engine.engine import Engine
    from edgespec.engine.result import Result
    from edgespec.errors import EdgespecError
    from edgespec.export.api import export
    from edgespec.export.options import ExportOptions
    from edgespec.library import load
    from edgespec.runtimes.audio.audio import Audio
    from edgespec.runtimes.images.image import Image
    from edgespec.runtimes.options import LoadOptions

_WHERE = {
    "Audio": "edgespec.runtimes.audio.audio",
    "Engine": "edgespec.engine.engine",
    "ExportOptions": "edgespec.export.options",
    "Grammar": "edgespec.decoding.settings",
    "Image": "edgespec.runtimes.images.image",
    "LoadOptions": "edgespec.runtimes.options",
    "Result": "edgespec.engine.result",
    "load": "edgespec.library",
    "EdgespecError": "edgespec.errors",
    "SamplingParams": "edgespec.decoding.sampling",
    "Settings": "edgespec.decoding.settings",
}


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Import public names on first use: `edgespec --help` must not wait for numpy or ONNX Runtime."""
    from importlib import import_module

    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Edgespec(ModuleType):
    """This module, whose ``export`` is the function, though there is a package of that name.

    The import of a package puts it into the one above it: what is put there as ``export`` is not kept.  The function
    has what the package has, so that ``import edgespec.export.api as api`` finds it.
    """

    @property
    def export(self) -> Any:
        """The function; see ``edgespec.export.api.export``."""
        from edgespec.export.api import export

        vars(export).update({name: one for name, one in vars(sys.modules["edgespec.export"]).items() if name[0] != "_"})
        return export

    @export.setter
    def export(self, package: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Edgespec
