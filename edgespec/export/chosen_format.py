"""Candidates of a format choice: size, memory, speed and quality loss of a bundle in each format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.registry import AR
from edgespec.export.architectures import Architecture
from edgespec.export.emit.plan import is_quantized
from edgespec.export.emit.stock import keeps_weights
from edgespec.export.format_choice import CHOSEN, Candidate, FormatChoice, choose
from edgespec.export.measuring.loss import LENGTH, NOTHING, TEXTS, Loss, measure_losses
from edgespec.export.options import ExportOptions
from edgespec.export.plan_manifest import PlannedSource, plan_bundle
from edgespec.export.quantization.calibrate import sequences
from edgespec.planning.budget import available_memory
from edgespec.planning.plan import Option, PlanRequest, make_plan
from edgespec.planning.profiles import latest_profile
from edgespec.runtimes.files.formats import FILE, Format

if TYPE_CHECKING:
    from edgespec.export.loaded_source import LoadedSource


def chosen_format(source: LoadedSource) -> FormatChoice:
    """Choose the format of an export.

    Raises:
        QualityError: only what loses more than the bound fits, or nothing.
    """
    options, arch = source.options, source.arch
    budget = available_memory().reachable if options.budget is None else options.budget
    if arch is None:  # a foreign graph: its sizes are not planned
        pick = Candidate("int8", 0, 0, 1.0, True, None)
        return FormatChoice(pick, (pick,), "its graph is not one of edgespec's own", False)
    shapes = PlannedSource(options.model, options.revision)
    if keeps_file(source) and (own := candidate(options, FILE, budget, shapes)).fits:
        own = replace(own, loss=NOTHING)
        return FormatChoice(own, (own,))
    plain = [candidate(options, form, budget, shapes) for form in CHOSEN]
    if not any(one.fits for one in plain):
        return choose(plain, budget)
    unmeasured = _unmeasured(source, arch)
    losses: Mapping[Format, Loss] = {} if unmeasured else _losses(source, arch, [one.format for one in plain])
    known = [replace(one, loss=losses.get(one.format)) for one in plain]
    return choose(known, budget, unmeasured, options.quantizer is None and not options.quick)


def keeps_file(source: LoadedSource) -> bool:
    """Whether the weights can stay as a file has them: quantized ones, of types that operators multiply as they are."""
    options, arch = source.options, source.arch
    if arch is None or arch.encoder is not None or options.devices or options.adapter is not None:
        return False
    return keeps_weights(arch, replace(options, format=FILE).placed().layout)


def candidate(options: ExportOptions, form: Format, budget: int, source: PlannedSource) -> Candidate:
    """Predict a bundle in a format; its loss is not known."""
    planned = plan_bundle(replace(options, format=form, choose=False), source)
    option = Option(planned, options.model, ("--format", form), profile=latest_profile(options.threads))
    plan = make_plan([option], PlanRequest(budget))
    own = [one for one in plan.candidates if one.use.method == AR]
    least = min(own or plan.candidates, key=lambda one: one.memory.peak)
    size = sum(entry.size for entry in planned.files.values())
    streams = plan.pick is not None and plan.pick.streaming is not None and plan.pick.streaming.kind == "layers"
    return Candidate(form, size, least.memory.peak, max(one.rate for one in own or plan.candidates),
                     plan.pick is not None, None, streams)  # fmt: skip


def _unmeasured(source: LoadedSource, arch: Architecture) -> str:
    """Say why a model's loss cannot be measured on a text; empty = it can."""
    if arch.encoder is not None and (source.sample.read is None or not isinstance(source.sample.read.content, list)):
        return "it reads recordings, and there is no bundled one with its words"
    if source.tokenizers.speech is not None:
        return "it writes what it hears"
    return ""


def _losses(source: LoadedSource, arch: Architecture, forms: list[Format]) -> Mapping[Format, Loss]:
    # a file in fewer bits is not measured against formats that round it a second time, and much
    if is_quantized(arch):
        forms = [form for form in forms if form != "int4"]
    measured = [form for form in forms if form != "fp32"]
    found = measure_losses(arch, texts(source, arch), measured, lambda done, of, what: source.progress(
        "quality", done, of, what), source.sample.read)  # fmt: skip
    return found | ({"fp32": NOTHING} if "fp32" in forms else {})


def texts(source: LoadedSource, arch: Architecture) -> NDArray[np.int64]:  # [S, T]
    """Cut the export's text into what is measured on."""
    read, context = source.sample.read, arch.facts.context
    if read is not None:  # the source itself: what is written about it is not known yet
        content = read.content
        assert isinstance(content, list)
        words = (source.tokenizers.source_codec or source.tokenizers.codec).decode(content)
        tokens = [*read.begin, *source.tokenizers.codec.encode(words, special=False)]
        return np.asarray([tokens[: min(LENGTH, context)]], np.int64)
    bos = source.tokenizers.facts.bos
    begin = source.tokenizers.codec.encode("")[:1] or ([] if bos is None else [bos])
    tokens = source.tokenizers.codec.encode(source.sample.text.text, special=False)
    return sequences(tokens[: TEXTS * LENGTH], begin, min(LENGTH + len(begin), context))
