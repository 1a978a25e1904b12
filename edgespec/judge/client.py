"""Ask an OpenAI-compatible server: find its abilities, and read answers as tokens with log-probabilities."""

from __future__ import annotations

import http.client
import json
import math
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from edgespec.errors import EdgespecError, first_line

LIKELIEST = (20, 5, 1, 0)  # likeliest tokens that are asked for, the first that a server gives
CHOICES = (16, 4)  # texts of one request
SECONDS = 600.0  # for one answer
PROBE = "The capital of France is"
BUSY, WAITS = (429, 503), (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # statuses of a full queue, seconds before new tries
PATIENCE = 20.0  # seconds that a server which was just started may need until it listens
LOCKED = (401, 403, 407)  # statuses of a server that wants a key
MOST_BYTES = 1 << 26  # of an answer
RISE = 0.05  # nats above zero that rounding makes of a log-probability
# what engines call the rules that reshape a distribution, with the values that switch them off
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "repetition_penalty": 1.0}
Send = Callable[[str, str, "bytes | None"], "tuple[int, bytes]"]
T = TypeVar("T")
S = TypeVar("S")


class ServerError(EdgespecError):
    """A server cannot be asked: it is not there, wants a key, stays busy, or does not speak this API."""


class NotListening(ServerError):
    """No server listens at an address, perhaps not yet."""


class Refused(ServerError):
    """A server refuses one request, and may answer others."""


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
        text: its text; bytes that are not valid text are escaped.  It identifies the token.
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
        self.url = url.strip().rstrip("/").removesuffix("/v1")
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
        self._wait()
        if not self.model:
            self.model = self._first_model()
        told: dict[str, ServerError] = {}
        for api in ("completions", "chat"):
            for likeliest in LIKELIEST:
                self.abilities = Abilities(api, likeliest)
                try:
                    answer = self.ask(PROBE, 2, 1.0)[0]
                except Refused as error:
                    told.setdefault(api, error)
                    continue
                if likeliest and not any(token.top for token in answer.tokens):
                    continue  # it takes the field and gives nothing, or nothing that can be used
                self._find_limits()
                return
        raise ServerError("; ".join(error.message for error in told.values()), "see its log, and check --model")

    def _wait(self) -> None:
        """Wait until it listens, and has loaded its model."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                status = self._send("GET", "/v1/models", None)[0]
                if status not in BUSY:
                    return
            except NotListening:
                if time.monotonic() > end:
                    raise
            if time.monotonic() > end:
                return
            time.sleep(0.25)

    def _first_model(self) -> str:
        try:
            listed = self._json(*self._send("GET", "/v1/models", None), "/v1/models").get("data")
        except Refused as error:
            raise ServerError(error.message, "name the model with --model, and check the URL") from None
        names = [one.get("id") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        if not names or not isinstance(names[0], str):
            raise ServerError(f"{self.url}/v1/models lists no model", "name one with --model")
        return names[0]

    def _find_limits(self) -> None:
        able = self.abilities
        with suppress(Refused):
            self.ask(PROBE, 1, 1.0, extra=NEUTRAL)
            able.fields = dict(NEUTRAL)
        for name, value in NEUTRAL.items() if not able.fields else ():
            with suppress(Refused):
                self.ask(PROBE, 1, 1.0, extra={name: value})
                able.fields[name] = value
        for choices in CHOICES:
            with suppress(Refused):
                if len(self.ask(PROBE, 1, 1.0, choices)) == choices:
                    able.choices = choices
                    return

    def ask(
        self, prompt: str, most: int, temperature: float = 0.0, choices: int = 1, likeliest: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Ask for texts.

        Args:
            prompt: a text; in a chat it is the user's message.
            most: new tokens.
            temperature: 0 = greedy.
            choices: number of texts, at most the server's maximum.
            likeliest: likeliest tokens to report, at most the server's maximum, which is the default.
            extra: fields for only this request.

        Raises:
            ServerError: no answer, or not one of this API.
        """
        able = self.abilities
        body: dict[str, Any] = {"model": self.model, "max_tokens": most, "temperature": temperature, "stream": False}
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
        where = f"{self.url}{path}"
        said = content[:300].decode("utf-8", "replace")
        if status in LOCKED:
            raise ServerError(f"{where}: {status}, it wants a key: {said}", "give it with --api-key")
        if status in BUSY:
            raise ServerError(f"{where}: {status}, still busy after {sum(WAITS):.0f} s: {said}", "try again later")
        if 300 <= status < 400:
            raise ServerError(f"{where}: {status}, it is elsewhere: {said}", "give the URL that it names")
        if content.startswith((b"data:", b"event:", b":")):
            raise ServerError(f"{where}: it streams, although `stream` is false", "try --fields '{\"stream\": false}'")
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if status != 200 or not isinstance(found, dict) or ("choices" not in found and "error" in found):
            raise Refused(f"{where}: expected an answer in JSON, got {status}: {said}", "see its log")
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
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ServerError(f"{url!r}: {error}: expected a URL such as http://127.0.0.1:8080") from None
        plain = url.isascii() and url.isprintable() and " " not in url and not parts.query and not parts.fragment
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain or parts.username is not None:
            raise ServerError(f"{url!r}: expected a URL such as http://127.0.0.1:8080")
        if not (key.isascii() and key.isprintable()):
            raise ServerError("the key has characters that cannot be sent: expected printable ASCII")
        self.parts, self.port, self._idle = parts, port, list[http.client.HTTPConnection]()
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def __call__(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Send a request, and send it again on a fresh connection if the server has closed the old one."""
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        while True:
            reused = bool(self._idle)
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread took it, or there was none
                connection, reused = kind(str(self.parts.hostname), self.port, timeout=SECONDS), False
            try:
                connection.request(method, self.parts.path + path, body, self.headers)
                answer = connection.getresponse()
                size = answer.length  # None = it is not told
                found = answer.status, answer.read(MOST_BYTES + 1 if size is None or size > MOST_BYTES else None)
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                connection.close()
                if not reused or isinstance(error, TimeoutError):
                    raised = NotListening if isinstance(error, ConnectionRefusedError) else ServerError
                    said = f"{self.parts.geturl()}: no answer: {first_line(error)}"
                    raise raised(said, _hint(error)) from None
                continue
            except BaseException:
                connection.close()
                raise
            if len(found[1]) > MOST_BYTES:
                connection.close()
                raise ServerError(f"{self.parts.geturl()}: the answer has over {MOST_BYTES >> 20} MiB", "see its log")
            self._idle.append(connection)
            return found

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()


def _hint(error: Exception) -> str:
    """Say what to do about a connection that fails."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "SSL_CERT_FILE names a file of certificates to trust"
    if isinstance(error, ssl.SSLError):
        return "does it speak https? try http://"
    if isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.RemoteDisconnected):
        return "does it speak http? try https://"
    return "is the server running, and is that its port? see its log"


