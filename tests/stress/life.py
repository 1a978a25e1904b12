"""Long life: mixed requests on open engines, each text against plain decoding's; memory and descriptors stay flat."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.engine.result import Result
from tests.conftest import PROMPTS

NEW = 64  # maximum tokens of a request
WORKERS = 3
GROWTH = ("rss", "in_use", "objects", "descriptors", "threads")
FLAT = 0.01  # most growth of what counts as flat
TIE = 1e-4  # of the largest logit: what another order of a sum may change
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 3, "acceptance": "coupled"},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 11, "acceptance": "coupled"},
)
WAYS = ("whole", "streamed", "cancelled", "abandoned", "unread", "batch", "asyncio", "stopped", "statistics")


@dataclass(frozen=True)
class Held:
    """Resources that the process holds between requests: private memory, open descriptors, threads.

    Attributes:
        seconds: since the beginning.
        rss: resident bytes.
        in_use: of them, allocated bytes of malloc: growth here is a leak; 0 = glibc does not report it.
        objects: Python's blocks of memory.
        caches: bytes of KV, on separate pages; those never written are not resident.
        descriptors, threads: open ones.
    """

    seconds: float
    rss: int
    in_use: int
    objects: int
    caches: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls, start: float, engines: Sequence[Engine] = ()) -> Held:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        rss = pages * os.sysconf("SC_PAGE_SIZE")
        caches = sum(engine.kv_bytes() for engine in engines)
        seconds = round(time.monotonic() - start, 1)
        return cls(seconds, rss, _in_use(), sys.getallocatedblocks(), caches, descriptors, threading.active_count())


class _Mallinfo(ctypes.Structure):
    """mallinfo2 of glibc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*"0123", "mapped", *"56", "used", *"89"))


def _in_use() -> int:
    """Bytes that malloc has given out."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # another C library, or one before 2.33
        return 0
    ask.restype = _Mallinfo
    found = ask()
    return int(found.used + found.mapped)


@dataclass
class Life:
    """Results of a life."""

    held: list[Held] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)  # differing texts whose results report that they may differ

    def quarters(self, of: str) -> list[float]:
        """Return the median of each quarter of the looks; fewer than four looks: of all."""
        values, quarter = [getattr(one, of) for one in self.held], len(self.held) // 4
        if not quarter:
            return [median(values)] * 4
        ends = [number * quarter for number in range(4)]
        return [median(values[end : end + quarter]) for end in ends[:3]] + [median(values[-quarter:])]

    def growth(self, of: str) -> float:
        """Return the last quarter's median over that of the second quarter, less one: the first warms up."""
        _, early, _, late = self.quarters(of)
        return late / max(early, 1) - 1

    def verdict(self) -> str:
        """Lines of what grew, and by how much."""
        lines = []
        for of in GROWTH:
            scale, unit = (1 << 20, " MiB") if of in ("rss", "in_use") else (1, "")
            medians = ", ".join(f"{value / scale:.1f}" for value in self.quarters(of))
            lines.append(f"{of}: quarters {medians}{unit}; the last over the second {self.growth(of):+.1%}")
        flat = all(self.growth(of) < FLAT for of in ("rss", "descriptors", "threads"))
        return "\n".join([*lines, "flat" if flat else f"NOT flat: more than {FLAT:.0%}"])

    def report(self) -> dict[str, Any]:
        """For a file."""
        return {
            "requests": dict(self.requests),
            "tokens": self.tokens,
            "wrong": self.wrong,
            "ties": self.ties,
            **{of.name: [getattr(one, of.name) for one in self.held] for of in fields(Held)},
            **{f"growth_{of}": self.growth(of) for of in GROWTH},
            **{f"quarters_{of}": self.quarters(of) for of in GROWTH},
        }


