"""Functions of the native library for objects that it keeps, and Python has handles of."""

from __future__ import annotations

import ctypes
from typing import Any

from edgespec.errors import InvalidRequest
from edgespec.runtimes.ort.native_library import native_library

HANDLE, ADDRESS, NUMBER = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64


class Functions:
    """The functions for one kind of object; each call is over in microseconds, so it keeps the interpreter's lock.

    Args:
        kind: their names are ``edgespec_KIND_NAME``.
        signatures: by name, the type of the result and those of the arguments after the handle.
        arguments: how many numbers ``open`` takes.

    Attributes:
        of: the functions by name; one that can fail returns a number below 0.
    """

    def __init__(self, kind: str, signatures: dict[str, tuple[Any, ...]], arguments: int) -> None:
        path = native_library().path
        assert path is not None  # without it there is nothing to keep
        library = ctypes.PyDLL(str(path))
        self._kind, self._open, self._error = kind, library[f"edgespec_{kind}_open"], library.edgespec_error
        self._open.restype, self._open.argtypes = HANDLE, [NUMBER] * arguments
        self._error.restype, self._error.argtypes = ctypes.c_char_p, []
        self.of: dict[str, Any] = {}
        for name, (result, *types) in signatures.items():
            self.of[name] = function = library[f"edgespec_{kind}_{name}"]
            function.restype, function.argtypes = result, [HANDLE, *types]

    def open(self, *numbers: int) -> int:
        """Make an object -> its handle."""
        handle = self._open(*numbers)
        if handle is None:
            raise MemoryError(f"no memory for a {self._kind}")
        return int(handle)

    def refusal(self) -> InvalidRequest:
        """Make the error that the last call reported."""
        return InvalidRequest(self._error().decode().removeprefix("edgespec: "))
