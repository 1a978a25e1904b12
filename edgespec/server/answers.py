"""What a client gets, in the shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edgespec.engine.result import Chunk, Result
from edgespec.server.scheduler import Event

Kind = Literal["completion", "chat"]
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "length"}


@dataclass
class Choice:
    """One of the texts of a request, as it comes.

    Attributes:
        index: which of them.
        text: so far.
        result: once it has ended.
        late: it was cut because its time was over.
    """

    index: int
    kind: Kind
    text: str = ""
    result: Result | None = None
    late: bool = False
    _scored: list[tuple[str, float]] = field(default_factory=list)  # piece and log-probability of each token

    def add(self, event: Event) -> str:
        """Take an event that is no error; returns its text."""
        if event.chunk is None:
            self.result, self.late = event.result, event.late
            return ""
        self.text += event.chunk.text
        self._scored += scored(event.chunk)
        return event.chunk.text

    @property
    def finish(self) -> str | None:
        """Why it ended, in the API's words; None = it has not."""
        return FINISH[self.result.finish] if self.result else None

    def whole(self, logprobs: bool) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        body: dict[str, Any] = {"index": self.index, "finish_reason": self.finish}
        if self.kind == "chat":
            body["message"] = {"role": "assistant", "content": self.text, "refusal": None}
        else:
            body["text"] = self.text
        return body | {"logprobs": self._logprobs(self._scored, 0) if logprobs else None}

    def piece(self, text: str, chunk: Chunk | None, logprobs: bool) -> dict[str, Any]:
        """The choice of one event of a stream; ``chunk`` None = the last."""
        body: dict[str, Any] = {"index": self.index, "finish_reason": None if chunk else self.finish}
        if self.kind == "chat":
            body["delta"] = {"content": text} if chunk else {}
        else:
            body["text"] = text
        found = scored(chunk) if chunk and logprobs else []
        return body | {"logprobs": self._logprobs(found, len(self.text) - len(text)) if found else None}

    def _logprobs(self, found: Sequence[tuple[str, float]], offset: int) -> dict[str, Any]:
        if self.kind == "chat":
            return {
                "content": [
                    {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                    for piece, value in found
                ],
                "refusal": None,
            }
        offsets = [offset + sum(len(piece) for piece, _ in found[:at]) for at in range(len(found))]
        tokens, values = [piece for piece, _ in found], [value for _, value in found]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def scored(chunk: Chunk) -> list[tuple[str, float]]:
    """Text and log-probability of each token of a chunk, where they were asked for."""
    known = (chunk.round.logprobs if chunk.round else None) or ()
    return list(zip(chunk.pieces, known, strict=False))


def usage(prompt_tokens: int, results: Sequence[Result]) -> dict[str, Any]:
    """How many tokens went in and out; the prompt is counted once a prompt, as the API does."""
    written = sum(len(result.tokens) for result in results)
    reused = sum(result.stats.reused_tokens for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": min(prompt_tokens, reused)},
    }


def extension(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """The field ``edgespec`` of an answer: how each choice was decoded."""
    return [
        {
            "method_requested": result.method_requested,
            "method_used": result.method_used,
            "reason": result.reason,
            "lossless": result.lossless,
            "exact": result.exact,
            "unproven": result.unproven,
            "finish": result.finish,
            "late": choice.late,
            "rounds": result.stats.rounds,
            "drafted": result.stats.drafted,
            "accepted": result.stats.accepted,
            "tokens_per_round": round(len(result.tokens) / max(1, result.stats.rounds), 3),
        }
        for choice in choices
        if (result := choice.result)
    ]
