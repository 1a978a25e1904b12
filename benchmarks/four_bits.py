"""Compare int4-k with llama.cpp's Q4_K_M in the same bytes, with and without importance, in float32.

    python -m benchmarks.four_bits builtin:shakespeare ./model --text FILE --ggml LIB

Every matrix gets the same type in both: Q6_K for the LM head, and for values and the MLP's last matrix in half of the
layers, Q4_K for the rest.  Rows are filled up with zeros to multiples of 256, on both sides.  It measures on the text's
end; importance and error feedback come from a part before it, of the inputs that matrices have in the float model.
``LIB``: ggml's libggml-base.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.architectures.rules import Linear, Norm
from edgespec.export.bundle.model_part import open_model
from edgespec.export.measuring.parity import divergence, log_softmax
from edgespec.export.quantization.k_blocks import K_BLOCKS, KBlocks, k_values
from edgespec.export.quantization.k_source import has_six_bits
from edgespec.export.quantization.levels import BLOCKS, Array
from edgespec.export.quantization.quantizer import QUANTIZERS, prepared, restored
from edgespec.export.quantization.reference import SequenceOps
from edgespec.export.source.source import Checkpoint, resolve
from edgespec.runtimes.text.codec import TextCodec

LENGTH, HELD, USED = 256, 8, 32  # tokens of a sequence, and sequences of either text
NUMBERS = {"q4_k": 12, "q6_k": 14}  # of ggml's types
Rounding = Callable[[str, Array], Array]  # a matrix's name, its rows [n, k] -> what they become


class Inputs(SequenceOps):
    """Records the mean products of every matrix's inputs."""

    found: dict[str, Array]

    def linear(self, x: Array, parts: tuple[Linear, ...], joined: bool) -> tuple[Array, ...]:
        self._record(x, *parts)
        return super().linear(x, parts, joined)

    def head(self, x: Array, norm: Norm | None, head: Linear) -> Array:
        self._record(self.encoded(x, norm), head)
        return super().head(x, norm, head)

    def _record(self, x: Array, *parts: Linear) -> None:
        flat = x.reshape(-1, x.shape[-1])
        self.found |= {part.weight: flat.T @ flat / np.float32(len(flat)) for part in parts}


class Replaced:
    """A checkpoint with other matrices."""

    def __init__(self, base: Checkpoint, matrices: dict[str, Array]) -> None:
        self._base, self._matrices = base, matrices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def read(self, name: str, rows: slice = slice(None), columns: slice | None = None) -> Array:
        if name not in self._matrices:
            return self._base.read(name, rows, columns)
        found = self._matrices[name][rows]
        return found if columns is None else found[:, columns]

    def pieces(self, name: str) -> Iterator[Array]:
        return iter([self._matrices[name]]) if name in self._matrices else self._base.pieces(name)


def filled(x: Array, axes: int) -> Array:
    """Fill the last axes up with zeros to multiples of 256."""
    short = -x.shape[-1] % 256
    return np.ascontiguousarray(np.pad(x, [(0, 0)] * (x.ndim - axes) + [(0, short)] * axes))


def form_of(arch: Architecture, name: str) -> KBlocks:
    """Return the type of a matrix."""
    return K_BLOCKS["q6_k" if has_six_bits(arch, name) else "q4_k"]


def by_ggml(arch: Architecture, library: ctypes.CDLL, inputs: dict[str, Array] | None) -> Rounding:
    """Round as llama.cpp does; ``inputs``: with their importance."""

    def rounded(name: str, rows: Array) -> Array:
        form, whole, importance = form_of(arch, name), filled(rows, 1), None
        out = np.empty((len(whole), whole.shape[1] // 256 * form.bytes), np.uint8)
        if inputs and name in inputs:
            importance = filled(np.diag(inputs[name]), 1).ctypes.data_as(ctypes.c_void_p)
        start, count, each = (ctypes.c_int64(value) for value in (0, *whole.shape))
        source, target = (array.ctypes.data_as(ctypes.c_void_p) for array in (whole, out))
        library.ggml_quantize_chunk(NUMBERS[form.kind], source, target, start, count, each, importance)
        return k_values(out, form)[:, : rows.shape[1]]

    return rounded


def by_us(arch: Architecture, quantizer: str, inputs: dict[str, Array], int4: bool) -> Rounding:
    """Round with one of our quantizers, to int4-k, or to int4."""

    def rounded(name: str, rows: Array) -> Array:
        products = inputs.get(name)
        if int4:
            form = BLOCKS["int4"]
            return restored(prepared(QUANTIZERS[quantizer], products)(rows, form), form, rows.shape[1])
        of = None if products is None else filled(products, 2)
        made = prepared(QUANTIZERS[quantizer], of)(filled(rows, 1), form_of(arch, name))
        return made[1][:, : rows.shape[1]]

    return rounded


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ggml", type=Path, required=True)
    arguments = parser.parse_args()
    library = ctypes.CDLL(str(arguments.ggml))
    for model in arguments.models:
        arch, codec = open_model(folder := resolve(model), None), TextCodec(folder)
        tokens = codec.encode(arguments.text.read_text("utf-8"), special=False)
        both = np.asarray(tokens[-LENGTH * (HELD + USED) :], np.int64).reshape(-1, LENGTH)
        print(model)
        for label, line in compared(arch, library, both[-HELD:], both[:-HELD]):
            print(f"{label:24}{line}", flush=True)


def compared(
    arch: Architecture, library: ctypes.CDLL, held: NDArray[np.int64], used: NDArray[np.int64]
) -> Iterator[tuple[str, str]]:
    """Give a line of figures for each way to round; ``held``, ``used`` [S, T]: what is measured and calibrated on."""
    recording = Inputs(arch, used, [0])
    recording.found = {}
    recording.run(arch.trace())
    inputs, matrices = recording.found, {name: arch.source.read(name) for name, shape in arch.tensors.items()
                                         if len(shape) == 2}  # fmt: skip
    exact = np.asarray(SequenceOps(arch, held).run(arch.trace()))
    ways: dict[str, Rounding] = {
        "int4 mse": by_us(arch, "mse", inputs, int4=True),
        "int4 gptq": by_us(arch, "gptq", inputs, int4=True),
        "Q4_K_M": by_ggml(arch, library, None),
        "Q4_K_M, imatrix": by_ggml(arch, library, inputs),
        **{f"int4-k {name}": by_us(arch, name, inputs, int4=False) for name in ("mse", "awq", "gptq")},
    }
    yield "float32", f"perplexity {np.exp(nats(exact, held)):.3f}, {held.size} positions"
    for label, way in ways.items():
        source = Replaced(arch.source, {name: way(name, rows) for name, rows in matrices.items()})
        ours = np.asarray(SequenceOps(arch, held, source=cast(Checkpoint, source)).run(arch.trace()))
        kl = float(np.mean([divergence(*pair) for pair in zip(exact, ours, strict=True)]))
        same = float(np.mean(exact.argmax(-1) == ours.argmax(-1)))
        lost = np.exp(nats(ours, held) - nats(exact, held)) - 1
        yield label, f"KL {kl:.5f}, top-1 {same:.1%}, perplexity {lost:+.2%}"


def nats(logits: Array, rows: NDArray[np.int64]) -> float:  # [S, T, vocab], [S, T]
    """Return the mean of minus the logarithms of the probabilities of a text's tokens."""
    following = rows[:, 1:, None]
    return -float(np.take_along_axis(log_softmax(logits[:, :-1]), following, -1).mean())


if __name__ == "__main__":
    main()
