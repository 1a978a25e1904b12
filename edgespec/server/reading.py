"""Turn a request's body into token ids and settings, in a separate process (readers.py).

The time and memory of parsing, validation, templates, tokenizing and grammars grow with what a client sends, and they
hold Python's lock.  So none of it runs in the process that answers.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from edgespec.decoding.loop import check_prompt
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Grammar, Settings
from edgespec.engine.encoders import no_encoder
from edgespec.errors import EdgespecError, InvalidRequest, install_hint
from edgespec.runtimes.files.codes import CodesPart
from edgespec.runtimes.files.embedding import EmbeddingPart
from edgespec.runtimes.files.images import ImagePart
from edgespec.runtimes.files.seq2seq_format import TextForm
from edgespec.runtimes.files.sound import SoundPart
from edgespec.runtimes.process import trim_memory
from edgespec.runtimes.text.call_formats import AnswerShape
from edgespec.runtimes.text.codec import TextCodec
from edgespec.runtimes.text.guidance import Guidance
from edgespec.runtimes.text.sandbox_process import limit_request
from edgespec.runtimes.text.schemas import parameters
from edgespec.runtimes.text.sources import SourceTexts
from edgespec.server.apis import APIS, Kind, fields_of
from edgespec.server.audio import TASKS, read_form
from edgespec.server.audio import Kind as AudioKind
from edgespec.server.errors import Failure, failure, misread
from edgespec.server.pictures import Given, VisionConfig
from edgespec.server.requests import MOST_LEVELS, MOST_NAME, MOST_TEXTS, ChatRequest, CompletionBase, CompletionRequest
from edgespec.server.responses import ResponsesRequest
from edgespec.server.tooling import Plan, plan_chat

COMPLETION_TOKENS = 16  # the API's default for completions
MEMORY = 3 << 29  # bytes that the process may have
# before a request: seconds, its kind, bytes of its body, and bytes of the conversation that it continues
HEAD = struct.Struct("<IBQQ")
TRIM_EVERY = 5.0  # seconds between two times that what large requests took goes back to the system
MOST_UNKNOWN = 16  # unknown field names of one request that are reported
TRIED_KNOWN = 64  # grammars that need not be tried again
LONGEST_TOKEN = 64  # characters, for cutting a text that is expected
STARTING = 60  # seconds of processor time to open a tokenizer


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a served model that a reader needs.

    Attributes:
        bundle: folder.
        name: of the model.
        vocab, context, eos: of the model.
        sampling: defaults for what a request leaves open.
        tokens: maximum new tokens of a text.
        calls: notation of tool calls; None = that of the chat template.
        text: prefix and suffix tokens of an encoder-decoder's source texts.
        most: maximum tokens of a source.
        senses: vision and audio encoders; empty = it reads only text.
        pictures: folder whose pictures requests may name; empty = none.
        codes: codec that decodes its tokens to pictures or sound; None = it generates text.
        embedding: how it embeds or scores texts; None = by nothing but its pooling.
        adapters: names of its LoRA adapters; a request asks for one as ``MODEL:ADAPTER``.
    """

    bundle: str
    name: str
    vocab: int
    context: int
    eos: tuple[int, ...]
    sampling: dict[str, Any]
    tokens: int
    calls: str | None = None
    text: TextForm | None = None
    most: int = 0
    senses: tuple[ImagePart | SoundPart, ...] = ()
    pictures: str = ""
    codes: CodesPart | None = None
    embedding: EmbeddingPart | None = None
    adapters: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """List the names that requests ask for it by."""
        return [self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)]


MODELS = TypeAdapter(list[ModelInfo])
Asking = Kind | AudioKind


def kinds() -> list[Asking]:
    """List the kinds of requests, as the processes number them."""
    return [*APIS, *TASKS]


