"""Read the recordings that a speech model's export calibrates and measures on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError, InvalidRequest, first_line
from edgespec.runtimes.audio.features import HOP, encoder_rows, log_mel
from edgespec.runtimes.audio.reading import pieces
from edgespec.runtimes.files.manifest import FeaturePart

ENDS = (".wav", ".flac", ".ogg", ".mp3")
MOST = 64  # pieces


def read_sounds(path: Path, part: FeaturePart, rows: int) -> NDArray[np.float32]:
    """Cut recordings into pieces that an encoder reads.

    Args:
        path: of ``--calibration``: a recording, or a folder of them.
        part: how sound becomes rows.
        rows: of a piece; two frames of 10 ms each.

    Returns:
        float32 [S, rows, columns], at most ``MOST`` of them, in an order that depends on their contents.  An
        incomplete last piece is left out; silence fills a recording that is shorter than one piece.

    Raises:
        ExportError: no recording there, or one that cannot be read.
    """
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in ENDS) if path.is_dir() else [path]
    if not files:
        raise ExportError(f"--calibration {path}: this model hears, and there is no recording", _advice())
    found: list[NDArray[np.float32]] = []
    for file in files:
        try:
            mels = log_mel(pieces(file), part.bands, least=2 * rows * HOP)
        except InvalidRequest as error:
            raise ExportError(f"--calibration {path}: this model hears: {first_line(error)}", _advice()) from error
        made = encoder_rows(mels[: 2 * rows * (len(mels) // (2 * rows))], part)
        found += list(made.reshape(-1, rows, made.shape[-1]))
    found.sort(key=lambda piece: hashlib.sha256(piece.tobytes()).digest())
    return np.stack(found[:MOST])


def _advice() -> str:
    return f"give a recording or a folder of them ({', '.join(ENDS)}), such as the model will hear"
