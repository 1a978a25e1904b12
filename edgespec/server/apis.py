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
    """One of them."""

    path: str  # that is asked
    what: str  # is answered, in words
    request: Request  # what is asked
    answer: str  # the name of its shape (openapi.py)
    writer: type[Writer] | None = None  # of its answers; None = no text is written
    prefix: str = ""  # of their ids


APIS: dict[Kind, Api] = {
    "completion": Api("/v1/completions", "Texts", CompletionRequest, "Completion", CompletionWriter, "cmpl-"),
    "chat": Api("/v1/chat/completions", "An answer", ChatRequest, "ChatCompletion", ChatWriter, "chatcmpl-"),
    "message": Api("/v1/messages", "An answer", MessagesRequest, "Message", MessageWriter, "msg_"),
    "count": Api("/v1/messages/count_tokens", "Tokens of a prompt", CountRequest, "Count"),
    "embedding": Api("/v1/embeddings", "Embeddings of texts", EmbeddingRequest, "Embeddings"),
    "speech": Api("/v1/audio/speech", "Speech", SpeechRequest, "Failure"),
    "image": Api("/v1/images/generations", "Pictures", ImageRequest, "Pictures"),
    "response": Api("/v1/responses", "An answer", ResponsesRequest, "Response", ResponseWriter, "resp_"),
}
