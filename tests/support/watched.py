"""Record the inputs of ONNX Runtime sessions: their shapes, counted at the session itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgespec.runtimes.ort.session import make_session
from edgespec.runtimes.slots import shared

Shapes = dict[str, tuple[int, ...]]


class _Binding:
    """A binding that remembers what its inputs are bound to."""

    def __init__(self, binding: Any) -> None:
        self.real, self.shapes = binding, Shapes()

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self.shapes[name] = tuple(value.shape())
        self.real.bind_ortvalue_input(name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class _Session:
    """A session whose passes are noted."""

    def __init__(self, session: Any, file: str, seen: list[tuple[str, Shapes]]) -> None:
        self._session, self._file, self._seen = session, file, seen

    def io_binding(self) -> _Binding:
        return _Binding(self._session.io_binding())

    def run_with_iobinding(self, io: _Binding) -> None:
        self._seen.append((self._file, dict(io.shapes)))
        self._session.run_with_iobinding(io.real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@dataclass
class Watched:
    """The passes of all sessions that were opened since ``watch``."""

    passes: list[tuple[str, Shapes]] = field(default_factory=list)  # name of the graph's file, inputs

    def strict(self) -> list[Shapes]:
        """List the passes of padded graphs, whose attention has more rows than there are tokens."""
        shapes = [shapes for _, shapes in self.passes]
        return [one for one in shapes if one["position_ids"][1] > one["input_ids"][1]]

    def alone(self) -> list[Shapes]:
        """List the strict passes in which a layer or an LM head has one row."""
        return [one for one in self.strict() if one["input_ids"][1] == 1 or one["rows"][0] == 1]


def watch(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Note the passes of every session that a slot's model opens from now on."""
    watched = Watched()

    def opened(path: Path, *options: Any) -> _Session:
        return _Session(make_session(path, *options), path.name, watched.passes)

    monkeypatch.setattr(shared, "make_session", opened)
    return watched
