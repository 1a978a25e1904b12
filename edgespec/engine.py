"""The front door: load a bundle, generate, stream, chat."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec.decode import DecodeOptions, Round, decode
from edgespec.errors import InvalidRequest
from edgespec.lanes import Lane, LanePool
from edgespec.methods import MethodChoice, choose_method
from edgespec.runtimes.bundle import Bundle
from edgespec.runtimes.probe import rows_exact
from edgespec.runtimes.process import peak_bytes
from edgespec.runtimes.session import Model
from edgespec.runtimes.text import Message, StreamDecoder, TextCodec
from edgespec.settings import Settings
from edgespec.stats import Stats

Prompt = str | Sequence[int]
Finish = Literal["eos", "length", "context", "stop", "cancelled"]
INTERLEAVED = 4  # sequences of a batch that are in memory at once


@dataclass(frozen=True)
class Result:
    """What a request gave.

    Attributes:
        text: the new text, without stop string and special tokens.
        tokens: the new token ids only; the one that ended the text included.
        finish: why it ended.
        stats: counters and times.
        method_requested: as asked for; None = the default was taken.
        method_used: what decoded.
        reason: why that method, and whether drafting paid.
        lossless: the text has the distribution of plain decoding of this bundle.
        exact: the text is bit for bit that of plain decoding in strict mode.
        approximations: what differs from the source model.
        logprobs: log-probability of each token by the unadjusted model, if asked for.
    """

    text: str
    tokens: list[int]
    finish: Finish
    stats: Stats
    method_requested: str | None
    method_used: str
    reason: str
    lossless: bool
    exact: bool
    approximations: list[str]
    logprobs: list[float] | None = None
    peak_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        found: dict[str, Any] = {
            "text": self.text,
            "tokens": self.tokens,
            "finish": self.finish,
            "method_requested": self.method_requested,
            "method_used": self.method_used,
            "reason": self.reason,
            "lossless": self.lossless,
            "exact": self.exact,
            "approximations": self.approximations,
            "stats": self.stats.as_dict() | {"peak_bytes": self.peak_bytes},
        }
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
        return found


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream.

    Attributes:
        text: what became complete in one round.
        round: the round; None for text held back until the very end.
        pieces: ``text`` by the round's tokens: pieces[i] became complete with token i.
    """

    text: str
    round: Round | None
    pieces: tuple[str, ...] = ()


