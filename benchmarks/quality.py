"""What each choice of weights costs in quality: perplexity, top-1 agreement and divergence from the float32 source.

    python -m benchmarks.quality builtin:shakespeare ./model BUNDLE --text held-out.txt [--tail 0.05] [--markdown]

Every model is written in every variant and read teacher-forced through its ONNX graph; a bundle is read as it is and
compared with nothing.  The text must not be what the quantizers calibrate on: wherever a model's calibration text
occurs in it, it is cut out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import conditions, show
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.measuring.mixer import Mixer
from edgespec.export.measuring.parity import divergence, log_softmax
from edgespec.export.quantization.calibrate import chosen_levels
from edgespec.export.quantization.calibration_text import quantizer_texts, read_calibration
from edgespec.export.quantization.quantizer import QUANTIZERS
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import Format
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec

CHUNK = 128  # rows of a pass
Logits = NDArray[np.float32]
Variant = tuple[str, Callable[[], Any]]  # label, context manager that gives the slot

VARIANTS: list[tuple[Format, str | None, Format | None]] = [
    *(("int4", name, None) for name in QUANTIZERS),
    *(("int4", name, "int8") for name in QUANTIZERS),
    *(("int4-64", name, None) for name in QUANTIZERS),
    *(("int8", name, None) for name in QUANTIZERS),
]
MIXED = (0.25, 0.5, 0.75)  # of the way from int4 to int8, by bytes


def read(slot: Slot, rows: NDArray[np.int64]) -> Iterator[Logits]:
    """Logits [T, vocab] of every row of ``rows`` [S, T], each from an empty cache, in passes of CHUNK rows."""
    for row in rows:
        slot.follow([])
        found = []
        for start in range(0, len(row), CHUNK):
            part = row[start : start + CHUNK]
            found.append(slot.forward(part).logits.copy())
            slot.keep(range(len(part)))
        yield np.concatenate(found)


def table(reference: Variant | None, variants: Sequence[Variant], rows: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Make a row of figures for each variant; ``reference`` is what they are compared with."""
    exact: list[Logits] = []
    found = []
    for label, opened in [*([reference] if reference else []), *variants]:
        with opened() as slot:
            logits = list(read(slot, rows))
        if reference and not exact:
            exact = logits
        figures: dict[str, Any] = {"label": label, "perplexity": perplexity(logits, rows)}
        if exact:
            figures["perplexity_gap"] = figures["perplexity"] - perplexity(exact, rows)
            figures["top1_agreement"] = float(
                np.mean([a.argmax(-1) == b.argmax(-1) for a, b in zip(logits, exact, strict=True)])
            )
            figures["kl"] = float(np.mean([divergence(a, b) for a, b in zip(exact, logits, strict=True)]))
        found.append(figures)
    return found


def perplexity(logits: Sequence[Logits], rows: NDArray[np.int64]) -> float:
    """Of the text itself."""
    total = [
        log_softmax(each[:-1])[np.arange(len(row) - 1), row[1:]].mean() for each, row in zip(logits, rows, strict=True)
    ]
    return float(np.exp(-np.mean(total)))


