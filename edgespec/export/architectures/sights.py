"""Vision and audio encoders of models, by the ``model_type`` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from edgespec.errors import ExportError, UnsupportedModel, first_line
from edgespec.export.architectures import (
    gemma3_vl,
    gemma4_audio,
    gemma4_vl,
    idefics3,
    internvl,
    lfm2_vl,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_asr,
    qwen_vl,
    voxtral,
)
from edgespec.export.architectures.base import Architecture, AudioEncoderSpec, VisionEncoderSpec
from edgespec.export.architectures.checked import check_tensors
from edgespec.export.architectures.rope import axes_of
from edgespec.export.architectures.towers import MultimodalCheckpoint, Tower, VisionCheckpoint
from edgespec.export.source.derived import DerivedCheckpoint
from edgespec.export.source.source import Checkpoint, ConfigOnly
from edgespec.export.source.stored import NONSENSE, read_object
from edgespec.runtimes.audio.features import HOP, WINDOW
from edgespec.runtimes.audio.reading import RATE
from edgespec.runtimes.images.limits import limited

SIGHTS: dict[str, Callable[[VisionCheckpoint], VisionEncoderSpec]] = {
    "idefics3": idefics3.open_sight,
    "smolvlm": idefics3.open_sight,
    "lfm2_vl": lfm2_vl.open_sight,
    "lfm2-vl": lfm2_vl.open_sight,
    "gemma3": gemma3_vl.open_sight,
    "gemma4": gemma4_vl.open_sight,
    "internvl": internvl.open_sight,
    "qwen2_vl": qwen2_vl.open_sight,
    "qwen2_5_vl": qwen2_5_vl.open_sight,
    "qwen3_vl": qwen_vl.open_sight,
    "qwen3_vl_moe": qwen_vl.open_sight,
    "qwen3_5": qwen_vl.open_sight,
    "qwen3_5_moe": qwen_vl.open_sight,
}
HEARINGS: dict[str, Callable[[MultimodalCheckpoint], AudioEncoderSpec]] = {
    "gemma4": gemma4_audio.open_hearing,
    "qwen3_asr": qwen3_asr.open_hearing,
    "voxtral": voxtral.open_hearing,
}
READ: dict[str, Iterable[str]] = {"images": SIGHTS, "sound": HEARINGS}
"""Inputs other than text, and the types of models for each."""
BOTH = ("gemma4",)
"""Models of images and sound."""
FEATURES = {"sampling_rate": RATE, "hop_length": HOP, "n_fft": WINDOW}
"""Kinds of features; there is one."""


def limit_images(arch: Architecture, rows: int | None) -> None:
    """Limit the rows of an image; see ``limited``."""
    image = limited(arch.sight and arch.sight.image, rows)
    if arch.sight is not None and image is not None:
        arch.sight = arch.sight._replace(image=image)


def _check(found: VisionEncoderSpec, path: Path) -> None:
    processor, places, tower = found.image.processor, found.image.position_embedding, found.tower
    if isinstance(tower, Tower) and tower.patch != processor.patch:
        raise ExportError(f"{path}: pictures are cut into patches of {processor.patch} pixels, and the tower reads "
                          f"{tower.patch}", "preprocessor_config.json belongs to another model")  # fmt: skip
    if any(tap > tower.facts.layers for tap in found.image.deepstack_layers):
        raise ExportError(
            f"{path}: deepstack_visual_indexes {found.image.deepstack_layers} in {tower.facts.layers} layers"
        )
    if places is None or found.places is None or isinstance(tower.source, ConfigOnly):
        return
    learnt = found.places.shape
    if learnt != (places.rows, places.width):
        raise ExportError(f"{path}: learnt positions {list(learnt)}: expected {places.rows} of {places.width}")


def open_sight(kind: str, source: Checkpoint, text: Architecture) -> VisionEncoderSpec:
    """Open the vision encoder of a decoder.

    Args:
        kind: the model's type, one of ``SIGHTS``.
        source: the whole checkpoint, with its own configuration.
        text: the decoder, which gets the sizes.

    Raises:
        ExportError: tensors or settings that do not fit.
    """
    try:
        found = SIGHTS[kind](VisionCheckpoint(source, text))
    except NONSENSE as error:
        what = "what config.json and preprocessor_config.json say of images cannot be understood"
        raise ExportError(f"{source.path}: {what}: {first_line(error)}", "repair them, or use --text-only") from error
    _check(found, source.path)
    for side in (found.tower, *found.projectors):
        assert isinstance(side.source, DerivedCheckpoint)
        check_tensors(side, side.source.base)
    text.inserts = text.facts.hidden * len(found.projectors)
    if found.image.positions == "grid":
        mixed = {"mrope_interleaved": kind not in ("qwen2_vl", "qwen2_5_vl")}  # independent of config.json
        text.rotaries = {
            name: replace(rotary, axes=axes_of({**rotary.parameters, **mixed}, rotary.dims))
            for name, rotary in text.rotaries.items()
        }
    return found


def open_hearing(kind: str, source: Checkpoint, text: Architecture) -> AudioEncoderSpec:
    """Open the audio encoder of a decoder; arguments and errors are those of ``open_sight``.

    ``kind``: one of ``HEARINGS``.
    """
    file = source.path / "preprocessor_config.json"
    given = read_object(file, "download it again") if file.is_file() else {}
    for key, wanted in FEATURES.items() if kind not in BOTH else ():
        if (got := given.get(key, wanted)) != wanted:
            raise UnsupportedModel(f"{file}: {key} {got!r}: expected {wanted}, as Whisper's features have")
    try:
        found = HEARINGS[kind](MultimodalCheckpoint(source, text))
    except NONSENSE as error:
        what = "what config.json says of sound cannot be understood"
        raise ExportError(f"{source.path}: {what}: {first_line(error)}", "repair it, or use --text-only") from error
    for side in (found.tower, *found.projectors, *found.convolutions):
        assert isinstance(side.source, DerivedCheckpoint)
        check_tensors(side, side.source.base)
    text.inserts = text.facts.hidden
    return found