@dataclass(frozen=True)
class ParsedRequest:
    """A request that may run, as plain data: the process that reads makes it, and the one that answers gets it.

    Attributes:
        model: that is asked.
        prompts: token ids of each.
        sampling: of the model, where the request says nothing.
        changes: of settings, as ``Settings.changed`` takes them.
        biases: tokens, and what is added to their logits.
        grammar: of the whole answer; None = it is free.
        predicted: token ids of the expected text; None = nothing is expected.
        choices: texts for each prompt.
        seed: of the first choice; None = none was given.
        stream, usage, drafts: how it is answered.
        single: one call of a tool ends it.
        shape: how its texts are read.
        large: its grammar needs much memory.
        echo: what of it the answer repeats.
        pictures: uint8 [h, w, 3] each, or recordings, float32 [n]; the only prompt has a token for each of their rows.
    """

    model: str
    prompts: list[array[int]]
    sampling: dict[str, Any]
    changes: dict[str, Any]
    biases: list[tuple[int, float]]
    grammar: Grammar | None
    predicted: array[int] | None
    choices: int
    seed: int | None
    stream: bool
    usage: bool
    drafts: bool
    single: bool
    large: bool
    shape: AnswerShape
    echo: dict[str, Any]
    pictures: list[Given]

    @cached_property
    def settings(self) -> Settings:
        """Return the settings of all its texts, without seeds; raises InvalidRequest for a value outside its range."""
        base = Settings(sampling=SamplingParams(**self.sampling), grammar=self.grammar)
        lists = {name: tuple(self.changes[name]) for name in ("stop", "markers")}
        expected = {} if self.predicted is None else {"prediction": tuple(self.predicted)}
        return base.changed(**self.changes | lists | expected | {"logit_bias": dict(self.biases)})

    def told(self) -> tuple[dict[str, Any], list[array[int]]]:
        """Return it as JSON, bytes and pictures separately, and the arrays of token ids; ``of`` reads both."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("prompts", "predicted")}
        blobs = {name: value for name, value in self.echo.items() if isinstance(value, bytes)}
        found |= {"echo": {name: value for name, value in self.echo.items() if name not in blobs}, "blobs": blobs}
        found |= {"grammar": self.grammar and [self.grammar.kind, self.grammar.text], "shape": asdict(self.shape)}
        found["predicted"] = self.predicted is not None
        return found, [*self.prompts, *([] if self.predicted is None else [self.predicted])]

    @classmethod
    def of(cls, found: dict[str, Any], prompts: list[array[int]]) -> ParsedRequest:
        """Make it from what ``told`` gives."""
        predicted = prompts[-1] if found["predicted"] else None
        prompts = prompts[:-1] if found["predicted"] else prompts
        plain = {one.name: found[one.name] for one in fields(cls) if one.name in found}
        grammar, echo = found["grammar"], found["echo"] | found["blobs"]
        own = {"grammar": grammar and Grammar(*grammar), "shape": AnswerShape(**found["shape"]), "echo": echo}
        return cls(**plain | own | {"prompts": prompts, "predicted": predicted})

    def each(self) -> list[Settings]:
        """List the settings of each choice of a prompt."""
        if self.seed is None:
            return [self.settings] * self.choices
        return [self.settings.changed(seed=self.seed + at) for at in range(self.choices)]


class ModelTokens:
    """A model's tokens, and grammars compiled for them."""

    def __init__(self, known: ModelInfo) -> None:
        self.known = known
        self.codec = TextCodec(Path(known.bundle))
        self.sources: SourceTexts | None = None
        if known.text is not None:
            self.sources = SourceTexts(Path(known.bundle), known.text, self.codec)
        self.sight = VisionConfig(known.senses, known.pictures) if known.senses else None
        self.tried: dict[Grammar, None] = {}  # grammars that can be followed

    @cached_property
    def guidance(self) -> Guidance:
        return Guidance(self.codec, self.known.eos, self.known.vocab)