class Requests:
    """Random requests to engines whose plain texts are known."""

    def __init__(self, bundles: list[Path], most_threads: int) -> None:
        self.engines: list[Engine] = []
        self.prompts: list[list[int]] = []
        self.expected: dict[tuple[int, int, int], Result] = {}  # bundle, prompt, sampling
        self.bundle_of: list[int] = []
        for number, bundle in enumerate(bundles):
            plain = load(bundle, threads=1, budget="off")
            if not self.prompts:
                ids = [plain.codec.encode(text) for text in PROMPTS[:10]]
                whole = (plain.codec.encode(PROMPTS[18]) * plain.context)[: plain.context]
                self.prompts = [*ids, whole[: plain.context - 20], whole[1 : plain.context - 2]]
            for prompt, tokens in enumerate(self.prompts):
                for sampling, params in enumerate(SAMPLINGS):
                    result = plain.generate(tokens, method="ar", max_new_tokens=NEW, **params)
                    self.expected[number, prompt, sampling] = result
            plain.close()
            for threads in range(1, most_threads + 1):
                self.engines.append(load(bundle, threads=threads, check=False, budget="off"))
                self.bundle_of.append(number)

    def one(self, rng: Random) -> tuple[str, int, list[str], list[str]]:
        """Make a random request -> how, tokens it wrote, what was wrong with its texts, and which are near-ties."""
        at = rng.randrange(len(self.engines))
        engine, way = self.engines[at], rng.choice(WAYS)
        prompt, sampling = rng.randrange(len(self.prompts)), rng.randrange(len(SAMPLINGS))
        most = rng.choice((1, 7, 24, NEW))
        methods = [*engine.methods, "auto", "chain", None]
        settings: dict[str, Any] = {
            "method": rng.choice(methods),
            "max_new_tokens": most,
            "gamma": rng.choice((None, None, 1, 3, 8)),
            "adaptive": rng.random() < 0.8,
            "fallback": rng.random() < 0.8,
            "logprobs": rng.random() < 0.1,
            "sampling": SamplingParams(**SAMPLINGS[sampling]),
        }
        expected = self.expected[self.bundle_of[at], prompt, sampling]
        results = self._made(engine, way, self.prompts[prompt], settings, expected, rng)
        tokens = sum(len(one.tokens) for one in results)
        wrong: list[str] = []
        ties: list[str] = []
        for result in results:
            if found := _wrong(result, expected, most, way):
                # stock operators sum a tree's rows in another order than a chain's: it says that it promises no text
                tie = not result.exact and result.lossless and result.operators == "stock"
                what = f"engine {at}, {way}, prompt {prompt}, {settings}, used {result.method_used}"
                (ties if tie and self._near(engine, prompt, result, expected, sampling) else wrong).append(
                    f"{what}: {found}"
                )
        return f"{way} {settings['method']}", tokens, wrong, ties

    def _near(self, engine: Engine, prompt: int, result: Result, expected: Result, sampling: int) -> bool:
        """Whether a text leaves plain decoding's where two tokens are equally likely; ignores sampled texts."""
        pairs = zip(result.tokens, expected.tokens, strict=False)
        at, (other, first) = next(((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1]), (0, (0, 0)))
        if other == first:
            return False  # not another text: a wrong length
        if SAMPLINGS[sampling]:
            return True
        text = self.prompts[prompt] + expected.tokens[:at]
        session = engine.sessions.take(text)
        try:
            with engine.lock:
                session.target.prefill(text[session.target.follow(text[:-1]) : -1])
                logits = session.target.forward(np.array(text[-1:])).logits[0]  # [vocab]
                return bool(abs(logits[other] - logits[first]) <= TIE * np.abs(logits).max())
        finally:
            engine.sessions.give_back(session)

    def _made(
        self, engine: Engine, way: str, prompt: list[int], settings: dict[str, Any], expected: Result, rng: Random
    ) -> list[Result]:
        if way == "batch":
            return engine.generate_batch([prompt] * rng.randint(2, 4), **settings)
        if way == "asyncio":
            return asyncio.run(_gathered(engine, prompt, settings))
        if way == "stopped" and len(expected.text) > 12:
            settings["stop"] = expected.text[8:12]
        if way in ("whole", "stopped"):
            return [engine.generate(prompt, **settings)]
        if way == "statistics":
            return [engine.generate(prompt, on_stats=lambda _: None, stats_every=2, **settings)]
        cancel = threading.Event()
        stream = engine.stream(prompt, cancel=cancel, **settings)
        if way == "unread":
            stream.close()
            return [stream.result]
        wanted = rng.randint(0, 6)
        for number, _ in enumerate(stream):
            if way == "cancelled" and number >= wanted:
                cancel.set()
            if way == "abandoned" and number >= wanted:
                break
        stream.close()
        return [stream.result]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


