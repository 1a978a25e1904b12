"""Sessions of the C interface (edgespec/runtimes/native/edgespec.h), through ctypes."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import EdgespecError
from edgespec.runtimes.text.codec import TextCodec
from tests.support.c_interface import array, library

OK, REFUSED, NO_MEMORY, CANCELLED, FULL, NO_FILE, BROKEN, HOST_FAILED = range(8)
FINISH = None, "eos", "length", "context", "stop"

PROGRESS = CFUNCTYPE(c_int32, c_void_p, c_int64, c_int64)

MASK = CFUNCTYPE(c_int32, c_void_p, POINTER(c_int64), c_int64, POINTER(c_int64), c_int32, POINTER(c_float), c_int64,
                 POINTER(c_uint8))  # fmt: skip


class BundleFacts(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("has_draft", c_int32), ("context", c_int64), ("vocab", c_int64),
        ("stops", POINTER(c_int64)), ("stop_count", c_int32),
    )  # fmt: skip


class HostPass(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("rows", c_int32), ("tokens", POINTER(c_int64)), ("positions", POINTER(c_int64)),
        ("parents", POINTER(c_int32)), ("kept", c_int64), ("moves", POINTER(c_int64)), ("move_count", c_int32),
        ("scored", c_int32), ("columns", c_int64), ("logits", POINTER(c_float)),
    )  # fmt: skip


RUN = CFUNCTYPE(c_int32, c_void_p, POINTER(HostPass))
WHY = CFUNCTYPE(c_void_p, c_void_p)


class HostOfC(ctypes.Structure):
    _fields_ = (("size", c_uint32), ("trees", c_int32), ("user", c_void_p), ("run", RUN), ("error", WHY))


class SessionOptions(ctypes.Structure):
    _fields_ = (("size", c_uint32), ("attention", c_int32), ("context", c_int64), ("ngram_store", c_char_p),
                ("max_bytes", c_uint64), ("target", POINTER(HostOfC)), ("draft", POINTER(HostOfC)))  # fmt: skip


class Settings(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("guesses", c_int32), ("max_new_tokens", c_int64), ("method", c_char_p),
        ("stops", POINTER(c_int64)), ("stop_count", c_int32), ("ignore_eos", c_int32),
        ("temperature", c_double), ("top_k", c_int64),
        *((name, c_double) for name in
          ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")),
        ("bias_tokens", POINTER(c_int64)), ("biases", POINTER(c_double)), ("bias_count", c_int32),
        ("seeded", c_int32), ("seed", c_int64), ("coupled", c_int32), ("block", c_int32),
        ("branch", POINTER(c_int32)), ("branch_count", c_int32), ("logprobs", c_int32), ("fixed", c_int32),
        ("prediction", POINTER(c_int64)), ("prediction_count", c_int64),
        ("progress", PROGRESS), ("mask", MASK), ("user", c_void_p),
        ("stop_texts", POINTER(c_char_p)), ("stop_text_count", c_int32),
        ("nodes", c_int32), ("cycles", c_int32), ("top_logprobs", c_int32), ("adapter", c_int32),
        ("reserved", c_int32),
    )  # fmt: skip


class RoundOfC(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("finish", c_int32),
        *((name, POINTER(c_int64)) for name in ("tokens", "drafted", "rejected")),
        *((name, c_int32) for name in ("count", "drafted_count", "rejected_count", "accepted")),
        ("drafter", c_char_p), ("logprobs", POINTER(c_double)), ("text", c_void_p), ("text_size", c_size_t),
        ("top_ids", POINTER(c_int64)), ("top_logprobs", POINTER(c_double)),
        ("top_count", c_int32), ("reserved", c_int32),
    )  # fmt: skip


ON_ROUND = CFUNCTYPE(c_int32, c_void_p, POINTER(RoundOfC))


ENCODE = CFUNCTYPE(c_int32, c_void_p, POINTER(c_char), c_size_t, c_int32, POINTER(c_int64), c_size_t,
                   POINTER(c_size_t))  # fmt: skip
DECODE = CFUNCTYPE(c_int32, c_void_p, POINTER(c_int64), c_size_t, POINTER(c_char), c_size_t, POINTER(c_size_t))
ENCODE_CHAT = CFUNCTYPE(c_int32, c_void_p, POINTER(c_char), c_size_t, POINTER(c_int64), c_size_t, POINTER(c_size_t))
ERROR = CFUNCTYPE(c_void_p)
CLOSE = CFUNCTYPE(None, c_void_p)


class CodecOfC(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("reserved", c_int32), ("user", c_void_p), ("encode", ENCODE), ("decode", DECODE),
        ("encode_chat", ENCODE_CHAT), ("error", ERROR), ("close", CLOSE),
    )  # fmt: skip


def codec_of(codec: TextCodec, closed: Callable[[], None] = lambda: None) -> CodecOfC:
    """Make functions for C of a tokenizer; those of a conversation take a list of messages."""
    said = ctypes.create_string_buffer(512)

    def given(ids: Sequence[int], to: Any, room: int, count: Any) -> None:
        count[0] = len(ids)
        for at, one in enumerate(ids[:room]):
            to[at] = one

    def refusing(work: Callable[..., None]) -> Callable[..., int]:
        def call(user: Any, *arguments: Any) -> int:
            try:
                work(*arguments)
            except EdgespecError as error:
                said.value = str(error).encode()[:511]
                return 1
            return 0

        return call

    def encode(text: Any, size: int, special: int, ids: Any, room: int, count: Any) -> None:
        given(codec.encode(text[:size].decode(), bool(special)), ids, room, count)

    def decode(ids: Any, number: int, text: Any, room: int, size: Any) -> None:
        made = codec.decode(ids[:number]).encode()
        size[0] = len(made)
        ctypes.memmove(text, made, min(room, len(made)))

    def encode_chat(conversation: Any, size: int, ids: Any, room: int, count: Any) -> None:
        chat = json.loads(conversation[:size])
        given(codec.chat(chat["messages"], chat.get("tools")), ids, room, count)

    calls = ENCODE(refusing(encode)), DECODE(refusing(decode)), ENCODE_CHAT(refusing(encode_chat))
    return CodecOfC(
        ctypes.sizeof(CodecOfC), 0, None, *calls, ERROR(lambda: ctypes.addressof(said)), CLOSE(lambda user: closed())
    )


class Message(ctypes.Structure):
    _fields_ = (("role", c_char_p), ("content", c_char_p))


def messages_of(messages: Sequence[dict[str, Any]]) -> Any:
    """Make messages for C: those with more than a role and a text as JSON."""
    made = [
        Message(one["role"].encode(), one["content"].encode())
        if set(one) == {"role", "content"} and isinstance(one["content"], str)
        else Message(None, json.dumps(one).encode())
        for one in messages
    ]
    return (Message * len(made))(*made)


class Counts(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32), ("reserved", c_int32),
        *((name, c_int64) for name in
          ("prompt_tokens", "reused_tokens", "rounds", "tokens", "drafted", "accepted")),
        *((name, c_uint64) for name in ("prompt_ns", "round_ns", "pass_ns")), ("dropped", c_char_p),
    )  # fmt: skip


@dataclass(frozen=True)
class RoundFound:
    """A round, copied."""

    tokens: list[int]
    drafted: list[int]
    rejected: list[int]
    accepted: int
    finish: str | None
    logprobs: list[float] | None = None
    text: str | None = None
    top: list[list[tuple[int, float]]] | None = None


class Refused(Exception):
    """A call failed with a ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(library().edgespec_error().decode())
        self.status = status


