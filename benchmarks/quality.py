"""Measure the quality of each weight format: perplexity, top-1 agreement and divergence from the float32 source.

    python -m benchmarks.quality builtin:shakespeare ./model BUNDLE --text held-out.txt [--tail 0.05] [--markdown]
    python -m benchmarks.quality builtin:shakespeare ./model --text held-out.txt --seeds 0,1,2 [--ggml LIB] --markdown

Every model is written in every variant and read teacher-forced through its ONNX graph; a bundle is read as it is and
compared with nothing.  The text must not be what the quantizers calibrate on: wherever a model's calibration text
occurs in it, it is cut out.

With ``--seeds`` it prints a table of equal sizes and the next ones up, as exports choose levels now.  They are measured
on text of the model itself, after calibration on other such text of each seed, and on the held-out text.  ``--ggml``
names ggml's libggml-base, which adds llama.cpp's Q4_K_M (k_quants.py), with float32 activations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import conditions, show
from benchmarks.k_quants import k_quantized
from edgespec.export.bundle.model import write_model
from edgespec.export.bundle.model_part import ModelSpec, open_model
from edgespec.export.calibrated import TOKENS
from edgespec.export.measuring.held_out import Q4_0
from edgespec.export.measuring.mixer import Mixer
from edgespec.export.measuring.parity import divergence, log_softmax
from edgespec.export.onnx_model import with_levels
from edgespec.export.quantization.calibrate import chosen_levels
from edgespec.export.quantization.calibration_text import quantizer_texts, read_calibration
from edgespec.export.quantization.own_text import LENGTH, write_own_text
from edgespec.export.quantization.quantizer import QUANTIZERS
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import resolve
from edgespec.runtimes.files.bundle import Bundle
from edgespec.runtimes.files.formats import MIXED as MIXED_FORMAT
from edgespec.runtimes.files.formats import ExportFormat, Format
from edgespec.runtimes.files.manifest import MANIFEST
from edgespec.runtimes.files.operators import choose_operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec

CHUNK = 128  # rows of a pass
Logits = NDArray[np.float32]
Variant = tuple[str, Callable[[], Any]]  # label, context manager that gives the slot

VARIANTS: list[tuple[ExportFormat, str | None, Format | None]] = [
    *(("int4", name, None) for name in QUANTIZERS),
    *(("int4", name, "int8") for name in QUANTIZERS),
    *((MIXED_FORMAT, name, None) for name in QUANTIZERS),
    *(("int8", name, None) for name in QUANTIZERS),
]
MIXED = (0.25, 0.5, 0.75)  # of the way from int4 to int8, by bytes
OWN_VARIANTS: list[tuple[str, str, Format | None, float, bool]] = [  # label, quantizer, head, mixed, on its own text
    ("Q4_0", "q4_0", None, 0, False),
    ("rtn", "rtn", None, 0, False),
    ("mse (--quick)", "mse", None, 0, False),
    ("awq, own text", "awq", None, 0, True),
    ("gptq, shipped text", "gptq", None, 0, False),
    ("gptq, own text (default)", "gptq", None, 0, True),
    ("mse, head int8", "mse", "int8", 0, False),
    ("gptq, own text, head int8", "gptq", "int8", 0, True),
    ("gptq, own text, a quarter of the way to int8", "gptq", None, 0.25, True),
    ("gptq, own text, half of the way to int8", "gptq", None, 0.5, True),
]
HELD = 8  # sequences of a model's own writing that are measured on


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
    """Compute the perplexity of the text itself."""
    total = [
        log_softmax(each[:-1])[np.arange(len(row) - 1), row[1:]].mean() for each, row in zip(logits, rows, strict=True)
    ]
    return float(np.exp(-np.mean(total)))


class Writer:
    """Writes a model in many forms."""

    def __init__(self, name: str, calibration: Path | None, threads: int) -> None:
        folder = resolve(name)
        self.arch, self.codec, self.threads = open_model(folder, None), TextCodec(folder), threads
        self.text = read_calibration(calibration, folder, self.codec)[0]
        self.texts = quantizer_texts(self.codec, self.text, self.arch.facts.context)

    @contextmanager
    def written(self, choice: WeightChoice, texts: NDArray[np.int64] | None = None) -> Iterator[Slot]:
        """Write it, calibrated on ``texts`` or on the calibration text."""
        form, arch = choice.stored, self.arch
        with tempfile.TemporaryDirectory() as temporary:
            where = Path(temporary)
            if choice.quantizer is None:
                part = write_model(where, arch, ModelSpec(form, draft=True)).part
            else:
                texts = self.texts if texts is None else texts
                with chosen_levels(arch, choice.quantizer, choice.blocks(arch), texts, where) as chosen:
                    arch = with_levels(arch, choice, chosen)[0]
                    part = write_model(
                        where, arch, ModelSpec(form, head=choice.head, fine=choice.fine, draft=True), chosen
                    ).part
            yield open_slot(Model(where, part, choose_operators("auto", part).graph(part, False), self.threads))

    def mixed(self, choice: WeightChoice, share: float) -> tuple[WeightChoice, float]:
        """Give int8 to parts, a share of the way by bytes; and the bytes over those of int4."""
        mixer = Mixer(self.arch, choice, "native", None, self.codec.encode(self.text))
        least, most = mixer.bytes([]), mixer.bytes(mixer.parts)
        made = mixer.allocate_for_size(round(least + share * (most - least)))
        return made.choice, made.facts["bytes"] / least


def weight_variants(name: str, calibration: Path | None, threads: int) -> tuple[Variant, list[Variant]]:
    """Give the float32 form of a model, and its forms in VARIANTS."""
    writer = Writer(name, calibration, threads)

    def variant(form: ExportFormat, quantizer: str | None, head: Format | None) -> Variant:
        label = " ".join([form, *([quantizer] if quantizer else []), *([f"head {head}"] if head else [])])
        return label, lambda: writer.written(WeightChoice.of(form, quantizer, head))

    def mixed(share: float) -> Variant:
        choice, size = writer.mixed(WeightChoice.of("int4", "mse", None), share)
        return f"int4 mse, {size:.2f} times its bytes", lambda: writer.written(choice)

    return variant("fp32", None, None), [*(variant(*each) for each in VARIANTS), *map(mixed, MIXED)]


def own_table(writer: Writer, rows: NDArray[np.int64], seeds: Sequence[int], ggml: Path | None) -> list[dict[str, Any]]:
    """Make figures for each of OWN_VARIANTS, by seed: KL and top-1, on the model's writing and on rows."""
    found = dict[str, dict[str, Any]]()
    begin, plain = writer.codec.encode("")[:1], WeightChoice.of("int4", "mse", None)
    for seed in seeds:
        with writer.written(plain) as slot:
            count = max(1, TOKENS // min(LENGTH, slot.context - 1))
            calibrated = write_own_text(slot, count, begin, (), seed)
        with writer.written(WeightChoice.of("fp32", None, None)) as slot:
            texts = {"own": write_own_text(slot, HELD, begin, (), 1000 + seed), "text": rows}
            exact = {which: list(read(slot, text)) for which, text in texts.items()}
        for label, size, opened in _own_variants(writer, plain, calibrated, ggml):
            row = found.setdefault(label, {"label": label, "size": size, "own": [], "text": []})
            with opened as slot:
                for which, text in texts.items():
                    pairs = list(zip(exact[which], read(slot, text), strict=True))
                    top1 = float(np.mean([a.argmax(-1) == b.argmax(-1) for a, b in pairs]))
                    row[which].append({"kl": float(np.mean([divergence(*pair) for pair in pairs])), "top1": top1})
    return list(found.values())


def _own_variants(
    writer: Writer, plain: WeightChoice, calibrated: NDArray[np.int64], ggml: Path | None
) -> Iterator[tuple[str, float, Any]]:
    """Give each variant's label, its bytes over int4's, and the context manager of its slot."""
    for label, quantizer, head, share, own in OWN_VARIANTS:
        choice, size = replace(plain, quantizer=QUANTIZERS.get(quantizer, Q4_0), head=head), 1.0
        if share:
            choice, size = writer.mixed(choice, share)
        yield label, size, writer.written(choice, calibrated if own else None)
    for label, filled in (("Q4_K_M", False), ("Q4_K_M, rows filled up to 256", True)) if ggml else ():
        assert ggml is not None
        other = copy(writer)
        other.arch, size = k_quantized(writer.arch, ggml, filled)
        yield label, size, other.written(WeightChoice.of("fp32", None, None))


def own_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Give the table of ``own_table``: means, the range over seeds, and the share of Q4_0's."""
    lines = ["| weights | own text: top-1 | KL | of Q4_0's | held-out text: top-1 | KL | of Q4_0's |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        cells = [row["label"] + (f" ({row['size']:.2f} times the bytes)" if row["size"] != 1 else "")]
        for which in ("own", "text"):
            kl = [figures["kl"] for figures in row[which]]
            top1 = 100 * float(np.mean([figures["top1"] for figures in row[which]]))
            share = float(np.mean(kl) / np.mean([figures["kl"] for figures in rows[0][which]]))
            cells += [f"{top1:.1f} %", f"{np.mean(kl):.4f} ({min(kl):.4f} to {max(kl):.4f})", f"{share:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser.add_argument("--seeds", help="of what models write, 0,1,2: the table of as many bytes")
    parser.add_argument("--ggml", type=Path, help="ggml's library libggml-base, for Q4_K_M beside --seeds")
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
        elif arguments.seeds:
            seeds = [int(seed) for seed in arguments.seeds.split(",")]
            writer = Writer(name, arguments.calibration, arguments.threads)
            found = own_table(writer, rows, seeds, arguments.ggml)
        else:
            found = table(*weight_variants(name, arguments.calibration, arguments.threads), rows)
        results[path.name] = {"tokens": int(rows.size), "rows": found}
        if arguments.markdown:
            made = own_markdown(found) if arguments.seeds and not is_bundle else markdown(found)
            print(f"{path.name}, {rows.size} tokens\n\n{made}\n", flush=True)
    if not arguments.markdown:
        show(conditions(text=arguments.text.name, length=arguments.length) | {"models": results})


if __name__ == "__main__":
    main()
