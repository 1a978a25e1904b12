"""THE loop.  Every method decodes through it; with the empty proposal it is plain decoding.

State: ``tokens`` is the truth; the target's slot holds all of them but the last, the pending token.  A round feeds the
pending token and a proposal, and commits the accepted guesses and one token more, recovered or bonus.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple, overload

import numpy as np

from edgespec.decoding.drafter import Drafter, DraftRequest
from edgespec.decoding.drafting import Drafting
from edgespec.decoding.noise import Noise
from edgespec.decoding.policy import Policy
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import PLAIN, RoundTime, Stats
from edgespec.decoding.target import BEST, Output, Pass, Target
from edgespec.decoding.text import INSERTED, Text
from edgespec.decoding.verify import EXACT, Accept, RowSampler, keeps_text, verify
from edgespec.errors import ContextFull, InvalidRequest

Finish = Literal["eos", "length", "context"]


@dataclass(frozen=True)
class DecodeOptions:
    """Decoding options of one request.  A count below 1 raises InvalidRequest."""

    max_new_tokens: int = 128  # maximum tokens to emit, >= 1
    gamma: int = 4  # deepest guess of a proposal, >= 1
    eos: frozenset[int] = frozenset()  # tokens that end the text; the one that ended it is emitted
    sampling: SamplingParams = field(default_factory=SamplingParams)  # how tokens are chosen
    logprobs: bool = False  # report the model's own log-probability of each emitted token
    top_logprobs: int = 0  # and of this many of the likeliest tokens
    shadow: int = 0  # compare one of this many rounds with plain decoding (``Stats.shadow_checked``); 0 = none
    accept: Accept = EXACT  # which guesses are accepted
    source: Sequence[int] = ()  # of an encoder-decoder: what it was given to read, which drafters may copy from
    first: Sequence[Drafter] = ()  # drafters of this request that are asked before those of the policy

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.gamma < 1:
            raise InvalidRequest(
                f"expected max_new_tokens >= 1 and gamma >= 1, got max_new_tokens {self.max_new_tokens} "
                f"and gamma {self.gamma}"
            )


@dataclass(slots=True)
class PrefillRequest:
    """Some of the text is to be read; a ``Piece`` is to be sent."""

    left: int  # tokens to be read
    # whether a draft model reads them, after the target; also in the middle of a text, if it joins there
    draft: bool = False
    anywhere: bool = False  # whether the target may take them up from another slot that has read the same


class Piece(NamedTuple):
    """The part of a text that is read next."""

    rows: int  # tokens that a pass reads
    taken: int = 0  # tokens before them that the target copied from another slot


@dataclass(slots=True)
class Round:
    """One round, as a caller that streams sees it."""

    tokens: list[int]  # emitted: accepted guesses, then the recovered or bonus token (cut after EOS)
    drafted: list[int]  # all guesses that were verified, in the proposal's order
    accepted: int  # how many of ``tokens`` were guesses
    path: Sequence[int]  # indices of the accepted guesses in ``drafted``
    # the guesses that would have followed the accepted ones: in a tree, the drafter's first choices
    rejected: list[int]
    logprobs: list[float] | None  # log-probability of each of ``tokens`` by the unadjusted model; None if not asked for
    finish: Finish | None  # why this round is the last; None = it is not
    top_logprobs: Sequence[list[tuple[int, float]]] = ()  # of the likeliest tokens in the place of each of ``tokens``


def run_pass(target: Target, wanted: Pass) -> Output:
    """Run a pass of only this request, and time it."""
    start = perf_counter()
    output = target.run(wanted)
    output.ms = 1000 * (perf_counter() - start)
    return output


Run = Callable[[Target, Pass], Output]
Reading = Generator[PrefillRequest, Piece, None]
Driven = Generator[Round | Pass | PrefillRequest, Output | Piece | None, None]  # by who drives the request


@overload
def decode(
    target: Target, policy: Policy | Drafter, prompt: Sequence[int], options: DecodeOptions, stats: Stats | None = None,
    run: Run = run_pass,
) -> Generator[Round, None, None]: ...  # fmt: skip


@overload
def decode(
    target: Target, policy: Policy | Drafter, prompt: Sequence[int], options: DecodeOptions, stats: Stats | None = None,
    run: Run | None = run_pass, pieces: bool = False,
) -> Driven: ...  # fmt: skip


def decode(
    target: Target, policy: Policy | Drafter, prompt: Sequence[int], options: DecodeOptions, stats: Stats | None = None,
    run: Run | None = run_pass, pieces: bool = False,
) -> Driven | Generator[Round, None, None]:  # fmt: skip
    """Decode ``prompt`` round by round.

    The generator may be closed at any yield: the target's slot then holds a prefix of what was emitted, and the next
    request on it reuses what it can.

    Args:
        target: the model that decides.
        policy: chooses the drafter and the number of draft tokens; a drafter in its place is always asked.  A drafter
            that raises or returns invalid output is dropped for the request (``stats.drops``), and the text does not
            change.
        prompt: token ids, at least one.
        options: of the request.
        stats: filled round by round, complete before each yield.
        run: runs a pass.  None leaves it to the driver of the generator, which may batch it with other requests: it
            yields a ``Pass`` and expects its ``Output`` to be sent, whose arrays stay valid until the next yield.
        pieces: read by pieces: it yields a ``PrefillRequest``, and reads the ``Piece`` that it is sent.

    Yields:
        a ``Round`` for each pass.

    Raises:
        InvalidRequest: at the first step: see ``check_prompt``.
        EdgespecError: the target failed or yields NaN.
    """
    tokens, params, stats = Text(map(int, prompt)), options.sampling, stats or Stats()
    check_prompt(tokens, params, target.vocab_size, target.context)
    noise, left = Noise(params.seed), options.max_new_tokens
    finish: Finish | None = None
    drafting = Drafting(policy if isinstance(policy, Policy) else Policy([policy]), target, options.eos, stats)
    known = drafting.begin(DraftRequest(tokens, params, noise, options.source), options.first)
    yield from _read(target, drafting, tokens, known, stats, pieces)
    only_best, stats.shadow_every = _needs_only_best(target, options), options.shadow
    while finish is None:
        # one of the `left` tokens is the recovered or bonus one, and so is one of the places left in the context
        budget = min(options.gamma, left - 1, target.context - len(tokens) - 1)
        if unread := drafting.choose(tokens, budget):
            yield from _read_ahead(drafting, tokens, unread, stats, pieces)

        # propose: guesses that hang off the pending token; no guess is plain decoding
        proposal = drafting.propose(tokens)

        # pass: the pending token and all guesses at once
        wanted = _pass(tokens[-1], proposal, only_best, drafting)
        output = run(target, wanted) if run is not None else _sent((yield wanted))
        passed = perf_counter()

        # verify: which guesses are accepted, and the token after them
        sampler = RowSampler(output.logits, tokens, proposal, params, noise, output.best)
        verdict = verify(proposal, sampler, noise, options.accept)

        # commit: the slot keeps the row that each new token was chosen from and forgets those of rejected draft tokens;
        # the last token is the new pending one, whose own row comes with the next pass
        made = _round(proposal, verdict, options.eos, left, target.context - len(tokens))
        rows = [0, *(node + 1 for node in made.path)][: len(made.tokens)] if made.drafted else [0]
        target.keep(rows)
        if options.logprobs:
            made.logprobs = list(map(sampler.logprob, rows, made.tokens))
            made.top_logprobs = [sampler.top_logprobs(row, options.top_logprobs) for row in rows]
        if options.shadow and stats.rounds % options.shadow == 0:
            stats.compare(options.max_new_tokens - left, zip(map(sampler.choose, rows), made.tokens, strict=True))
        tokens += made.tokens
        left -= len(made.tokens)
        finish, time = made.finish, _time(drafting, output, 1 + len(made.drafted), made)
        stats.add(time, passed)
        if made.drafted:
            exact = keeps_text(proposal, sampler, options.accept, target)
            tested, expected = proposal.tested(made.path), drafting.expected(proposal)
            stats.add_guesses(time, tested, exact, options.accept.lossless, expected)
        drafting.learn(proposal, verdict, output, time)
        yield made


def check_prompt(tokens: Sequence[int], sampling: SamplingParams, vocab: int, context: int) -> None:
    """Refuse what could never run: tokens or biases outside the vocabulary, or a prompt that leaves no room in the
    context.

    Raises:
        InvalidRequest: an empty prompt, one that leaves no room in the context, an unknown token.
    """
    if not tokens:
        raise InvalidRequest("expected a prompt of at least one token, got none", "a bare request may start with BOS")
    if len(tokens) >= context:
        raise ContextFull(
            f"the prompt has {len(tokens)} tokens and the context {context}: no room for a new one",
            "shorten the prompt, or give more context where the bundle has it",
        )
    check_tokens(tokens, vocab)
    if max(sampling.logit_bias, default=0) >= vocab:
        raise InvalidRequest(f"logit_bias names token {max(sampling.logit_bias)}; the vocabulary has {vocab}")


def check_tokens(tokens: Sequence[int], vocab: int) -> None:
    """Refuse token ids that are neither of the vocabulary nor embedding spans.

    Raises:
        InvalidRequest: there is one.
    """
    if tokens and (min(tokens) < 0 or (max(tokens) >= vocab and any(vocab <= one < INSERTED for one in tokens))):
        raise InvalidRequest(
            f"the prompt has a token id outside the vocabulary (the vocabulary has {vocab})", "check the tokenizer"
        )


def _read(target: Target, drafting: Drafting, tokens: list[int], known: int, stats: Stats, pieces: bool) -> Reading:
    """Read the prompt, without its last token, into the slot, which may already hold its beginning.

    A drafter that needs auxiliary states receives those of all tokens after the first ``known``: some tokens are read
    again for that.
    """
    start = perf_counter()
    held = reused = target.follow(tokens[: min(len(tokens) - 1, known)])
    while left := len(tokens) - 1 - held:
        count = left
        if pieces:
            piece = yield PrefillRequest(left, anywhere=not drafting.aux_hidden)
            held += piece.taken
            reused += piece.taken
            count = min(left - piece.taken, piece.rows)
        if drafting.aux_hidden:
            for output in target.read(tokens[held : held + count], aux_hidden=True):
                if output.aux_hidden is not None:
                    drafting.absorb(len(target.tokens) - len(output.aux_hidden), output.aux_hidden)
        else:
            target.prefill(tokens[held : held + count])
        held += count
    stats.prompt_tokens += len(tokens)
    stats.reused_tokens += reused
    stats.prefill_ms += 1000 * (perf_counter() - start)


def _read_ahead(drafting: Drafting, tokens: list[int], left: int, stats: Stats, pieces: bool) -> Reading:
    """Let the drafter read the ``left`` tokens that its next proposal needs; stop if it makes no progress."""
    start, before = perf_counter(), left + 1
    while 0 < left < before:
        most = (yield PrefillRequest(left, draft=True)).rows if pieces else left
        before, left = left, drafting.read(tokens, most)
    stats.draft_ms += 1000 * (perf_counter() - start)


def _needs_only_best(target: Target, options: DecodeOptions) -> bool:
    """Whether logits need not leave the LM head, because only the likeliest tokens are needed."""
    bare = options.sampling.plain_greedy and options.accept.lossless and not options.logprobs
    return bare and BEST in target.can


def _sent(answer: Output | Piece | None) -> Output:
    assert isinstance(answer, Output)
    return answer


def _pass(pending: int, proposal: Proposal, only_best: bool, drafting: Drafting) -> Pass:
    """Describe the pass over the pending token and the guesses, or what a drafter has left of it."""
    parents, top = None, int(only_best)
    if proposal is EMPTY:
        rows = np.array((pending,), np.int64)
    else:
        rows = np.empty(1 + len(proposal), np.int64)  # [1 + n]
        rows[0] = pending
        rows[1:] = proposal.tokens
        parents = None if proposal.parents is None else np.concatenate(([-1], proposal.parents + 1))
    whole = Pass(rows, parents, top, drafting.hidden, drafting.aux_hidden)
    return whole if drafting.ahead is None else drafting.rest(whole)


def _round(proposal: Proposal, verdict: Verdict, eos: frozenset[int], left: int, room: int) -> Round:
    """Make a round: its text ends with the first EOS, after ``left`` tokens, or where the context has no ``room``."""
    path = verdict.path
    emitted = proposal.tokens[list(path)].tolist() if path else []
    emitted.append(verdict.next_token)
    made = Round(emitted, [], 0, path, [], None, None)
    if eos and (end := next((at for at, token in enumerate(emitted, 1) if token in eos), 0)):
        del emitted[end:]
        made.finish = "eos"
    elif len(emitted) >= min(left, room):
        made.finish = "length" if len(emitted) == left else "context"
    if proposal is not EMPTY:
        made.drafted = proposal.tokens.tolist()
        made.accepted = min(len(path), len(emitted))
        made.rejected = proposal.refused(path)
    return made


def _time(drafting: Drafting, output: Output, rows: int, made: Round) -> RoundTime:
    """Return the times and tokens of a round over ``rows`` rows of this request."""
    return RoundTime(
        drafting.draft_ms,
        output.ms,
        rows + output.other_rows,
        output.other_rows > 0,
        drafting.winner if made.drafted else PLAIN,
        len(made.tokens),
        len(made.drafted),
        made.accepted,
        rows * output.share,
        output.waited_ms,
        output.read,
    )