def called(name: str, *arguments: Any) -> None:
    if status := getattr(library(), name)(*arguments):
        raise Refused(status)


class Owned:
    """An object of the library, which is closed at the end of a ``with``."""

    kind = ""

    def __init__(self) -> None:
        self.handle = c_void_p()

    def close(self) -> None:
        getattr(library(), f"edgespec_{self.kind}_close")(self.handle)
        self.handle = c_void_p()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Bundle(Owned):
    """An opened folder; ``cache``: bytes for weights that stay in the file; ``hosted``: its passes are the caller's."""

    kind = "bundle"

    def __init__(self, folder: Path, threads: int = 1, cache: int | None = None, hosted: bool = False) -> None:
        super().__init__()
        given = str(folder).encode(), c_int32(threads)
        if hosted:
            called("edgespec_bundle_open_hosted", given[0], byref(self.handle))
        elif cache is None:
            called("edgespec_bundle_open", *given, byref(self.handle))
        else:
            called("edgespec_bundle_open_streamed", *given, c_uint64(cache), byref(self.handle))
        self.facts = BundleFacts(ctypes.sizeof(BundleFacts))
        called("edgespec_bundle_describe", self.handle, byref(self.facts))
        self._codec: CodecOfC | None = None

    def set_codec(self, codec: CodecOfC) -> None:
        called("edgespec_bundle_set_codec", self.handle, byref(codec))
        self._codec = codec  # whose functions C calls

    def add_adapter(self, folder: Path) -> int:
        number = c_int32()
        called("edgespec_bundle_add_adapter", self.handle, str(folder).encode(), byref(number))
        return number.value

    def load_codec(self, path: Path | str | None) -> None:
        called("edgespec_bundle_load_codec", self.handle, None if path is None else str(path).encode())

    def encode(self, text: str, special: bool = True) -> list[int]:
        return self._ids("edgespec_encode", text.encode(), c_size_t(len(text.encode())), c_int32(special))

    def encode_chat(self, messages: Sequence[dict[str, Any]], more: dict[str, Any] | None = None) -> list[int]:
        said = None if more is None else json.dumps(more).encode()
        return self._ids("edgespec_encode_chat", messages_of(messages), c_int32(len(messages)), said)

    def decode(self, ids: Sequence[int]) -> str:
        size, text = c_size_t(), ctypes.create_string_buffer(1 << 16)
        called("edgespec_decode", self.handle, array(ids, np.int64, POINTER(c_int64)), c_size_t(len(ids)), text,
               c_size_t(1 << 16), byref(size))  # fmt: skip
        return text.raw[: size.value].decode()

    def _ids(self, name: str, *arguments: Any) -> list[int]:
        count = c_size_t()
        called(name, self.handle, *arguments, None, c_size_t(0), byref(count))
        ids = (c_int64 * count.value)()
        called(name, self.handle, *arguments, ids, count, byref(count))
        return list(ids)

    def session(self, **options: Any) -> Session:
        return Session(self, **options)


