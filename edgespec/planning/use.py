"""How a bundle is to be run: what memory and speed are predicted for."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.runtimes.devices.webgpu import DeviceName
from edgespec.runtimes.files.manifest import Attention, Operators
from edgespec.runtimes.slots.slot import PREFILL_CHUNK

GAMMA = 8  # most guesses a round that adaptive control takes


@dataclass(frozen=True)
class Use:
    """One way to run a bundle.

    Attributes:
        method: the decoding method; ``ar`` = plain decoding.
        operators: stock or native.
        context: tokens held at once, prompt and answer.
        attention: native operators: how keys and values are kept; None = what the bundle was exported for.
        gamma: most guesses a round; of a tree its nodes.
        batch: sequences decoded together.
        threads: of ONNX Runtime.
        chunk: rows of a prefill's pass.
        greedy: whether only the likeliest token of a row is needed; False = whole rows of logits.
        strict: whether stock operators must give a row the same bits in every pass.
        device: where passes run.
    """

    method: str = "ar"
    operators: Operators = "native"
    context: int = 512
    attention: Attention | None = None
    gamma: int = GAMMA
    batch: int = 1
    threads: int = 2
    chunk: int = PREFILL_CHUNK
    greedy: bool = True
    strict: bool = True
    device: DeviceName = "cpu"