class Reader:
    """Reads requests.

    Args:
        models: served models; the first one's tokenizer is opened now, the others' at their first request.
        grammars: whether it compiles grammars, rather than leave them to another process.
        limit: called with the seconds of processor time that opening a tokenizer may take from now on.

    Attributes:
        seconds: for the request itself.

    Raises:
        BundleError: an invalid tokenizer.
    """

    def __init__(
        self, models: Sequence[ModelInfo], grammars: bool = True, limit: Callable[[int], object] = lambda _: None
    ) -> None:
        self._models, self._grammars, self._limit = {known.name: known for known in models}, grammars, limit
        self._names = {name: (known.name, adapter) for known in models for name, adapter in _adapters(known)}
        self._opened: dict[str, ModelTokens] = {}
        self.seconds = STARTING
        self._tokens(models[0].name)

    def _tokens(self, model: str) -> ModelTokens:
        if model not in self._models:
            raise no_model(model, self._names)
        if model not in self._opened:
            self._limit(STARTING)
            self._opened[model] = ModelTokens(self._models[model])
            self._limit(self.seconds)
        return self._opened[model]

    def read(self, kind: Asking, body: bytes, earlier: bytes = b"") -> tuple[dict[str, Any], list[array[int]]]:
        """Parse a request -> plain data (for text, that of ``ParsedRequest.told``), and the token ids of each prompt.

        Args:
            kind: of the request.
            body: as received; a form for audio.
            earlier: messages of the response that it continues, as JSON.  If they are missing, the result names that
                response.  For a form, its Content-Type.

        Raises:
            EdgespecError: it cannot be answered; the message explains why.
            ValidationError: an unknown field, or a value outside its bounds.
        """
        if kind in TASKS:
            asked, sound = read_form(body, earlier, kind)
            return {"audio": asked.model_dump(), "blobs": {"sound": sound}}, []
        assert kind in APIS
        made, unknown = fields_of(kind, parsed(body))
        found, prompts = self._read(kind, APIS[kind].request.model_validate(made), earlier)
        return found | {"unknown": unknown[:MOST_UNKNOWN]}, prompts

    def _read(self, kind: Kind, sent: Any, earlier: bytes) -> tuple[dict[str, Any], list[array[int]]]:
        if (read := APIS[kind].read) is not None:
            if self._names.get(sent.model, ("", None))[1] is not None:
                what = f"model {sent.model!r}: adapters are for texts that are written"
                raise InvalidRequest(what, "ask the model itself")
            data, texts = read(self._tokens(sent.model), sent)
            return {"model": sent.model, "asked": data}, texts
        if isinstance(sent, ResponsesRequest) and sent.previous_response_id and not earlier:
            return {"previous": sent.previous_response_id}, []
        asked: CompletionBase = sent.asked(earlier)
        if asked.edgespec.show_drafts and kind not in ("completion", "chat"):
            raise InvalidRequest("show_drafts: only streams of completions and chats show guesses")
        name, adapter = self._names.get(asked.model, (asked.model, None))
        tokens = self._tokens(name)
        known, grammar = tokens.known, asked.grammar
        if known.embedding is not None and known.embedding.encoder:
            raise no_encoder()
        if (grammar is not None or asked.forces_call) and not self._grammars:
            return {"elsewhere": True}, []
        prompts, default, plan = _prompts(tokens, asked)
        grammar = plan.grammar
        if kind == "count":
            return {"count": len(prompts[0])}, []
        changes = asked.changes(known.tokens, default) | {"markers": plan.markers, "adapter": adapter}
        biases = {int(token): bias for token, bias in (asked.logit_bias or {}).items()}
        predicted, options = changes.pop("prediction", None), asked.stream_options
        try:
            large = grammar is not None and _tried(tokens, grammar)
        except InvalidRequest as error:
            raise _of_a_tool(tokens, asked) or error from error
        made = ParsedRequest(
            model=known.name,
            prompts=[array("i", prompt) for prompt in prompts],
            sampling=known.sampling,
            changes=changes,
            biases=list(biases.items()),
            grammar=grammar,
            predicted=_predicted(tokens, predicted) if predicted else None,
            choices=asked.choices,
            seed=asked.seed,
            stream=bool(asked.stream),
            usage=options is not None and options.include_usage,
            drafts=asked.edgespec.show_drafts,
            single=plan.single,
            large=large,
            shape=plan.shape,
            echo=sent.echo(earlier) if isinstance(sent, ResponsesRequest) else {},
            pictures=list(plan.pictures),
        )
        for prompt in prompts:
            check_prompt(prompt, made.settings.sampling, known.vocab, known.most + 1 if known.most else known.context)
        return made.told()


