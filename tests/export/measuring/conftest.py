"""Chains of the embedded model's continuations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgespec.export.measuring.acceptance import ChainScorer
from edgespec.export.quantization.calibration_text import read_calibration
from edgespec.runtimes.slots.slot import Slot
from edgespec.runtimes.text.codec import TextCodec
from tests.conftest import TARGET, Written


@pytest.fixture(scope="module")
def scorer(writer: Callable[..., Written]) -> tuple[Slot, ChainScorer]:
    made = writer("stock", TARGET, "fp32")
    codec = TextCodec(made.arch.source.path)
    text, _ = read_calibration(None, made.arch.source.path / "none", codec)
    return made.slot("gated", 2), ChainScorer(made.slot("gated", 2), codec.encode(text)[:120], positions=24, gamma=4)