class Session(Owned):
    """A text over a bundle."""

    kind = "session"

    def __init__(self, bundle: Bundle, attention: int = 0, context: int = 0, store: Path | None = None,
                 max_bytes: int = 0, target: HostOfC | None = None, draft: HostOfC | None = None) -> None:  # fmt: skip
        super().__init__()
        named = None if store is None else str(store).encode()
        hosts = [POINTER(HostOfC)() if one is None else ctypes.pointer(one) for one in (target, draft)]
        options = SessionOptions(ctypes.sizeof(SessionOptions), attention, context, named, max_bytes, *hosts)
        self._hosts = target, draft  # whose functions C calls
        called("edgespec_session_open", bundle.handle, byref(options), byref(self.handle))

    def begin(self, prompt: Sequence[int], settings: Settings) -> None:
        called("edgespec_begin", self.handle, array(prompt, np.int64, POINTER(c_int64)), c_int64(len(prompt)),
               byref(settings))  # fmt: skip

    def next(self) -> RoundFound:
        found = RoundOfC(ctypes.sizeof(RoundOfC))
        called("edgespec_next", self.handle, byref(found))
        return copied(found)

    def rounds(self, prompt: Sequence[int], settings: Settings) -> list[RoundFound]:
        """Decode a text round by round; the passes of a round are in its time."""
        self.begin(prompt, settings)
        found, before = list[RoundFound](), (0, 0)
        while not found or found[-1].finish is None:
            found.append(self.next())
            counts = self.counts()
            now = int(counts.round_ns), int(counts.pass_ns)
            assert 0 <= now[1] - before[1] <= now[0] - before[0]
            before = now
        return found

    def generate(
        self, prompt: Sequence[int], settings: Settings, on_round: Callable[[RoundFound], int] = lambda one: 0
    ) -> list[int]:
        """Decode a text in one call."""
        tokens: list[int] = []

        def told(user: Any, one: Any) -> int:
            found = copied(one.contents)
            tokens.extend(found.tokens)
            return on_round(found)

        called("edgespec_generate", self.handle, array(prompt, np.int64, POINTER(c_int64)), c_int64(len(prompt)),
               byref(settings), ON_ROUND(told), None)  # fmt: skip
        return tokens

    def chat(self, messages: Sequence[dict[str, Any]], settings: Settings) -> str:
        """Write the answer of a conversation."""
        said: list[str] = []

        def told(user: Any, one: Any) -> int:
            said.append(copied(one.contents).text or "")
            return 0

        called("edgespec_chat", self.handle, messages_of(messages), c_int32(len(messages)), None, byref(settings),
               ON_ROUND(told), None)  # fmt: skip
        return "".join(said)

    def bytes(self) -> int:
        return int(library().edgespec_session_bytes(self.handle))

    def save(self, path: Path) -> None:
        called("edgespec_session_save", self.handle, str(path).encode())

    def restore(self, path: Path) -> int:
        tokens = c_int64()
        called("edgespec_session_restore", self.handle, str(path).encode(), byref(tokens))
        return tokens.value

    def cancel(self) -> None:
        library().edgespec_cancel(self.handle)

    def counts(self) -> Counts:
        found = Counts(ctypes.sizeof(Counts))
        called("edgespec_session_counts", self.handle, byref(found))
        return found


