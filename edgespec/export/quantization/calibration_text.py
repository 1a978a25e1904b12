"""The text that an export calibrates and measures on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ExportError
from edgespec.export.quantization.calibrate import sequences
from edgespec.runtimes.text.codec import TextCodec

MIN_TOKENS = 32  # minimum, for every context
MEASURED_TOKENS = 512  # at the text's beginning: what parity, acceptance and the search are measured on
QUANTIZER_TOKENS = 8192  # bounds the activations that awq and gptq hold


class CalibrationText(NamedTuple):
    """A text and the name of its file."""

    text: str
    name: str

    @property
    def facts(self) -> dict[str, Any]:
        """Return its entry in the manifest."""
        return {"text": self.name, "text_sha256": digest(self.text)}


def digest(text: str) -> str:
    """SHA-256 of a text as hex digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_calibration(file: Path | None, model: Path, codec: TextCodec) -> CalibrationText:
    """Read the text.

    Args:
        file: the value of ``--calibration``; None = the one in the model's folder, or the built-in one.

    Raises:
        ExportError: the file cannot be read, or is too short.
    """
    if file is None:
        own = model / "calibration.txt"
        file = own if own.is_file() else Path(__file__).with_name("calibration.txt")
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{file}: cannot read the calibration text: {error}", "give a UTF-8 text file") from error
    if len(codec.encode(text)) < MIN_TOKENS:
        raise ExportError(
            f"{file}: expected at least {MIN_TOKENS} tokens of calibration text", "give a page of typical text"
        )
    return CalibrationText(text, file.name)


def quantizer_texts(codec: TextCodec, text: str, context: int) -> NDArray[np.int64]:  # [S, T]
    """Return the calibration text of awq and gptq: the part after the evaluation prefix, if long enough for both."""
    tokens = codec.encode(text, special=False)
    begin = codec.encode("")[:1]  # BOS, where the tokenizer puts one in front of a text
    return sequences(unmeasured(tokens)[:QUANTIZER_TOKENS], begin, context)


def unmeasured(tokens: list[int]) -> list[int]:
    """Return the text after the evaluation prefix, or all of it if it is too short for both."""
    return tokens[MEASURED_TOKENS:] if len(tokens) >= 2 * MEASURED_TOKENS else tokens
