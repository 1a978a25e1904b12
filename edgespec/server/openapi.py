"""The description of a server's API (OpenAPI 3.1): every field with its bounds, every answer with its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.runtimes.files.sound import SoundPart
from edgespec.server.apis import APIS, Api
from edgespec.server.audio import PATHS, AudioRequest, Kind
from edgespec.server.errors import MESSAGES
from edgespec.server.messages import MessagesRequest
from edgespec.server.pictures import MOST_PICTURES, MOST_PIXELS, MOST_SECONDS
from edgespec.server.reading import ModelInfo
from edgespec.server.requests import MOST_GRAMMAR, MOST_LEVELS, MOST_TEXTS, StrictModel
from edgespec.server.scheduler import Limits
from edgespec.version import __version__

Shape = dict[str, Any]
TEXT, WHOLE, NUMBER, FLAG, NULL, ANY = (
    {"type": kind} for kind in ("string", "integer", "number", "boolean", "null", "object")
)
FILE: Shape = {"type": "string", "contentMediaType": "application/octet-stream"}
# an event of a stream, whose data is JSON, or [DONE]
EVENT: Shape = {"type": "object", "properties": {"event": TEXT, "data": TEXT}, "required": ["data"]}


def describe(models: Sequence[ModelInfo], limits: Limits, keys: bool) -> Shape:
    """Describe one server.

    Args:
        models: that it has.
        limits: what it takes at most.
        keys: whether it asks for one.
    """
    schemas: Shape = {}
    name: Shape = {"enum": [name for known in models for name in known.names]}
    vocab = ", ".join(f"{known.vocab} for {known.name}" for known in models)
    requests: list[type[StrictModel]] = [*(api.request for api in APIS.values()), AudioRequest]
    for asked in requests:
        made = asked.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= made.pop("$defs", {})
        made["properties"]["model"] = name | {"title": "Model"}
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if field in made["properties"] and not issubclass(asked, MessagesRequest):
                made["properties"][field] = _or_null({**WHOLE, "minimum": 1}) | {"default": None}
        schemas[asked.__name__] = made
    bounds = (
        f"A text has at most {limits.tokens} tokens, also where more are asked for. "
        f"A body has at most {limits.body} bytes and {MOST_LEVELS} levels, prompts x n are at most {MOST_TEXTS} texts, "
        f"a grammar or a schema at most {MOST_GRAMMAR} characters, token ids are below {vocab}."
    )
    senses = [type(sense) for known in models for sense in known.senses]
    if set(senses) - {SoundPart}:
        bounds += f" A request has at most {MOST_PICTURES} pictures of {MOST_PIXELS} pixels in all."
    if SoundPart in senses:
        bounds += f" A chat has at most {MOST_SECONDS} s of recordings in all."
    paths = {
        "/health": _get("Whether it lives", "Health"),
        "/openapi.json": _get("This description", None),
        "/metrics": _get("Figures for Prometheus", None, kind="text/plain"),
        "/v1/models": _get("The models", "Models"),
        "/v1/models/{model}": _get("The model by its name", "Model", parameter="model"),
        "/v1/responses/{response}": _get("A stored answer", "Response", parameter="response")
        | {"delete": _get("Forget a stored answer", "Deleted", parameter="response")["get"]},
        **{api.path: _api(api) for api in APIS.values()},
        **{path: _audio(kind, schemas["AudioRequest"]) for kind, path in PATHS.items()},
    }
    components: Shape = {"schemas": schemas | _answers(name) | _other_answers(name)}
    for api in APIS.values():
        components["schemas"] |= api.shapes
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in paths.keys() - {"/health", "/openapi.json"}:
            for method in paths[path].values():
                method["security"] = [{"key": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "edgespec", "version": __version__, "description": f"OpenAI's API. {bounds}"},
        "paths": paths,
        "components": components,
    }


def _get(what: str, schema: str | None, kind: str = "application/json", parameter: str = "") -> Shape:
    refused = (400, 401, 403) + ((404,) if parameter else ())
    made: Shape = {"summary": what, "responses": {"200": _answer(what, kind, schema)} | _refused(*refused)}
    if parameter:
        made["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}]
    return {"get": made}


def _post(what: str, asked: str, answer: str, stream: bool = True, error: str = "Failure") -> Shape:
    whole = _answer(what, "application/json", answer)
    if stream:
        whole["content"]["text/event-stream"] = {"schema": EVENT}
    made: Shape = {
        "summary": what,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
        "responses": {"200": whole} | _refused(400, 401, 403, 404, 408, 413, 415, 429, 503, error=error),
    }
    return {"post": made}


def _api(api: Api) -> Shape:
    error = "Error" if api.path.startswith(MESSAGES) else "Failure"
    made = _post(api.what, api.request.__name__, api.answer, api.writer is not None, error)
    if api.content is not None:
        made["post"]["responses"]["200"]["content"] = {kind: {"schema": shape} for kind, shape in api.content.items()}
    return made


def _audio(kind: Kind, asked: Shape) -> Shape:
    """Describe a form with a recording."""
    made = _post(f"Text of a recording ({kind})", "AudioRequest", "Transcript")
    fields = {"properties": asked["properties"] | {"file": FILE}, "required": [*asked.get("required", ()), "file"]}
    made["post"]["requestBody"]["content"] = {"multipart/form-data": {"schema": asked | fields}}
    made["post"]["responses"]["200"]["content"] |= {name: {"schema": TEXT} for name in ("text/plain", "text/vtt")}
    return made


def _answer(what: str, kind: str, schema: str | None) -> Shape:
    plain = TEXT if kind == "text/plain" else ANY
    return {"description": what, "content": {kind: {"schema": _ref(schema) if schema else plain}}}


def _refused(*codes: int, error: str = "Failure") -> Shape:
    return {str(code): _answer("What was wrong", "application/json", error) for code in codes}


def _ref(schema: str) -> Shape:
    return {"$ref": f"#/components/schemas/{schema}"}


def _object(**fields: Shape) -> Shape:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _each(shape: Shape, *names: str) -> dict[str, Shape]:
    """Fields of one shape."""
    return dict.fromkeys(names, shape)


def _list(shape: Shape) -> Shape:
    return {"type": "array", "items": shape}


def _either(*shapes: Shape) -> Shape:
    return {"anyOf": list(shapes)}


def _or_null(shape: Shape) -> Shape:
    return _either(shape, NULL)


def _const(value: str | bool) -> Shape:
    return {"const": value}


# how a text was decoded; more keys may be present
_HOW = _object(
    method_requested=_or_null(TEXT),
    exact=_or_null(FLAG),
    **_each(NUMBER, "tokens_per_round", "tokens_per_second"),
    details=_list(TEXT),
    **_each(TEXT, "method_used", "reason", "finish"),
    **_each(FLAG, "lossless", "timed_out"),
    **_each(WHOLE, "rounds", "drafted", "accepted"),
) | {"additionalProperties": True}


def _answers(name: Shape) -> Shape:
    """Shapes of what is answered."""
    model = {"id": name, "object": _const("model"), "type": _const("model"), "lifecycle": _const("active")}
    model |= _each(TEXT, "owned_by", "display_name", "created_at")
    model |= _each(WHOLE, "created", "max_input_tokens", "max_tokens")
    own = _object(
        methods=_list(TEXT),
        context=WHOLE,
        operators=TEXT,
        **_each(FLAG, "chat", "embeddings", "reranks", "hears", "sees", "speaks", "draws", "loaded"),
    )
    usage = _object(
        **_each(WHOLE, "prompt_tokens", "completion_tokens", "total_tokens"),
        prompt_tokens_details=_object(cached_tokens=WHOLE),
    )
    usage["properties"]["completion_tokens_details"] = _object(reasoning_tokens=WHOLE)
    scored = _object(
        tokens=_list(TEXT), token_logprobs=_list(NUMBER), top_logprobs=_or_null(_list(ANY)), text_offset=_list(WHOLE)
    )
    other = {"token": TEXT, "logprob": NUMBER, "bytes": _list(WHOLE)}
    token = _object(**other, top_logprobs=_list(_object(**other)))
    call = _object(id=TEXT, type=_const("function"), function=_object(name=TEXT, arguments=TEXT))
    message = _object(role=_const("assistant"), content=_or_null(TEXT), refusal=NULL)
    message["properties"] |= {"reasoning_content": TEXT, "tool_calls": _list(call)}

    def whole(kind: str, said: dict[str, Shape], logprobs: Shape) -> Shape:
        finish = {"enum": ["stop", "length", "tool_calls", None]}
        choice = _object(index=WHOLE, finish_reason=finish, logprobs=_or_null(logprobs), **said)
        return _object(
            id=TEXT,
            object=_const(kind),
            created=WHOLE,
            model=name,
            choices=_list(choice),
            usage=usage,
            edgespec=_list(_HOW),
        )

    return {
        "Health": _object(status=_const("ok"), running=WHOLE, waiting=WHOLE),
        "Model": _object(**model),
        "Models": _object(
            object=_const("list"),
            data=_list(_object(**model, edgespec=own)),
            has_more=_const(False),
            **_each(name, "first_id", "last_id"),
        ),
        "Completion": whole("text_completion", {"text": TEXT}, scored),
        "ChatCompletion": whole("chat.completion", {"message": message}, _object(content=_list(token), refusal=NULL)),
        "Failure": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
    }


def _other_answers(name: Shape) -> Shape:
    """Return the shapes of messages, responses and answers other than text; blocks and items are of many kinds."""
    part: Shape = {"type": "object", "properties": {"type": TEXT}, "required": ["type"]}
    counts = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    vector = _object(object=_const("embedding"), index=WHOLE, embedding=_either(_list(NUMBER), TEXT))
    ranked = _object(index=WHOLE, relevance_score=NUMBER)
    ranked["properties"]["document"] = _object(text=TEXT)
    error = _object(type=TEXT, message=TEXT)
    error["properties"]["details"] = ANY
    response = _object(
        id=TEXT,
        object=_const("response"),
        created_at=WHOLE,
        status={"enum": ["completed", "incomplete"]},
        model=name,
        output=_list(part),
        usage=ANY,
        edgespec=_list(_HOW),
    )
    return {
        "Message": _object(
            id=TEXT,
            type=_const("message"),
            role=_const("assistant"),
            model=name,
            content=_list(part),
            stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            stop_sequence=_or_null(TEXT),
            usage=_object(**_each(WHOLE, *counts)),
            edgespec=_list(_HOW),
        ),
        "Embeddings": _object(
            object=_const("list"),
            data=_list(vector),
            model=name,
            usage=_object(prompt_tokens=WHOLE, total_tokens=WHOLE),
        ),
        "Ranking": _object(
            id=TEXT,
            object=_const("list"),
            model=name,
            results=_list(ranked),
            usage=_object(prompt_tokens=WHOLE, total_tokens=WHOLE),
            meta=ANY,
        ),
        "Transcript": _object(text=TEXT, usage=_object(type=_const("duration"), seconds=NUMBER))
        | {"additionalProperties": True},  # times, language and how it was decoded
        "Count": _object(input_tokens=WHOLE),
        "Response": response | {"additionalProperties": True},  # it repeats what was asked
        "Deleted": _object(id=TEXT, object=_const("response"), deleted=FLAG),
        "Error": _object(type=_const("error"), error=error),
    }
