"""Calibrate a target's quantization on text that it generates, and keep the result only if it loses less."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures import Architecture
from edgespec.export.bundle.source_model import Writing, WrittenModel
from edgespec.export.measuring.held_out import Figures, HeldOut
from edgespec.export.measuring.parity import relative_error
from edgespec.export.measuring.reading import Sources
from edgespec.export.onnx_model import EmittedModel
from edgespec.export.quantization.calibrate import SourcedTexts, sequences
from edgespec.export.quantization.calibration_text import MEASURED_TOKENS
from edgespec.export.quantization.own_text import LENGTH, TOGETHER, write_own_text
from edgespec.export.quantization.quantizer import QUANTIZERS, Quantizer
from edgespec.runtimes.files.formats import FOUR_BITS
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot

OWN, SHIPPED = "own", "text"  # names of the texts that are measured on: the model's writing, and another text
HELD_OUT = 2  # sequences of each
SOURCE, ABOUT = 64, 96  # tokens of a source of an encoder-decoder, and of what it writes about it
SOUND = 256  # rows of a piece of a recording
MEMORIES = 2 << 30  # bytes of the memories of all texts, which are held at once, unquantized and quantized
LEAST_SOURCES = 8
TOKENS = 8192  # to calibrate on: twice as many gain 3 % on average, half as many lose 2 %
COPIED = 1e-4  # relative error of weights whose levels a checkpoint had already
CALIBRATED = QUANTIZERS["gptq"]
Rows: TypeAlias = "NDArray[np.int64] | NDArray[np.float32]"
QUICK = QUANTIZERS["mse"]


@dataclass(frozen=True)
class Calibration:
    """How a target's levels are to be calibrated."""

    model: EmittedModel  # the target
    # requested one; None = ``CALIBRATED``, or ``QUICK`` if that loses less on any held-out text
    quantizer: Quantizer | None
    given: Sequence[int] | None  # tokens of the user's text; None = the model's own output
    text: Sequence[int]  # tokens of another text, which is measured on
    begin: Sequence[int]  # tokens that a text begins with
    eos: Sequence[int]  # tokens that end one
    seed: int  # of the generated text
    # of an encoder-decoder, from ``arranged``: int64 [S, R] token ids, or float32 [S, R, columns] of sounds
    sources: Rows | None = None

    @property
    def tokens(self) -> int:
        return TOKENS if self.given is None else min(TOKENS, len(self.given))

    def write(self, writing: Writing) -> tuple[WrittenModel, dict[str, Any]]:
        """Write the model into the folder.

        Returns what was written, and a JSON object: ``calibration``, what was done; ``held_out``, what was measured.
        """
        model = self.model
        writing.progress("calibrate", 0, 1, self.describe())
        first = replace(writing, progress=lambda stage, *rest: writing.progress(f"first {stage}", *rest))
        with _folder(writing) as quick, _folder(writing) as calibrated:
            written = model.write(_by(QUICK, first, quick))
            if self.quantizer is None and relative_error(written.errors.values()) < COPIED:
                _move(quick, writing.folder)
                return written, {"calibration": {"quantizer": QUICK.name, "reason": "the checkpoint's own levels"}}
            slot = _opened(written, quick, writing)
            read = self._sources(written, quick, slot)
            count, texts = self._texts(slot, writing, read)
            held = self._held_out(texts[count:], writing)
            before = held.of(slot, self._attending(read, slot))
            q4_0 = held.q4_0() if writing.choice.format in FOUR_BITS and read is None else None
            _close(slot, read)
            rows = self._calibrates_on(texts[:count])
            quantizer = self.quantizer or CALIBRATED
            better = model.write(replace(_by(quantizer, writing, calibrated), texts=lambda context: rows))
            slot = _opened(better, calibrated, writing)
            read = self._sources(better, calibrated, slot)
            after = held.of(slot, self._attending(read, slot))
            _close(slot, read)
            worse = [name for name in after if after[name]["kl"] > before[name]["kl"]]
            keep = self.quantizer is not None or not worse
            _move(calibrated if keep else quick, writing.folder)
        writing.progress("calibrate", 1, 1, "done")
        text = "the model's own" if self.given is None else "given"
        facts = {"quantizer": quantizer.name, "kept": keep, "tokens": int(rows.size), "text": text,
                 "uncalibrated_matrices": better.uncalibrated}  # fmt: skip
        figures = {"model": after if keep else before, "mse": before, "calibrated": after, "q4_0": q4_0}
        return better if keep else written, {"calibration": facts, "held_out": _by_text(figures)}

    def describe(self) -> str:
        """Describe the calibration, and estimate its time on this machine."""
        minutes = seconds(self.model, self.tokens) / 60
        text = "text that the model writes" if self.given is None else "the text given"
        how = "less than a minute" if minutes < 1 else f"about {minutes:.0f} minutes"
        return f"on {self.tokens} tokens of {text}: {how} (--quick: without)"

    def _texts(self, slot: Slot, writing: Writing, read: Sources | None) -> tuple[int, NDArray[np.int64]]:
        """Generate texts with the model, [count + HELD_OUT, T]; the last ones are for measuring."""
        length = min(LENGTH if read is None else ABOUT, slot.context - 1)
        count = max(1, self.tokens // length) if self.given is None else 0
        count = count if read is None else len(read.ids) - HELD_OUT

        def progress(done: int, of: int) -> None:
            writing.progress("own text", done, of, "tokens that the model writes")

        attend = read.attend if read else None
        return count, write_own_text(slot, count + HELD_OUT, self.begin, self.eos, self.seed, progress, length, attend)

    def _held_out(self, own: NDArray[np.int64], writing: Writing) -> HeldOut:
        """Prepare the texts for measuring: ``own`` [HELD_OUT, T], and without an encoder another text."""
        sources = None if self.sources is None else self.sources[-HELD_OUT:]
        texts = {OWN: own}
        if self.sources is None:
            texts[SHIPPED] = self._rows(self.text[:MEASURED_TOKENS])[:HELD_OUT]

        def progress(done: int, of: int) -> None:
            writing.progress("held out", done, of, "texts that nothing is calibrated on, in fp32")

        return HeldOut(self.model.arch, texts, progress, sources)

    def _calibrates_on(self, own: NDArray[np.int64]) -> NDArray[np.int64] | SourcedTexts:
        if self.sources is not None:
            return SourcedTexts(self.sources[:-HELD_OUT], own)
        return own if self.given is None else self._rows(self.given)

    def _sources(self, written: WrittenModel, folder: str, slot: Slot) -> Sources | None:
        if self.sources is None:
            return None
        return Sources(self.sources, Path(folder), written.part, slot.model, TOGETHER + 1)

    def _attending(self, read: Sources | None, slot: Slot) -> Callable[[int], None] | None:
        """Return what lets a slot attend over the source of a held-out text, by its number."""
        return None if read is None else lambda number: read.attend([slot], len(read.ids) - HELD_OUT + number)

    def _rows(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        return sequences(tokens[:TOKENS], self.begin, min(LENGTH, self.model.facts.context - 1))


def arranged(sources: Rows, arch: Architecture) -> Rows:
    """Repeat sources [n, R, ...] for as many texts as are calibrated on; the last ``HELD_OUT`` are measured with."""
    facts, rows = arch.facts, 2 * sources.shape[1]
    memory = 4 * rows * facts.layers * 2 * facts.kv_heads * facts.head_dim  # bytes of a text's
    count = max(1, min(TOKENS // min(ABOUT, facts.context - 1), MEMORIES // memory))
    return np.concatenate([np.resize(sources[:-HELD_OUT], (count, *sources.shape[1:])), sources[-HELD_OUT:]])


def seconds(model: EmittedModel, tokens: int) -> float:
    """Estimate how long this machine will calibrate, from how fast it multiplies matrices."""
    side, least = np.ones((1024, 1024), np.float32), np.inf
    for _ in range(8):
        start = perf_counter()
        side @ side
        least = min(least, perf_counter() - start)  # of the first one, threads begin
    rate = SUSTAINED * 2 * 1024**3 / least
    arch, source = model.arch, model.source
    shapes = {name: source.shape(name) for name in arch.tensors}
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    products = 0.0
    for name, (n, k) in matrices.items():  # forward twice, and once or twice more to measure; then factors and feedback
        rows = 0.0 if name in (arch.embedding, arch.head.weight) else 6.5 * tokens
        products += n * k * (rows + 3 * k) + k * k * (tokens + k)
    return products / rate + sum(n * k for n, k in matrices.values()) * PER_WEIGHT


SUSTAINED = 0.8  # of that speed is left in large products
PER_WEIGHT = 1.5e-7  # seconds: reading, writing text, two searches of scales, rounding to Q4_0, writing twice


def note(facts: dict[str, Any]) -> str | None:
    """Describe the result of the calibration."""
    if "held_out" not in facts:
        return None
    done, lost = facts["calibration"], []
    for name, of in ((OWN, "the model's own writing"), (SHIPPED, "another text")):
        if name not in facts["held_out"]:
            continue
        figures = {which: f"{own['kl']:.2g}" for which, own in facts["held_out"][name].items()}
        others = f"{figures['mse']} without" + (f", {figures['q4_0']} by Q4_0" if "q4_0" in figures else "")
        lost.append(f"{figures['calibrated']} nats on {of} ({others})")
    start = f"calibrated by {done['quantizer']} on {done['tokens']} tokens"
    verdict = "loses" if done["kept"] else "loses more somewhere, so levels are mse's:"
    few = done["uncalibrated_matrices"]
    rest = f"; too few tokens came to {few} matrices of experts" if few else ""
    return f"{start}: {verdict} {', '.join(lost)}{rest}"


def _by_text(figures: dict[str, Figures | None]) -> dict[str, dict[str, Any]]:
    names = list(figures["mse"] or {})
    return {name: {which: own[name] for which, own in figures.items() if own} for name in names}


def _by(quantizer: Quantizer, writing: Writing, folder: str) -> Writing:
    return replace(writing, folder=Path(folder), choice=replace(writing.choice, quantizer=quantizer))


def _close(slot: Slot, read: Sources | None) -> None:
    slot.close()
    if read is not None:
        read.close()


def _folder(writing: Writing) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=writing.folder, prefix=".calibrate-")


def _opened(written: WrittenModel, folder: str, writing: Writing) -> Slot:
    graph = choose_operators(writing.operators, written.part).graph(written.part, strict=True)
    return open_slot(Model(Path(folder), written.part, graph, writing.threads))


def _move(folder: str, target: Path) -> None:
    for file in Path(folder).iterdir():
        file.replace(target / file.name)
