"""Output of a request: pieces while it runs, a result at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.decoding.loop import Round
from edgespec.decoding.stats import Stats

SHOWN = 60  # characters of a text in a representation
Finish = Literal["eos", "length", "context", "stop", "cancelled"]


def of_all(claims: Iterable[bool | None]) -> bool | None:
    """Whether all of these hold: False if one does not, else None if one is unknown."""
    found = list(claims)
    return False if False in found else None if None in found else True


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a request; ``str`` of it is its text.

    Attributes:
        text: the new text, without the stop string and special tokens.
        tokens: the new token ids, including the one that ended the text.
        finish: why it ended.
        stats: counters and times.
        method_requested: the requested method; None = the default, auto.
        method_used: the method that decoded; for auto, the method of most rounds with guesses, else the last.
        reason: why that method, and whether drafting was faster, in one line.
        details: counts, estimates and changes during the request, a sentence each.
        lossless: the text has the distribution of plain decoding of this bundle; false by another rule of acceptance;
            None: see ``unverified``.
        exact: the text is bit for bit that of plain decoding in strict mode; None: see ``unverified``.
        approximations: differences from the source model, and those of another acceptance rule.
        operators: stock or native.
        device: where the last pass ran.
        device_lost: why the request continued on the CPU; None = it did not.
        draft_attention: the coarser keys that drafts read; None = those of verification.  The text is the same.
        logprobs: log-probability of each token by the unadjusted model, if asked for.
        peak_bytes: largest resident memory of the process so far; 0 = the system does not report it.
        predicted_bytes: the prediction for this request before it started; 0 = not predicted.
        model_sampling: settings that the model recommends and that this request used, by name.
        stop: the stop string that ended it; None = none did.
        unverified: why ``lossless`` and ``exact`` are unknown, a sentence each: something that ran was not checked.
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
    unverified: list[str] = field(default_factory=list)
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
            "unverified": self.unverified,
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
        text: the text that became complete in one round.
        round: the round; None for text held back until the very end.
        pieces: ``text`` by the round's tokens: pieces[i] became complete with token i.
    """

    text: str
    round: Round | None
    pieces: tuple[str, ...] = ()
