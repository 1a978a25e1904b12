"""The decoder of a bundle's codes: a stock graph, from token ids of a picture or of sound to what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BundleError, InvalidRequest, first_line
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.graph_check import check_graph
from edgespec.runtimes.ort.session import make_session


class CodeDecoder:
    """The opened decoder of a bundle whose manifest has ``codes``.

    Raises:
        BundleError: the graph is not one that a bundle may have.
        InvalidRequest: this bundle's tokens are text.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        if (part := bundle.manifest.codes) is None:
            raise InvalidRequest(
                "this bundle's model writes text: expected one whose tokens are a picture's or a sound's",
                "such as builtin:glyphs",
            )
        self.part, self._path = part, bundle.path / part.graph
        check_graph(self._path, "stock")
        self._session = make_session(self._path, threads)

    def run(self, codes: NDArray[np.integer[Any]], **beside: NDArray[np.float32]) -> NDArray[np.float32]:
        """Decode codes, counted from 0, with what else the graph takes -> its output, of whatever shape it has.

        Raises:
            BundleError: the graph does not take them.
        """
        try:
            (found,) = self._session.run(None, {"codes": np.ascontiguousarray(codes, np.int64), **beside})
        except Exception as error:  # ONNX Runtime's exceptions share no public base class
            raise BundleError(f"{self._path}: cannot decode these codes: {first_line(error)}") from error
        return np.asarray(found, np.float32)
