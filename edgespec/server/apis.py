"""Which APIs there are: what is asked of each, and what writes its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.server.chats import ChatWriter, CompletionWriter
from edgespec.server.drawings import ImageRequest
from edgespec.server.embeddings import EmbeddingRequest
from edgespec.server.messages import CountRequest, MessagesRequest, MessageWriter
from edgespec.server.requests import ChatRequest, CompletionRequest
from edgespec.server.responses import ResponsesRequest, ResponseWriter
from edgespec.server.speech import SpeechRequest
from edgespec.server.writer import Writer

Kind = Literal["completion", "chat", "message", "count", "response", "embedding", "speech", "image"]
Texts = CompletionRequest | ChatRequest | MessagesRequest | ResponsesRequest
Request = type[Texts | EmbeddingRequest | SpeechRequest | ImageRequest]


@dataclass(frozen=True)
class Api:
    """One of them.

    Attributes:
        path: that is asked.
        request: what is asked.
        writer: of its answers; None = no text is written.
        prefix: of their ids.
    """

    path: str
    request: Request
    writer: type[Writer] | None
    prefix: str = ""


APIS: dict[Kind, Api] = {
    "completion": Api("/v1/completions", CompletionRequest, CompletionWriter, "cmpl-"),
    "chat": Api("/v1/chat/completions", ChatRequest, ChatWriter, "chatcmpl-"),
    "message": Api("/v1/messages", MessagesRequest, MessageWriter, "msg_"),
    "count": Api("/v1/messages/count_tokens", CountRequest, None),
    "embedding": Api("/v1/embeddings", EmbeddingRequest, None),
    "speech": Api("/v1/audio/speech", SpeechRequest, None),
    "image": Api("/v1/images/generations", ImageRequest, None),
    "response": Api("/v1/responses", ResponsesRequest, ResponseWriter, "resp_"),
}
