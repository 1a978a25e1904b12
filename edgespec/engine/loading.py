"""Load the folder of a bundle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.options import LoadOptions


def load(bundle: str | os.PathLike[str] | Path, options: LoadOptions | None = None, **changes: Any) -> Engine:
    """Load a bundle's folder; see ``edgespec.library.load``."""
    if not isinstance(bundle, (str, os.PathLike)):
        raise InvalidRequest(f"bundle is {bundle!r}: expected a folder")
    options = (options or LoadOptions()).changed(**changes)
    return Engine(Bundle.open(bundle, check=options.check), options)