class Stream:
    """A running request: iterate for text as it comes; ``result`` is there at the end, or after ``close``."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], settings: Settings, cancel: threading.Event | None
    ) -> None:
        self._engine, self._settings = engine, settings
        self._prompt = list(prompt)
        self._cancel = cancel or threading.Event()
        self._choice = engine.choose(settings.method)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._finish: Finish | None = None
        self._stats = Stats()
        self._decoder = StreamDecoder(engine.codec, self._prompt, settings.stop)
        self._lane = engine.lanes.take(self._prompt)
        try:
            self._drafter = self._lane.drafter(self._choice, settings.gamma, settings.adaptive, settings.fallback)
            self._rounds = decode(self._lane.target, self._drafter, self._prompt, self._options(), self._stats)
        except BaseException:
            engine.lanes.give_back(self._lane)
            raise
        self._chunks = self._run()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def cancel(self) -> None:
        """End the request after the round at hand; safe from another thread."""
        self._cancel.set()

    def close(self) -> None:
        """End the request now; what was written so far is in ``result``."""
        self._chunks.close()

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens so far."""
        return self._prompt + self._tokens

    @property
    def result(self) -> Result:
        """The result so far; complete once the stream has ended."""
        engine, choice, settings = self._engine, self._choice, self._settings
        sampling = settings.sampling
        drawn = not sampling.greedy and sampling.acceptance == "rejection" and choice.draws
        exact = engine.strict and not drawn and (choice.name == "ar" or engine.rows_exact())
        return Result(
            text=self._decoder.text,
            tokens=list(self._tokens),
            finish=self._finish or "cancelled",
            stats=self._stats,
            method_requested=settings.method,
            method_used=choice.name,
            reason=self._reason(),
            lossless=True,
            exact=exact,
            approximations=engine.approximations,
            logprobs=self._logprobs if settings.logprobs else None,
            peak_bytes=peak_bytes(),
        )

    def _options(self) -> DecodeOptions:
        settings, engine = self._settings, self._engine
        return DecodeOptions(
            max_new_tokens=settings.max_new_tokens,
            gamma=settings.gamma or self._choice.gamma,
            eos=frozenset() if settings.ignore_eos else engine.eos,
            sampling=settings.sampling,
            logprobs=settings.logprobs,
        )

    def _run(self) -> Iterator[Chunk]:
        self._lane.target.reserve(min(self._lane.target.context, len(self._prompt) + self._settings.max_new_tokens))
        try:
            while self._finish is None:
                if self._cancel.is_set():
                    self._finish = "cancelled"
                    break
                with self._engine.lock:  # buffers are shared by all slots: one round at a time
                    item = next(self._rounds, None)
                if item is None:
                    break
                yield self._take(item)
            if rest := self._decoder.finish():
                yield Chunk(rest, None)
        finally:
            self._rounds.close()
            self._engine.lanes.give_back(self._lane)

    def _take(self, item: Round) -> Chunk:
        """Add a round's tokens; a stop string in the middle of it drops the tokens after."""
        pieces: list[str] = []
        self._finish = item.finish
        for at, token in enumerate(item.tokens):
            self._tokens.append(token)
            if item.logprobs is not None:
                self._logprobs.append(item.logprobs[at])
            pieces.append(self._decoder.push([token]))
            if self._decoder.stopped is not None:
                self._finish = "stop"
                break
        return Chunk("".join(pieces), item, tuple(pieces))

    def _reason(self) -> str:
        if self._stats.dropped_reason:
            return f"{self._choice.reason}; drafter dropped: {self._stats.dropped_reason}"
        drafting = getattr(self._drafter, "reason", "")
        return f"{self._choice.reason}; {drafting}" if drafting else self._choice.reason


