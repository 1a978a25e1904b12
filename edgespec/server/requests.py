"""Request models in the shapes of OpenAI's API; fields that would be ignored silently are rejected by name.

Every field has a bound, listed in the description of the API (openapi.py) and in docs/guides/serve.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    create_model,
    model_validator,
)

from edgespec.declared import Range
from edgespec.decoding.settings import MOST_LIKELIEST, Grammar, every_setting
from edgespec.errors import InvalidRequest

MOST_CHOICES, MOST_PROMPTS, MOST_TEXTS = 16, 32, 64  # of a request; texts = prompts x choices
MOST_STOPS, MOST_STOP = 16, 256  # strings, and characters of one
MOST_BIASES, LARGEST_BIAS = 1024, 100.0
MOST_MESSAGES, MOST_TOOLS = 1024, 128
MOST_GRAMMAR = 1 << 16  # characters of a schema, an expression or a grammar
MOST_LEVELS = 48  # of JSON
MOST_NAME = 256  # characters
WHOLE = 2**31 - 1
SEED = 2**63 - 1
TEXT_ALONE = "this model reads text alone"  # hints
TEXT_AND_PICTURES = "this server reads text and pictures"
NO_TOOLS = "this server runs no tools itself"

Name = Annotated[str, StringConstraints(min_length=1, max_length=MOST_NAME)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MOST_STOP)]


def _number(given: Any) -> Any:
    """Read 5.0 as 5: JSON has one kind of numbers, and some clients write all of them so."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


