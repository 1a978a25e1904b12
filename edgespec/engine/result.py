"""What a request gives: pieces while it runs, a result at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.decoding.loop import Round
from edgespec.decoding.stats import Stats

SHOWN = 60  # characters of a text in a representation
Finish = Literal["eos", "length", "context", "stop", "cancelled"]


def of_all(claims: Iterable[bool | None]) -> bool | None:
    """Whether all of these hold: False where one does not, else None where one cannot be said."""
    found = list(claims)
    return False if False in found else None if None in found else True


@dataclass(frozen=True, repr=False)
class Result:
    """What a request gave; ``str`` of it is its text.

    Attributes:
        text: the new text, without stop string and special tokens.
        tokens: the new token ids only; the one that ended the text included.
        finish: why it ended.
        stats: counters and times.
        method_requested: as asked for; None = the default, auto, was taken.
        method_used: what decoded; of auto the method of most rounds with guesses, else the one in use last.
        reason: why that method, and whether drafting paid, in one line.
        details: what was counted, estimated and changed on the way, a sentence each.
        lossless: the text has the distribution of plain decoding of this bundle; false by another rule of acceptance;
            None: see ``unproven``.
        exact: the text is bit for bit that of plain decoding in strict mode; None: see ``unproven``.
        approximations: what differs from the source model, and what another rule of acceptance gives away.
        operators: stock or native.
        device: where the last pass ran.
        device_lost: why the request went on on the CPU; None = it did not have to.
        draft_attention: the coarser keys that drafts read; None = those of verification.  No approximation of the text.
        logprobs: log-probability of each token by the unadjusted model, if asked for.
        peak_bytes: largest resident memory of the process so far; 0 = the system does not tell.
        predicted_bytes: what was predicted for this request before it began; 0 = nothing was counted.
        model_sampling: the model's own settings that chose tokens here, by name; empty = none did.
        stop: the stop string that ended it; None = none did.
        unproven: why ``lossless`` and ``exact`` cannot be said, a sentence each: something that ran was not checked.
    """

    text: str
    tokens: list[int]
    finish: Finish
    stats: Stats
    method_requested: str | None
    method_used: str
    reason: str
    lossless: bool | None
    exact: bool | None
    approximations: list[str]
    operators: str = "stock"
    device: str = "cpu"
    device_lost: str | None = None
    draft_attention: str | None = None
    logprobs: list[float] | None = None
    peak_bytes: int = 0
    predicted_bytes: int = 0
    model_sampling: dict[str, float] = field(default_factory=dict)
    unproven: list[str] = field(default_factory=list)
    stop: str | None = None
    details: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
        how = f"{len(self.tokens)} tokens, finish={self.finish!r}, method_used={self.method_used!r}"
        return f"<Result {text!r}, {how}, exact={self.exact}>"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        found: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
            "method_requested": self.method_requested,
            "method_used": self.method_used,
            "reason": self.reason,
            "details": self.details,
            "lossless": self.lossless,
            "exact": self.exact,
            "unproven": self.unproven,
            "approximations": self.approximations,
            "operators": self.operators,
            "device": self.device,
            "stats": self.stats.as_dict() | {"peak_bytes": self.peak_bytes, "predicted_bytes": self.predicted_bytes},
        }
        if self.device_lost is not None:
            found["device_lost"] = self.device_lost
        if self.draft_attention is not None:
            found["draft_attention"] = self.draft_attention
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
        if self.model_sampling:
            found["model_sampling"] = self.model_sampling
        return found


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        text: what became complete in one round.
        round: the round; None for text held back until the very end.
        pieces: ``text`` by the round's tokens: pieces[i] became complete with token i.
    """

    text: str
    round: Round | None
    pieces: tuple[str, ...] = ()
