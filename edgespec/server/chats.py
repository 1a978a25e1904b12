"""Answers in the shapes of OpenAI's completions and chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from edgespec.engine.result import Chunk
from edgespec.runtimes.text.call_syntax import Event as Piece
from edgespec.server.answers import Choice, Part, TokenLogprob, extension
from edgespec.server.errors import Failure
from edgespec.server.writer import Body, Writer, listed, sse

DONE = b"data: [DONE]\n\n"


class CompletionWriter(Writer):
    """Texts of ``/v1/completions``."""

    kind = piece_kind = "text_completion"
    empty: ClassVar[Body] = {"text": ""}  # of a choice that received no text
    end: ClassVar[Body] = {"text": ""}

    def _body(self, kind: str) -> Body:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> Body:
        used = self.used
        made: Body = {
            "prompt_tokens": used.prompt,
            "completion_tokens": used.written,
            "total_tokens": used.prompt + used.written,
            "prompt_tokens_details": {"cached_tokens": used.cached},
        }
        return made | ({"completion_tokens_details": {"reasoning_tokens": used.thought}} if used.thought else {})

    def whole(self) -> Iterator[str]:
        end = {"usage": self._usage(), "edgespec": extension(self.choices)}
        yield from listed(self._body(self.kind), "choices", map(self._choice, self.choices), end)

    def _choice(self, choice: Choice) -> Body:
        logprobs = self._logprobs(choice.scored, 0) if self.logprobs else None
        return {"index": choice.index, "finish_reason": choice.finish} | self._said(choice) | {"logprobs": logprobs}

    def piece(self, choice: Choice, found: Sequence[tuple[Piece, Part]], chunk: Chunk | None) -> Iterator[bytes]:
        own = [said] if chunk and choice.drafts and (said := choice.drafts.add(chunk)) else []
        deltas = [made for piece, part in found if (made := self._delta(piece, part))]
        if own and not deltas:
            deltas = [self.empty]
        before = len(choice.text) - sum(len(piece.text) for piece, _ in found if piece.kind == "text")
        for delta in deltas:
            fresh = choice.take_scored()
            logprobs = self._logprobs(fresh, before) if fresh else None
            one = {"index": choice.index, "finish_reason": None} | delta | {"logprobs": logprobs}
            body = self._body(self.piece_kind) | {"choices": [one]}
            yield sse(body | {"edgespec": own} if own else body)
            own = []
        if chunk is None:
            last = {"index": choice.index, "finish_reason": choice.finish} | self.end | {"logprobs": None}
            yield sse(self._body(self.piece_kind) | {"choices": [last], "edgespec": extension([choice])})

    def closing(self) -> Iterator[bytes]:
        if self.usage:
            yield sse(self._body(self.piece_kind) | {"choices": [], "usage": self._usage()})
        yield DONE

    def failed(self, failure: Failure) -> Iterator[bytes]:
        yield sse(failure.body())
        yield DONE

    # -- what differs in chats -----------------------------------------------------------------------------------------

    def _said(self, choice: Choice) -> Body:
        return {"text": choice.text}

    def _delta(self, piece: Piece, part: Part) -> Body:
        return {"text": piece.text}

    def _logprobs(self, found: Sequence[TokenLogprob], offset: int) -> Body | None:
        offsets = [offset + sum(len(one.text) for one in found[:at]) for at in range(len(found))]
        named = [{name: score for name, score, _ in one.likeliest} for one in found]
        likeliest = named if any(named) else None
        tokens, values = [one.text for one in found], [one.logprob for one in found]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": offsets}


class ChatWriter(CompletionWriter):
    """Messages of ``/v1/chat/completions``."""

    kind, piece_kind = "chat.completion", "chat.completion.chunk"
    empty: ClassVar[Body] = {"delta": {"content": ""}}
    end: ClassVar[Body] = {"delta": {}}

    def opening(self) -> Iterator[bytes]:
        begun = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield sse(self._body(self.piece_kind) | {"choices": [{"index": one.index} | begun for one in self.choices]})

    def _said(self, choice: Choice) -> Body:
        return {"message": choice.said() | {"refusal": None}}

    def _delta(self, piece: Piece, part: Part) -> Body:
        names = {"text": "content", "reasoning": "reasoning_content"}
        if piece.kind in names:
            return {"delta": {names[piece.kind]: piece.text}}
        if piece.kind == "called":
            return {}
        call: Body = {"index": part.index}
        if piece.kind == "call":
            call |= {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": piece.text}
        return {"delta": {"tool_calls": [call]}}

    def _logprobs(self, found: Sequence[TokenLogprob], offset: int) -> Body | None:
        tokens = [
            _token(one.text, one.logprob, one.bytes) | {"top_logprobs": [_token(*other) for other in one.likeliest]}
            for one in found
        ]
        return {"content": tokens, "refusal": None}


def _token(text: str, value: float, own: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(own)}
