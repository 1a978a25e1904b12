"""Choose stock or native operators, and the graph of a model that runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from edgespec.errors import BundleError
from edgespec.runtimes.files.manifest import ModelPart, Operators
from edgespec.runtimes.ort.native_library import NativeLibrary, native_library

WantedOperators = Literal["auto", "stock", "native"]
NATIVE = "native"  # name of the graph
LINEAR = "linear"  # of another exporter's graph whose linear layers run on native operators


@dataclass(frozen=True)
class OperatorChoice:
    """The operators of a session."""

    kind: Operators  # stock or native
    reason: str  # why
    linear: bool = False  # stock ones, but native ones for the linear layers of a foreign graph

    def graph(self, part: ModelPart, strict: bool) -> str:
        """Name the graph of ``part`` for every method, ``strict`` if asked; native rows always have the same bits."""
        if self.kind == "native" and NATIVE in part.graphs:
            return NATIVE
        if self.linear and LINEAR in part.graphs:
            return LINEAR
        main = part.main
        return main if strict or main == "gated" else "plain"


def choose_operators(wanted: WantedOperators, part: ModelPart) -> OperatorChoice:
    """Choose native operators if available and if the bundle has their weights, otherwise stock ones.

    Raises:
        BundleError: native operators are asked for and cannot run.
    """
    library = native_library()
    if part.main == NATIVE:
        if wanted == "stock" or library.path is None:
            raise _lacking(wanted, library.reason)
        return OperatorChoice("native", library.reason)
    if wanted == "stock":
        return OperatorChoice("stock", "asked for")
    if part.foreign:
        return _choose_foreign(wanted, part, library)
    if NATIVE not in part.graphs:
        if wanted == "native":
            raise BundleError("this bundle has no graph for native operators", "export it again with this version")
        return OperatorChoice("stock", "the bundle has no graph for native operators")
    if library.path is None:
        if wanted == "native":
            raise BundleError(library.reason, "install edgespec where there is a C++ compiler, or use stock operators")
        return OperatorChoice("stock", library.reason)
    if wanted == "auto" and _portable(library):
        return OperatorChoice(
            "stock", "there are no kernels for this processor: the portable ones are slower than stock"
        )
    if wanted == "auto" and part.layout != "native":
        return OperatorChoice("stock", "the bundle was exported for stock operators")
    return OperatorChoice("native", library.reason)


def _choose_foreign(wanted: WantedOperators, part: ModelPart, library: NativeLibrary) -> OperatorChoice:
    """Choose operators for a foreign graph: native ones take over as much of it as was recognized."""
    if library.path is not None and (wanted == "native" or not _portable(library)):
        why = f"the graph was exported by {part.origin}"
        if NATIVE in part.graphs:
            return OperatorChoice("native", f"{why}; it runs on {library.reason}")
        if LINEAR in part.graphs:
            return OperatorChoice("stock", f"{why}; its linear layers run on {library.reason}", linear=True)
    if wanted == "native":
        raise BundleError(
            f"this model's graph was exported by {part.origin}: it has only ONNX Runtime's operators",
            "native operators need an architecture that edgespec emits itself: docs/architectures.md",
        )
    return OperatorChoice("stock", f"the graph was exported by {part.origin}")


def _portable(library: NativeLibrary) -> bool:
    """Whether only the portable kernels can run, which nothing asks for."""
    return library.isa == "scalar" and "EDGESPEC_ISA" not in os.environ


def _lacking(wanted: WantedOperators, reason: str) -> BundleError:
    """Explain why a model for native operators only cannot run, with the remedy."""
    what = "this model needs native operators"
    if wanted == "stock":
        why = "stock ones, and devices such as webgpu, cannot run it"
        return BundleError(f"{what}: {why}", "run it on the CPU: leave --device and --operators out")
    return BundleError(f"{what}: {reason}", "install edgespec where there is a C++ compiler")
