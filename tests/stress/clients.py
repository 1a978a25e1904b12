"""Many clients of a server with prompt cache and tools: each answer is the one that a single client gets.

A first server answers every kind of request separately, and writes its prompts to the disk.  A second one over the same
cache serves all clients at once: chats with one of a few long system prompts, half of them with a call that is forced,
streamed and not, greedy and sampled, by several methods.  Every eighth answer is abandoned in the middle.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.text.call_formats import FORMATS
from tests.conftest import DRAFT, PROMPTS
from tests.server.conftest import source_with_template, start, stop
from tests.server.test_prompts import KEEPS_ALL
from tests.server.test_tools import TOOLS
from tests.stress.hostile import MIB, growth, resident

KINDS = 32
SYSTEMS = 4
LEFT = 8  # one of this many answers is abandoned
TOOL_FORMATS = sorted(FORMATS)
METHODS = (None, "ar", "ngram", "speculative", "eagle")
Said = tuple[str, list[tuple[str, str]], str]  # text, calls by name and arguments, why it ended


def asked(kind: int) -> dict[str, Any]:
    """Give the body of a request of a kind."""
    random = Random(kind)
    system = " ".join(PROMPTS[(5 * (kind % SYSTEMS) + at) % len(PROMPTS)] for at in range(40))[
        : 900 + 200 * (kind % SYSTEMS)
    ]
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": f"{random.choice(PROMPTS)} {kind}"},
        ],
        "max_tokens": (12, 48)[kind % 3 == 0],
        "temperature": 0.9 if kind % 4 == 3 else 0.0,
        "seed": kind,
        "edgespec": {"method": METHODS[kind % len(METHODS)], "tool_format": TOOL_FORMATS[kind % len(TOOL_FORMATS)]},
    }
    if kind % 2:
        body |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150}
    return body


def answer(http: httpx.Client, body: dict[str, Any]) -> tuple[Said, int, int]:
    """Ask, not streamed -> the answer, tokens of the prompt, and how many of them were cached."""
    got = http.post("chat/completions", json=body).raise_for_status().json()
    choice, usage = got["choices"][0], got["usage"]
    calls = [
        (one["function"]["name"], one["function"]["arguments"]) for one in choice["message"].get("tool_calls") or ()
    ]
    found = usage["prompt_tokens_details"]["cached_tokens"]
    return (choice["message"]["content"] or "", calls, choice["finish_reason"]), usage["prompt_tokens"], found


def streamed(http: httpx.Client, body: dict[str, Any], leave: bool = False) -> Said | None:
    """Ask, and put the stream together; None = it was left after its first event."""
    text, why, calls = "", "", list[list[str]]()
    with http.stream("POST", "chat/completions", json=body | {"stream": True}) as sent:
        sent.raise_for_status()
        for line in sent.iter_lines():
            if not line.startswith("data: {"):
                continue
            if leave:
                return None
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.HTTPError(str(event["error"]))
            for choice in event["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                for one in delta.get("tool_calls") or ():
                    if "id" in one:
                        calls.append([one["function"]["name"], ""])
                    calls[one["index"]][1] += one["function"].get("arguments", "")
                why = choice["finish_reason"] or why
    return text, [(name, arguments) for name, arguments in calls], why


@dataclass
class Outcome:
    """Results of all clients.

    Attributes:
        answers: whole ones, of each way; and those that were left.
        wrong: answers that a single client does not get, and requests that failed.
        prompt, found: tokens of the prompts that were not streamed, and of them those that were not read.
        resident: bytes of the server every half second.
    """

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    prompt: int = 0
    found: int = 0
    resident: list[int] = field(default_factory=list)

    def growth(self) -> float:
        """Resident memory of the last quarter over the second one, less one."""
        return growth(self.resident)

    def report(self) -> dict[str, Any]:
        return {
            "answers": dict(sorted(self.answers.items())),
            "wrong": len(self.wrong),
            "examples": self.wrong[:5],
            "found_share": round(self.found / max(self.prompt, 1), 3),
            "resident_mib": [round(size / MIB) for size in (min(self.resident), max(self.resident))],
            "growth": round(self.growth(), 4),
        }


def bundle(folder: Path) -> Path:
    """Make a bundle with a template of conversations and drafters of several kinds."""
    source = source_with_template(folder)
    methods, drafter = ["speculative", "eagle"], "builtin:shakespeare-eagle"
    options = ExportOptions(str(source), folder / "bundle", methods, "int4", draft=DRAFT, drafter=drafter, threads=1)
    export_model(options, golden=False)
    return options.output


def crowd(made: Path, count: int, seconds: float, threads: int) -> tuple[Outcome, str]:
    """Serve ``count`` clients for ``seconds`` -> their results, and the servers' output.

    Args:
        made: the bundle.
        count: clients at once.
        seconds: how long.
        threads: that decode.
    """
    options = ("--name", "demo", "--queue", "1000", "--max-batch-size", "8", "--no-log")
    served = start(made, *options, threads=threads, program=("-c", KEEPS_ALL))
    try:
        with httpx.Client(base_url=f"{served.url}/v1/", timeout=600) as http:
            alone = [answer(http, asked(kind))[0] for kind in range(KINDS)]
    finally:
        said = stop(served)
    found, lock, ended = Outcome(), threading.Lock(), threading.Event()
    served = start(made, *options, threads=threads, program=("-c", KEEPS_ALL))

    def go_on(number: int) -> None:
        with httpx.Client(base_url=f"{served.url}/v1/", timeout=600) as http:
            for at in range(10**9):
                if at and time.monotonic() > end:
                    return
                ask(http, (number + 7 * at) % KINDS, number + at)

    def ask(http: httpx.Client, kind: int, at: int) -> None:
        body, got, prompt, reused = asked(kind), None, 0, 0
        way = "left" if at % LEFT == LEFT - 1 else "streamed" if at % 2 else "whole"
        try:
            if way == "whole":
                got, prompt, reused = answer(http, body)
            else:
                got = streamed(http, body, way == "left")
        except (httpx.HTTPError, ValueError, LookupError) as error:
            way, problem = "failed", f"{kind}, {way}: {error!r}"
        else:
            problem = "" if got in (None, alone[kind]) else f"{kind}, {way}: {got!r}: expected {alone[kind]!r}"
        with lock:
            found.answers[way] += 1
            found.prompt, found.found = found.prompt + prompt, found.found + reused
            found.wrong += [problem] if problem else []

    def look() -> None:
        while not ended.wait(0.5):
            found.resident.append(resident(served.process.pid))

    watch, end = threading.Thread(target=look), time.monotonic() + seconds
    try:
        watch.start()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(go_on, range(count)))
    finally:
        ended.set()
        watch.join()
        said += stop(served)
    return found, said