def weight_variants(name: str, calibration: Path | None, threads: int) -> tuple[Variant, list[Variant]]:
    """Give the float32 form of a model, and its forms in VARIANTS."""
    folder = resolve(name)
    arch, codec = open_model(folder, None), TextCodec(folder)
    text = read_calibration(calibration, folder, codec)[0]
    texts = quantizer_texts(codec, text, arch.facts.context)

    @contextmanager
    def written(choice: WeightChoice) -> Iterator[Slot]:
        form = choice.format
        with tempfile.TemporaryDirectory() as temporary:
            where = Path(temporary)
            if choice.quantizer is None:
                part = write_model(where, arch, ModelSpec(form, draft=True)).part
            else:
                with chosen_levels(arch, choice.quantizer, choice.blocks(arch), texts, where) as chosen:
                    part = write_model(
                        where, arch, ModelSpec(form, head=choice.head, fine=choice.fine, draft=True), chosen
                    ).part
            yield open_slot(Model(where, part, choose_operators("auto", part).graph(part, False), threads))

    def variant(form: Format, quantizer: str | None, head: Format | None) -> Variant:
        label = " ".join([form, *([quantizer] if quantizer else []), *([f"head {head}"] if head else [])])
        return label, lambda: written(WeightChoice.of(form, quantizer, head))

    def mixed(share: float) -> Variant:
        mixer = Mixer(arch, WeightChoice.of("int4", "mse", None), "native", None, codec.encode(text))
        least, most = mixer.bytes([]), mixer.bytes(mixer.parts)
        made = mixer.within(round(least + share * (most - least)))
        return f"int4 mse, {made.facts['bytes'] / least:.2f} times its bytes", lambda: written(made.choice)

    return variant("fp32", None, None), [*(variant(*each) for each in VARIANTS), *map(mixed, MIXED)]


def bundle_variant(path: Path, threads: int) -> Variant:
    """Give the target of a bundle."""

    @contextmanager
    def opened() -> Iterator[Slot]:
        part = Bundle.open(path, check=False).manifest.target
        yield open_slot(Model(path, part, choose_operators("auto", part).graph(part, False), threads))

    return path.name, opened


def held_out(text: str, folder: Path, calibration: Path | None, tokens: int, length: int) -> NDArray[np.int64]:
    """Up to ``tokens`` tokens in rows [S, length], BOS in front of each, without the calibration text."""
    codec, file = TextCodec(folder), calibration or folder / "calibration.txt"
    if file.is_file():
        for passage in file.read_text("utf-8").split("\n\n"):  # speech by speech: it may be put together from several
            if len(passage) > 40:
                text = text.replace(passage, "")
    ids, begin = codec.encode(text, special=False)[:tokens], codec.encode("")[:1]
    step = length - len(begin)
    count = len(ids) // step
    return np.array([begin + ids[at * step : (at + 1) * step] for at in range(count)], np.int64)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Give the table."""
    lines = ["| weights | perplexity | gap | top-1 agreement | KL, nats a token |", "|---|---|---|---|---|"]
    for row in rows:
        gap = f"{row['perplexity_gap']:+.3f}" if "perplexity_gap" in row else ""
        agreement = f"{100 * row['top1_agreement']:.1f} %" if "top1_agreement" in row else ""
        kl = f"{row['kl']:.5f}" if "kl" in row else ""
        lines.append(f"| {row['label']} | {row['perplexity']:.3f} | {gap} | {agreement} | {kl} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="bundle, model folder, hub id or builtin:NAME")
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tail", type=float, default=1.0, help="share of the text, at its end, that is held out")
    parser.add_argument("--calibration", type=Path, help="as of edgespec export")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", action="store_true", help="tables instead of JSON")
    arguments = parser.parse_args()
    text = arguments.text.read_text("utf-8")
    start = int(len(text) * (1 - arguments.tail))
    text = text[text.index("\n\n", start) + 2 if start else 0 :]
    results: dict[str, Any] = {}
    for name in arguments.models:
        path = Path(name)
        is_bundle = (path / MANIFEST).is_file()
        folder = path if is_bundle else resolve(name)
        rows = held_out(text, folder, arguments.calibration, arguments.tokens, arguments.length)
        if is_bundle:
            found = table(None, [bundle_variant(path, arguments.threads)], rows)
        else:
            found = table(*weight_variants(name, arguments.calibration, arguments.threads), rows)
        results[path.name] = {"tokens": int(rows.size), "rows": found}
        if arguments.markdown:
            print(f"{path.name}, {rows.size} tokens\n\n{markdown(found)}\n", flush=True)
    if not arguments.markdown:
        show(conditions(text=arguments.text.name, length=arguments.length) | {"models": results})


if __name__ == "__main__":
    main()