# of a type's annotations the last one: after it, bounds would be missing in the JSON schema
INTEGRAL = BeforeValidator(_number)
Count = Annotated[int, Field(ge=0, le=WHOLE), INTEGRAL]
Most = Annotated[int, Field(ge=0, le=SEED), INTEGRAL]  # tokens; clients write any large number for as many as there are
Number = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Likeliest = Annotated[int, Field(ge=0, le=MOST_LIKELIEST), INTEGRAL]
Token = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS, allow_inf_nan=False)]
Ids = Annotated[list[Count], Field(min_length=1)]
# settings that default to the model's own; those in `edgespec` take precedence
CHOSEN = ("presence_penalty", "frequency_penalty", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Source = Annotated[str, StringConstraints(max_length=MOST_GRAMMAR)]


# types of parts of messages: text, and thoughts
TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")


class StrictModel(BaseModel):
    """Object that rejects unknown fields and converts no types; a field that is null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[Sequence[str]] = ()  # fields of a request that change nothing of an answer

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class OpaqueObject(StrictModel):
    """An object that clients may say more of, which changes nothing of an answer, such as how it is cached."""

    model_config = ConfigDict(extra="ignore", strict=True)


class StreamOptions(OpaqueObject):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: bool = False


class OwnFields(StrictModel):
    """Fields of ``edgespec`` other than settings.

    Attributes:
        regex, lark: a grammar of the text; `response_format` does the same for JSON.
        tool_format: notation of tool calls; None = the server's, by default that of the chat template.
        reasoning: whether thoughts are separate from the text.
        show_drafts: whether each event of a stream marks accepted and rejected guesses.
    """

    regex: Source | None = None
    lark: Source | None = None
    show_drafts: bool = False
    tool_format: Name | None = None
    reasoning: bool = True


def _field(values: Range) -> Any:
    """Return the type of a setting's field."""
    if values.choices:
        return Literal[values.choices]
    if values.kind is int:
        most = WHOLE if values.most is None else values.most
        return Annotated[int, Field(ge=values.least, le=most), INTEGRAL]
    if values.kind is float:
        return Annotated[float, Field(ge=values.least, le=values.most, allow_inf_nan=False)]
    return bool if values.kind is bool else Name


OWN_SETTINGS = {one.name: found for one, found in every_setting() if found.server}
if TYPE_CHECKING:

    class Extension(OwnFields):
        """The field ``edgespec`` of a request."""
else:
    Extension = create_model(
        "Extension",
        __base__=OwnFields,
        __doc__="The field ``edgespec`` of a request: settings, and what no API of others has.  null = the server's.",
        **{name: (_field(found.values) | None, Field(None, description=found.help))
           for name, found in OWN_SETTINGS.items()},
    )  # fmt: skip


def some(stops: Any) -> Any:
    """Leave out strings of no characters, which stop nothing."""
    return [one for one in stops if one != ""] if isinstance(stops, list) else stops or None


Stops = Annotated[Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None, BeforeValidator(some)]


class SamplingFields(StrictModel):
    """Fields with the same names in every text API."""

    model: Name
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    edgespec: Extension = Extension()

    @property
    def common(self) -> dict[str, Any]:
        """These fields, for a chat."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


class CompletionBase(SamplingFields):
    """Fields that completions and chats have in common."""

    ignored: ClassVar[Sequence[str]] = (  # fields that change nothing of an answer
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity", "cache_prompt", "usage",
    )  # fmt: skip
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), INTEGRAL] | None = None
    stream_options: StreamOptions | None = None
    stop: Stops = None
    seed: Annotated[int, Field(ge=-SEED, le=SEED), INTEGRAL] | None = None
    logit_bias: Annotated[dict[Token, Bias], Field(max_length=MOST_BIASES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_format: dict[str, Any] | None = None
    top_k: Count | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    max_tokens: Most | None = None

    @property
    def choices(self) -> int:
        """Texts for each prompt."""
        return self.n or 1

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return False

    @property
    def likeliest(self) -> int | None:
        """Number of top logprobs of each token; None = no logprobs."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Maximum new tokens; None = not set."""
        return self.max_tokens

    def asked(self, earlier: bytes = b"") -> CompletionBase:
        """Return this request; other APIs convert theirs to a chat request."""
        return self

    @property
    def grammar(self) -> Grammar | None:
        """Return the grammar that the text must match, or None."""
        form, own = self.response_format or {}, self.edgespec
        found = [Grammar.regex(own.regex)] if own.regex is not None else []
        found += [Grammar.lark(own.lark)] if own.lark is not None else []
        kind = form.get("type", "text")
        if kind in ("json_schema", "json_object"):
            schema = _schema(form)
            if schema is None and kind == "json_schema":
                raise InvalidRequest(
                    "response_format without a schema: expected json_schema with a schema", "json_object is any object"
                )
            found.append(Grammar.json_schema({"type": "object"} if schema is None else schema))
        elif kind != "text":
            raise InvalidRequest(
                f"response_format of type {str(kind)[:80]!r}: expected text, json_object or json_schema with a schema"
            )
        if len(found) > 1:
            raise InvalidRequest("got several grammars: expected one of response_format, regex and lark")
        if found and len(found[0].text) > MOST_GRAMMAR:
            raise InvalidRequest(f"a grammar of {len(found[0].text)} characters: expected at most {MOST_GRAMMAR}")
        return next(iter(found), None)

    def changes(self, most: int, default: int) -> dict[str, Any]:
        """List the settings that differ from the server's, as ``Settings.changed`` takes them, without seed and
        grammar.

        Args:
            most: maximum tokens that the server allows.
            default: tokens if the request sets no maximum.

        Raises:
            InvalidRequest: a field that this server does not support, or a value outside its range.
        """
        if self.edgespec.show_drafts and not self.stream:
            raise InvalidRequest("show_drafts without stream: expected true for both", "guesses are shown as they come")
        tokens = default if self.most_tokens is None else self.most_tokens
        if tokens < 1:
            raise InvalidRequest(f"max_tokens {tokens}: expected 1 to {most}")
        tokens = min(tokens, most)  # clients send what their usual models give
        own = self.edgespec
        said = self.model_dump(include=set(CHOSEN), exclude_none=True)
        said |= own.model_dump(include=set(OWN_SETTINGS), exclude_none=True)
        # the same seed gives the same text, regardless of other requests
        coupled = "rejection" if self.seed is None else "coupled"
        return (
            {"acceptance": coupled}
            | said
            | {
                "max_new_tokens": tokens,
                "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
                "logprobs": self.likeliest is not None,
                "top_logprobs": self.likeliest or 0,
            }
        )


def _schema(form: dict[str, Any]) -> dict[str, Any] | None:
    """Find the schema of a ``response_format``, which some clients write without ``json_schema`` around it."""
    inner = form.get("json_schema")
    found = inner.get("schema") if isinstance(inner, dict) else None
    found = form.get("schema") if found is None else found
    if found is not None and not isinstance(found, dict):
        raise InvalidRequest(f"a schema that is {type(found).__name__}: expected an object")
    return found


class CompletionRequest(CompletionBase):
    """``POST /v1/completions``."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Likeliest | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt."""
        return several(self.prompt)


def several(given: Any) -> list[str | list[int]]:
    """List texts or token ids that may be given as one."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class Function(OpaqueObject):
    """A function that the model may call."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/\-]+$", max_length=MOST_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OpaqueObject):
    """A tool; this server supports only functions."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(OpaqueObject):
    """Which function is to be called."""

    name: Name


class NamedTool(OpaqueObject):
    """A tool that is to be called."""

    type: Literal["function"] = "function"
    function: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        """Read a tool in the words of responses, which have its name next to its type."""
        flat = isinstance(given, dict) and given.get("function") is None and given.get("name") is not None
        return {"type": given.get("type"), "function": {"name": given["name"]}} if flat else given


class AllowedTools(OpaqueObject):
    """Which of the tools may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MOST_TOOLS)]


