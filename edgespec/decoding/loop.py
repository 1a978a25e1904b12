"""THE loop.  Every method decodes through it; with the empty proposal it is plain decoding.

State: ``tokens`` is the truth; the target's slot holds all of them but the last, the pending token.  A round feeds the
pending token and a proposal, and commits the accepted guesses and one token more, recovered or bonus.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import perf_counter

import numpy as np

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.guard import Guard
from edgespec.decoding.noise import Noise
from edgespec.decoding.observer import Observer
from edgespec.decoding.proposal import EMPTY
from edgespec.decoding.request import DecodeOptions, Finish, PassRequest, PrefillRequest, Round
from edgespec.decoding.rows import RowSampler
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import GreedyTarget, HeadTarget, Pass, TappedTarget, Target
from edgespec.decoding.text import Text
from edgespec.decoding.verify import keeps_text, verify
from edgespec.errors import ContextFull, InvalidRequest

# a PrefillRequest is answered by a number of tokens (``send``) or None, a PassRequest by its Pass; then comes the Round
Rounds = Generator[PrefillRequest | PassRequest | Round, int | Pass | None, None]


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


def run_pass(target: Target, request: PassRequest) -> Pass:
    """Run a pass by itself, and time it."""
    start = perf_counter()
    if request.resume is not None:
        output = target.forward_resumed(request.tokens, request.resume, best=request.best)  # type: ignore[attr-defined]
    elif request.best:
        output = target.forward_best(request.tokens, request.parents)  # type: ignore[attr-defined]
    else:
        output = target.forward(request.tokens, request.parents)
    request.ms = 1000 * (perf_counter() - start)
    return output


def _alone(target: Target, running: Rounds) -> Generator[Round, None, None]:
    """Drive one request: each of its passes at once."""
    for item in running:
        if isinstance(item, PrefillRequest):
            continue
        if isinstance(item, PassRequest):
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

    First it yields a ``PrefillRequest`` as long as some of the prompt is not read, and reads as many tokens as it is
    sent; before a round, too, while a draft model has text to read.  Then it yields a ``PassRequest``, wants its
    ``Pass`` sent, and yields the ``Round`` made of it; the arrays of the pass must stay as they are until then.
    """
    tokens = Text(int(token) for token in prompt)
    check_prompt(tokens, options.sampling, target.vocab_size, target.context)
    return _rounds(target, drafter, tokens, options, Stats() if stats is None else stats)


def check_prompt(tokens: Sequence[int], sampling: SamplingParams, vocab: int, context: int) -> None:
    """Refuse what could never run.

    Args:
        tokens: of the prompt.
        sampling: whose biases name tokens.
        vocab: tokens of the vocabulary.
        context: most tokens of a sequence.

    Raises:
        InvalidRequest: see ``decode``.
    """
    if not tokens:
        raise InvalidRequest("expected a prompt of at least one token, got none", "a bare request may start with BOS")
    if len(tokens) >= context:
        raise ContextFull(
            f"the prompt has {len(tokens)} tokens and the context {context}: no room for a new one",
            "shorten the prompt, or give more context where the bundle has it",
        )
    known = f"the vocabulary has {vocab}"
    if min(tokens) < 0 or max(tokens) >= vocab:
        raise InvalidRequest(f"the prompt has a token id outside the vocabulary ({known})", "check the tokenizer")
    if max(sampling.logit_bias, default=0) >= vocab:
        raise InvalidRequest(f"logit_bias names token {max(sampling.logit_bias)}; {known}")


Reading = Generator[PrefillRequest, int | Pass | None, int]


def _read(target: Target, tapped: TappedTarget | None, tokens: list[int], guard: Guard) -> Reading:
    """Read the prompt, but for its last token, into the slot; returns how many tokens were there already.

    A drafter that looks at what is tapped of the target is shown it of every token that it does not know yet: those
    are read again, if need be.
    """
    tapped = tapped if guard.wants_taps else None
    held = reused = target.follow(tokens[: min(len(tokens) - 1, guard.known(tokens) if tapped else len(tokens))])
    while left := len(tokens) - 1 - held:
        most = yield PrefillRequest(left)
        assert not isinstance(most, Pass)
        if tapped:
            tapped.tap_sink = guard.absorb
        try:
            target.prefill(tokens[held : held + min(left, most or left)])
        finally:
            if tapped:
                tapped.tap_sink = None
        held += min(left, most or left)
    return reused


