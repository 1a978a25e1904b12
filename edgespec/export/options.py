"""What ``edgespec export`` asks for, and options that a foreign graph cannot serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from edgespec.drafters.registry import EAGLE, METHODS, MTP, SELF_SPEC, SPECULATIVE, drafters_apart, needing
from edgespec.errors import ExportError
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.quantization.native_packing import lacks_packing
from edgespec.export.quantization.weights import WeightChoice
from edgespec.export.source.source import BUILTIN, builtin_drafters
from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.formats import DEVICE_FORMATS, FILE, FOUR_BITS, MIXED, ExportFormat, Format, listed
from edgespec.runtimes.files.manifest import Layout, Precision
from edgespec.runtimes.files.operators import WantedOperators

CALIBRATED: tuple[ExportFormat, ...] = (*FOUR_BITS, MIXED)
"""Formats whose levels are calibrated unless ``quick``: of 8 bits little is lost without."""


def layout_of(operators: WantedOperators) -> Layout:
    """Return the layout that weights are stored in for these operators."""
    return "stock" if operators == "stock" else "native"


class ExportChanges(TypedDict, total=False):
    """Fields of ``ExportOptions`` by name, for editors; texts stand for lists of one, for paths and for sizes."""

    methods: str | Sequence[str]
    format: ExportFormat
    quantizer: str | None
    head_format: Format | None
    draft: str | None
    draft_format: Format | None
    context: int | None
    calibration: str | Path | None
    skip_set: str | Path | None
    trials: int
    seed: int
    threads: int | None
    overwrite: bool
    revision: str | None
    keep_search: str | Path | None
    operators: WantedOperators
    attention: str | Sequence[str]
    heads: str | Sequence[str]
    head_vocab: int | None
    draft_vocab: int | None
    devices: DeviceName | Sequence[DeviceName]
    device_precisions: Precision | Sequence[Precision]
    adapter: str | None
    drafter: str | None
    codes: str | Path | None
    text_only: bool
    image_rows: int | None
    target_size: str | int | None
    target_kl: float | None
    quick: bool
    choose: bool
    budget: str | int | None


@dataclass(frozen=True)
class ExportOptions:
    """Options of ``edgespec export``.

    Attributes:
        model: folder, .gguf file, hub id or ``builtin:NAME``.
        output: the bundle's folder.
        methods: decoding methods to prepare; ar and ngram are always included.
        format: weight format of target and draft.
        quantizer: how int4 and int8 levels are chosen; None = mse, or for an int4 target gptq if that loses less.
        head_format: weight format of the LM head and the embedding tied to it; None = ``format``.
        draft: the draft model, for ``speculative``.
        draft_format: weight format of the draft; None = the target's, or int4 for int8.
        context: maximum tokens of a sequence; None = the model's own limit.
        calibration: text, or for a speech model a recording, to calibrate on, and to measure parity, acceptance and the
            search on; None = the model's own output to calibrate on, that or a text of edgespec to measure on.
        skip_set: a JSON file with a published skip set, instead of the search.
        trials: proposals of the skip-set search.
        seed: of the skip-set search, and of the text that the model generates.
        threads: threads of the measurements; None = all processors this process may use.
        overwrite: replace an older bundle.
        revision: branch, tag or commit of a hub model.
        keep_search: folder for the state of an interrupted search.
        operators: layout of the weights: native unless ``stock``; either kind can run them, after a conversion.
        attention: formats of the KV cache's keys to prepare; the first one that passes its quality gate becomes the
            default; none = float16.
        heads: folders of trained heads, one for each method that needs them.
        head_vocab: rows of the heads' LM head, the most frequent tokens of the calibration text; None = all.
        draft_vocab: rows of the LM head of the draft and of the drafter; 0 = all, None = the fastest number for the
            draft (``planning/vocab_pruning.py``), and the drafter's own.
        devices: those to write graphs for.
        device_precisions: precisions of activations on ``devices``; none = fp32.
        adapter: LoRA adapter to merge into the target.
        drafter: folder of a drafter conditioned on hidden states; or a layer for ``mtp``, in place of the checkpoint's.
        codes: folder of the decoder of a model's codes; None = ``codes`` in the model's own folder, if it exists.
        text_only: export only the text part of a model for images or sound.
        image_rows: maximum rows of an image; None = the model's own maximum.
        target_size: maximum bytes of the target's weights: parts of an int4 model become int8 (``measuring/mixer.py``).
        target_kl: maximum nats of divergence from the source, reached in the same way.
        quick: choose levels only by mse, without calibration.
        choose: use the fastest format that keeps the model's quality instead of ``format`` (``format_choice.py``).
        budget: maximum bytes of memory that such a bundle may use; None = the memory that is free here.
    """

    model: str
    output: Path = Path()
    methods: Sequence[str] = ()
    format: ExportFormat = "int4"
    quantizer: str | None = None
    head_format: Format | None = None
    draft: str | None = None
    draft_format: Format | None = None
    context: int | None = None
    calibration: Path | None = None
    skip_set: Path | None = None
    trials: int = 64
    seed: int = 0
    threads: int | None = None
    overwrite: bool = False
    revision: str | None = None
    keep_search: Path | None = None
    operators: WantedOperators = "auto"
    attention: Sequence[str] = ()
    heads: Sequence[str] = ()
    head_vocab: int | None = None
    draft_vocab: int | None = None
    devices: Sequence[DeviceName] = ()
    device_precisions: Sequence[Precision] = ()
    adapter: str | None = None
    drafter: str | None = None
    codes: Path | None = None
    text_only: bool = False
    image_rows: int | None = None
    target_size: int | None = None
    target_kl: float | None = None
    quick: bool = False
    choose: bool = False
    budget: int | None = None

    @property
    def names_format(self) -> bool:
        """Whether an option says how weights are stored, so that no format needs to be chosen."""
        return any((self.quantizer, self.head_format, self.target_size, self.target_kl))

    @property
    def calibrates(self) -> bool:
        """Whether levels are calibrated by default, without a requested quantizer."""
        return self.quantizer is None and not self.quick and self.format in CALIBRATED

    @property
    def layout(self) -> Layout:
        """How weights are stored first."""
        return layout_of(self.operators)

    def placed(self) -> ExportOptions:
        """Store a file's own weights for stock operators where there are no native ones to pack them."""
        if FILE in (self.format, self.draft_format) and self.operators == "auto" and lacks_packing():
            return replace(self, operators="stock")
        return self

    @property
    def choice(self) -> WeightChoice:
        """How the target's matrices are stored, and those of a drafter.

        Raises:
            ExportError: see ``WeightChoice.of``.
        """
        return WeightChoice.of(self.format, self.quantizer, self.head_format)

    @property
    def draft_choice(self) -> WeightChoice:
        """Storage of a draft's matrices: its own format by mse, else the target's, or 4 bits for a target in int8.

        Rounding a draft to 4 bits loses few guesses, and halves the bytes that each one reads.
        """
        form = self.draft_format or ("int4" if self.format == "int8" else self.format)
        return self.choice if form == self.format else WeightChoice.of(form, None, None)

    @property
    def its_drafter(self) -> str | None:
        """The drafter: as given, or the one that an embedded model comes with if ``eagle`` is wanted."""
        own = f"{self.model}-eagle"
        known = EAGLE in self.methods and own.removeprefix(BUILTIN) in builtin_drafters()
        return self.drafter or (own if known and self.model.startswith(BUILTIN) else None)

    def wanted(self) -> list[str]:
        """All methods of the bundle, in the usual order.

        Raises:
            ExportError: an unknown method, or options that do not fit together.
        """
        if unknown := [name for name in self.methods if name not in METHODS]:
            error = METHODS.refused("method", unknown[0])
            raise ExportError(error.message, error.hint)
        methods = [name for name in METHODS if name in self.methods or METHODS[name].needs == "text"]
        self._check_formats()
        self._check_drafts(methods)
        self._check_parts(methods)
        return methods

    def _check_formats(self) -> None:
        for option, form in (("--format", self.format), ("--draft-format", self.draft_format)):
            if self.devices and form not in (None, *DEVICE_FORMATS):
                raise ExportError(
                    f"--device {self.devices[0]} and {option} {form}: expected {listed(DEVICE_FORMATS)}",
                    f"choose {option} {listed(DEVICE_FORMATS)}",
                )
        goals = {"--target-size": self.target_size, "--target-kl": self.target_kl}
        given = {name: goal for name, goal in goals.items() if goal is not None}
        if len(given) > 1:
            raise ExportError(f"{' and '.join(given)}: expected one of them")
        for name, goal in given.items():
            if not 0 < goal < math.inf:
                raise ExportError(f"{name} {goal}: expected a positive number")
            if self.format not in FOUR_BITS:
                raise ExportError(
                    f"{name} and --format {self.format}: expected {listed(FOUR_BITS)}, of which parts become int8",
                    "leave --format out",
                )
        if self.format == FILE:
            self._check_file()
        if self.format == MIXED and (self.operators == "stock" or lacks_packing()):
            why = lacks_packing() or "stock operators cannot hold its weights"
            raise ExportError(f"--format {MIXED} needs native operators: {why}", "choose --format int4")
        if self.quick and self.quantizer not in (None, "mse"):
            raise ExportError(f"--quick and --quantizer {self.quantizer}: expected one of them", "--quick is mse alone")
        if self.device_precisions and not self.devices:
            raise ExportError("--device-precision was given, but no --device", "add --device webgpu")

    def _check_file(self) -> None:
        if self.adapter:
            raise ExportError("--format file and --adapter: expected one of them", "choose another --format")
        if self.operators == "native" and (why := lacks_packing()):
            raise ExportError(f"--format file needs native operators: {why}", "leave --operators out")

    def _check_drafts(self, methods: list[str]) -> None:
        if SPECULATIVE in methods and self.draft is None:
            raise ExportError("method speculative needs a draft model", "add --draft MODEL2")
        for option, value in (("--draft", self.draft), ("--draft-format", self.draft_format)):
            if value is not None and SPECULATIVE not in methods:
                raise ExportError(f"{option} was given, but not --method speculative", "add --method speculative")
        if EAGLE in methods and self.its_drafter is None:
            raise ExportError(
                "method eagle needs a drafter",
                "train one with `edgespec train eagle MODEL -o DIR`, then add --drafter DIR",
            )
        if self.drafter is None and (lost := sorted({*drafters_apart()} & {*methods} - {EAGLE})):
            hint = "add --drafter with the one published for this model"
            raise ExportError(f"method {lost[0]} needs a drafter", hint)
        apart = (*drafters_apart(), MTP)  # whose layer may also be in the checkpoint
        if self.drafter is not None and not set(apart) & set(methods):
            raise ExportError(f"--drafter was given, but not --method {' or '.join(apart)}", "add --method eagle")
        if len(several := [name for name in needing("drafter") if name in methods]) > 1:
            raise ExportError(f"a bundle holds one drafter: expected one of --method {', '.join(several)}")

    def _check_parts(self, methods: list[str]) -> None:
        if self.codes is not None and not self.codes.is_dir():
            raise ExportError(f"--codec {self.codes}: there is no such folder", "give that of the decoder's checkpoint")
        if self.skip_set is not None and SELF_SPEC not in methods:
            raise ExportError("--skip-set was given, but not --method self-spec", "add --method self-spec")
        if self.draft_vocab and not {SPECULATIVE, *needing("drafter")} & set(methods):
            raise ExportError(
                "--draft-vocab was given, but no method that it is for",
                f"methods: {', '.join((SPECULATIVE, *needing('drafter')))}",
            )
        if self.head_vocab is not None and not set(needing("heads")) & set(methods):
            raise ExportError(
                "--head-vocab was given, but no method with heads", f"methods: {', '.join(needing('heads'))}"
            )


