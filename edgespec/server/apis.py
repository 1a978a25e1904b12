"""Which APIs there are: what is asked of each, and what writes its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.server.chats import ChatWriter, CompletionWriter
from edgespec.server.requests import ChatRequest, CompletionRequest
from edgespec.server.writer import Writer

Kind = Literal["completion", "chat"]


@dataclass(frozen=True)
class Api:
    """One of them.

    Attributes:
        path: that is asked.
        request: what is asked.
        writer: of its answers.
        prefix: of their ids.
    """

    path: str
    request: type[CompletionRequest] | type[ChatRequest]
    writer: type[Writer]
    prefix: str


APIS: dict[Kind, Api] = {
    "completion": Api("/v1/completions", CompletionRequest, CompletionWriter, "cmpl-"),
    "chat": Api("/v1/chat/completions", ChatRequest, ChatWriter, "chatcmpl-"),
}
