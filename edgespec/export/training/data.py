"""Generate training texts with the target (self-distillation)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgespec.export.quantization.calibration_text import read_calibration
from edgespec.export.training.target import Source, Target
from edgespec.export.training.windows import Windows

TOGETHER = 32  # texts written at once: bounds the KV cache
SAID = 32  # tokens between two reports
SEED_TOKENS = 4  # from a random place of a text, if there is no BOS


@dataclass(frozen=True)
class Order:
    """A batch of texts to generate."""

    name: str  # of the batch; also what its random numbers depend on
    count: int  # texts
    length: int  # tokens of each, seed included
    greedy_from: int | None = None  # first greedy token; earlier ones are sampled; None = all are
    read: NDArray[np.int64] | None = None  # sources of an encoder-decoder, int64 [count, S]; see ``Windows``


def orders(
    kind: str, count: int, length: int, greedy_from: int | None = None, read: NDArray[np.int64] | None = None
) -> list[Order]:
    """Split ``count`` texts into batches of ``TOGETHER``; ``read``: the source of each."""
    found = []
    for number, start in enumerate(range(0, count, TOGETHER)):
        own = None if read is None else read[start : start + TOGETHER]
        found.append(Order(f"{kind}-{number:05}", min(TOGETHER, count - start), length, greedy_from, own))
    return found


class Writes(Protocol):
    """A model that can write texts: ``Target``, or ``NativeWriter``."""

    source: Source

    @property
    def device(self) -> Any:
        """Where its tokens are."""

    def attend(self, sources: NDArray[np.int64] | None) -> None:
        """See ``Target``."""

    def follow(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        """Read tokens [B, T] -> rows [B, any, any], whose last one ``logits`` takes, and a cache."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits [B, vocab] of the last rows [B, any]."""


def write_texts(
    target: Writes,
    order: Order,
    seed: int,
    texts: Sequence[str] = (),
    report: Callable[[int], None] = lambda tokens: None,
) -> Windows:
    """Generate texts with the target; they depend only on the seed and the order's name.

    A text begins with BOS.  If the tokenizer has none, it begins with ``SEED_TOKENS`` tokens of a random place of
    ``texts`` (or of the calibration text).  It is sampled at temperature 1 and ends after an EOS.  For an
    encoder-decoder, the beginning is the usual one.

    Args:
        report: called with the number of tokens that each text has, now and then.

    Returns:
        ``order.count`` windows of at most ``order.length`` tokens.
    """
    numbers = np.random.Generator(np.random.PCG64([seed, *order.name.encode()]))
    reader = target.source.reader
    if reader is not None:
        begin = torch.tensor([reader.begin] * order.count)
        target.attend(order.read)
    else:
        begin = _seeds(target.source, order.count, numbers, texts)  # [B, s]
    generator = torch.Generator(device=target.device).manual_seed(int(numbers.integers(2**62)))

    def choose(logits: Tensor, at: int) -> Tensor:  # [B, vocab] -> [B]
        if order.greedy_from is not None and at >= order.greedy_from:
            return logits.argmax(-1)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    made = _continued(target, begin.to(target.device), order.length, choose, report)
    return made if order.read is None else replace(made.first(order.count), read=order.read)


def greedy_texts(
    target: Target, prompts: Windows, prompt: int, length: int, report: Callable[[int], None] = lambda tokens: None
) -> Windows:
    """Return the target's greedy continuations of the first ``prompt`` tokens of texts, ``length`` tokens in all."""
    parts = []
    for start in range(0, len(prompts), TOGETHER):
        begin = torch.from_numpy(prompts.tokens[start : start + TOGETHER, :prompt]).to(target.device)
        parts.append(_continued(target, begin, length, lambda logits, at: logits.argmax(-1), report))
    return Windows.joined(parts)


@torch.no_grad()
def _continued(
    target: Writes,
    begin: Tensor,
    length: int,
    choose: Callable[[Tensor, int], Tensor],
    report: Callable[[int], None],
) -> Windows:
    tokens = begin  # [B, t]
    ends = torch.tensor(target.source.eos, dtype=torch.long, device=tokens.device)
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    past, fresh = None, begin
    while tokens.shape[1] < length and not bool(ended.all()):
        hidden, past = target.follow(fresh, past)
        fresh = choose(target.logits(hidden[:, -1]), tokens.shape[1])[:, None]
        tokens = torch.cat([tokens, fresh], 1)
        if tokens.shape[1] % SAID == 0:
            report(tokens.shape[1])
        ended |= torch.isin(fresh[:, 0], ends)
    rows = tokens.cpu().tolist()
    return Windows.of([_cut(row, begin.shape[1], target.source.eos) for row in rows], length)


def _cut(row: list[int], begin: int, eos: Sequence[int]) -> list[int]:
    at = next((place for place in range(begin, len(row)) if row[place] in eos), len(row) - 1)
    return row[: at + 1]


def _seeds(source: Source, count: int, numbers: np.random.Generator, texts: Sequence[str]) -> Tensor:  # [count, s]
    bos = source.codec.encode("")[:1]
    if bos:
        return torch.tensor([bos] * count)
    if not texts:
        texts = [read_calibration(None, source.path, source.codec)[0]]
    found: list[list[int]] = []
    while len(found) < count:
        text = texts[int(numbers.integers(len(texts)))]
        lines = [line for line in text.splitlines() if line.strip()]
        tokens = source.codec.encode(lines[int(numbers.integers(len(lines)))], special=False)
        place = int(numbers.integers(max(1, len(tokens) - SEED_TOKENS)))
        if len(tokens) - place >= SEED_TOKENS:
            found.append(tokens[place : place + SEED_TOKENS])
    return torch.tensor(found)
