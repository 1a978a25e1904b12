"""Exports: ``edgespec.export(model, output)``, and the modules that do it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Export(ModuleType):
    """This package, which can be called: see ``edgespec.export.front.export``."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from edgespec.export.front import export

        return export(*args, **options)


sys.modules[__name__].__class__ = _Export
