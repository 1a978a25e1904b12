"""Ask an OpenAI-compatible server: find its abilities, and read answers as tokens with log-probabilities."""

from __future__ import annotations

import http.client
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError

LIKELIEST = (20, 5, 0)  # likeliest tokens that are asked for, the first that a server gives
CHOICES = (16, 4)  # texts of one request
SECONDS = 600.0  # for one answer
PROBE = "The capital of France is"
BUSY, WAITS = (429, 503), (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # statuses of a full queue, and seconds before the next tries
# what engines call the rules that reshape a distribution, with the values that switch them off
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "repetition_penalty": 1.0}
Send = Callable[[str, str, "bytes | None"], "tuple[int, bytes]"]
T = TypeVar("T")
S = TypeVar("S")


class ServerError(EdgespecError):
    """A server cannot be asked: it is not there, refuses, or answers something else."""


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        text: what it stands for; bytes that are no text are escaped.  It identifies the token.
        top: log-probabilities of the likeliest tokens in its place, by their texts; empty = not reported.
    """

    text: str
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One text of a server.

    Attributes:
        tokens: empty where the server does not report them.
        ended: whether the model ended it.
        prompt_tokens, cached: as the server counts them; None = not reported.
        written: tokens, as the server counts them, of all texts of its request.
        seconds: of the request.
    """

    text: str
    tokens: tuple[Token, ...]
    ended: bool
    prompt_tokens: int | None
    cached: int | None
    written: int
    seconds: float


@dataclass
class Abilities:
    """The features of a server that were found."""

    api: str = "completions"  # or "chat"
    likeliest: int = 0
    choices: int = 1
    fields: dict[str, Any] = field(default_factory=dict)  # of NEUTRAL, those that it takes


class Server:
    """A server to ask.

    Args:
        url: as http://127.0.0.1:8080, with or without /v1.
        model: its name; empty = the first that the server lists.
        key: bearer token; empty = none.
        fields: are added to every request.
        send: (method, path, body) -> (status, body); None = over HTTP.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        key: str = "",
        fields: Mapping[str, Any] | None = None,
        send: Send | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self.fields = model, dict(fields or {})
        self.abilities = Abilities()
        self._send = send or Http(self.url, key)
        self.tokens, self.seconds = 0, 0.0  # of texts that were asked for one at a time, for the speed

    def close(self) -> None:
        """Close its connections; it may be asked again."""
        if isinstance(self._send, Http):
            self._send.close()

    def probe(self) -> None:
        """Find out which API the server has, and what it takes.

        Raises:
            ServerError: it does not answer, or has neither completions nor chats.
        """
        if not self.model:
            listed = self._json(*self._send("GET", "/v1/models", None), "/v1/models")
            names = [one.get("id") for one in listed.get("data") or [] if isinstance(one, dict)]
            if not names:
                raise ServerError(f"{self.url}/v1/models lists no model", "name one with --model")
            self.model = str(names[0])
        told = ""
        for api in ("completions", "chat"):
            for likeliest in LIKELIEST:
                self.abilities = Abilities(api, likeliest)
                try:
                    answer = self.ask(PROBE, 2, 1.0)[0]
                except ServerError as error:
                    told = told or error.message
                    continue
                if likeliest and not any(token.top for token in answer.tokens):
                    continue  # it takes the field and gives nothing
                self._find_limits()
                return
        raise ServerError(f"{self.url}: neither completions nor chats are answered: {told}", "see its log")

    def _find_limits(self) -> None:
        able = self.abilities
        with suppress(ServerError):
            self.ask(PROBE, 1, 1.0, extra=NEUTRAL)
            able.fields = dict(NEUTRAL)
        for name, value in NEUTRAL.items() if not able.fields else ():
            with suppress(ServerError):
                self.ask(PROBE, 1, 1.0, extra={name: value})
                able.fields[name] = value
        for choices in CHOICES:
            with suppress(ServerError):
                if len(self.ask(PROBE, 1, 1.0, choices)) == choices:
                    able.choices = choices
                    return

    def ask(
        self, prompt: str, most: int, temperature: float = 0.0, choices: int = 1, likeliest: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Ask for texts.

        Args:
            prompt: a text; of a chat it is the user's message.
            most: new tokens.
            temperature: 0 = greedy.
            choices: how many texts; at most as many as the server takes.
            likeliest: likeliest tokens to report, at most as many as the server does; None = as many.
            extra: fields for this request alone.

        Raises:
            ServerError: no answer, or not one of this API.
        """
        able = self.abilities
        body: dict[str, Any] = {"model": self.model, "max_tokens": most, "temperature": temperature}
        body |= able.fields
        if choices > 1:
            body["n"] = choices
        told = able.likeliest if likeliest is None else min(likeliest, able.likeliest)
        if able.api == "chat":
            body |= {"messages": [{"role": "user", "content": prompt}]}
            body |= {"logprobs": True, "top_logprobs": told} if told else {}
        else:
            body |= {"prompt": prompt} | ({"logprobs": told} if told else {})
        path = "/v1/chat/completions" if able.api == "chat" else "/v1/completions"
        start = time.perf_counter()
        sent = json.dumps(body | self.fields | dict(extra or {})).encode()
        status, content = self._send("POST", path, sent)
        for wait in WAITS:
            if status not in BUSY:
                break
            time.sleep(wait)
            start = time.perf_counter()
            status, content = self._send("POST", path, sent)
        took = time.perf_counter() - start
        return _answers(self._json(status, content, path), took, f"{self.url}{path}")

    def _json(self, status: int, content: bytes, path: str) -> dict[str, Any]:
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if status != 200 or not isinstance(found, dict):
            said = content[:300].decode("utf-8", "replace")
            raise ServerError(f"{self.url}{path}: expected an answer in JSON, got {status}: {said}", "see its log")
        return found


