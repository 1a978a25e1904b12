"""edgespec: lossless accelerated decoding of language models on devices.

import edgespec
engine = edgespec.load("my-bundle")
print(engine.generate("Once upon a time", max_new_tokens=64).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["EdgespecError", "Engine", "Result", "SamplingParams", "Settings", "__version__", "load"]

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.errors import EdgespecError
    from edgespec.loading import load
    from edgespec.result import Result
    from edgespec.sampling import SamplingParams
    from edgespec.settings import Settings

_WHERE = {
    "Engine": "edgespec.engine",
    "Result": "edgespec.result",
    "load": "edgespec.loading",
    "EdgespecError": "edgespec.errors",
    "SamplingParams": "edgespec.sampling",
    "Settings": "edgespec.settings",
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: `edgespec --help` must not wait for numpy or ONNX Runtime."""
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
