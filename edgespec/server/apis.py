"""Which APIs there are: what is asked of each, and what writes its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgespec.server.chats import ChatWriter, CompletionWriter
from edgespec.server.drawings import ImageRequest
from edgespec.server.embeddings import EmbeddingRequest
from edgespec.server.fields import known_fields
from edgespec.server.messages import CountRequest, MessagesRequest, MessageWriter
from edgespec.server.requests import ChatRequest, CompletionRequest
from edgespec.server.responses import ResponsesRequest, ResponseWriter
from edgespec.server.speech import SpeechRequest
from edgespec.server.writer import Writer

Kind = Literal["completion", "chat", "message", "count", "response", "embedding", "speech", "image"]
Texts = CompletionRequest | ChatRequest | MessagesRequest | ResponsesRequest
Request = Texts | EmbeddingRequest | SpeechRequest | ImageRequest


@dataclass(frozen=True)
class Api:
    """One of them."""

    path: str  # that is asked
    what: str  # is answered, in words
    request: type[Request]  # what is asked
    answer: str  # the name of its shape (openapi.py)
    writer: type[Writer] | None = None  # of its answers; None = no text is written
    prefix: str = ""  # of their ids


def fields_of(kind: Kind, sent: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split the fields of a request, as ``known_fields``."""
    form = APIS[kind].request
    others = [api.request for api in APIS.values()]
    ignored = {name for one in others for name in one.ignored} - form.model_fields.keys()
    fields = {name for one in others for name in one.model_fields} - {"model"}
    return known_fields(sent, list(form.model_fields), sorted(ignored), sorted(fields))


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
