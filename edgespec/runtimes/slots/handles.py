"""Functions of the native library for objects that it keeps, and Python has handles of."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.ort.native_library import native_library

HANDLE, ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64


class Functions:
    """The functions for one kind of object; they keep the interpreter's lock, as calls are over in microseconds.

    Args:
        kind: their names are ``edgespec_KIND_NAME``.
        signatures: by name, the type of the result and those of the arguments after the handle.
        arguments: types of what ``open`` takes, or how many numbers.
        slow: whether calls may take long: the lock is given up.

    Attributes:
        of: the functions by name; one that can fail returns a number below 0.
    """

    def __init__(
        self, kind: str, signatures: dict[str, tuple[Any, ...]], arguments: int | Sequence[Any], slow: bool = False
    ) -> None:
        path = native_library().path
        assert path is not None  # without it there is nothing to keep
        library = ctypes.CDLL(str(path)) if slow else ctypes.PyDLL(str(path))
        self._kind, self._open, self._error = kind, library[f"edgespec_{kind}_open"], library.edgespec_error
        types = [NUMBER] * arguments if isinstance(arguments, int) else list(arguments)
        self._open.restype, self._open.argtypes = HANDLE, types
        self._error.restype, self._error.argtypes = ctypes.c_char_p, []
        self.of: dict[str, Any] = {}
        for name, (result, *rest) in signatures.items():
            self.of[name] = function = library[f"edgespec_{kind}_{name}"]
            function.restype, function.argtypes = result, [HANDLE, *rest]

    def open(self, *given: int | bytes) -> int:
        """Make an object -> its handle."""
        handle = self.try_open(*given)
        if handle is None:
            raise MemoryError(f"no memory for a {self._kind}")
        return handle

    def try_open(self, *given: int | bytes) -> int | None:
        """Make an object -> its handle; None = it failed, see ``why``."""
        handle = self._open(*given)
        return None if handle is None else int(handle)

    @property
    def why(self) -> str:
        """The reason of the last call that failed."""
        return str(self._error().decode(errors="replace").removeprefix("edgespec: "))

    def refusal(self) -> InvalidRequest:
        """Make the error that the last call reported."""
        return InvalidRequest(self.why)
