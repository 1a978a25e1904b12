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
    """Load a bundle.

    Args:
        bundle: its folder.
        options: how.
        **changes: fields of ``LoadOptions`` (threads, context, strict, device, budget, ...), set on top.

    Raises:
        BudgetError: the bundle, or the context asked for, does not fit.
        BundleError: something is missing, short, altered or newer than this version, or cannot run here.
        DeviceError: the device is not there, or gives wrong numbers.
        InvalidRequest: a context or an attention that this bundle does not have, an unknown option, or one of another
            type.
        StoreError: the n-gram store is damaged, newer than this version, or of another tokenizer.
    """
    if not isinstance(bundle, (str, os.PathLike)):
        raise InvalidRequest(f"bundle is {bundle!r}: expected a folder")
    options = (options or LoadOptions()).changed(**changes)
    return Engine(Bundle.open(bundle, check=options.check), options)