def copied(found: RoundOfC) -> RoundFound:
    return RoundFound(
        found.tokens[: found.count], found.drafted[: found.drafted_count], found.rejected[: found.rejected_count],
        found.accepted, FINISH[found.finish], found.logprobs[: found.count] if found.logprobs else None,
        ctypes.string_at(found.text, found.text_size).decode() if found.text else None,
        [[(found.top_ids[at + i], found.top_logprobs[at + i]) for i in range(found.top_count)]
         for at in range(0, found.count * found.top_count, found.top_count)] if found.top_count else None,
    )  # fmt: skip


def settings_of(
    params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    method: str | None = "plain",
    tokens: int = 32,
    guesses: int = 0,
    stops: Sequence[int] = (),
    branch: Sequence[int] = (),
    prediction: Sequence[int] = (),
    stop_texts: Sequence[str] = (),
    **fields: Any,
) -> Settings:
    """Make settings of Python's sampling; ``fields`` of the structure as they are."""
    bias, texts = params.logit_bias, [text.encode() for text in stop_texts]
    kept = [  # a structure does not keep what its pointers point to
        array(stops, np.int64, POINTER(c_int64)), array(list(bias), np.int64, POINTER(c_int64)),
        array(list(bias.values()), np.float64, POINTER(c_double)), array(branch, np.int32, POINTER(c_int32)),
        array(prediction, np.int64, POINTER(c_int64)),
    ]  # fmt: skip
    found = Settings(
        ctypes.sizeof(Settings), guesses, tokens, method and method.encode(), kept[0], len(stops), 1,
        params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty, kept[1], kept[2], len(bias), params.seed is not None, params.seed or 0,
        params.acceptance == "coupled", params.verification == "block", kept[3], len(branch), 0, 1, kept[4],
        len(prediction), PROGRESS(), MASK(), None, (c_char_p * len(texts))(*texts), len(texts), 0, 0, 0, 0, 0,
    )  # fmt: skip
    found.kept = kept
    for name, value in fields.items():
        setattr(found, name, value)
    return found