def refuse_target(options: ExportOptions, choice: WeightChoice, path: Path) -> None:
    """Refuse options that need a target with edgespec's graphs."""
    given = [
        *((f"--method {name}", True) for name in options.wanted() if name not in needing("text", "draft")),
        ("--format w8a8", options.format == "w8a8"),
        (f"--format {MIXED}", options.format == MIXED),
        (f"--quantizer {options.quantizer}", bool(choice.quantizer and choice.quantizer.calibrated)),
        ("--target-size", options.target_size is not None),
        ("--target-kl", options.target_kl is not None),
        ("--attention", bool(options.attention)),
        ("--device", bool(options.devices)),
        ("--heads", bool(options.heads)),
        ("--adapter", options.adapter is not None),
        ("--operators native", options.operators == "native"),
    ]
    _refuse(given, f"{path} goes through another exporter, whose graph cannot be cut into layers or rewritten",
            f"such a model has the methods {', '.join(needing('text', 'draft'))}, in int4, int8 (quantizers rtn, mse) "
            f"or fp32; architectures that edgespec emits itself: {', '.join(sorted(ARCHITECTURES))}")  # fmt: skip


def refuse_draft(options: ExportOptions, path: Path) -> None:
    """Refuse options that need a draft with edgespec's graphs."""
    given = [
        ("--draft-vocab", bool(options.draft_vocab)),
        ("--format w8a8", (options.draft_format or options.format) == "w8a8"),
    ]
    hint = f"leave it out, or take a draft that edgespec emits itself: {', '.join(sorted(ARCHITECTURES))}"
    _refuse(given, f"the draft {path} goes through another exporter, whose graphs know no such thing", hint)


def refuse_reading(options: ExportOptions) -> None:
    """Refuse options that need a decoder-only model."""
    given = [
        (f"--format {MIXED}", options.format == MIXED),
        (f"--attention {' '.join(options.attention)}", bool(set(options.attention) - {"f32", "f16", "int8"})),
        ("--drafter", options.drafter is not None),
    ]
    _refuse(given, "there is no such thing for encoder-decoders yet", "leave it out")


def _refuse(given: list[tuple[str, bool]], why: str, hint: str) -> None:
    for option, wrong in given:
        if wrong:
            raise ExportError(f"{option}: {why}", hint)
