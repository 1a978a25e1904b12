"""Judge a server: ask, compare, and sum up."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.formulas.agreement import Verdict, worst
from edgespec.judge.client import Answer, Server, ServerError
from edgespec.judge.greedy import Asked, Comparison, Forced, Report, ask_all, compare, drift, force, measure_noise
from edgespec.judge.rows import FLOOR, MOST, Noise
from edgespec.judge.sampled import Judge, Plan, Sampled
from edgespec.version import __version__

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, there was a little",
    "Question: Why is the sky blue?\nAnswer:",
    "import numpy as np\n\ndef softmax(x):\n",
    "To make bread, you need",
    "List three colors:\n1.",
    "The difference between a list and a tuple in Python is",
)
WEAK = 0.3  # smallest excess found: tests of less power are noted
KNOWN = 16  # rows of the judged server that tell how exact its rows are
WORDS = {
    "identical": "identical",
    "near-ties": "identical except near-ties, as by rounding",
    "wrong": "WRONG: more than rounding explains",
}


@dataclass(frozen=True)
class Options:
    """Amount of work.

    Attributes:
        tokens: of a greedy text.
        lanes: requests at once, for the texts in parallel.
        repeats: how often they are asked for in parallel.
        noise: nats that count as a near-tie; None = measured.
        seconds: limit for the greedy texts; after it, no other prompt is asked.
        plan: of the sampled texts; None = only greedy texts.
    """

    tokens: int = 48
    lanes: int = 4
    repeats: int = 2
    noise: float | None = None
    seconds: float = 600.0
    plan: Plan | None = field(default_factory=Plan)


@dataclass
class Judgement:
    """The result for one server."""

    server: Server
    against: Server | None
    switch: Mapping[str, Any]  # fields that make one server decode plainly
    noise: Noise = field(default_factory=Noise)
    drift: Noise | None = None  # between the rows of the two
    greedy: list[Comparison] = field(default_factory=list)
    forced: Forced | None = None
    sampled: list[Sampled] = field(default_factory=list)  # by temperature
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # whether the two run the same model
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Give the worst of everything."""
        found = [one.verdict for one in self.greedy] + [one.verdict for one in self.sampled]
        return worst([*found, "wrong" if self.forced and self.forced.wrong else "identical"])

    @property
    def line(self) -> str:
        """Everything in one line."""
        first = self.greedy[0]
        parts = [f"{first.what}: {first.equal} of {first.prompts} greedy texts equal"]
        differences = [one for item in self.greedy for one in item.differences]
        margins = [one.margin for one in differences if one.margin is not None and one.near_tie is not None]
        if margins:
            parts.append(
                f"where they differ, margins up to {max(margins):.3g} nats (rounding explains {self.noise.limit:.3g})"
            )
        if draws := sum(one.draws for one in self.sampled if one.tests):
            said = "not " if worst(one.verdict for one in self.sampled) == "wrong" else ""
            parts.append(f"{draws} draws {said}of the right distribution")
        if self.against and (ratio := self.ratio):
            parts.append(f"{ratio:.2f} times as fast")
        unknown = sum(one.near_tie is None for one in differences)
        if unknown:
            parts.append(f"{unknown} differences of unknown margin")
        words = WORDS[self.verdict]
        if self.verdict == "near-ties" and unknown == len(differences):
            words = "not identical, and not known to be wrong"
        return f"{words}; {'; '.join(parts)}"

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the other it writes; None = not known."""
        speeds = [speed(one) for one in (self.server, self.against) if one is not None]
        return speeds[0] / speeds[1] if len(speeds) == 2 and speeds[0] and speeds[1] else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        sides = [None if one is None else _side(one) for one in (self.server, self.against)]
        return {
            "edgespec": __version__,
            "verdict": self.verdict,
            "line": self.line,
            "server": sides[0],
            "against": sides[1],
            "plain": dict(self.switch) or None,
            "noise": _noise(self.noise) | {"stated": self.noise.stated is not None},
            "drift": None if self.drift is None else _noise(self.drift),
            "greedy": [one.as_dict() for one in self.greedy],
            "forced": None if self.forced is None else self.forced.as_dict(),
            "sampled": [one.as_dict() for one in self.sampled],
            "speed": {
                "server": speed(self.server),
                "against": self.against and speed(self.against),
                "ratio": self.ratio,
            },
            "notes": self.notes,
            "seconds": self.seconds,
        }


def speed(server: Server) -> float | None:
    """Return tokens per second of greedy texts, one at a time, their prompts included; None = not known."""
    return server.tokens / server.seconds if server.tokens and server.seconds else None


def _side(server: Server) -> dict[str, Any]:
    able = server.abilities
    return {"url": server.url, "model": server.model, "api": able.api, "logprobs": able.likeliest,
            "choices": able.choices, "fields": {**able.fields, **server.fields}}  # fmt: skip


def _noise(noise: Noise) -> dict[str, Any]:
    return {"rows": noise.rows, "largest": noise.largest, "limit": noise.limit, "distance": noise.distance}


def judge(
    server: Server, against: Server | None, prompts: Sequence[str], options: Options,
    report: Callable[[int, int, str], None], switch: Mapping[str, Any] | None = None,
) -> Judgement:  # fmt: skip
    """Judge a server against another one that decodes plainly, or against itself.

    Args:
        server: what is judged.
        against: the reference: another server, or the same one with fields that make it decode plainly; None = rows of
            one-token requests, which no draft guesses, are the reference.
        prompts: at least one.
        options: amount of work.
        report: is called with steps done, steps in all, and what is done.
        switch: those fields, for the report.

    Raises:
        ServerError: a server cannot be asked.
    """
    servers = [server] if against is None else [against, server]
    try:
        return _judge(servers, prompts, options, report, switch or {})
    finally:
        for one in servers:
            one.close()


def _judge(
    servers: Sequence[Server], prompts: Sequence[str], options: Options, report: Callable[[int, int, str], None],
    switch: Mapping[str, Any],
) -> Judgement:  # fmt: skip
    start = time.monotonic()
    server, against = servers[-1], servers[0] if len(servers) > 1 else None
    for at, one in enumerate(servers):
        one.probe()
        report(at + 1, len(servers), "what the server takes")
    found = Judgement(server, against, switch, Noise(stated=options.noise))
    asked = ask_all(servers, prompts, options.tokens, options.lanes, options.repeats, options.seconds, report)
    plain, judged = asked[0], asked[-1]
    prompts = prompts[: len(judged.cold)]
    _measure(found, plain, judged, prompts, report)

    def add(what: str, reference: Server, expected: Sequence[Any], got: Sequence[Any]) -> None:
        found.greedy.append(compare(what, reference, prompts, expected, got, found.noise))

    if against is not None:
        add("against plain", against, plain.cold, judged.cold)
    add("warm against cold", judged.server, judged.cold, judged.warm)
    for number, beside in enumerate(judged.beside):
        add(f"in parallel against alone{f', {number + 1}' * (number > 0)}", judged.server, judged.cold, beside)
    if against is not None:
        add("plain: warm against cold", against, plain.cold, plain.warm)
        for number, beside in enumerate(plain.beside):
            add(f"plain: in parallel against alone{f', {number + 1}' * (number > 0)}", against, plain.cold, beside)
    found.forced = force(against or server, prompts, judged.cold, found.noise, report)
    if options.plan is not None:
        plan, noise = options.plan, found.noise.distance
        for temperature in plan.temperatures:
            found.sampled.append(Judge(server, against or server, prompts, plan, temperature, noise, report).run())
            if found.sampled[-1].verdict == "wrong":
                break
    found.notes = _notes(found)
    found.seconds = time.monotonic() - start
    return found


def _measure(found: Judgement, plain: Asked, judged: Asked, prompts: Sequence[str], report: Report) -> None:
    """Measure how exact rows are, of the reference and between the two servers."""
    for one in (plain, judged):
        if not any(answer.text for answer in one.cold):
            raise ServerError(f"{one.server.url}: every text is empty: nothing can be compared", "give other --prompts")
    measure_noise(plain, prompts, found.noise, report)
    if found.against is None:
        return
    found.doubts = _same_model(plain.cold, judged.cold)
    found.drift = drift(plain.cold, judged.cold)
    found.noise.join(found.drift)
    if found.drift.rows < KNOWN:
        found.noise.least = FLOOR


def _same_model(plain: Sequence[Answer], judged: Sequence[Answer]) -> list[str]:
    """Find signs that two servers do not run the same model: what hardly a guess can change."""
    found = []
    counts = {(one.prompt_tokens, other.prompt_tokens) for one, other in zip(plain, judged, strict=True)}
    odd = sorted((one, other) for one, other in counts if None not in (one, other) and one != other)
    if odd:
        found.append(f"the reference reads a prompt as {odd[0][0]} tokens, and the server as {odd[0][1]}")
    first = drift([replace(one, tokens=one.tokens[:1]) for one in plain],
                  [replace(one, tokens=one.tokens[:1]) for one in judged])  # fmt: skip
    if first.largest > MOST:
        found.append(f"rows right after a prompt differ by {first.largest:.3g} nats")
    return found


def _notes(found: Judgement) -> list[str]:
    """List limits of the judgment."""
    notes = []
    if found.verdict != "identical" and found.doubts:
        names = {one.model for one in (found.server, found.against) if one is not None}
        called = f" ({' and '.join(sorted(names))})" if len(names) > 1 else ""
        notes.append(f"{'; '.join(found.doubts)}: do both run the same model with the same weights{called}?")
    for who, server in (("the server", found.server), ("the reference", found.against)):
        if server is not None and not server.abilities.likeliest:
            notes.append(f"{who} reports no log-probabilities: texts alone were compared")
        if server is not None and server.abilities.api == "chat":
            notes.append(f"{who} has chats alone: a text cannot be continued, so its rows were not asked for again")
    if found.against is None:
        notes.append("no reference that decodes plainly: rows of one-token requests are the reference")
    unknown = sum(one.near_tie is None for item in found.greedy for one in item.differences)
    if unknown:
        notes.append(f"{unknown} differences with an unknown margin: not held against the server")
    if found.noise.stated is None and found.noise.largest * 4 > found.noise.limit:
        notes.append(f"rows of the same text differ by up to {found.noise.largest:.3g} nats")
    for one in found.sampled:
        if one.tests and (one.excess is None or one.excess > WEAK):
            told = "no excess" if one.excess is None else f"an excess of {one.excess:.0%} at least"
            notes.append(
                f"temperature {one.temperature:g}: {one.draws} draws find {told}; a longer --duration gives more"
            )
    if any(one.cut for one in found.sampled):
        notes.append("unlikely tokens are never sampled: the distribution is compared without them")
    return notes + list(dict.fromkeys(note for one in found.sampled for note in one.notes))