async def _gathered(engine: Engine, prompt: list[int], settings: dict[str, Any]) -> list[Result]:
    def made() -> Result:
        return engine.generate(prompt, **settings)

    return list(await asyncio.gather(asyncio.to_thread(made), asyncio.to_thread(made)))


def _wrong(result: Result, expected: Result, most: int, way: str) -> str:
    """Say what is wrong with a text that plain decoding has written too."""
    count = len(result.tokens)
    if result.tokens != expected.tokens[:count]:
        return f"{result.tokens} against {expected.tokens}"
    if way not in ("cancelled", "abandoned", "unread", "stopped") and count != min(most, len(expected.tokens)):
        return f"{count} tokens, finish {result.finish}, against {len(expected.tokens)}, finish {expected.finish}"
    return ""


def live(
    bundles: list[Path],
    seed: int,
    seconds: float,
    most: int = 1 << 60,
    every: float = 30.0,
    most_threads: int = 2,
    watch: Callable[[Life], None] = lambda life: None,
) -> Life:
    """Make requests from several threads until the time or ``most`` requests are over, and check memory in between.

    Args:
        bundles: which are opened, with one thread and with every number up to ``most_threads``.
        seed: of the requests.
        seconds: how long.
        most: requests.
        every: seconds between two looks, at which no request runs.
        watch: called after each look.
    """
    life, start = Life(), time.monotonic()
    requests, lock = Requests(bundles, most_threads), threading.Lock()
    done = 0
    while time.monotonic() - start < seconds and done < most:
        until = min(time.monotonic() + every, start + seconds)

        def work(rng: Random, until: float = until) -> None:
            nonlocal done
            while time.monotonic() < until:
                with lock:
                    if done >= most:
                        return
                    done += 1
                try:
                    name, tokens, wrong, ties = requests.one(rng)
                except Exception as error:
                    name, tokens, wrong, ties = "error", 0, [f"{type(error).__name__}: {error}"], []
                with lock:
                    life.requests[name] += 1
                    life.tokens += tokens
                    life.wrong += wrong
                    life.ties += ties

        threads = [
            threading.Thread(target=work, args=(Random(seed << 48 | len(life.held) << 8 | worker),))
            for worker in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        life.held.append(Held.now(start, requests.engines))
        watch(life)
    requests.close()
    return life


def open_and_close(bundle: Path, count: int, start: float) -> Life:
    """Engines opened, asked and closed again, one after the other."""
    life = Life()
    expected: list[int] | None = None
    for number in range(count):
        method = ("ar", "ngram", "speculative", "self-spec", "medusa", "auto")[number % 6]
        engine = load(bundle, threads=1, check=False, budget="off")
        result = engine.generate(PROMPTS[number % 2], method=method, max_new_tokens=16, ignore_eos=True)
        if number % 2 == 0:
            expected = expected or result.tokens
            if result.tokens != expected:
                life.wrong.append(f"{method}: {result.tokens} against {expected}")
        engine.close()
        del engine
        life.requests[method] += 1
        life.tokens += len(result.tokens)
        life.held.append(Held.now(start))
    return life