def side_by_side(work: Callable[[T], S], items: Sequence[T], lanes: int) -> list[S]:
    """Do some work for each item, ``lanes`` at a time -> what comes of it, in the order of the items.

    An exception of one ends it all, and so does a signal: pending requests are abandoned.
    """
    left: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, S] | BaseException] = queue.SimpleQueue()
    for pair in enumerate(items):
        left.put(pair)

    def run() -> None:
        with suppress(queue.Empty):
            while True:
                at, item = left.get_nowait()
                try:
                    done.put((at, work(item)))
                except BaseException as error:
                    done.put(error)

    for _ in range(min(lanes, len(items))):
        threading.Thread(target=run, daemon=True).start()
    found: dict[int, S] = {}
    while len(found) < len(items):
        one = done.get()
        if isinstance(one, BaseException):
            raise one
        found[one[0]] = one[1]
    return [found[at] for at in range(len(items))]


class Http:
    """Sends requests over HTTP, on connections that are kept."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r}: expected a URL such as http://127.0.0.1:8080")
        self.parts, self._idle = parts, list[http.client.HTTPConnection]()
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def __call__(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a request, once more on a fresh connection where the server closed the old one meanwhile."""
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        while True:
            reused = bool(self._idle)
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it, or there was none
                connection, reused = kind(self.parts.netloc, timeout=SECONDS), False
            try:
                connection.request(method, self.parts.path + path, body, self.headers)
                answer = connection.getresponse()
                found = answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not reused or isinstance(error, TimeoutError):
                    raise ServerError(f"{self.parts.geturl()}: no answer: {error}", "is the server running?") from None
                continue
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            return found

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()


def _answers(found: dict[str, Any], seconds: float, where: str) -> list[Answer]:
    usage = found.get("usage") if isinstance(found.get("usage"), dict) else {}
    assert isinstance(usage, dict)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    answers = []
    try:
        choices = sorted(found["choices"], key=lambda one: one.get("index") or 0)
        for choice in choices:
            message = choice.get("message")
            text = choice["text"] if message is None else message.get("content") or ""
            tokens = tuple(_tokens(choice.get("logprobs")))
            ended = choice.get("finish_reason") not in ("length", None)
            written = usage.get("completion_tokens") or len(tokens)
            answers.append(Answer(str(text), tokens, ended, usage.get("prompt_tokens"), cached, written, seconds))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ServerError(f"{where}: expected `choices` with texts, got {str(found)[:200]}") from None
    if not answers:
        raise ServerError(f"{where}: expected a text, got none")
    return answers


def _tokens(told: Any) -> Iterator[Token]:
    """Read log-probabilities in the shape of chats, or in that of completions."""
    if not isinstance(told, dict):
        return
    if isinstance(told.get("content"), list):
        for one in told["content"]:
            yield Token(
                _text(one), _merged((_text(other), other["logprob"]) for other in one.get("top_logprobs") or ())
            )
        return
    texts = told.get("tokens") or []
    tops = told.get("top_logprobs") or [None] * len(texts)
    for text, top in zip(texts, tops, strict=False):
        yield Token(str(text), _merged((top or {}).items()))


def _text(one: dict[str, Any]) -> str:
    raw = one.get("bytes")
    if isinstance(raw, list) and raw:
        return bytes(raw).decode("utf-8", "backslashreplace")
    return str(one.get("token", ""))


def _merged(pairs: Any) -> dict[str, float]:
    """Add the probabilities of tokens whose texts are equal."""
    found: dict[str, float] = {}
    for text, value in pairs:
        if value is None or value == -math.inf:
            continue
        found[text] = float(value) if text not in found else math.log(math.exp(found[text]) + math.exp(value))
    return found
