"""THE loop.  Every method decodes through it; with the empty proposal it is plain decoding.

State: ``tokens`` is the truth; the target's slot holds all of them but the last, the pending token.  A round feeds the
pending token and a proposal, and commits the accepted guesses and one token more, recovered or bonus.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.decoding.accept import EXACT, Accept
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.guard import Guard
from edgespec.decoding.monitor import PLAIN, Seen
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import RowSampler, SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import GreedyTarget, HeadTarget, LayeredTarget, Pass, Resume, Target
from edgespec.decoding.verify import children, reached, verify
from edgespec.errors import InvalidRequest

Finish = Literal["eos", "length", "context"]


@dataclass(frozen=True)
class DecodeOptions:
    """What one request asks for.

    Attributes:
        max_new_tokens: most tokens to emit, >= 1.
        gamma: deepest guess of a proposal, >= 1.
        eos: tokens that end the text; the one that ended it is emitted.
        sampling: how tokens are chosen.
        logprobs: report the model's own log-probability of each emitted token.
        shadow: compare one round in so many with plain decoding (``Stats.monitor.shadow``); 0 = none.
        accept: which guesses stand.

    Raises:
        InvalidRequest: a count below 1.
    """

    max_new_tokens: int = 128
    gamma: int = 4
    eos: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: bool = False
    shadow: int = 0
    accept: Accept = EXACT

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.gamma < 1:
            raise InvalidRequest(
                f"expected max_new_tokens >= 1 and gamma >= 1, got max_new_tokens {self.max_new_tokens} "
                f"and gamma {self.gamma}"
            )


@dataclass(slots=True)
class Round:
    """One round, as a caller that streams sees it.

    Attributes:
        tokens: emitted: accepted guesses, then the recovered or bonus token (cut after EOS).
        drafted: all guesses that were verified, in the proposal's order.
        accepted: how many of ``tokens`` were guesses.
        path: indices of the accepted guesses in ``drafted``.
        rejected: the guesses that would have followed the accepted ones: in a tree, the drafter's first choices.
        logprobs: log-probability of each of ``tokens`` by the unadjusted model; None if not asked for.
        finish: why this round is the last; None = it is not.
    """

    tokens: list[int]
    drafted: list[int]
    accepted: int
    path: Sequence[int]
    rejected: list[int]
    logprobs: list[float] | None
    finish: Finish | None


@dataclass(slots=True)
class Ask:
    """A pass that a request wants.  Whoever drives it runs the pass, perhaps together with those of other requests.

    Attributes:
        tokens: int64 [n], the pending token and its guesses.
        parents: int64 [n], parent row of each row, -1 for row 0; None = a chain.
        resume: [n] rows whose first layers have run; None = all are to run.
        best: whether the likeliest token of each row and its logit are enough.
        ms: set by the driver: what the pass took.
        beside: set by the driver: rows of other requests in the same pass.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64] | None
    resume: Resume | None
    best: bool
    ms: float = 0.0
    beside: int = 0


Rounds = Generator[Ask | Round, Pass | None, None]  # each Ask is answered by its Pass (``send``); then comes the Round


def decode(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    options: DecodeOptions,
    stats: Stats | None = None,
) -> Generator[Round, None, None]:
    """Decode ``prompt`` round by round.

    The generator may be closed at any yield: the target's slot then holds a prefix of what was emitted, and the next
    request on it reuses what it can.

    Args:
        target: the model that decides.
        drafter: whatever guesses.  If it raises or yields nonsense it is dropped for the request
            (``stats.dropped_reason``), and the text does not change.
        prompt: token ids, at least one.
        options: what is asked for.
        stats: filled round by round, complete before each yield.

    Raises:
        InvalidRequest: at once: an empty prompt, one that leaves no room in the context, an unknown token.
        EdgespecError: while decoding: the target failed or yields NaN.
    """
    return _alone(target, rounds(target, drafter, prompt, options, stats))


def run_pass(target: Target, ask: Ask) -> Pass:
    """Run a pass by itself, and time it."""
    start = perf_counter()
    if ask.resume is not None:
        assert isinstance(target, LayeredTarget)
        output = target.forward_resumed(ask.tokens, ask.resume, best=ask.best)
    elif ask.best:
        output = target.forward_best(ask.tokens, ask.parents)  # type: ignore[attr-defined]
    else:
        output = target.forward(ask.tokens, ask.parents)
    ask.ms = 1000 * (perf_counter() - start)
    return output


def _alone(target: Target, running: Rounds) -> Generator[Round, None, None]:
    """Drive one request: each of its passes at once."""
    for item in running:
        if isinstance(item, Ask):
            item = running.send(run_pass(target, item))
        assert isinstance(item, Round)
        yield item


def rounds(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    options: DecodeOptions,
    stats: Stats | None = None,
) -> Rounds:
    """Like ``decode``, but the passes over the target are left to whoever drives the generator.

    It yields an ``Ask``, wants its ``Pass`` sent, and yields the ``Round`` made of it; the arrays of the pass must
    stay as they are until then.
    """
    tokens = [int(token) for token in prompt]
    if not tokens:
        raise InvalidRequest("expected a prompt of at least one token, got none", "a bare request may start with BOS")
    if len(tokens) >= target.context:
        raise InvalidRequest(
            f"the prompt has {len(tokens)} tokens and the context {target.context}: no room for a new one",
            "shorten the prompt or load the model with a larger context",
        )
    known = f"the vocabulary has {target.vocab_size}"
    if min(tokens) < 0 or max(tokens) >= target.vocab_size:
        raise InvalidRequest(f"the prompt has a token id outside the vocabulary ({known})", "check the tokenizer")
    if max(options.sampling.logit_bias, default=0) >= target.vocab_size:
        raise InvalidRequest(f"logit_bias names token {max(options.sampling.logit_bias)}; {known}")
    return _rounds(target, drafter, tokens, options, Stats() if stats is None else stats)