class Engine:
    """A loaded bundle.  Requests may come from several threads; each keeps its own KV slot while it runs.

    Attributes:
        bundle: the opened bundle.
        codec: its tokenizer.
        strict: whether passes are padded so that speculation gives the bits of plain decoding.
        context: most tokens of a sequence, prompt included.

    Args (beyond those of ``load``):
        graph: which graph of the target; None = the one that can run every method.
        share: use this engine's session rather than a new one.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        context: int | None = None,
        strict: bool = True,
        graph: str | None = None,
        share: Engine | None = None,
    ) -> None:
        manifest = bundle.manifest
        facts = manifest.target.facts
        if context is not None and not 1 < context <= facts.context:
            raise InvalidRequest(f"context {context}: expected 2 to {facts.context}, what the bundle was exported for")
        self.bundle, self.strict = bundle, strict
        self.context = context or facts.context
        self.codec = TextCodec(bundle.path)
        self.eos = frozenset(manifest.tokenizer.eos)
        self.lock = threading.RLock()
        graph = graph or ("gated" if "gated" in manifest.target.graphs else "plain")
        start = time.perf_counter()
        self.model = share.model if share else Model(bundle.path, manifest.target, graph, threads)
        self.load_ms = 1000 * (time.perf_counter() - start)
        self._draft: Model | None = None
        self.lanes = LanePool(self._new_lane)
        self._rows_exact: bool | None = None

    # -- requests ----------------------------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, settings: Settings | None = None, *, cancel: threading.Event | None = None, **changes: Any
    ) -> Stream:
        """Start a request.

        Args:
            prompt: text, or token ids.
            settings: what to set.
            cancel: set it to end the request after the round at hand.
            **changes: fields of ``Settings``, or of ``SamplingParams`` (temperature, top_k, ...), set on top.

        Raises:
            InvalidRequest: an empty or too long prompt, an unknown method, nonsense settings.
        """
        settings = (settings or Settings()).changed(**changes)
        return Stream(self, self._encode(prompt), settings, cancel)

    def generate(
        self,
        prompt: Prompt,
        settings: Settings | None = None,
        *,
        on_chunk: Callable[[Chunk], None] | None = None,
        cancel: threading.Event | None = None,
        **changes: Any,
    ) -> Result:
        """Complete a prompt; arguments as for ``stream``, and ``on_chunk`` is called with every piece."""
        stream = self.stream(prompt, settings, cancel=cancel, **changes)
        for chunk in stream:
            if on_chunk:
                on_chunk(chunk)
        return stream.result

    def generate_batch(
        self, prompts: Sequence[Prompt], settings: Settings | None = None, **changes: Any
    ) -> list[Result]:
        """Complete several prompts, INTERLEAVED at a time, a round each in turn; results in the order of the prompts.

        Stock attention takes one sequence a pass, so a batch is no faster than its parts; it is for convenience.
        """
        settings = (settings or Settings()).changed(**changes)
        encoded = [self._encode(prompt) for prompt in prompts]
        results: list[Result | None] = [None] * len(encoded)
        waiting = iter(range(len(encoded)))
        running: dict[int, Stream] = {}
        try:
            while True:
                while len(running) < INTERLEAVED and (at := next(waiting, None)) is not None:
                    running[at] = Stream(self, encoded[at], settings, None)
                if not running:
                    return [result for result in results if result is not None]
                for at, stream in list(running.items()):
                    if next(iter(stream), None) is None:
                        results[at] = running.pop(at).result
        finally:
            for stream in running.values():
                stream.close()

    def chat(
        self,
        messages: Sequence[Message],
        settings: Settings | None = None,
        *,
        tools: Sequence[Any] | None = None,
        **changes: Any,
    ) -> Result:
        """Answer a conversation, rendered by the model's own template.  Earlier turns still in a slot are reused."""
        return self.generate(self.codec.chat(messages, tools), settings, **changes)

    # -- what this bundle is -------------------------------------------------------------------------------------------

    @property
    def methods(self) -> list[str]:
        """Methods this bundle can run."""
        return list(self.bundle.manifest.methods)

    @property
    def approximations(self) -> list[str]:
        """What differs from the source model whatever the method."""
        form = self.bundle.manifest.target.format
        return [] if form == "fp32" else [f"{form} weights"] + (["8-bit activations"] if form != "fp32" else [])

    def choose(self, method: str | None) -> MethodChoice:
        """The method for a request, with the reason."""
        return choose_method(self.bundle.manifest, method)

    def rows_exact(self) -> bool:
        """Whether verified rows have the bits of plain decoding's on this machine; probed once, then known."""
        if self._rows_exact is None:
            with self.lock:
                self._rows_exact = self.strict and rows_exact(self.model)
        return self._rows_exact

    def kv_bytes(self) -> int:
        """Bytes of KV allocated by all slots."""
        return self.lanes.kv_bytes()

    def close(self) -> None:
        """Forget all slots; the sessions go with the engine."""
        self.lanes.clear()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> list[int]:
        tokens = self.codec.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if isinstance(prompt, str) and not prompt.strip():
            raise InvalidRequest("the prompt is empty", "give at least one word, or token ids to start from")
        return tokens

    def _new_lane(self) -> Lane:
        return Lane(self.bundle.manifest, self.model, self._draft_model, self.context, self.strict)

    def _draft_model(self) -> Model:
        if self._draft is None:
            self._draft = Model(self.bundle.path, self.bundle.part("draft"), "plain", self.model.threads)
        return self._draft


def load(
    bundle: str | os.PathLike[str] | Path,
    *,
    threads: int | None = None,
    context: int | None = None,
    strict: bool = True,
    check: bool = True,
) -> Engine:
    """Load a bundle.

    Args:
        bundle: its folder.
        threads: of ONNX Runtime; None = all processors this process may use.
        context: most tokens of a sequence; None = what the bundle was exported for.  Memory grows with use.
        strict: pad lone rows so that speculation gives the bits of plain decoding (design: strict mode).
        check: compare the SHA-256 of every file first.

    Raises:
        BundleError: something is missing, short, altered or newer than this version.
    """
    return Engine(Bundle.open(bundle, check=check), threads=threads, context=context, strict=strict)
