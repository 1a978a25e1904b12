"""A server under load: many clients of another process, long and short requests, some that go away.

    python -m benchmarks.serving BUNDLE [--clients 64] [--seconds 60] [--parallel 8] [--threads 2]

Each client repeats one of sixteen requests; every eighth answer is abandoned in the middle.  It prints texts that
differ from the same single request's by plain decoding; tokens per second, also of one client; times of short and
long requests; Jain's index of fairness over the results of each kind of client (1: all the same); and the server's
resident memory over the time.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from threading import Event, Thread
from time import monotonic, perf_counter
from typing import Any

import httpx

from benchmarks.common import conditions, show

KINDS = 16
SHORT, LONG = 16, 96  # new tokens
LEFT = 8  # one of this many answers is abandoned
PROMPTS = (
    "ROMEO:\n",
    "First Citizen:\n",
    "The king is",
    "To be, or not",
    "JULIET:\nGood night",
    "O",
    "My lord,",
    "Enter",
)


def request(kind: int) -> dict[str, Any]:
    """Return greedy and sampled requests, short and long."""
    drawn = kind % 2 == 1
    return {
        "model": "served",
        "prompt": PROMPTS[kind % len(PROMPTS)],
        "max_tokens": LONG if kind % 4 == 0 else SHORT,
        "temperature": 0.9 if drawn else 0.0,
        "seed": kind,
    }


@dataclass
class Client:
    """Results of a client.

    Attributes:
        kind: of its request.
        seconds: of each whole answer.
        left: answers that it abandoned.
        other: answers that differ from the single request's.
        failed: errors.
    """

    kind: int
    seconds: list[float] = field(default_factory=list)
    left: int = 0
    other: int = 0
    failed: int = 0

    def run(self, http: httpx.Client, alone: str, until: float) -> Client:
        """Ask until then, and at least twice, so that there is a whole answer."""
        for number in count(self.kind):
            if number >= self.kind + 2 and monotonic() >= until:
                break
            start = perf_counter()
            try:
                if number % LEFT == 0:
                    with http.stream("POST", "completions", json=request(self.kind) | {"stream": True}) as sent:
                        next(sent.iter_lines())
                    self.left += 1
                    continue
                text = _text(http, request(self.kind))
            except httpx.HTTPError:
                self.failed += 1
                continue
            self.seconds.append(perf_counter() - start)
            self.other += text != alone
        return self


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    options = ["--port", "0", "--name", "served", "--queue", "1000", "--max-batch-size", str(arguments.parallel)]
    command = [sys.executable, "-m", "edgespec", "serve", str(arguments.bundle), *options, "--threads"]
    with subprocess.Popen([*command, str(arguments.threads)], stderr=subprocess.PIPE, text=True) as server:
        try:
            address, rest = listening(server)
            limits = httpx.Limits(max_connections=arguments.clients)
            with httpx.Client(base_url=f"{address}/v1/", timeout=600, limits=limits) as http:
                show(conditions(bundle=arguments.bundle.name) | _measure(http, server.pid, arguments))
        finally:
            server.terminate()
            server.wait(60)
        rest.join()


def _measure(http: httpx.Client, server: int, arguments: argparse.Namespace) -> dict[str, Any]:
    alone = [_text(http, request(kind) | {"edgespec": {"method": "ar"}}) for kind in range(KINDS)]
    start = perf_counter()
    for kind in range(KINDS):
        _text(http, request(kind))
    one = sum(request(kind)["max_tokens"] for kind in range(KINDS)) / (perf_counter() - start)
    ended, memory = Event(), [_resident(server)]

    def look() -> None:
        while not ended.wait(1):
            memory.append(_resident(server))

    watch = Thread(target=look)
    watch.start()
    start, until = perf_counter(), monotonic() + arguments.seconds
    clients = [Client(number % KINDS) for number in range(arguments.clients)]
    with ThreadPoolExecutor(arguments.clients) as pool:
        list(pool.map(lambda client: client.run(http, alone[client.kind], until), clients))
    took = perf_counter() - start
    ended.set()
    watch.join()
    tokens = sum(len(client.seconds) * request(client.kind)["max_tokens"] for client in clients)
    later = memory[len(memory) // 4 :]
    return {
        "clients": arguments.clients,
        "parallel": arguments.parallel,
        "seconds": round(took, 1),
        "whole_answers": sum(len(client.seconds) for client in clients),
        "left": sum(client.left for client in clients),
        "failed": sum(client.failed for client in clients),
        "other_text": sum(client.other for client in clients),
        "tokens_per_second": round(tokens / took, 1),
        "tokens_per_second_of_one_client": round(one, 1),
        "short": _times([s for client in clients if client.kind % 4 for s in client.seconds]),
        "long": _times([s for client in clients if not client.kind % 4 for s in client.seconds]),
        "fairness": {
            "short": _jain([len(client.seconds) + client.left for client in clients if client.kind % 4]),
            "long": _jain([len(client.seconds) + client.left for client in clients if not client.kind % 4]),
        },
        "resident_mib": {
            "before": memory[0],
            "after_a_quarter": later[0],
            "at_the_end": later[-1],
            "most": max(memory),
        },
    }


def _text(http: httpx.Client, body: dict[str, Any]) -> str:
    answer = http.post("completions", json=body)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def _times(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95 % point."""
    return {"median_s": round(median(seconds), 2), "p95_s": round(quantiles(seconds, n=20)[-1], 2)}


def _jain(got: Sequence[int]) -> float:
    """(sum x)^2 / (n sum x^2): Jain, Chiu and Hawe, 1984."""
    return round(sum(got) ** 2 / (len(got) * sum(x * x for x in got)), 3)


def _resident(process: int) -> float:
    """MiB."""
    status = Path(f"/proc/{process}/status").read_text("ascii", errors="replace")
    return round(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024, 1)


def listening(server: subprocess.Popen[str]) -> tuple[str, Thread]:
    """Where a server listens, and who reads what it says later: a full pipe would stop it."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"at (http://\S+)/v1", line):
            rest = Thread(target=server.stderr.read)
            rest.start()
            return found[1], rest
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
