"""From a row of logits to a token: the adjusted distribution p, sampling from it, and the rows of a pass.

A token is sampled by the Gumbel-max trick, ``argmax(log p + gumbel(position, token))``, with counter-based noise
(``noise.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.declared import Range, check, choice, count, number, setting
from edgespec.declared import whole as whole
from edgespec.decoding.noise import TARGET, Noise, gumbel_of
from edgespec.decoding.text import different
from edgespec.errors import EdgespecError, InvalidRequest

_FIRST_NUCLEUS = 64  # top-p sorts this many candidates first, and 16 times more while they do not hold enough mass
_BLOCK = 128  # selection looks at the maxima of blocks of this many tokens first
# in a support of more tokens, those this many nats below the best are considered only if their noise is large
_MANY, _NEAR = 4096, 8.0


class Constraint(Protocol):
    """A grammar that a request's text must follow.

    It is asked for any prefix, committed or drafted, in any order.  Its answer depends on the prefix and the model's
    row there, which the prefix decides.  So a row has the same distribution in every pass, and every method that is
    lossless without a constraint is also lossless with it.

    Attributes:
        scored: log-probabilities include it, with bias and penalties; else they are the unadjusted model's.
    """

    @property
    def scored(self) -> bool: ...

    def allowed(self, prefix: Sequence[int], row: NDArray[np.float32] | None = None) -> NDArray[np.bool_] | None:
        """bool [vocab]: the tokens that may follow ``prefix``, prompt included; None = any.

        ``row``: float32 [vocab], the logits there after bias and penalties; most grammars do not look at it.
        """

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """List the next tokens that the grammar leaves no choice about, ``most`` at most."""


def _are_biases(value: Mapping[int, float]) -> bool:
    return all(token >= 0 and (bias == -math.inf or abs(bias) <= 1e30) for token, bias in value.items())


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen.  Its rules are applied in this order, as Hugging Face transformers does.

    Attributes:
        prompt: number of first tokens that presence and frequency penalties do not count; a request sets it.
        constraint: the tokens that may follow; ``Settings.grammar`` makes it.

    Raises:
        InvalidRequest: a value outside its range.
    """

    # logits of tokens in the prefix (prompt included) are divided by the repetition penalty if positive, multiplied if
    # negative (CTRL, arXiv 1909.05858); they are float32, and a factor beyond its range would make infinities of them
    temperature: float = setting(
        0.0,
        number("a number >= 0 (0 = greedy)", 0),
        "sampling temperature; 0 is greedy",
        option="--temperature",
    )
    top_k: int = setting(
        0, count(words="an integer >= 0 (0 = off)"), "sample from the k most likely tokens; 0 is off",
        option="--top-k", server=True,
    )  # fmt: skip
    top_p: float = setting(
        1.0,
        number("0 < top_p <= 1 (1 = off)", 0, 1, above=True),
        "sample from the fewest tokens with this total probability (arXiv 1904.09751); 1 is off",
        option="--top-p",
    )
    min_p: float = setting(
        0.0,
        number("0 <= min_p <= 1 (0 = off)", 0, 1),
        "leave out tokens below this fraction of the largest probability; 0 is off",
        option="--min-p",
        server=True,
    )
    repetition_penalty: float = setting(
        1.0,
        number("a number from 0.000001 to 1000000", 1e-6, 1e6),
        "divide the logits of tokens in the text, prompt included; 1 is off",
        option="--repetition-penalty",
        server=True,
    )
    logit_bias: Mapping[int, float] = setting(
        dict,
        Range("{token >= 0: number up to 1e30, or -inf}", _are_biases),
        "numbers added to the logits of tokens; -inf forbids one",
        field_options={"hash": False},
        shown="none",
    )
    seed: int | None = setting(
        None, Range("an integer", lambda value: whole(value, -math.inf), int),
        "the same seed gives the same text",
        option="--seed", shown="none",
    )  # fmt: skip
    acceptance: Literal["rejection", "coupled"] = setting(
        "rejection",
        choice("rejection", "coupled"),
        "sampling: accept more guesses (rejection), or keep plain decoding's text (coupled, arXiv 2408.07978)",
        option="--acceptance",
        server=True,
    )
    verification: Literal["token", "block"] = setting(
        "token",
        choice("token", "block"),
        "rejection sampling: judge a chain token by token, or as a block, which accepts more (arXiv 2403.10444)",
        set=str,
    )
    presence_penalty: float = setting(
        0.0, number("a number from -2 to 2 (0 = off)", -2, 2),
        "subtracted from the logits of tokens in the new text; 0 is off",
    )  # fmt: skip
    frequency_penalty: float = setting(
        0.0, number("a number from -2 to 2 (0 = off)", -2, 2),
        "the same, for each time; 0 is off",
    )  # fmt: skip
    prompt: int = field(default=0, repr=False)
    constraint: Constraint | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check(self)

    @property
    def greedy(self) -> bool:
        """Whether there is nothing random."""
        return self.temperature == 0

    @cached_property
    def adjusts(self) -> bool:
        """Whether single logits are changed, by bias, penalties or a constraint."""
        return bool(self.logit_bias) or self.reads_prefix

    @cached_property
    def reads_prefix(self) -> bool:
        """Whether the tokens before decide too."""
        return self.repetition_penalty != 1 or self.constraint is not None or self.counts

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token is in the text."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def plain_greedy(self) -> bool:
        """Whether the token is the argmax of the raw row."""
        return self.temperature == 0 and not self.adjusts

    @cached_property
    def rejects(self) -> bool:
        """Whether sampled draft tokens are verified by rejection sampling; else all are verified by matching."""
        return self.temperature != 0 and self.acceptance == "rejection"

    @property
    def seeded_rejection(self) -> bool:
        """Whether the seed decides the text together with how much is guessed: guesses use up random numbers."""
        return self.seed is not None and self.rejects


