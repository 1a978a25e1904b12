"""What to expect of a method where nothing was measured: from the literature, for conversation, always said aloud.

Numbers of other people's models on other people's texts.  A tokens-per-round figure carries over from one machine to
another, a speed-up does not (Spec-Bench's same run is 1.71x on one card and 1.44x on another), so only the former are
used, and what a pass costs here is put in its place.

Spec-Bench (arXiv 2401.07851; its published ranking, Vicuna-7B, one A100) gives mean tokens per round over all its
tasks, and speed-ups by task; tokens per round of conversation are taken to be the mean times its speed-up over the
mean one's: Medusa-1 2.31 (1.97/1.71), a draft of 68M parameters 2.28 (1.66/1.52).
"""

from __future__ import annotations

from dataclasses import dataclass, field

_HEAD_FALL = 0.65  # a head is so much less often right than the one before it
# how often a head's guess of each rank is right, over its first guess's share
_RANKS = (1.0, 0.3, 0.16, 0.1, 0.07, 0.055, 0.045, 0.035, 0.03, 0.025)


@dataclass(frozen=True)
class Prior:
    """What a method is assumed to do.

    Attributes:
        acceptance: P(a guess is accepted | all before it were).
        source: whose number it is.
        ranks: of heads, [head][rank]: share of the positions where that guess is right.
        fixed: of drafters that stop by themselves: guesses and tokens of a round.
    """

    acceptance: float
    source: str
    ranks: list[list[float]] = field(default_factory=list)
    fixed: tuple[float, float] | None = None


# this package's own policy on the first turns of MT-bench; Spec-Bench's conversations have second turns, too: 1.69
NGRAM = Prior(0.31 / 0.90, "texts replayed for drafters/ngram.py", fixed=(0.90, 1.31))
# chains without end give 1 / (1 - a) tokens a round
SPECULATIVE = Prior(1 - 1 / 2.49, "a draft of 68M in Spec-Bench, arXiv 2401.07851")
# The paper steers to .9 on models of 13B and more, half of whose sub-layers can go; on CodeLlama-13B it gained 1.03,
# 1.14 and 1.12 (XSum, HumanEval, GSM8K in arXiv 2506.03700); .7 gives 1.07 at c = .55 with native int4 ones.
SELF_SPEC = Prior(0.70, "Draft & Verify, arXiv 2309.08168, as measured again in arXiv 2506.03700")
SWIFT = Prior(0.70, "SWIFT, arXiv 2410.06916, as measured again in arXiv 2506.03700")
# four heads whose tree of 64 nodes gives Spec-Bench's tokens per round, 2.5
MEDUSA = Prior(
    0.50,
    "Medusa-1 in Spec-Bench, arXiv 2401.07851",
    [[0.50 * _HEAD_FALL**head * share for share in _RANKS] for head in range(4)],
)
# blocks of 1.73 tokens with 4 heads of a frozen model (table 1): 1 + a + a^2 + a^3
BLOCKWISE = Prior(0.48, "a frozen model in arXiv 1811.03115, table 1")
# speculators' measured lengths of chains of 3 with Qwen3-8B (its issue 563): 2.71 on code, 2.25 on summaries; chat is
# taken to be between them: 1 + a + a^2 + a^3
EAGLE = Prior(0.66, "EAGLE-3 with Qwen3-8B, measured by its publishers")
# 35 to 47 % of two guesses on prose with Qwen3.5-4B (Rapid-MLX's issue 3115)
MTP = Prior(0.60, "Qwen3.5-4B, measured by its users")
# first 1, 2, 3, 4 guesses right with a DFlash drafter of Qwen3-8B, as its publisher measured it: .665 .474 .338 .243
DFLASH = Prior(0.68, "DFlash with Qwen3-8B, measured by its publisher")
# first 1 to 4 guesses right with Gemma 4 12B: .47, .30, .23, .20 (koboldcpp's issue 2262); .66 to .89 of 4 with 31B
# (llama.cpp's issue 23398)
ASSISTANT = Prior(0.60, "Gemma 4 12B and 31B, measured by their users")
# of AdaDecode none: how many tokens take an exit is a model's own, so no gain is assumed
