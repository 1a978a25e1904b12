"""Attack a decoding server with eight kinds of hostile clients at once: it must keep answering others.

Each attack continues until it is stopped, and records the answers: refusals (4xx) and, if a request is large but valid,
texts.  A watcher requests /health all the time, over separate connections.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from tests.stress.attacks import ALL, ATTACKS, WAIT, Attack, Place

EVERY = 0.05  # seconds between two looks
MIB = 1 << 20


def growth(resident: Sequence[int]) -> float:
    """Return the median of the last quarter over that of the second one, less one."""
    quarter = len(resident) // 4
    if not quarter:
        return 0.0
    return median(resident[-quarter:]) / median(resident[quarter : 2 * quarter]) - 1


def points(seconds: Sequence[float]) -> dict[str, float]:
    """Return milliseconds within which half, 99 % and all of them were."""
    each = sorted(seconds) or [0.0]
    of = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {name: round(1000 * each[min(len(each) - 1, int(share * len(each)))], 1) for name, share in of.items()}


@dataclass
class Outcome:
    """Results of the attacks.

    Attributes:
        answers: by attack and status; "closed" = the connection was.
        health: seconds of each request of /health.
        bad: failed ones, and answers of 500 and above.
        resident: bytes of the server and its children at each of them, if it runs here.
        server: those of only the server, which a budget counts.
        texts: seconds of each pair of texts, for honest clients; a text that differs from a single client's is bad.
    """

    answers: Counter[str] = field(default_factory=Counter)
    health: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    server: list[int] = field(default_factory=list)
    texts: list[float] = field(default_factory=list)

    def growth(self) -> float:
        """Compare the server's resident memory of the last quarter with the second one.

        The processes that read requests are not in it: each large request makes them larger for a moment, up to a limit
        of their own, and they are replaced.
        """
        return growth(self.server or self.resident)

    def report(self) -> dict[str, Any]:
        return {
            "answers": dict(sorted(self.answers.items())),
            "texts": len(self.texts),
            "text_ms": points(self.texts),
            "looks": len(self.health),
            "health_ms": points(self.health),
            "resident_mib": [round(size / MIB) for size in (min(self.resident), max(self.resident))]
            if self.resident
            else [],
            "server_mib": round(max(self.server, default=0) / MIB),
            "growth": round(self.growth(), 4),
            "bad": self.bad[:20],
        }


@dataclass(frozen=True)
class Means:
    """Resources of the machine for the attackers, who would not share them with a server elsewhere.

    Attributes:
        nice: of their process.
        core: on which they run; None = on any.
    """

    nice: int = 10
    core: int | None = None


def attack(
    place: Place,
    seconds: float,
    pid: int | None = None,
    seed: int = 0,
    names: Sequence[str] = tuple(ATTACKS),
    means: Means | None = None,
) -> Outcome:
    """Run the attacks ``names`` at once for ``seconds``.

    Args:
        place: where the server is.
        seconds: how long.
        pid: of the server, to look at its memory; None = it is elsewhere.
        seed: of what the attacks choose.
        names: of the attacks, from ``ALL``.
        means: of those who attack.
    """
    context = multiprocessing.get_context("spawn")  # what it costs to attack must not slow those who look
    told, tells = context.Pipe(duplex=False)
    enemies = context.Process(target=_attack, args=(place, seconds, seed, names, means or Means(), tells), daemon=True)
    enemies.start()
    found, end = _told(told, WAIT), time.monotonic() + seconds  # they have begun
    while time.monotonic() < end:
        begun = time.perf_counter()
        try:
            if (status := _looked(place)) != 200:
                found.bad.append(f"/health: {status}")
        except OSError as error:
            found.bad.append(f"/health: {error!r}")
        found.health.append(time.perf_counter() - begun)
        if pid is not None:
            found.resident.append(resident(pid))
            found.server.append(4096 * int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]))
        time.sleep(EVERY)
    came = _told(told, 2 * WAIT)
    enemies.join()
    found.answers, found.texts, found.bad = came.answers, came.texts, found.bad + came.bad
    return found


def _told(told: Any, seconds: float) -> Outcome:
    """Say what the process of the attacks says.

    Raises:
        TimeoutError: it says nothing.
    """
    if not told.poll(seconds):
        raise TimeoutError("the process that attacks says nothing")
    return told.recv()


def _looked(place: Place) -> int:
    """Return the status of /health, over a separate connection."""
    asking = http.client.HTTPConnection(place.host, place.port, timeout=WAIT)
    try:
        asking.request("GET", "/health")
        return asking.getresponse().status
    finally:
        asking.close()


def _attack(place: Place, seconds: float, seed: int, names: Sequence[str], means: Means, told: Any) -> None:
    """Run all attacks and two honest clients, in a separate process."""
    _give_way(means)
    found, stop, lock = Outcome(), threading.Event(), threading.Lock()

    def go_on(name: str, one: Attack, number: int) -> None:
        random = Random(1000 * seed + number)
        while not stop.is_set():
            with suppress(OSError, httpx.HTTPError):
                for answer in one(place, random):
                    with lock:
                        found.answers[f"{name} {answer}"] += 1
                        if answer.isdigit() and int(answer) >= 500:
                            found.bad.append(f"{name}: {answer}")
                    if stop.is_set():
                        return
            stop.wait(0.01)

    right = _texts(place, found)

    def talk() -> None:
        while not stop.is_set():
            with suppress(httpx.HTTPError):
                begun = time.perf_counter()
                if (texts := _texts(place, found)) is None:
                    time.sleep(EVERY)
                    continue
                found.texts.append(time.perf_counter() - begun)
                if texts != right:
                    found.bad.append(f"another text: {texts}")

    threads = [
        threading.Thread(target=go_on, args=(name, ALL[name], number), daemon=True) for number, name in enumerate(names)
    ]
    threads += [threading.Thread(target=talk, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    told.send(Outcome())
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join(WAIT)
    told.send(found)


def _give_way(means: Means) -> None:
    """Leave the processors to the server: those who attack one have others."""
    if hasattr(os, "nice"):
        os.nice(means.nice)
    if means.core is not None:
        os.sched_setaffinity(0, {means.core})


def _texts(place: Place, found: Outcome) -> list[str] | None:
    """Return texts for an honest client; None = the server asks it to come again."""
    asked = {"model": place.model, "prompt": "The king", "max_tokens": 200, "temperature": 0, "n": 2}
    headers = {"Authorization": f"Bearer {place.key}"}
    own = httpx.HTTPTransport(local_address="127.0.0.2" if sys.platform == "linux" else None)  # a separate client
    with httpx.Client(timeout=2 * WAIT, headers=headers, transport=own) as client:
        answer = client.post(f"{place.url}/v1/completions", json=asked)
    if answer.status_code != 200:
        found.answers[f"no harm {answer.status_code}"] += 1
        return None
    return [one["text"] for one in answer.json()["choices"]]


def resident(pid: int) -> int:
    """Resident bytes of a process and its children; 0 where the system does not tell."""
    sizes: dict[int, int] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[1]
            )
            sizes[int(folder.name)] = 4096 * int((folder / "statm").read_text("ascii").split()[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sizes.get(one, 0) for one in family)
