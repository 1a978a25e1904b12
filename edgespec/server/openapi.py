"""The description of a server's API (OpenAPI 3.1): every field with its bounds, every answer with its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec import __version__
from edgespec.server.apis import APIS
from edgespec.server.audio import PATHS, AudioRequest, Kind
from edgespec.server.messages import MessagesRequest
from edgespec.server.pictures import MOST_PICTURES, MOST_PIXELS, MOST_SECONDS
from edgespec.server.reading import Known
from edgespec.server.requests import MOST_GRAMMAR, MOST_LEVELS, MOST_TEXTS
from edgespec.server.scheduler import Limits
from edgespec.server.speech import KINDS

Shape = dict[str, Any]
TEXT, WHOLE, NUMBER, FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
FINISH = {"enum": ["stop", "length", "tool_calls", None]}


def describe(models: Sequence[Known], limits: Limits, keys: bool) -> Shape:
    """Describe one server.

    Args:
        models: that it has.
        limits: what it takes at most.
        keys: whether it asks for one.
    """
    schemas: Shape = {}
    name: Shape = {"enum": [known.name for known in models]}
    vocab = ", ".join(f"{known.vocab} for {known.name}" for known in models)
    for asked in (*(api.request for api in APIS.values()), AudioRequest):
        made = asked.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= made.pop("$defs", {})
        made["properties"]["model"] = name | {"title": "Model"}
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if field in made["properties"] and not issubclass(asked, MessagesRequest):
                made["properties"][field] = _or_null({**WHOLE, "minimum": 1, "maximum": limits.tokens})
        schemas[asked.__name__] = made
    schemas |= _answers(name)
    security: list[Shape] = [{"key": []}] if keys else []
    bounds = (
        f"A body has at most {limits.body} bytes and {MOST_LEVELS} levels, prompts x n are at most {MOST_TEXTS} texts, "
        f"a grammar or a schema at most {MOST_GRAMMAR} characters, token ids are below {vocab}."
    )
    if any(known.image for known in models):
        bounds += f" A request has at most {MOST_PICTURES} pictures of {MOST_PIXELS} pixels in all."
    if any(known.sound for known in models):
        bounds += f" A chat has at most {MOST_SECONDS} s of recordings in all."
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__, "description": f"OpenAI's API. {bounds}"},
        "paths": {
            "/health": _get("Whether it lives", "Health"),
            "/openapi.json": _get("This description", None),
            "/metrics": _get("Figures for Prometheus", None, security, "text/plain"),
            "/v1/models": _get("The models", "Models", security),
            "/v1/models/{model}": _get("The model by its name", "Model", security, parameter="model"),
            "/v1/completions": _post("Texts", "CompletionRequest", "Completion", security),
            "/v1/chat/completions": _post("An answer", "ChatRequest", "ChatCompletion", security),
            "/v1/messages": _post("An answer", "MessagesRequest", "Message", security, "Error"),
            "/v1/messages/count_tokens": _post(
                "Tokens of a prompt", "CountRequest", "Count", security, "Error", stream=False
            ),
            "/v1/embeddings": _post("Embeddings of texts", "EmbeddingRequest", "Embeddings", security, stream=False),
            **{path: _audio(kind, schemas, security) for kind, path in PATHS.items()},
            "/v1/images/generations": _post("Pictures", "ImageRequest", "Pictures", security, stream=False),
            "/v1/audio/speech": _speech(security),
            "/v1/responses": _post("An answer", "ResponsesRequest", "Response", security),
            "/v1/responses/{response}": _get("A stored answer", "Response", security, parameter="response")
            | {"delete": _get("Forget a stored answer", "Deleted", security, parameter="response")["get"]},
        },
        "components": {
            "schemas": schemas,
            **({"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if keys else {}),
        },
    }


def _get(
    what: str,
    schema: str | None,
    security: list[Shape] | None = None,
    kind: str = "application/json",
    parameter: str = "",
) -> Shape:
    refused = (400, 401, 403) + ((404,) if parameter else ())
    made: Shape = {"summary": what, "responses": {"200": _answer(what, kind, schema)} | _refused(*refused)}
    if security:
        made["security"] = security
    if parameter:
        made["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}]
    return {"get": made}


def _post(
    what: str, asked: str, answer: str, security: list[Shape], error: str = "Failure", stream: bool = True
) -> Shape:
    whole = _answer(what, "application/json", answer)
    if stream:
        whole["content"]["text/event-stream"] = {"schema": TEXT}
    made: Shape = {
        "summary": what,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
        "responses": {"200": whole} | _refused(400, 401, 403, 404, 408, 413, 415, 429, 503, error=error),
    }
    return {"post": made | ({"security": security} if security else {})}


def _audio(kind: Kind, schemas: Shape, security: list[Shape]) -> Shape:
    """Describe a form with a recording."""
    made = _post(f"Text of a recording ({kind})", "AudioRequest", "Transcript", security)
    sound: Shape = {"type": "string", "contentMediaType": "application/octet-stream"}
    asked = schemas["AudioRequest"]
    form = asked | {
        "properties": asked["properties"] | {"file": sound},
        "required": [*asked.get("required", ()), "file"],
    }
    made["post"]["requestBody"]["content"] = {"multipart/form-data": {"schema": form}}
    made["post"]["responses"]["200"]["content"] |= {name: {"schema": TEXT} for name in ("text/plain", "text/vtt")}
    return made


def _speech(security: list[Shape]) -> Shape:
    """Describe speech, which is answered as sound."""
    made = _post("Speech", "SpeechRequest", "Failure", security, stream=False)
    sound: Shape = {"type": "string", "contentMediaType": "application/octet-stream"}
    made["post"]["responses"]["200"]["content"] = {kind: {"schema": sound} for kind in KINDS.values()}
    return made


def _answer(what: str, kind: str, schema: str | None) -> Shape:
    plain = TEXT if kind == "text/plain" else {"type": "object"}
    return {"description": what, "content": {kind: {"schema": _ref(schema) if schema else plain}}}


def _refused(*codes: int, error: str = "Failure") -> Shape:
    return {str(code): _answer("What was wrong", "application/json", error) for code in codes}


def _ref(schema: str) -> Shape:
    return {"$ref": f"#/components/schemas/{schema}"}


def _or_null(shape: Shape) -> Shape:
    return {"anyOf": [shape, {"type": "null"}], "default": None}


def _object(**fields: Shape) -> Shape:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _list(shape: Shape) -> Shape:
    return {"type": "array", "items": shape}


def _answers(name: Shape) -> Shape:
    """Shapes of what is answered."""
    null: Shape = {"type": "null"}
    model = {"id": name, "object": {"const": "model"}, "created": WHOLE, "owned_by": TEXT}
    own = _object(
        methods=_list(TEXT),
        context=WHOLE,
        operators=TEXT,
        chat=FLAG,
        embeddings=FLAG,
        hears=FLAG,
        sees=FLAG,
        speaks=FLAG,
        draws=FLAG,
        loaded=FLAG,
    )
    usage = _object(
        prompt_tokens=WHOLE,
        completion_tokens=WHOLE,
        total_tokens=WHOLE,
        prompt_tokens_details=_object(cached_tokens=WHOLE),
    )
    usage["properties"]["completion_tokens_details"] = _object(reasoning_tokens=WHOLE)
    how = _object(
        method_requested=_either(TEXT, null),
        method_used=TEXT,
        reason=TEXT,
        lossless=FLAG,
        exact=_either(FLAG, null),
        finish=TEXT,
        late=FLAG,
        rounds=WHOLE,
        drafted=WHOLE,
        accepted=WHOLE,
        tokens_per_round=NUMBER,
    )
    how["additionalProperties"] = True  # more may be said of how a text was decoded
    likeliest = _either(_list({"type": "object"}), null)
    scored = _object(
        tokens=_list(TEXT),
        token_logprobs=_list(NUMBER),
        top_logprobs=likeliest,
        text_offset=_list(WHOLE),
    )
    other = _object(token=TEXT, logprob=NUMBER, bytes=_list(WHOLE))
    token = _object(token=TEXT, logprob=NUMBER, bytes=_list(WHOLE), top_logprobs=_list(other))
    chat_scored = _object(content=_list(token), refusal=null)
    function = _object(name=TEXT, arguments=TEXT)
    call = _object(id=TEXT, type={"const": "function"}, function=function)
    message = _object(role={"const": "assistant"}, content=_either(TEXT, null), refusal=null)
    message["properties"] |= {"reasoning_content": TEXT, "tool_calls": _list(call)}
    text = _object(index=WHOLE, finish_reason=FINISH, text=TEXT, logprobs=_either(scored, null))
    said = _object(index=WHOLE, finish_reason=FINISH, message=message, logprobs=_either(chat_scored, null))

    def whole(kind: str, choice: Shape) -> Shape:
        return _object(
            id=TEXT,
            object={"const": kind},
            created=WHOLE,
            model=name,
            choices=_list(choice),
            usage=usage,
            edgespec=_list(how),
        )

    return _other_answers(name, how) | {
        "Health": _object(status={"const": "ok"}, running=WHOLE, waiting=WHOLE),
        "Model": _object(**model),
        "Models": _object(object={"const": "list"}, data=_list(_object(**model, edgespec=own))),
        "Pictures": _object(
            created=WHOLE,
            data=_list(_object(b64_json=TEXT)),
            output_format=TEXT,
            size=TEXT,
            edgespec=_list({"type": "object"}),
        ),
        "Completion": whole("text_completion", text),
        "ChatCompletion": whole("chat.completion", said),
        "Failure": _object(error=_object(message=TEXT, type=TEXT, param=_either(TEXT, null), code=_either(TEXT, null))),
    }


def _other_answers(name: Shape, how: Shape) -> Shape:
    """Shapes of Anthropic's messages and of OpenAI's responses; blocks and items are of many kinds."""
    null: Shape = {"type": "null"}
    part: Shape = {"type": "object", "properties": {"type": TEXT}, "required": ["type"]}
    usage = _object(
        input_tokens=WHOLE,
        output_tokens=WHOLE,
        cache_creation_input_tokens=WHOLE,
        cache_read_input_tokens=WHOLE,
    )
    response: Shape = _object(
        id=TEXT,
        object={"const": "response"},
        created_at=WHOLE,
        status={"enum": ["completed", "incomplete"]},
        model=name,
        output=_list(part),
        usage={"type": "object"},
        edgespec=_list(how),
    )
    return {
        "Message": _object(
            id=TEXT,
            type={"const": "message"},
            role={"const": "assistant"},
            model=name,
            content=_list(part),
            stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            stop_sequence=_either(TEXT, null),
            usage=usage,
            edgespec=_list(how),
        ),
        "Embeddings": _object(
            object={"const": "list"},
            data=_list(
                _object(object={"const": "embedding"}, index=WHOLE, embedding=_either(_list(NUMBER), TEXT)),
            ),
            model=name,
            usage=_object(prompt_tokens=WHOLE, total_tokens=WHOLE),
        ),
        "Transcript": _object(text=TEXT, usage=_object(type={"const": "duration"}, seconds=NUMBER))
        | {"additionalProperties": True},  # times, language and how it was decoded
        "Count": _object(input_tokens=WHOLE),
        "Response": response | {"additionalProperties": True},  # it repeats what was asked
        "Deleted": _object(id=TEXT, object={"const": "response"}, deleted=FLAG),
        "Error": _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT)),
    }


def _either(*shapes: Shape) -> Shape:
    return {"anyOf": list(shapes)}
