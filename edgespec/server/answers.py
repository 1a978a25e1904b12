"""The texts of a request as they come: their events become parts, which every API writes in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from edgespec.engine.result import Chunk, Result
from edgespec.runtimes.text.answer import AnswerReader
from edgespec.runtimes.text.byte_tokens import REPLACEMENT
from edgespec.runtimes.text.call_formats import AnswerShape
from edgespec.runtimes.text.call_syntax import Event as Piece
from edgespec.runtimes.text.codec import TextCodec
from edgespec.server.drafts import Drafts
from edgespec.server.scheduler import Event

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length", "cancelled": "length"}
SAID = ("method_requested", "method_used", "reason", "details", "lossless", "exact", "unverified",
        "finish")  # of each result  # fmt: skip


@dataclass(frozen=True)
class TokenLogprob:
    """A token's piece, log-probability and bytes, and those of the likeliest tokens in its place.

    Bytes put together are the text, also where a token is a part of a character.
    """

    text: str
    logprob: float
    likeliest: list[tuple[str, float, bytes]]
    bytes: bytes


@dataclass
class Part:
    """Text, a thought, or a call of a tool.

    Attributes:
        kind: which of them.
        text: of it so far; of a call its arguments as JSON.
        name, id: of a call.
        index: among the calls.
    """

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    name: str = ""
    id: str = ""
    index: int = 0


@dataclass
class Choice:
    """One of the texts of a request, as it is generated."""

    index: int  # which of them
    shape: AnswerShape = field(default_factory=AnswerShape)  # how it is to be read
    drafts: Drafts | None = None  # describes draft tokens for ``show_drafts``; None = not requested
    single: bool = False  # one call ends it
    codec: TextCodec | None = None  # turns likely tokens into text for logprobs; None = not requested
    parts: list[Part] = field(default_factory=list)  # so far
    result: Result | None = None  # once it has ended
    timed_out: bool = False  # it was cut because its time was over
    enough: bool = False  # no further text is wanted
    thought: int = 0  # tokens of its thoughts, about
    scored: list[TokenLogprob] = field(default_factory=list)  # of all its tokens
    fresh: list[TokenLogprob] = field(default_factory=list)  # of those that were not written yet

    def __post_init__(self) -> None:
        self._last: list[int] = []  # tokens
        self._reader = None if self.shape.plain else AnswerReader(self.shape)

    def add(self, event: Event) -> list[tuple[Piece, Part]]:
        """Add an event that is not an error -> the new pieces, each with its part."""
        if self.enough:
            pieces = []
        elif event.chunk is None:
            cut = event.result is not None and FINISH[event.result.finish] == "length"
            pieces = self._reader.finish(cut) if self._reader else []
        elif self._reader:
            pieces = self._reader.push(event.chunk.text)
        else:
            pieces = [Piece("text", event.chunk.text)] if event.chunk.text else []
        if event.chunk is None:
            self.result, self.timed_out = event.result, event.timed_out
        else:
            self.scored += (known := self._scored(event.chunk))
            self.fresh += known
        found = [(piece, self._part(piece)) for piece in pieces]
        if self.single and (ended := [at for at, (piece, _) in enumerate(found) if piece.kind == "called"]):
            self.enough = True
            del found[ended[0] + 1 :]
            self.parts = [part for part in self.parts if part.kind != "call" or part.index == 0]
        if event.chunk and event.chunk.round and self.parts and self.parts[-1].kind == "reasoning":
            self.thought += len(event.chunk.round.tokens)
        return found

    def _scored(self, chunk: Chunk) -> list[TokenLogprob]:
        """List what is known of each token of a chunk, where it was asked for."""
        item = chunk.round
        if item is None or item.logprobs is None:
            return []
        found = []
        told = zip(chunk.pieces, item.logprobs, item.tokens, item.top_logprobs, strict=False)
        for text, value, token, likely in told:
            before, codec = self._last, self.codec
            named = _named(codec, before, likely) if codec else []
            own = text.encode("utf-8", "replace")
            if codec and (REPLACEMENT in text or REPLACEMENT in codec.decode([token])):
                own = codec.token_bytes(token)
            found.append(TokenLogprob(text, value, named, own))
            self._last = [*before[-7:], token]
        return found

    def _part(self, piece: Piece) -> Part:
        """Add a piece to its part."""
        if piece.kind == "call":
            self.parts.append(Part("call", "", piece.text, self.shape.new_call_id(), len(self.calls)))
            return self.parts[-1]
        if piece.kind in ("text", "reasoning") and (not self.parts or self.parts[-1].kind != piece.kind):
            self.parts.append(Part("text" if piece.kind == "text" else "reasoning"))
        self.parts[-1].text += piece.text
        return self.parts[-1]

    @property
    def text(self) -> str:
        """All text so far."""
        return self._all("text")

    def _all(self, kind: str) -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)

    @property
    def calls(self) -> list[Part]:
        """All calls so far."""
        return [part for part in self.parts if part.kind == "call"]

    @property
    def finish(self) -> str | None:
        """Why it ended, in OpenAI's words; None = it has not."""
        if self.result is None:
            return None
        found = FINISH[self.result.finish]
        return "tool_calls" if self.calls and (self.enough or found == "stop") else found

    def take_scored(self) -> list[TokenLogprob]:
        """Return the tokens' scores that were not written yet, and mark them as written."""
        found, self.fresh = self.fresh, []
        return found

    def said(self) -> dict[str, Any]:
        """Write it as a message of a chat."""
        calls = [
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
            for part in self.calls
        ]
        made: dict[str, Any] = {"role": "assistant", "content": self.text or (None if calls else "")}
        if thoughts := self._all("reasoning"):
            made["reasoning_content"] = thoughts
        return made | ({"tool_calls": calls} if calls else {})


def _named(
    codec: TextCodec, before: Sequence[int], likely: Sequence[tuple[int, float]]
) -> list[tuple[str, float, bytes]]:
    """Name tokens by their texts, parts of characters by their bytes, and equal texts by the vocabulary's names."""
    found: dict[str, tuple[float, bytes]] = {}
    for token, score in likely:
        name = codec.continuation(before, [token])
        own = name.encode("utf-8", "replace")
        if REPLACEMENT in name:
            own = codec.token_bytes(token)
            name = "bytes:" + "".join(f"\\x{value:02x}" for value in own)
        if not name or name in found:
            name = codec.token_name(token)
        found[name if name not in found else f"token_id:{token}"] = score, own
    return [(name, *rest) for name, rest in found.items()]


class Used(NamedTuple):
    """How many tokens went in and out; the prompt is counted once a prompt, as OpenAI does."""

    prompt: int
    written: int
    cached: int
    thought: int


def extension(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Write the field ``edgespec`` of an answer: how each choice was decoded."""
    return [
        {
            **{name: getattr(result, name) for name in SAID},
            "timed_out": choice.timed_out,
            **{name: getattr(result.stats, name) for name in ("rounds", "drafted", "accepted")},
            "tokens_per_round": round(len(result.tokens) / max(1, result.stats.rounds), 3),
            "tokens_per_second": round(result.stats.tokens_per_second, 1),
        }
        for choice in choices
        if (result := choice.result)
    ]