def _rounds(target: Target, drafter: Drafter, tokens: list[int], options: DecodeOptions, stats: Stats) -> Rounds:
    """The rounds of a valid request."""
    params, gamma, eos, context = options.sampling, options.gamma, options.eos, target.context
    noise = Noise(params.seed)
    start = perf_counter()
    if isinstance(target, HeadTarget):
        target.keep_hidden = bool(getattr(drafter, "wants_hidden", False))
    reused = target.follow(tokens[:-1])
    if reused < len(tokens) - 1:
        target.prefill(tokens[reused:-1])
    stats.prompt_tokens += len(tokens)
    stats.reused_tokens += reused
    prefilled = perf_counter()
    stats.prefill_ms += 1000 * (prefilled - start)
    guard = Guard(drafter, stats, eos, target)
    shadow = stats.monitor.shadow
    shadow.every = options.shadow
    layers = getattr(target, "layers", 0)
    guard.begin(tokens, params, noise)
    stats.draft_ms += 1000 * (perf_counter() - prefilled)

    # where greedy decoding looks at nothing else, the logits need not leave the LM head
    bare = params.plain_greedy and not options.logprobs and options.accept.rule != "top-k"
    only_best = bare and isinstance(target, GreedyTarget)
    left = options.max_new_tokens
    pending = np.empty(1, np.int64)  # [1]: the whole input of a plain round
    finish: Finish | None = None
    while finish is None:
        begun = perf_counter()
        # One of the `left` tokens is the recovered or bonus one, and so is one of the places left in the context.
        budget = min(gamma, left - 1, context - len(tokens) - 1)
        proposal = guard.propose(tokens, budget) if budget > 0 else EMPTY
        proposed = perf_counter()
        pending[0] = tokens[-1]
        if len(proposal):
            parents = proposal.parents
            rows = np.concatenate((pending, proposal.tokens))  # [1 + n]
            above = None if parents is None else np.concatenate(([-1], parents + 1))
        else:
            rows, above = pending, None
        ask = Ask(rows, above, proposal.resume, only_best)
        output = yield ask
        assert output is not None, "a pass that was asked for must be answered"
        passed = perf_counter()

        sampler = RowSampler(output.logits, tokens, proposal, params, noise, output.best)
        verdict = verify(proposal, sampler, noise, options.accept)
        path = verdict.path
        emitted = proposal.tokens[list(path)].tolist() if path else []
        emitted.append(verdict.next_token)
        if eos:
            at = next((i for i, token in enumerate(emitted) if token in eos), -1)
            if at >= 0:
                del emitted[at + 1 :]
                finish = "eos"
        # The last emitted token is the new pending one: it never enters the slot, not even an accepted EOS.
        target.keep([0, *(node + 1 for node in path[: len(emitted) - 1])])
        logprobs = None
        if options.logprobs:
            at_rows = [0, *(node + 1 for node in path)]
            logprobs = [sampler.logprob(row, token) for row, token in zip(at_rows, emitted, strict=False)]
        if shadow.every and stats.rounds % shadow.every == 0:  # the rows of this very pass say it
            plain = (sampler.choose(row) for row in [0, *(node + 1 for node in path)][: len(emitted)])
            shadow.compare(options.max_new_tokens - left, zip(plain, emitted, strict=True))
        tokens += emitted
        left -= len(emitted)
        if finish is None:
            finish = "length" if left == 0 else "context" if len(tokens) >= context else None
        accepted = min(len(path), len(emitted))
        stats.record(len(emitted), len(proposal), accepted, reached(proposal, path) if len(proposal) else 0)
        assert len(target.tokens) == len(tokens) - 1, "the slot must hold all committed tokens but the pending one"
        verified = perf_counter()
        guard.observe(proposal, verdict, output)
        observed = perf_counter()
        draft_ms = 1000 * (proposed - begun)
        stats.draft_ms += draft_ms + 1000 * (observed - verified)
        stats.verify_ms += ask.ms
        guard.timed(proposal, draft_ms, ask.ms, len(rows) + ask.beside)
        rows_run = len(rows) if proposal.resume is None else len(rows) * (1 - proposal.resume.layer / layers)
        who = guard.proposer if len(proposal) else PLAIN
        alone = not ask.beside
        stats.monitor.add(Seen(who, len(emitted), len(proposal), accepted, rows_run, draft_ms, ask.ms, alone))
        if len(proposal):
            drafted, refused = proposal.tokens.tolist(), _refused(proposal, path)
        else:
            drafted, refused = [], []
        stats.other_ms += 1000 * (perf_counter() - observed + verified - passed)
        yield Round(emitted, drafted, accepted, path, refused, logprobs, finish)


def _refused(proposal: Proposal, path: Sequence[int]) -> list[int]:
    """The drafter's first choices below the accepted path."""
    tokens: list[int] = []
    below = children(proposal, path[-1] if path else -1)
    while below:
        tokens.append(int(proposal.tokens[below[0]]))
        below = children(proposal, below[0])
    return tokens
