"""Rows of log-probabilities as a server reports them: how much two rows differ, and the margin of two tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.formulas.agreement import near_tie_limit
from edgespec.judge.client import Refused, Server, Token

Row = Mapping[str, float]  # text of a token -> its log-probability
LEAST = math.log(0.01)  # less likely tokens say nothing of rounding that could change a text
FLOOR, MOST = 0.1, 1.0  # nats: two tokens this close are a near-tie on any server, and none with a larger margin


@dataclass
class Noise:
    """How much rows of the same text differ between ways of computing them.

    Attributes:
        rows: how many pairs were compared.
        largest: difference of a log-probability, in nats.
        squares: sum of the squared distances of the distributions.
        stated: limit that the user gave; None = it is measured.
        least: distance of distributions that counts as rounding in any case.
    """

    rows: int = 0
    largest: float = 0.0
    squares: float = 0.0
    stated: float | None = None
    least: float = 0.0

    def add(self, one: Row, other: Row) -> None:
        """Compare two rows of the same text."""
        shared = [token for token in one if token in other]
        differences = [abs(one[token] - other[token]) for token in shared if max(one[token], other[token]) > LEAST]
        if differences:
            self.rows += 1
            self.largest = max(self.largest, *differences)
            self.squares += sum(math.exp(one[token]) * (one[token] - other[token]) ** 2 for token in shared)

    def join(self, other: Noise) -> None:
        """Count rows that were compared elsewhere; where those differ more, all count as if they did."""
        mean = max((one.squares / one.rows for one in (self, other) if one.rows), default=0.0)
        self.rows += other.rows
        self.squares = mean * self.rows
        self.largest = max(self.largest, other.largest)

    @property
    def limit(self) -> float:
        """Nats between two tokens that rounding explains."""
        return self.stated if self.stated is not None else near_tie_limit(self.largest, FLOOR, MOST)

    @property
    def distance(self) -> float:
        """Distance of distributions that rounding explains, as ``statistics.distance`` measures it."""
        return max(self.least, 2 * math.sqrt(self.squares / self.rows) if self.rows else FLOOR)


def margin(row: Row, chosen: str, other: str) -> tuple[float, bool] | None:
    """Say how much likelier one token is than another in a row, in nats.

    Returns:
        the margin, and whether it is at least that because the other one is not among the likeliest; None = not
            reported.
    """
    if chosen not in row:
        return None
    if other in row:
        return row[chosen] - row[other], False
    return row[chosen] - min(row.values()), True


def next_row(server: Server, prompt: str, tokens: Sequence[str], counted: int | None) -> Row:
    """Ask for the row after a prompt and the beginning of an answer: one token, which no draft guesses.

    Args:
        server: which.
        prompt: the prompt.
        tokens: texts of the answer's tokens so far.
        counted: tokens of the prompt; where the server then counts others than these and the answer's, it has read the
            text as other tokens, and its row is of another text.  None = not known: only the prompt's row is certain.

    Returns:
        the row; empty where there is none to be had.
    """
    if server.abilities.api != "completions" or not server.abilities.likeliest:
        return {}
    if any("\\x" in token or "\ufffd" in token for token in tokens):
        return {}  # parts of characters cannot be sent as text
    try:
        answer = server.ask(prompt + "".join(tokens), 1)[0]
    except Refused:
        return {}
    if tokens and (counted is None or answer.prompt_tokens != counted + len(tokens)):
        return {}  # it has read other tokens, or does not say how many
    return answer.tokens[0].top if answer.tokens else {}


def matching(row: Row, text: str) -> str:
    """Find the token of a row that a text begins with, the likeliest; its first character where there is none.

    Empty where it may begin with a part of a character.
    """
    found = max((token for token in row if token and text.startswith(token)), key=lambda token: row[token], default="")
    return found or (text[:1] if text[:1].isascii() else "")


def texts(tokens: Sequence[Token]) -> list[str]:
    """Give the texts of tokens."""
    return [token.text for token in tokens]