Rules = Mapping[str, tuple[str, Callable[[Any], bool]]]  # by field: a description of valid values, and a check


def check_fields(options: object, rules: Rules) -> None:
    """Refuse, by an ``InvalidRequest``, options with a field that is not what its rule says."""
    for name, (expected, valid) in rules.items():
        value = getattr(options, name)
        try:
            found = valid(value)
        except (AttributeError, OverflowError, TypeError):  # of another type, or an integer beyond every float
            found = False
        if not found:
            raise InvalidRequest(f"{name} is {value!r}: expected {expected}")


@lru_cache(maxsize=4)
def _all_tokens(vocab: int) -> NDArray[np.int64]:
    """int64 [vocab]: every token, shared and read-only."""
    tokens = np.arange(vocab, dtype=np.int64)
    tokens.flags.writeable = False
    return tokens


def not_finite(position: int | None = None) -> EdgespecError:
    """Describe a row of NaN, +inf or nothing but -inf."""
    where = "" if position is None else f" for position {position}"
    return EdgespecError(
        f"expected finite logits{where}, got NaN, +inf or nothing but -inf",
        "the model or its export is damaged; `edgespec export` it again and look at its parity report",
    )


def adjusted(
    logits: NDArray[np.float32],  # [vocab]
    params: SamplingParams,
    prefix: Sequence[int],
) -> NDArray[np.float32]:
    """float32 [vocab]: ``logits`` after bias, penalties and constraint; the same array if there are none.

    A row of a draft that has no token which is allowed stays as it is: its guess will be refused.
    """
    if not params.adjusts:
        return logits
    row = logits.astype(np.float32)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if params.repetition_penalty != 1:
        for seen in different(prefix):  # int64 [k]
            seen = seen[seen < len(row)]  # an image's rows are not tokens
            score = row[seen]
            row[seen] = np.where(score < 0, score * params.repetition_penalty, score / params.repetition_penalty)
    if params.counts and (text := prefix[params.prompt :]):
        ids, counts = np.unique(np.array(text, np.int64), return_counts=True)
        row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    if params.constraint is not None and (allowed := params.constraint.allowed(prefix, row)) is not None:
        kept = np.where(allowed[: len(row)], row, np.float32(-np.inf))
        return row if kept.max() == -np.inf else kept
    return row


@dataclass(frozen=True)
class Support:
    """The tokens that can be sampled."""

    ids: NDArray[np.int64]  # int64 [k], ascending
    logits: NDArray[np.float64]  # float64 [k], with ``softmax(logits)`` the probabilities of ``ids``

    def probs(self) -> NDArray[np.float64]:
        """float64 [k], sums to 1."""
        weights = np.exp(self.logits - self.logits.max())
        return np.asarray(weights / weights.sum(), np.float64)

    def draw(self, noise: Noise, position: int, stream: int = TARGET) -> int:
        """Draw the token at ``position``: Gumbel-max, so its distribution is ``probs()``.

        Logarithms are the expensive part of a large support.  A token far below the best can win only by a noise above
        a bound, which is a comparison of integers; the few that pass get their noise, and the result is the same.
        """
        logits, bits = self.logits, noise.bits(position, self.ids, stream)
        if len(bits) <= _MANY:
            return int(self.ids[(logits + gumbel_of(bits)).argmax()])
        far = logits.max() - _NEAR
        near = logits >= far
        beaten = (logits[near] + gumbel_of(bits[near])).max()  # at least 4 above far: noise is never below -3.7
        least = math.exp(-math.exp(far - beaten)) - 1e-9  # u that a token at `far` needs, less a margin for rounding
        chosen = np.flatnonzero(near | (bits >= np.uint64(int(least * 2.0**53))))
        return int(self.ids[chosen[(logits[chosen] + gumbel_of(bits[chosen])).argmax()]])