def _prompts(tokens: ModelTokens, asked: CompletionBase) -> tuple[list[list[int]], int, Plan]:
    """Return token ids, the default number of new tokens, and how answers are read."""
    known = tokens.known
    if isinstance(asked, ChatRequest):
        prompt, plan = plan_chat(asked, tokens.codec, known.calls, tokens.sight)
        return [prompt], max(1, min(known.tokens, known.context - len(prompt))), plan
    assert isinstance(asked, CompletionRequest)
    given = asked.prompts
    if len(given) * asked.choices > MOST_TEXTS:
        raise InvalidRequest(f"{len(given)} prompts x n {asked.choices}: expected at most {MOST_TEXTS} texts")
    if tokens.sources is None:
        encoded = [tokens.codec.encode(one) if isinstance(one, str) else one for one in given]
        return encoded, COMPLETION_TOKENS, Plan(grammar=asked.grammar)
    own = asked.edgespec.model_dump()
    languages = own["source_language"], own["target_language"]
    tokens.sources.begin(*languages)
    encoded = [tokens.sources.encode(one, *languages) if isinstance(one, str) else one for one in given]
    most = tokens.sources.form.rules.max_length or known.tokens  # a translation goes to its end
    return encoded, max(1, min(known.tokens, most, known.context - 1)), Plan(grammar=asked.grammar)


def _predicted(tokens: ModelTokens, text: str) -> array[int]:
    """Tokenize what is expected, as far as the context reaches."""
    context = tokens.known.context
    return array("i", tokens.codec.encode(text[: LONGEST_TOKEN * context], special=False)[:context])


def _tried(tokens: ModelTokens, grammar: Grammar) -> bool:
    """Refuse a grammar that cannot be followed -> whether it is large."""
    try:
        guidance = tokens.guidance
        if grammar not in tokens.tried:
            guidance.try_out(grammar)
            tokens.tried[grammar] = None
            while len(tokens.tried) > TRIED_KNOWN:
                del tokens.tried[next(iter(tokens.tried))]
        return guidance.is_large(grammar)
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            "this server cannot follow grammars: llguidance is not installed", install_hint("guidance")
        ) from error


def _of_a_tool(tokens: ModelTokens, asked: CompletionBase) -> InvalidRequest | None:
    """Name the tool whose parameters cannot be kept where a call is forced, and not the grammar made of all tools."""
    if not isinstance(asked, ChatRequest) or not asked.forces_call:
        return None
    for tool in asked.offered or ():
        name = tool["function"]["name"]
        try:
            tokens.guidance.try_out(Grammar.json_schema(parameters(tool["function"].get("parameters"), name)))
        except InvalidRequest as error:
            why = error.message.removeprefix("json_schema: ")
            return InvalidRequest(f"the parameters of tool {name!r}: {why}", error.hint)
    return InvalidRequest("the calls of these tools cannot be followed: expected fewer or simpler ones")


def _adapters(known: ModelInfo) -> Iterator[tuple[str, str | None]]:
    """Yield the names that requests ask for, with the adapter of each."""
    yield from zip(known.names, (None, *known.adapters), strict=True)