def _answers(found: dict[str, Any], seconds: float, where: str) -> list[Answer]:
    usage = found.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    answers = []
    try:
        choices = sorted(found["choices"], key=lambda one: one.get("index") or 0)
        for choice in choices:
            message = choice.get("message")
            text = choice["text"] if message is None else _said(message)
            if not isinstance(text, str):
                raise TypeError
            tokens = tuple(_tokens(choice.get("logprobs")))
            tokens = tokens if _spell(tokens, text) else ()
            ended = choice.get("finish_reason") not in ("length", None)
            while ended and tokens and sum(len(token.text) for token in tokens[:-1]) >= len(text):
                tokens = tokens[:-1]  # an end token, which has no text
            written = _count(usage.get("completion_tokens")) or len(tokens)
            counted = _count(usage.get("prompt_tokens"))
            answers.append(Answer(text, tokens, ended, counted, cached, written, seconds))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise Refused(f"{where}: expected `choices` with texts, got {str(found)[:200]}") from None
    if not answers:
        raise Refused(f"{where}: expected a text, got none")
    return answers


def _count(told: Any) -> int | None:
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else None


def _said(message: dict[str, Any]) -> Any:
    """Return the text of a chat's answer, thoughts first: engines that separate them may leave the rest empty."""
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    said = message.get("content")
    return (thought if isinstance(thought, str) else "") + ("" if said is None else said)


def _spell(tokens: Sequence[Token], text: str) -> bool:
    """Whether tokens are those of a text: some engines name pieces of the vocabulary, or the likeliest instead."""
    spelled = "".join(token.text for token in tokens)
    if "\\x" in spelled or "\ufffd" in spelled or "\ufffd" in text:  # parts of characters
        return True
    one, other = spelled.strip(), text.strip()
    return one.startswith(other) or other.startswith(one)  # an end has a token and no text


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
        if not value <= RISE:  # no log-probability, or no number: nothing of this row can be used
            return {}
        found[text] = float(value) if text not in found else math.log(math.exp(found[text]) + math.exp(value))
    return found
