"""The APIs of the server: the request model and the writer of answers of each."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from edgespec.extensions import SERVER_APIS, Table
from edgespec.server import embeddings, rerank
from edgespec.server.call import Call, Jobs, ModelTokens
from edgespec.server.chats import ChatWriter, CompletionWriter
from edgespec.server.fields import known_fields
from edgespec.server.messages import CountRequest, MessagesRequest, MessageWriter
from edgespec.server.requests import ChatRequest, CompletionRequest, StrictModel
from edgespec.server.responses import ResponsesRequest, ResponseWriter
from edgespec.server.writer import Writer

COUNT = "/v1/messages/count_tokens"  # answered by the process that reads
Kind = str  # the name of an API, as in the table
Texts = CompletionRequest | ChatRequest | MessagesRequest | ResponsesRequest


@dataclass(frozen=True)
class Api:
    """An API: a path, its request, and what answers it.

    APIs of texts have a ``writer``, or none where tokens are only counted.  Others have ``read`` and ``respond``.

    Attributes:
        path: of its requests, which are sent by POST.
        what: a summary of the answer.
        request: the fields of a request, with ``model`` among them.
        answer: the name of the answer's shape (openapi.py).
        writer: of the answers of a text API.
        prefix: of the answers' ids.
        read: called with the tokens of the model that is asked and the request, in the
            process that reads; returns plain data, and the token ids of prompts.
        respond: called with the jobs of the model and the call; returns the answer.
        shapes: JSON schemas of its answers, by name.
        content: JSON schemas of the answer by media type; None = ``answer``, as JSON.
    """

    path: str
    what: str
    request: type[StrictModel]
    answer: str
    writer: type[Writer] | None = None
    prefix: str = ""
    read: Callable[[ModelTokens, Any], tuple[dict[str, Any], list[array[int]]]] | None = None
    respond: Callable[[Jobs, Call], Awaitable[Response]] | None = None
    shapes: Mapping[str, Any] = field(default_factory=dict)
    content: Mapping[str, Any] | None = None


def fields_of(kind: Kind, sent: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split the fields of a request, as ``known_fields``."""
    form = APIS[kind].request
    others = [api.request for api in APIS.values()]
    ignored = {name for one in others for name in one.ignored} - form.model_fields.keys()
    fields = {name for one in others for name in one.model_fields} - {"model"}
    return known_fields(sent, list(form.model_fields), sorted(ignored), sorted(fields))


_CORE = {
    "completion": Api("/v1/completions", "Texts", CompletionRequest, "Completion", CompletionWriter, "cmpl-"),
    "chat": Api("/v1/chat/completions", "An answer", ChatRequest, "ChatCompletion", ChatWriter, "chatcmpl-"),
    "message": Api("/v1/messages", "An answer", MessagesRequest, "Message", MessageWriter, "msg_"),
    "count": Api(COUNT, "Tokens of a prompt", CountRequest, "Count"),
    "embedding": Api(
        "/v1/embeddings",
        "Embeddings of texts",
        embeddings.EmbeddingRequest,
        "Embeddings",
        read=embeddings.read,
        respond=embeddings.respond,
    ),
    "rerank": Api(
        "/v1/rerank", "Documents by score", rerank.RerankRequest, "Ranking", read=rerank.read, respond=rerank.respond
    ),
    "rerank2": Api(
        "/v2/rerank", "Documents by score", rerank.RerankRequest, "Ranking", read=rerank.read, respond=rerank.respond
    ),
    "response": Api("/v1/responses", "An answer", ResponsesRequest, "Response", ResponseWriter, "resp_"),
}

APIS: Table[Api] = Table(SERVER_APIS, _CORE, lambda made: isinstance(made, Api))
"""The APIs by name: those above, then those of plug-ins (group ``edgespec.server_apis``)."""
