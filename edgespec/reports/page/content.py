"""What a page shows beside the table: times of passes, memory, and a text with its guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine, Prompt
from edgespec.reports.measuring import pass_over, take_turns
from edgespec.runtimes.opening import open_slot

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
DEPTHS = (64, 256, 1024, 4096, 16384)
SECONDS = 6.0  # of all timed passes together

Kind = Literal["accepted", "rejected", "own", "prompt"]


@dataclass(frozen=True)
class Passes:
    """Times of passes of the target.

    Attributes:
        by_rows: milliseconds by rows, at the first depth.
        by_depth: milliseconds of one row by the tokens before it.
        depth: the first depth.
    """

    by_rows: dict[int, float]
    by_depth: dict[int, float]
    depth: int

    @property
    def curve(self) -> dict[int, float]:
        """The verify curve: v(n), the time of n rows over that of one."""
        return {rows: ms / self.by_rows[1] for rows, ms in self.by_rows.items()}


def time_passes(engine: Engine, seconds: float = SECONDS) -> Passes:
    """Time passes of several rows, and of one row at several depths; keys and values are made up, times are not."""
    slot = open_slot(engine.model, context=engine.context)
    rows = [n for n in ROWS if n + 1 < engine.context]
    depths = [depth for depth in DEPTHS if depth + max(rows) < engine.context] or [1]
    slot.stand_in(depths[0])
    by_rows = take_turns({n: pass_over(slot, n) for n in rows}, seconds / 2)
    one = pass_over(slot, 1)
    by_depth = take_turns(dict.fromkeys(depths, one), seconds / 2, prepare=slot.stand_in)
    return Passes(by_rows, by_depth, depths[0])


def coloured_text(engine: Engine, prompt: Prompt, settings: Settings) -> list[tuple[Kind, str]]:
    """A text in pieces: accepted guesses, those that the target refused, and its own tokens."""
    stream = engine.stream(prompt, settings)
    shown = prompt if isinstance(prompt, str) else engine.codec.decode(list(prompt))
    pieces: list[tuple[Kind, str]] = [("prompt", shown)]
    for chunk in stream:
        made = chunk.round
        if made is None:
            pieces.append(("own", chunk.text))
            continue
        pieces.append(("accepted", "".join(chunk.pieces[: made.accepted])))
        if made.rejected and len(chunk.pieces) == len(made.tokens):  # a stop string may have cut the round
            before = stream.tokens[: -len(made.tokens) + made.accepted or None]
            pieces.append(("rejected", engine.codec.continuation(before, made.rejected)))
        pieces.append(("own", "".join(chunk.pieces[made.accepted :])))
    return [(kind, text) for kind, text in pieces if text]


def memory_parts(engine: Engine, methods: Sequence[str]) -> dict[str, dict[str, int]]:
    """Predicted bytes by part of every method, the context full."""
    return {
        method: {part.name: part.private + part.file for part in engine.allowance.memory(method).parts}
        for method in methods
    }
