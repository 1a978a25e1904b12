"""How far a quantized tower is from the model's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.export.architectures.base import VisionEncoderSpec
from edgespec.export.quantization.reference import reference_rows
from edgespec.runtimes.files.manifest import ModelPart
from edgespec.runtimes.files.operators import NATIVE
from edgespec.runtimes.images.image import proof_picture
from edgespec.runtimes.images.processing import Floats, piece_rows, process, read_places
from edgespec.runtimes.ort.native_library import native_library
from edgespec.runtimes.slots.encoder import Encoder, encoder_attention
from edgespec.runtimes.slots.shared import Model

PICTURE = 96, 128  # pixels


def tower_note(sight: VisionEncoderSpec, folder: Path, target: ModelPart, threads: int | None) -> str | None:
    """Report how far the embeddings of a picture's first piece are from those of float32 weights; None = the same.

    The reference runs in numpy, which does not support encoders with windows: those are not compared.
    """
    tower, image = target.tower, sight.image
    if tower is None or tower.format == "fp32" or image.windows or native_library().path is None:
        return None
    image = image.model_copy(update={"deepstack_layers": []})
    piece, places = process(proof_picture(PICTURE).pixels, image).pieces[0], read_places(folder, image)
    sides, written = (sight.tower, sight.projectors[0]), (tower, (target.projectors or [])[0])

    def exact(side: int, rows: Floats, inside: NDArray[np.int64] | None) -> Floats:
        return reference_rows(sides[side], rows, inside if sides[side].rotaries else None)[0]

    def near(side: int, rows: Floats, inside: NDArray[np.int64] | None) -> Floats:
        part = written[side]
        encoder = Encoder(Model(folder, part, NATIVE, threads, encoder_attention(part)))
        found = encoder.encode(rows, inside)[:, : sides[side].facts.hidden if side == 0 else None]
        encoder.close()
        return np.ascontiguousarray(found)

    wanted, found = (piece_rows(piece, image, places, one) for one in (exact, near))
    share = float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted - wanted.mean(0)).mean()))
    return f"a picture's rows differ from those of float32 weights by {share:.1%} of their deviation"
