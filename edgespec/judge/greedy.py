"""Greedy texts of a server against those of another, or of itself under other conditions, difference by difference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from edgespec.formulas.agreement import Verdict, first_difference, verdict_of
from edgespec.judge.client import Answer, Server, Token, side_by_side
from edgespec.judge.rows import MOST, Noise, Row, margin, matching, next_row, texts

CHECKED = 6  # places of a text where its row is asked for again
DRAWS, CHANCE = 96, 1e-6  # draws at a difference, without log-probabilities; allowed chance of a false alarm
Report = Callable[[int, int, str], None]


@dataclass
class Difference:
    """Where a text first leaves the one it is compared with.

    Attributes:
        prompt: number of the prompt.
        position: of the token (or character, where tokens are not reported).
        expected, got: the two tokens.
        margin: how much likelier the expected one is after the same text, in nats; None = not reported.
        at_least: the margin is at least that: the other token is not among those reported.
        source: of the margin: ``row`` of the reference, ``asked`` of it again, ``own`` row of the judged text, or
            ``draws``.
        near_tie: whether rounding explains it; None = unknown, which is not held against the server.
    """

    prompt: int
    position: int
    expected: str
    got: str
    margin: float | None = None
    at_least: bool = False
    source: str = ""
    near_tie: bool | None = None


@dataclass
class Comparison:
    """The texts of one way of asking against those of another.

    Attributes:
        what: the two ways.
        prompts: how many texts were compared.
        equal: how many are the same.
        tokens: in all reference texts.
        agreed: of them, those before the first difference.
        differences: the first one of each text that differs.
    """

    what: str
    prompts: int = 0
    equal: int = 0
    tokens: int = 0
    agreed: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """Sum up the differences."""
        return verdict_of(one.near_tie for one in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return asdict(self) | {"verdict": self.verdict}


@dataclass
class Asked:
    """Greedy texts of one server, for every prompt and condition."""

    server: Server
    cold: list[Answer] = field(default_factory=list)  # first time, alone
    warm: list[Answer] = field(default_factory=list)  # again at once, alone
    beside: list[list[Answer]] = field(default_factory=list)  # in parallel, time after time


def ask_all(
    servers: Sequence[Server],
    prompts: Sequence[str],
    most: int,
    lanes: int,
    repeats: int,
    seconds: float,
    report: Report,
) -> list[Asked]:
    """Ask for a greedy text to every prompt, each server in turn: alone, again, and in parallel.

    After ``seconds`` the prompts that are left are left out.
    """
    asked, end = [Asked(server) for server in servers], time.monotonic() + seconds
    for number, prompt in enumerate(prompts):
        if number and time.monotonic() > end:
            prompts = prompts[:number]
            break
        for one in asked:
            for times in (one.cold, one.warm):
                answer = one.server.ask(prompt, most)[0]
                one.server.tokens += answer.written
                one.server.seconds += answer.seconds
                times.append(answer)
        report(number + 1, len(prompts), "greedy, alone")
    for at in range(repeats):
        for one in asked:
            ask = partial(_first, one.server, most)
            one.beside.append(side_by_side(ask, prompts, lanes))
        report(at + 1, repeats, "greedy, in parallel")
    return asked


def _first(server: Server, most: int, prompt: str) -> Answer:
    return server.ask(prompt, most)[0]


def measure_noise(plain: Asked, prompts: Sequence[str], noise: Noise, report: Report) -> None:
    """Measure how much the rows of one server differ: warm and cold, in parallel, and read instead of written."""
    for number, prompt in enumerate(prompts):
        base = plain.cold[number]
        for other in (plain.warm[number], *(one[number] for one in plain.beside)):
            _add_rows(noise, base, other)
        for at in places(len(base.tokens)):
            row = next_row(plain.server, prompt, texts(base.tokens[:at]), base.prompt_tokens)
            if row and base.tokens[at].top:
                noise.add(base.tokens[at].top, row)
        report(number + 1, len(prompts), "rows, read instead of written")


def _add_rows(noise: Noise, base: Answer, other: Answer) -> None:
    for one, two in zip(base.tokens, other.tokens, strict=False):
        if one.top and two.top:
            noise.add(one.top, two.top)
        if one.text != two.text:
            break


def drift(expected: Sequence[Answer], got: Sequence[Answer]) -> Noise:
    """Measure how much two servers' rows of the same text differ."""
    found = Noise()
    for one, two in zip(expected, got, strict=True):
        _add_rows(found, one, two)
    return found


def places(length: int) -> list[int]:
    """Choose places spread over a text; not the first token, whose row is the prompt's."""
    count = min(CHECKED, length - 1)
    return sorted({1 + round(at * (length - 2) / max(1, count - 1)) for at in range(count)}) if count > 0 else []