def _read_ahead(tokens: list[int], guard: Guard, left: int) -> Reading:
    """Let the drafter read what its next proposal needs, so many tokens; returns how much it would still read."""
    before = left + 1
    while 0 < left < before:  # one that does not get on is not asked again
        most = yield PrefillRequest(left, draft=True)
        assert not isinstance(most, Pass)
        before, left = left, guard.prefill(tokens, most or left)
    return left


def _rounds(target: Target, drafter: Drafter, tokens: Text, options: DecodeOptions, stats: Stats) -> Rounds:
    """The rounds of a valid request."""
    params, eos, context = options.sampling, options.eos, target.context
    noise, observer = Noise(params.seed), Observer(stats, options, target)
    guard = Guard(drafter, stats, eos, target)
    guard.watch(stats.monitor.control)
    guard.bind(params, noise)
    guard.begin(tokens)
    observer.begun()
    heads = target if isinstance(target, HeadTarget) else None
    tapped = target if isinstance(target, TappedTarget) else None
    exact_trees: bool = getattr(target, "exact_trees", False)
    reused = yield from _read(target, tapped, tokens, guard)
    observer.prefilled(len(tokens), reused)

    # where greedy decoding looks at nothing else, the logits need not leave the LM head
    bare = params.plain_greedy and not options.logprobs and options.accept.rule != "top-k"
    only_best = bare and isinstance(target, GreedyTarget)
    left = options.max_new_tokens
    pending = np.empty(1, np.int64)  # [1]: the whole input of a plain round
    finish: Finish | None = None
    while finish is None:
        observer.start()
        # One of the `left` tokens is the recovered or bonus one, and so is one of the places left in the context.
        budget = min(options.gamma, left - 1, context - len(tokens) - 1)
        if budget > 0 and (unread := guard.prefill(tokens, 0)):
            yield from _read_ahead(tokens, guard, unread)
            observer.begun()
            observer.start()
        proposal = guard.propose(tokens, budget) if budget > 0 else EMPTY
        guesses = len(proposal)
        observer.proposed(proposal, guesses, guard)
        if heads:
            heads.keep_hidden = guard.wants_hidden
        if tapped:
            tapped.keep_taps = guard.wants_taps
        pending[0] = tokens[-1]
        rows = np.concatenate((pending, proposal.tokens)) if guesses else pending  # [1 + n]
        parents = None if proposal.parents is None else np.concatenate(([-1], proposal.parents + 1))
        request = PassRequest(rows, parents, proposal.resume, only_best)
        output = yield request
        assert isinstance(output, Pass), "a pass that was asked for must be answered"
        observer.passed(request)

        sampler = RowSampler(output.logits, tokens, proposal, params, noise, output.best)
        verdict = verify(proposal, sampler, noise, options.accept)
        emitted = proposal.tokens[list(verdict.path)].tolist() if verdict.path else []
        emitted.append(verdict.next_token)
        end = next((at for at, token in enumerate(emitted, 1) if token in eos), 0) if eos else 0
        if end:
            del emitted[end:]
        # The row that each emitted token was chosen from.  The last token is the new pending one: its own row is not
        # kept, and it never enters the slot, not even as an accepted EOS.
        kept = [0, *(node + 1 for node in verdict.path)][: len(emitted)] if guesses else [0]
        target.keep(kept)
        logprobs = [sampler.logprob(*at) for at in zip(kept, emitted, strict=True)] if options.logprobs else None
        if options.shadow:
            observer.compare(sampler, kept, emitted)
        tokens += emitted
        left -= len(emitted)
        finish = "eos" if end else "length" if left == 0 else "context" if len(tokens) >= context else None
        assert len(target.tokens) == len(tokens) - 1, "the slot must hold all committed tokens but the pending one"
        made = Round(emitted, [], 0, verdict.path, [], logprobs, finish)
        if guesses:
            made.add_guesses(proposal)
        same_text = not guesses or keeps_text(proposal, sampler, options.accept, exact_trees)
        observer.verified(made, proposal, same_text)
        guard.observe(proposal, verdict, output)
        guard.timed(proposal, observer.observed())
        observer.ended(made)
        yield made