def _top(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """int64 [>= count], ascending: indices of the ``count`` largest of ``values`` [k] and of what ties with the last.

    The count-th largest maximum of blocks is a lower bound for the count-th largest value: it leaves few candidates, at
    a tenth of the cost of a selection among all.
    """
    blocks = len(values) // _BLOCK
    candidates: NDArray[np.int64] | None = None
    if count <= blocks:
        peaks = values[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(0)  # blocks of a stride: 5 times faster
        candidates = np.flatnonzero(values >= np.partition(peaks, blocks - count)[blocks - count])
        values = values[candidates]
    kept = np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])
    return kept if candidates is None else candidates[kept]


def best_of(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """int64 [<= count]: indices of the ``count`` largest of ``values`` [k], the largest first, the lowest on a tie.

    Those that are -inf are left out.
    """
    found = _top(values, min(count, len(values)))
    found = found[values[found] > -np.inf]
    return found[np.argsort(-values[found], kind="stable")][:count]


def _scaled(row: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """float64 [k]: ``row`` float32 [k] over the temperature, shifted so that the largest is 0."""
    scaled = row.astype(np.float64)
    scaled -= scaled.max()  # before the division: a tiny temperature must not overflow
    with np.errstate(over="ignore"):  # -inf is right for what a tiny temperature leaves no chance
        scaled /= temperature
    return scaled


def _nucleus(row: NDArray[np.float32], temperature: float, top_p: float) -> NDArray[np.int64]:
    """int64 [m], ascending: indices of the fewest of ``row`` float32 [k] that hold ``top_p`` of the mass."""
    count, size = len(row), _FIRST_NUCLEUS
    weights = row - row.max()
    with np.errstate(over="ignore"):
        # within float32: -inf over inf would be NaN
        weights /= np.float32(np.clip(temperature, np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    wanted = top_p * np.exp(weights, out=weights).sum(dtype=np.float64)
    while True:
        # Tokens that tie with the last candidate are included, so that the order is well defined.
        candidates = _top(row, size) if size * 2 < count else np.arange(count)
        order = candidates[np.argsort(-row[candidates], kind="stable")]
        mass = np.cumsum(np.exp(_scaled(row[order], temperature)))
        if mass[-1] >= wanted or len(order) == count:
            return np.sort(order[: int(np.searchsorted(mass, wanted)) + 1])
        size *= 16


def support(
    logits: NDArray[np.float32],  # [vocab]
    params: SamplingParams,
    prefix: Sequence[int],
) -> Support:
    """Return the adjusted distribution in sparse form; its cost after the first scan follows the size of the support.

    Raises:
        EdgespecError: NaN, +inf, or every logit -inf.
    """
    row = adjusted(logits, params, prefix)
    best = int(row.argmax())  # a NaN wins every argmax, so looking at the winner is enough
    if not math.isfinite(row[best]):
        raise not_finite()
    if params.greedy:
        return Support(np.array([best], np.int64), np.zeros(1))
    ids = _all_tokens(len(row))
    if 0 < params.top_k < len(row):
        ids = _top(row, params.top_k)
        row = row[ids]
    if params.top_p < 1:
        kept = _nucleus(row, params.temperature, params.top_p)
        ids, row = ids[kept], row[kept]
    scaled = _scaled(row, params.temperature)
    if params.min_p > 0:
        kept = np.flatnonzero(scaled >= math.log(params.min_p))
        ids, scaled = ids[kept], scaled[kept]
    return Support(ids, scaled)


def distribution(
    logits: NDArray[np.float32],  # [vocab]
    params: SamplingParams,
    prefix: Sequence[int],
) -> NDArray[np.float64]:
    """float64 [vocab]: the adjusted distribution of the token after ``prefix``.  Raises like ``support``."""
    found = support(logits, params, prefix)
    probs = np.zeros(len(logits))
    probs[found.ids] = found.probs()
    return probs


def log_softmax_at(logits: NDArray[np.float32], token: int) -> float:
    """Return the log-probability of ``token`` under the unadjusted ``logits`` float32 [vocab]."""
    shifted = logits - logits.max()  # float32: each exponential to 1e-7, which is plenty; only the sum needs more
    at = float(shifted[token])
    return at - math.log(float(np.exp(shifted, out=shifted).sum(dtype=np.float64)))


def likely_tokens(logits: NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """List the ``count`` likeliest tokens under the unadjusted ``logits`` float32 [vocab], with log-probabilities."""
    if not count:
        return []
    shifted, best = logits - logits.max(), best_of(logits, count)
    values = shifted[best].tolist()
    total = math.log(float(np.exp(shifted, out=shifted).sum(dtype=np.float64)))
    return [(token, value - total) for token, value in zip(best.tolist(), values, strict=True)]


def draw(p: NDArray[np.float64], u: float) -> int:
    """Draw a token from ``p`` float64 [vocab], which need not be normalised, by inversion of ``u`` in [0, 1)."""
    mass = np.cumsum(p)
    # "right" skips tokens of no mass; rounding may still reach past the end.
    token = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return token if token < len(p) else int(np.flatnonzero(p)[-1])
