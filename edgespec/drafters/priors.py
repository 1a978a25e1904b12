"""What to expect of a method where nothing was measured: from the literature, by kind of text, always said aloud.

Numbers of other people's models on other people's texts.  A tokens-per-round figure carries over from one machine to
another, a speed-up does not (Spec-Bench's same run is 1.71x on one card and 1.44x on another), so only the former are
used, and what a pass costs here is put in its place.

Spec-Bench (arXiv 2401.07851; its published ranking, Vicuna-7B, one A100) gives mean tokens per round over all its
tasks, and speed-ups by task; tokens per round of a task are taken to be the mean times the task's speed-up over the
mean one's: prompt lookup 1.75 (conversation 1.60/1.66, summarization 2.66/1.66), Medusa-1 2.31 (1.97/1.71 and
1.57/1.71), a draft of 68M parameters 2.28 (1.66/1.52 and 1.71/1.52).  It has no task of code; what stands here for
code is its mean over all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Text = Literal["chat", "code", "summarization"]
_SPEC_BENCH = "Spec-Bench, arXiv 2401.07851"
_REPLAY = "texts replayed for drafters/ngram.py"
_HEAD_FALL = 0.65  # a head is so much less often right than the one before it
# how often a head's guess of each rank is right, over its first guess's share
_RANKS = (1.0, 0.3, 0.16, 0.1, 0.07, 0.055, 0.045, 0.035, 0.03, 0.025)


@dataclass(frozen=True)
class Prior:
    """What a method is assumed to do on a kind of text.

    Attributes:
        acceptance: P(a guess is accepted | all before it were).
        source: whose number it is.
        ranks: of heads, [head][rank]: share of the positions where that guess is right.
        guesses, tokens: of drafters that stop by themselves: guesses and tokens of a round.
    """

    acceptance: float
    source: str
    ranks: list[list[float]] = field(default_factory=list)
    guesses: float | None = None
    tokens: float | None = None


Priors = Mapping[Text, Prior]  # by kind of text; empty = nothing is known, and no gain assumed


def _endless(tokens: float) -> float:
    """The acceptance at which chains without end give so many tokens a round: 1 / (1 - a)."""
    return 1 - 1 / tokens


def _same(chat: float, code: float, summarization: float, source: str) -> Priors:
    rates: dict[Text, float] = {"chat": chat, "code": code, "summarization": summarization}
    return {text: Prior(rate, source) for text, rate in rates.items()}


def _heads(first: float, count: int = 4) -> Prior:
    """Heads whose tree of 64 nodes gives Spec-Bench's tokens per round: 2.5 with .5, 2.3 with .45, 2.1 with .4."""
    ranks = [[first * _HEAD_FALL**head * share for share in _RANKS] for head in range(count)]
    return Prior(first, f"Medusa-1 in {_SPEC_BENCH}", ranks)


def _replayed(tokens: float, guesses: float) -> Prior:
    return Prior((tokens - 1) / guesses, _REPLAY, guesses=guesses, tokens=tokens)


# this package's own policy on the first turns of MT-bench and on HumanEval's solutions; Spec-Bench's conversations have
# second turns, too: 1.69
NGRAM: Priors = {
    "chat": _replayed(1.31, 0.90),
    "code": _replayed(1.84, 1.86),
    "summarization": Prior(0.5, f"prompt lookup in {_SPEC_BENCH}", guesses=3.6, tokens=2.80),
}
SPECULATIVE: Priors = {
    "chat": Prior(_endless(2.49), f"a draft of 68M in {_SPEC_BENCH}"),
    "code": Prior(_endless(2.28), f"a draft of 68M in {_SPEC_BENCH}, mean of its tasks"),
    "summarization": Prior(_endless(2.57), f"a draft of 68M in {_SPEC_BENCH}"),
}
# The paper steers to .9 on models of 13B and more, half of whose sub-layers can go; on CodeLlama-13B it gained 1.03,
# 1.14 and 1.12 (XSum, HumanEval, GSM8K in arXiv 2506.03700); .7 gives 1.07 at c = .55 with native int4 ones.
SELF_SPEC = _same(0.70, 0.75, 0.70, "Draft & Verify, arXiv 2309.08168, as measured again in arXiv 2506.03700")
SWIFT = _same(0.70, 0.80, 0.70, "SWIFT, arXiv 2410.06916, as measured again in arXiv 2506.03700")
MEDUSA: Priors = {"chat": _heads(0.50), "code": _heads(0.45), "summarization": _heads(0.40)}
# blocks of 1.73 tokens with 4 heads of a frozen model (table 1): 1 + a + a^2 + a^3
BLOCKWISE = _same(0.48, 0.48, 0.48, "a frozen model in arXiv 1811.03115, table 1")
# speculators' measured lengths of chains of 3 with Qwen3-8B (its issue 563): 2.71 on code, 2.25 on summaries; chat is
# taken to be between them: 1 + a + a^2 + a^3
EAGLE = _same(0.66, 0.70, 0.60, "EAGLE-3 with Qwen3-8B, measured by its publishers")
# 35 to 47 % of two guesses on prose with Qwen3.5-4B (Rapid-MLX's issue 3115), 85 % of three on structured text with 9B
# (its issue 2175)
MTP = _same(0.60, 0.80, 0.60, "Qwen3.5-4B and 9B, measured by their users")
# first 1, 2, 3, 4 guesses right with a DFlash drafter of Qwen3-8B, as its publisher measured it: .665 .474 .338 .243
DFLASH = _same(0.68, 0.75, 0.65, "DFlash with Qwen3-8B, measured by its publisher")
# first 1 to 4 guesses right with Gemma 4 12B: .47, .30, .23, .20 (koboldcpp's issue 2262); .66 to .89 of 4 with 31B
# (llama.cpp's issue 23398)
ASSISTANT = _same(0.60, 0.70, 0.60, "Gemma 4 12B and 31B, measured by their users")
# of AdaDecode none: how many tokens take an exit is a model's own, so no gain is assumed
