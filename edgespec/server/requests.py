"""What a client may ask, in the shapes of OpenAI's API; anything that would be ignored silently is refused by name."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from edgespec.decoding.constraint import Grammar
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.errors import InvalidRequest

MOST_CHOICES = 16
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False


class Extension(BaseModel):
    """What only edgespec knows: the field ``edgespec`` of a request.

    Attributes:
        method: which of the bundle's methods; None = the server's.
        gamma: most guesses a round.
        adaptive, fallback: as of ``Settings``.
        top_k, min_p, repetition_penalty: as of ``SamplingParams``; None = the model's own.
        regex, lark: what the text must match or follow; `response_format` does the same for JSON.
        acceptance: as of ``SamplingParams``; None = coupled where a seed is given, so that a request
            gives the same text whatever else the server does, else rejection.
    """

    model_config = ConfigDict(extra="forbid")
    method: str | None = None
    gamma: int | None = None
    adaptive: bool = True
    fallback: bool = True
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    acceptance: Literal["rejection", "coupled"] | None = None
    regex: str | None = None
    lark: str | None = None


class Asked(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="forbid")
    model: str
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    response_format: dict[str, Any] | None = None
    edgespec: Extension = Extension()

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probability of each token is asked for."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Most new tokens; None = not said."""
        raise NotImplementedError

    @property
    def grammar(self) -> Grammar | None:
        """What the text must be."""
        form, own = self.response_format or {}, self.edgespec
        found = [Grammar.regex(own.regex)] if own.regex is not None else []
        found += [Grammar.lark(own.lark)] if own.lark is not None else []
        kind = form.get("type", "text")
        if kind == "json_schema" and isinstance(form.get("json_schema"), dict):
            found.append(Grammar.json_schema(form["json_schema"].get("schema") or {}))
        elif kind == "json_object":
            found.append(Grammar.json_schema({"type": "object"}))
        elif kind != "text":
            raise InvalidRequest(f"response_format {form}: expected text, json_object or json_schema with a schema")
        if len(found) > 1:
            raise InvalidRequest("got several grammars: expected one of response_format, regex and lark")
        return next(iter(found), None)

    def settings(self, most: int, default: int, sampling: SamplingParams) -> list[Settings]:
        """Settings of each of the ``n`` choices.

        Args:
            most: tokens that the server gives at most.
            default: tokens where the request says nothing.
            sampling: what decides where the request says nothing.

        Raises:
            InvalidRequest: something that this server does not do, or a value outside its range.
        """
        if self.presence_penalty or self.frequency_penalty:
            raise InvalidRequest(
                "presence_penalty and frequency_penalty are not supported",
                'use {"edgespec": {"repetition_penalty": 1.1}}',
            )
        tokens = default if self.most_tokens is None else self.most_tokens
        if not 1 <= tokens <= most:
            raise InvalidRequest(f"max_tokens {tokens}: expected 1 to {most}, this server's limit")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop):
            raise InvalidRequest("stop holds an empty string: expected strings of at least one character")
        own, grammar = self.edgespec, self.grammar
        seed = secrets.randbits(32) if self.seed is None else self.seed
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": own.top_k,
            "min_p": own.min_p,
            "repetition_penalty": own.repetition_penalty,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        return [
            Settings(method=own.method, grammar=grammar, sampling=sampling).changed(
                max_new_tokens=tokens,
                stop=tuple(stop),
                gamma=own.gamma,
                adaptive=own.adaptive,
                fallback=own.fallback,
                logprobs=self.wants_logprobs,
                logit_bias=self.logit_bias or {},
                acceptance=own.acceptance or ("rejection" if self.seed is None else "coupled"),
                seed=seed + choice,
                **given,
            )
            for choice in range(self.n)
        ]


class CompletionRequest(Asked):
    """``POST /v1/completions``."""

    prompt: Annotated[str | list[int] | list[str] | list[list[int]], Field(min_length=1)]
    max_tokens: int | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def wants_logprobs(self) -> bool:
        """See the base."""
        if self.logprobs is not None and self.logprobs > 1:
            raise InvalidRequest(
                f"logprobs {self.logprobs}: expected 0 or 1", "only the chosen token's log-probability is reported"
            )
        return self.logprobs is not None

    @property
    def most_tokens(self) -> int | None:
        """See the base."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)  # type: ignore[arg-type]


class ChatRequest(Asked):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """See the base."""
        if self.top_logprobs:
            raise InvalidRequest(
                f"top_logprobs {self.top_logprobs}: expected 0", "only the chosen token's log-probability is reported"
            )
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int | None:
        """See the base."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def said(self) -> list[dict[str, Any]]:
        """The messages for the model's template; parts of text are joined, and anything else is refused."""
        return [message | {"content": _plain(message.get("content"))} for message in self.messages]


def _plain(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise InvalidRequest("a message's content is neither text nor parts of type text", "this server reads text alone")
