"""Time the first token of short requests while a long prompt is read: with threads on one engine, and with the server.

    python -m benchmarks.first_token BUNDLE [--prompt 10000] [--most 60] [--threads 2] [--serve] [--method ar]

Short requests arrive at random moments while the long prompt is read by the target, and by the draft model if
``--method`` has one, whether that helps or not.  Prints milliseconds to their first text, alone and during the long
prompt, and the seconds that the long prompt took with all of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any

from benchmarks.common import conditions, show
from benchmarks.serving import listening

SHORT, PAUSE = 12, 0.7  # tokens of a short prompt; longest time between two of them, seconds
ALONE = 20

Ask = Callable[[list[int]], None]  # a prompt; returns with the first text


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompt", type=int, default=10000, help="tokens of the long prompt")
    parser.add_argument("--most", type=int, default=60, help="short requests")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--method", default="ar")
    parser.add_argument("--serve", action="store_true", help="through `edgespec serve`")
    arguments = parser.parse_args()
    measure = _served if arguments.serve else _threads
    show(
        conditions(bundle=arguments.bundle.name, prompt=arguments.prompt, method=arguments.method) | measure(arguments)
    )


def _threads(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure threads on one engine."""
    import edgespec

    with edgespec.load(arguments.bundle, threads=arguments.threads) as engine:

        def ask(prompt: list[int]) -> None:
            settings = {"method": arguments.method, "fallback": False, "max_new_tokens": 2, "ignore_eos": True}
            with engine.stream(prompt, **settings) as stream:
                next(stream)

        return {"operators": engine.operators.kind} | _times(ask, arguments)


def _served(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure clients of a new server."""
    import httpx

    command = [sys.executable, "-m", "edgespec", "serve", str(arguments.bundle), "--port", "0", "--name", "served"]
    with subprocess.Popen([*command, "--threads", str(arguments.threads)], stderr=subprocess.PIPE, text=True) as server:
        try:
            address, rest = listening(server)
            with httpx.Client(base_url=f"{address}/v1/", timeout=600) as http:

                def ask(prompt: list[int]) -> None:
                    body = {"model": "served", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
                    body["edgespec"] = {"method": arguments.method, "fallback": False}
                    with http.stream("POST", "completions", json=body) as sent:
                        sent.raise_for_status()
                        next(sent.iter_lines())

                return _times(ask, arguments)
        finally:
            server.terminate()
            server.wait(60)
            rest.join()


def _times(ask: Ask, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = Random(1)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, 1000) for _ in range(length)]

    def short() -> float:
        tokens, start = prompt(SHORT), perf_counter()
        ask(tokens)
        return 1000 * (perf_counter() - start)

    short()
    alone = [short() for _ in range(ALONE)]
    taken: list[float] = []
    long = prompt(arguments.prompt)

    def read() -> None:
        start = perf_counter()
        ask(long)
        taken.append(perf_counter() - start)

    reading = Thread(target=read)
    reading.start()
    beside: list[float] = []
    while len(beside) < arguments.most:
        sleep(PAUSE * rng.random())
        ms = short()
        if taken:  # the long prompt ended before
            break
        beside.append(ms)
    reading.join()
    found = {"alone": alone, "beside": beside}
    return {f"{name}_ms": _summary(ms) for name, ms in found.items() if ms} | {"long_prompt_s": round(taken[0], 1)}


def _summary(ms: list[float]) -> dict[str, float]:
    ms = sorted(ms)
    at = min(len(ms) - 1, round(0.95 * len(ms)))
    return {"median": round(median(ms)), "p95": round(ms[at]), "most": round(ms[-1]), "requests": len(ms)}


if __name__ == "__main__":
    main()
