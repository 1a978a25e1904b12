"""Candidates of a format choice: size, memory, speed and quality loss of a bundle in each format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import AR
from edgespec.export.architectures import Architecture
from edgespec.export.bundle.progress import Progress
from edgespec.export.format_choice import CHOSEN, Candidate, FormatChoice, choose
from edgespec.export.measuring.loss import LENGTH, NOTHING, TEXTS, Loss, measure_losses
from edgespec.export.measuring.reading import Reading
from edgespec.export.options import ExportOptions
from edgespec.export.planned import PlannedSource, planned_bundle
from edgespec.export.quantization.calibrate import sequences
from edgespec.export.quantization.calibration_text import CalibrationText
from edgespec.export.quantization.native_packing import lacks_packing
from edgespec.export.source.gguf_files import is_quantized
from edgespec.planning.budget import available_memory
from edgespec.planning.plan import Option, PlanRequest, make_plan
from edgespec.planning.profiles import latest_profile
from edgespec.runtimes.files.formats import FILE, Format
from edgespec.runtimes.files.manifest import TokenizerFacts
from edgespec.runtimes.files.speech import SpeechPart
from edgespec.runtimes.text.codec import TextCodec


class Measurable(Protocol):
    """What a choice reads of the models and texts of an export (``Opened``)."""

    options: ExportOptions
    path: Path
    codec: TextCodec
    source_codec: TextCodec | None
    tokenizer: TokenizerFacts
    text: CalibrationText
    read: Reading | None
    speech: SpeechPart | None

    @property
    def progress(self) -> Progress:
        """Receive how far it is."""

    @property
    def arch(self) -> Architecture | None:
        """Of the target; None = its graphs are optimum's."""


def chosen_format(opened: Measurable) -> FormatChoice:
    """Choose the format of an export.

    Raises:
        QualityError: only what loses more than the bound fits, or nothing.
    """
    options, arch = opened.options, opened.arch
    budget = available_memory().reachable if options.budget is None else options.budget
    if arch is None:  # a graph of optimum's: its sizes are not planned
        pick = Candidate("int8", 0, 0, 1.0, True, None)
        return FormatChoice(pick, (pick,), "it goes through optimum", False)
    if keeps_file(opened) and (own := candidate(options, FILE, budget)).fits:
        own = replace(own, loss=NOTHING)
        return FormatChoice(own, (own,))
    plain = [candidate(options, form, budget) for form in CHOSEN]
    if not any(one.fits for one in plain):
        return choose(plain, budget)
    unmeasured = _unmeasured(opened, arch)
    losses: Mapping[Format, Loss] = {} if unmeasured else _losses(opened, arch, [one.format for one in plain])
    known = [replace(one, loss=losses.get(one.format)) for one in plain]
    return choose(known, budget, unmeasured, options.quantizer is None and not options.quick)


def keeps_file(opened: Measurable) -> bool:
    """Whether the weights can stay as a file has them: quantized ones, which native operators multiply as they are."""
    options, arch = opened.options, opened.arch
    if arch is None or arch.encoder is not None or options.operators == "stock" or lacks_packing():
        return False
    return not options.devices and options.adapter is None and is_quantized(opened.path)


def candidate(options: ExportOptions, form: Format, budget: int) -> Candidate:
    """Predict a bundle in a format; its loss is not known."""
    planned = planned_bundle(
        replace(options, format=form, choose=False), PlannedSource(options.model, options.revision)
    )
    option = Option(planned, options.model, ("--format", form), profile=latest_profile(options.threads))
    plan = make_plan([option], PlanRequest(budget))
    own = [one for one in plan.candidates if one.use.method == AR]
    least = min(own or plan.candidates, key=lambda one: one.memory.peak)
    size = sum(entry.size for entry in planned.files.values())
    return Candidate(form, size, least.memory.peak, max(one.rate for one in own or plan.candidates),
                     plan.pick is not None, None)  # fmt: skip


def _unmeasured(opened: Measurable, arch: Architecture) -> str:
    """Say why a model's loss cannot be measured on a text; empty = it can."""
    if arch.encoder is not None and (opened.read is None or not isinstance(opened.read.content, list)):
        return "it reads recordings, and there is no bundled one with its words"
    if opened.speech is not None:
        return "it writes what it hears"
    return ""


def _losses(opened: Measurable, arch: Architecture, forms: list[Format]) -> Mapping[Format, Loss]:
    # a file in fewer bits is not measured against formats that round it a second time, and much
    if is_quantized(opened.path):
        forms = [form for form in forms if form != "int4"]
    measured = [form for form in forms if form != "fp32"]
    found = measure_losses(arch, texts(opened, arch), measured, lambda done, of, what: opened.progress(
        "quality", done, of, what), opened.read)  # fmt: skip
    return found | ({"fp32": NOTHING} if "fp32" in forms else {})


def texts(opened: Measurable, arch: Architecture) -> NDArray[np.int64]:  # [S, T]
    """Cut the export's text into what is measured on."""
    read, context = opened.read, arch.facts.context
    if read is not None:  # the source itself: what is written about it is not known yet
        content = read.content
        assert isinstance(content, list)
        words = (opened.source_codec or opened.codec).decode(content)
        tokens = [*read.begin, *opened.codec.encode(words, special=False)]
        return np.asarray([tokens[: min(LENGTH, context)]], np.int64)
    bos = opened.tokenizer.bos
    begin = opened.codec.encode("")[:1] or ([] if bos is None else [bos])
    tokens = opened.codec.encode(opened.text.text, special=False)
    return sequences(tokens[: TEXTS * LENGTH], begin, min(LENGTH + len(begin), context))
