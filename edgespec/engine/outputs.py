"""Files that models make of codes instead of text; each kind is a plug-in of the group ``edgespec.outputs``."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.settings import Settings
from edgespec.engine.loaded import LoadedBundle
from edgespec.engine.result import Result
from edgespec.engine.stream import Stream
from edgespec.errors import InvalidRequest
from edgespec.extensions import OUTPUTS as GROUP
from edgespec.extensions import Table
from edgespec.runtimes.files.manifest import Manifest


class Picture(Protocol):
    """A generated image."""

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """The image, uint8 [height, width, 3]."""

    @property
    def result(self) -> Result:
        """The codes as tokens, and how they were decoded."""

    def png(self) -> bytes:
        """Encode the image as a PNG file."""


class Speech(Protocol):
    """Generated speech: iterate for float32 [n], samples; leaving it, or ``close``, ends it."""

    rate: int  # samples per second
    stream: Stream  # of the codes

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield the samples as they are decoded."""

    @property
    def result(self) -> Result:
        """The codes as tokens, and how they were decoded."""

    def close(self) -> None:
        """End it, and free its memory."""


@dataclass(frozen=True)
class Written:
    """A file that was made."""

    data: bytes  # the whole file
    what: str  # its size, as text
    result: Result
    more: dict[str, Any] = field(default_factory=dict)  # for the command's JSON


class Output(ABC):
    """A kind of file that a model's codes become."""

    file: ClassVar[str]  # the usual name of one
    options: ClassVar[tuple[str, ...]] = ()  # of `edgespec run` that only this kind takes

    @abstractmethod
    def fits(self, manifest: Manifest) -> bool:
        """Return whether a bundle makes this kind."""

    def defaults(self, engine: LoadedBundle) -> Settings:
        """Return the settings of a request that names none."""
        return engine.defaults

    @abstractmethod
    def make(
        self,
        engine: LoadedBundle,
        prompt: str,
        settings: Settings | None,
        cancel: threading.Event | None = None,
        **options: Any,
    ) -> Any:
        """Answer a prompt.

        Args:
            engine: of a bundle that makes this kind.
            prompt: as it was given.
            settings: None = ``defaults``.
            cancel: set it to end after the current round.
            **options: those of ``options``.

        Raises:
            InvalidRequest: another bundle, a prompt that it cannot answer, or settings out of range.
        """

    @abstractmethod
    def write(
        self, engine: LoadedBundle, prompt: str, settings: Settings, live: BinaryIO | None, **options: Any
    ) -> Written:
        """Answer a prompt by a file.

        Args:
            engine: of a bundle that makes this kind.
            prompt: as it was given.
            settings: of the codes.
            live: gets the file too, in pieces as they are made; None = nothing does.
            **options: those of ``options``.
        """


OUTPUTS: Table[Output] = Table(GROUP, {}, lambda made: isinstance(made, Output))
"""The kinds by name."""


def output(name: str) -> Output:
    """Return a kind by name; an ``InvalidRequest``: no installed package has it."""
    if name not in OUTPUTS:
        raise OUTPUTS.refused("output", name)
    return OUTPUTS[name]


def output_of(manifest: Manifest) -> Output | None:
    """Return the kind that a bundle makes; None = it generates text.

    Raises:
        InvalidRequest: no installed package makes a file of its codes.
    """
    if manifest.codes is None:
        return None
    found = next((one for one in OUTPUTS.values() if one.fits(manifest)), None)
    if found is None:
        raise InvalidRequest(
            "this bundle's model generates codes, and no installed package makes a file of them",
            f"install one with an entry point in {GROUP}",
        )
    return found