def no_model(name: str, models: Iterable[str]) -> Failure:
    """Refuse the name of a model that is not served, with the nearest one that is."""
    has = ", ".join(map(repr, models))
    near = get_close_matches(name, list(models), 1) if "," in has else []
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return Failure(f"no model {name[:MOST_NAME]!r}: this server has {has}{meant}", 404, param="model")


def parsed(body: bytes) -> dict[str, Any]:
    """Parse a body's JSON object.

    Raises:
        InvalidRequest: it is none, or too deep.
    """
    try:
        made = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(made, dict):
        raise InvalidRequest(f"expected a JSON object, got {type(made).__name__}")
    level: list[Any] = [made]
    for _ in range(MOST_LEVELS):
        level = [item for one in level for item in _inside(one)]
        if not level:
            return made
    raise InvalidRequest(f"the body has more than {MOST_LEVELS} levels of lists and objects")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


# -- the process -------------------------------------------------------------------------------------------------------


def serve(models: Sequence[ModelInfo], grammars: bool) -> None:
    """Answer requests from stdin until it closes."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    limit_request(1 + STARTING, MEMORY)
    with _told() as told:
        reader = Reader(models, grammars, lambda seconds: limit_request(1 + seconds, MEMORY))
    _write(stdout, told, [])
    while (head := stdin.read(HEAD.size)) and len(head) == HEAD.size:
        seconds, kind, size, more = HEAD.unpack(head)
        body, earlier = stdin.read(size), stdin.read(more)
        reader.seconds = seconds
        limit_request(1 + seconds, MEMORY)
        prompts: list[array[int]] = []
        with _told() as told:
            found, prompts = reader.read(kinds()[kind], body, earlier)
            told |= found
        _write(stdout, told, prompts)
        trim_memory(TRIM_EVERY)


@contextmanager
def _told() -> Iterator[dict[str, Any]]:
    """Collect what is answered: filled by the body, or a failure of it."""
    told: dict[str, Any] = {}
    try:
        yield told
    except ValidationError as error:
        told["refused"] = _refused(misread(error))
    except EdgespecError as error:
        told["refused"] = _refused(failure(error))
    except (MemoryError, RecursionError) as error:
        told["refused"] = _refused(Failure(f"reading this request failed: {type(error).__name__}"))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # a bug here or in a library; Rust panics are not Exceptions
        found = Failure(f"reading this request failed: {type(error).__name__}: {error}", 500, "server_error")
        told["refused"] = _refused(found)


def _refused(found: Failure) -> list[Any]:
    """List the arguments of a failure, for the process that answers."""
    return [found.message[:4000], found.status, found.kind, found.param, found.code]


def _write(stream: IO[bytes], told: dict[str, Any], prompts: list[array[int]]) -> None:
    pictures, blobs = told.pop("pictures", ()), told.pop("blobs", {})
    sizes = {
        "lengths": [len(prompt) for prompt in prompts],
        "sizes": [one.shape[:2] for one in pictures],
        "blobs": {name: len(blob) for name, blob in blobs.items()},
    }
    head = json.dumps(told | sizes).encode()
    stream.write(len(head).to_bytes(8, "little") + head + b"".join(prompt.tobytes() for prompt in prompts))
    for blob in blobs.values():
        stream.write(blob)
    for one in pictures:
        stream.write(one.tobytes())
    stream.flush()


def command(models: Sequence[ModelInfo], grammars: bool) -> list[str]:
    """Write what starts the process."""
    # what stops a service is the parent's to answer, and may be sent to all of its processes
    start = "import signal; [signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)]; "
    start += "import sys; sys.path[:] = sys.argv[2:]; from edgespec.server.reading import MODELS, serve; "
    start += f"serve(MODELS.validate_json(sys.argv[1]), {grammars})"
    return [sys.executable, "-c", start, MODELS.dump_json(list(models)).decode(), *sys.path]