def compare(
    what: str,
    reference: Server,
    prompts: Sequence[str],
    expected: Sequence[Answer],
    got: Sequence[Answer],
    noise: Noise,
) -> Comparison:
    """Compare texts one by one, and find the margin of the tokens where they first differ.

    Args:
        what: the name of the comparison.
        reference: the server of ``expected``; it is asked where its answer has no row.
        prompts: what was asked.
        expected, got: texts, one for each prompt.
        noise: says what rounding explains.
    """
    found = Comparison(what, len(prompts))
    for number, (prompt, one, two) in enumerate(zip(prompts, expected, got, strict=True)):
        length = len(one.tokens) or len(one.text)
        found.tokens += length
        if one.text == two.text:
            found.equal += 1
            found.agreed += length
        else:
            difference = _difference(reference, prompt, number, one, two, noise)
            found.agreed += difference.position
            found.differences.append(difference)
    return found


def _difference(reference: Server, prompt: str, number: int, expected: Answer, got: Answer, noise: Noise) -> Difference:
    if not expected.tokens:
        return _without_tokens(reference, prompt, number, expected.text, got.text)
    if got.tokens:
        at = first_difference(texts(expected.tokens), texts(got.tokens))
        at = min(len(expected.tokens), len(got.tokens)) if at is None else at
        other = got.tokens[at] if at < len(got.tokens) else Token("")
    else:
        character = first_difference(expected.text, got.text) or 0
        at = _token_at(expected, character)
        before = sum(map(len, texts(expected.tokens[:at])))
        row = expected.tokens[at].top if at < len(expected.tokens) else {}
        other = Token(matching(row, got.text[before:]))
    own = expected.tokens[at] if at < len(expected.tokens) else Token("")
    found = Difference(number, at, own.text, other.text)
    if not own.text or not other.text:  # one ends earlier: few servers report how likely an end is
        return found
    if any("\ufffd" in text for text in texts(expected.tokens[:at])):
        return found  # parts of characters look alike: the texts may have parted before
    rows: list[tuple[str, Row]] = [("row", own.top)]
    if margin(own.top, own.text, other.text) is None:
        rows.append(("asked", next_row(reference, prompt, texts(expected.tokens[:at]), expected.prompt_tokens)))
    for source, row in rows:
        if (told := margin(row, own.text, other.text)) is not None:
            found.margin, found.at_least, found.source = abs(told[0]), told[1], source
            if found.margin > noise.limit:
                found.near_tie = False
            elif not found.at_least:
                found.near_tie = True
            return found
    if (
        told := margin(other.top, other.text, own.text)
    ) is not None:  # the row of the judged text prefers its own token
        found.margin, found.at_least, found.source = abs(told[0]), told[1], "own"
        # the reference was not asked, so it is not held against the server
        found.near_tie = True if found.margin <= noise.limit and not found.at_least else None
    return found


def _token_at(answer: Answer, character: int) -> int:
    """Find the token that a character of a text belongs to."""
    end = 0
    for at, token in enumerate(answer.tokens):
        end += len(token.text)
        if character < end:
            return at
    return len(answer.tokens)


def _without_tokens(reference: Server, prompt: str, number: int, expected: str, got: str) -> Difference:
    """Sample the next token often, if log-probabilities are not reported: a token that never occurs is not a near-tie.

    The samples begin with the word in which the texts differ, as its tokens are not known.
    """
    at = first_difference(expected, got) or 0
    start = max((place for place in range(at) if expected[place].isspace()), default=0)
    found = Difference(number, at, expected[start : at + 1], got[start : at + 1])
    if reference.abilities.api != "completions" or at >= min(len(expected), len(got)):
        return found
    counts, both = [0, 0], 0
    choices = reference.abilities.choices
    for _ in range(0, DRAWS, choices):
        for answer in reference.ask(prompt + expected[:start], 1, 1.0, choices):
            fits = [bool(answer.text) and text[start:].startswith(answer.text) for text in (expected, got)]
            both += fits[0] and fits[1]
            if fits[0] != fits[1]:
                counts[fits[1]] += 1
    total = sum(counts)
    if total > both:  # else the texts part within the word, after a shared token
        found.source, found.margin = "draws", abs(math.log((counts[0] + 0.5) / (counts[1] + 0.5)))
        share = 1 / (1 + math.exp(MOST))  # of the other token, if it were as far away as a near-tie may be
        chance = sum(math.comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(counts[1] + 1))
        found.near_tie = False if chance < CHANCE else None
    return found


@dataclass
class Forced:
    """Tokens of judged texts against the rows that plain decoding gives after the same text.

    Attributes:
        places: how many rows were asked for.
        largest: how much likelier another token was than the one written, in nats, at most.
        wrong: places where that is more than rounding explains.
    """

    places: int = 0
    largest: float = 0.0
    wrong: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the keys are stable."""
        return asdict(self)


def force(reference: Server, prompts: Sequence[str], got: Sequence[Answer], noise: Noise, report: Report) -> Forced:
    """Ask the reference for rows after beginnings of greedy texts, where the next token must be about the likeliest."""
    found = Forced()
    for number, (prompt, answer) in enumerate(zip(prompts, got, strict=True)):
        for at in places(len(answer.tokens)):
            row = next_row(reference, prompt, texts(answer.tokens[:at]), answer.prompt_tokens)
            if not row:
                continue
            gap = max(row.values()) - row.get(answer.tokens[at].text, min(row.values()))
            found.places += 1
            found.largest = max(found.largest, gap)
            found.wrong += gap > noise.limit
        report(number + 1, len(prompts), "rows after the same texts")
    return found