class SomeTools(OpaqueObject):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _chosen(choice: Any) -> Any:
    """Write a choice among all tools as chats have it; some clients give an object, or Mistral's word."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    words = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
    return words.get(kind, choice) if isinstance(kind, str) else choice


class Prediction(OpaqueObject):
    """A text that is expected: guesses for every method."""

    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """Return the text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text") or "") for part in self.content)


class ChatRequest(CompletionBase):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Most | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | SomeTools | NamedTool | None, BeforeValidator(_chosen)
    ] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # other variables of the model's template
    # how much the model thinks first, if its template supports it; none: not at all
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    prediction: Prediction | None = None
    continue_final_message: bool | None = None  # the answer continues the last message, the assistant's
    _continued: bool = PrivateAttr(False)

    @property
    def likeliest(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(f"top_logprobs {self.top_logprobs} without logprobs: expected true for logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def forces_call(self) -> bool:
        if isinstance(self.tool_choice, SomeTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return bool(self.tool_choice) and self.tool_choice not in ("auto", "none")

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """Tools that the prompt lists; None = the request has none.

        Raises:
            InvalidRequest: ``tool_choice`` allows a tool that is not in the list.
        """
        if self.tools is None or self.tool_choice == "none":
            return None
        tools = self.tools
        if isinstance(self.tool_choice, SomeTools):
            allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            if unknown := allowed - {tool.function.name for tool in tools}:
                raise InvalidRequest(f"tool_choice allows {min(unknown)!r}: expected names of the request's tools")
            tools = [tool for tool in tools if tool.function.name in allowed]
        return [tool.model_dump(exclude_none=True) for tool in tools] or None

    @property
    def continued(self) -> bool:
        """Whether the answer continues the last message."""
        if self.continue_final_message and self.messages[-1].get("role") != "assistant":
            raise InvalidRequest("continue_final_message: expected the last message to be the assistant's")
        return self._continued or bool(self.continue_final_message)

    def goes_on(self, continued: bool) -> ChatRequest:
        """Set whether the answer continues the last message, for APIs that have no field for it."""
        self._continued = continued
        return self

    def changes(self, most: int, default: int) -> dict[str, Any]:
        return super().changes(most, default) | {"prediction": self.prediction.text if self.prediction else None}
