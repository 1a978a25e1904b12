"""Method auto: the text is the same for every candidate, and a failure costs one candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgespec.control.adaptive import Adaptive, Control
from edgespec.control.auto import Auto, Candidate
from edgespec.control.estimator import Evidence
from edgespec.decoding.drafter import HIDDEN
from edgespec.decoding.loop import DecodeOptions, Piece, PrefillRequest, Round, decode, run_pass
from edgespec.decoding.policy import Ask
from edgespec.decoding.proposal import EMPTY, Proposal
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.stats import PLAIN, Stats
from edgespec.decoding.target import Output, Pass, Target
from edgespec.drafters.speculative import Speculative
from edgespec.formulas.cost import CostModel
from tests.control.test_auto import always, three
from tests.support.reference import FunctionTarget
from tests.support.rounds import Rounds
from tests.support.timed_toy import DEAR, INT4, STOCK, Clock, Guesser, controlled, run, text
from tests.support.toy import Scripted, emitted, exact, hash_logits, hash_target, plain

# -- the text ----------------------------------------------------------------------------------------------------------


class Forced(Auto):
    """Goes to the next candidate, plain decoding among them, every ``every`` rounds."""

    def __init__(self, candidates: Sequence[Candidate], every: int) -> None:
        super().__init__(candidates)
        self.every = every

    def choose(self, tokens: list[int], budget: int) -> Sequence[Ask]:
        if self._seen and self._seen % self.every == 0:
            active = self._in_use.which
            following = 0 if active is None else active + 1
            self._change(following if following < len(self.candidates) else None, "forced")
        return super().choose(tokens, budget)

    def _judge(self, control: Control) -> None:
        pass


class Reader(FunctionTarget):
    """A draft that writes down how many tokens it reads at once."""

    def __init__(self, seed: int) -> None:
        super().__init__(hash_logits(seed, 11), 11)
        self.sizes: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        self.sizes.append(len(tokens))
        super().prefill(tokens)


@pytest.mark.parametrize("around", ["control", "auto", "chain"])
def test_a_draft_that_is_taken_up_in_the_middle_reads_by_pieces(around: str) -> None:
    """Nothing is drafted for a while; then the draft reads the whole text in pieces of the given size."""
    draft, asked, written = Reader(3), list[int](), list[int]()
    prompt = [1] * 150
    control = Control(Speculative(draft, 11), CostModel({1: 1.0, 2: 1.05}, 0.1))
    never = Scripted(lambda *_: EMPTY)
    never.cheap = True
    before = [Control(never, CostModel())] if around == "chain" else []
    policy: Adaptive = Adaptive([*before, control])
    if around == "auto":
        policy = switch = Auto([Candidate("speculative", 2.0, lambda: control)])
        switch.candidates[0].standing.until = 40
    else:
        control.learned.evidence[0] = Evidence(
            (99.0,), (0.0,)
        )  # its guesses were wrong so far: it waits before it tries again
    target = hash_target(3)
    driven = decode(target, policy, prompt, DecodeOptions(120, 4), stats := Stats(), run=None, pieces=True)
    item = next(driven, None)
    while item is not None:
        if isinstance(item, PrefillRequest):
            asked.append(item.left if item.draft else 0)
            item = driven.send(Piece(16))
        elif isinstance(item, Pass):
            item = driven.send(run_pass(target, item))
        else:
            assert isinstance(item, Round)
            written += item.tokens
            item = next(driven, None)
    assert written == plain(hash_logits(3, 11), 11, prompt, 120)
    assert stats.accepted > 5
    assert stats.dropped_reason is None
    assert draft.sizes[:10] == [16] * 10
    assert max(draft.sizes) <= 32
    lefts = [left for left in asked if left]
    assert lefts[0] >= len(prompt) + 16 - 1
    assert lefts[:10] == list(range(lefts[0], lefts[0] - 160, -16))


def _guess(name: str, seed: int, right: int) -> Callable[[], Control]:
    """Chains of which every ``right``-th guess is wrong."""
    truth = hash_logits(seed, 11)

    def guess(tokens: list[int], budget: int) -> Proposal:
        found = plain(truth, 11, tokens, budget)
        return Proposal(np.array([t if (len(tokens) + i) % right else (t + 1) % 11 for i, t in enumerate(found)]))

    inner = Scripted(guess)
    inner.name = name
    return lambda: controlled(inner, INT4, 0.01)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_the_text_is_plain_decodings_wherever_it_switches(every: int) -> None:
    for seed in range(3):
        switch = Forced([Candidate(f"g{i}", 1.2, _guess(f"g{i}", seed, i)) for i in (2, 3, 5)], every)
        stats, options = Stats(), DecodeOptions(120, 5)
        found = [t for r in decode(hash_target(seed), switch, [1], options, stats) for t in r.tokens]
        assert found == plain(hash_logits(seed, 11), 11, [1], 120)
        assert stats.accepted >= 5
        assert stats.dropped_reason is None
        taken = {at["to"] for at in stats.switches}
        assert taken == {"g2", "g3", "g5", PLAIN}
        coupled = DecodeOptions(80, 5, sampling=SamplingParams(1.0, seed=5, acceptance="coupled"))
        wanted = emitted(hash_target(seed), Scripted(lambda *_: Proposal(np.empty(0, np.int64))), [1], coupled)
        assert emitted(hash_target(seed), switch, [1], coupled) == wanted


@pytest.mark.parametrize("every", [1, 2])
def test_the_distribution_of_sampled_text_is_the_targets(every: int) -> None:
    from edgespec.formulas.statistics import chi_square
    from tests.support.toy import sample_texts

    vocab, truth = 5, hash_logits(2, 5, 3)

    def guess(flip: int) -> Callable[[], Control]:
        q = np.full(vocab, 1 / vocab)

        def drawn(tokens: list[int], budget: int) -> Proposal:
            rng = np.random.default_rng()
            return Proposal(rng.integers(0, vocab, budget), None, np.repeat(q[None], budget, 0))

        def named(tokens: list[int], budget: int) -> Proposal:
            return Proposal(np.full(budget, (tokens[-1] + flip) % vocab))

        return lambda: controlled(Scripted(drawn if flip else named), INT4, 0.01)

    switch = Forced([Candidate("a", 1.2, guess(0)), Candidate("b", 1.2, guess(1))], every)
    params = SamplingParams(1.0)
    from tests.support.reference import FunctionTarget

    counts = sample_texts(FunctionTarget(truth, vocab, 64), switch, [1], 3, lambda i: SamplingParams(1.0), 4000)
    assert chi_square(counts, exact(truth, vocab, [1], 3, params)) > 1e-4


def test_a_seeded_text_depends_on_nothing_but_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling: neither what was learned before nor the clock may change which guesses are made."""
    seeded = SamplingParams(1.0, seed=11)
    # times that are nothing like what control was given: by the clock nothing would be drafted
    fresh = three(INT4, 0.1, always(0.6), draws=True)
    expected = fresh.run(monkeypatch, 600, sampling=seeded)
    assert expected.stats.drafted > 100
    used = three(INT4, 0.1, always(0.6), draws=True)
    used.run(monkeypatch, 500, sampling=SamplingParams(1.0))
    used.switch.candidates[0].standing.budget = 0.0
    used.curve, now = DEAR, used.switch.candidates[0].standing.now
    for guesser in used.guessers.values():
        guesser.c *= 7
    again = used.run(monkeypatch, 600, sampling=seeded)
    assert again.tokens == expected.tokens
    assert again.switches == expected.switches
    assert again.stats.histogram == expected.stats.histogram
    assert used.switch.candidates[0].standing.now == now
    free = used.run(monkeypatch, 600, sampling=SamplingParams(1.0))
    assert free.stats.drafted != expected.stats.drafted


def test_seeded_requests_switch_by_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = SamplingParams(1.0, seed=3)
    runs = [three(STOCK, 0.2, draws=True).run(monkeypatch, 300, sampling=seeded) for _ in range(2)]
    assert runs[0].switches == runs[1].switches != []


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["make", "begin", "propose", "observe", "timed"])
def test_a_candidate_that_fails_is_dropped_alone(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    case = three(INT4, 0.05, always(0.8))
    case.switch.candidates[1] = Candidate("heads", 1.2, lambda: controlled(
        Guesser(always(0.8), 0.02, case.clock, name="heads"), INT4, 0.02))  # fmt: skip

    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    if where == "make":
        case.switch.candidates[0] = Candidate("draft", 1.4, fail)
    else:
        setattr(case.guessers["draft"], where, fail)
    made = case.run(monkeypatch, 100)
    (drop,) = made.stats.drops
    assert (drop["method"], drop["error"]) == ("draft", "RuntimeError: broken")
    assert made.switches[0][1:] == ("draft", "heads")
    assert "RuntimeError: broken" in "; ".join(case.switch.details)
    assert case.switch.used == "heads"
    assert made.loss < -0.2
    # it is in again in the next request, once its time has come
    standing = case.switch.candidates[0].standing
    assert not standing.ready
    assert "broken" in case.run(monkeypatch, 20).stats.switches[0]["why"]
    standing.now = standing.until
    assert standing.ready


def test_nonsense_guesses_cost_a_candidate_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three(INT4, 0.05, always(0.8))
    case.guessers["draft"].propose = lambda tokens, budget: Proposal(np.array([10**6]))  # type: ignore[method-assign]
    made = case.run(monkeypatch, 60)
    assert [drop["method"] for drop in made.stats.drops] == ["draft"]
    assert "outside the vocabulary" in made.stats.switches[0]["why"]


def test_when_all_have_failed_decoding_is_plain_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("gone")

    clock = Clock()
    switch = Auto([Candidate("draft", 1.4, fail), Candidate("ngram", 1.0, fail, cheap=True)])
    made = run(monkeypatch, switch, clock, INT4, 50)
    assert made.tokens == text([1], 50)
    assert [drop["method"] for drop in made.stats.drops] == ["draft", "ngram"]
    assert "gone" in (made.stats.dropped_reason or "")


# -- parts -------------------------------------------------------------------------------------------------------------


def test_hidden_states_are_asked_for_only_while_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    target = hash_target(1)
    wanting, not_wanting = (Scripted(lambda tokens, budget: Proposal(np.array([1]))) for _ in range(2))
    wanting.wants = HIDDEN
    seen: list[bool] = []
    wanting.observe = lambda proposal, verdict, output: seen.append(output.hidden is not None)  # type: ignore[method-assign]
    asked: list[bool] = []

    def run(target: Target, wanted: Pass) -> Output:
        asked.append(wanted.hidden)
        return run_pass(target, wanted)

    switch = Forced([Candidate("a", 1.2, lambda: controlled(not_wanting, INT4, 0.0)),
                     Candidate("b", 1.2, lambda: controlled(wanting, INT4, 0.0))], 3)  # fmt: skip

    found = []
    for _ in decode(target, switch, [1], DecodeOptions(30, 3), run=run):
        found.append((switch.in_use, asked[-1]))
    assert {wanted for name, wanted in found if name == "b"} == {True}
    assert {wanted for name, wanted in found if name == "a"} == {False}
    assert seen
    assert all(seen)


@pytest.mark.parametrize("width", [1, 4])
def test_a_width_reaches_whoever_is_in_use(width: int) -> None:
    """One more row is worth its time for one request, and not where four requests draft at once."""
    inner = [Scripted(lambda tokens, budget: Proposal(np.array([1]))) for _ in range(2)]
    controls = [controlled(one, STOCK, 0.1, 0.6) for one in inner]
    switch = Forced([Candidate(f"g{i}", 1.2, partial(controls.__getitem__, i)) for i in range(2)], 2)
    rounds, drafted = Rounds(switch, width=width), []
    for _ in range(4):
        proposal = rounds.propose([1], 1)
        drafted.append((switch.in_use, len(proposal)))
        rounds.learn(proposal, range(len(proposal)))
    assert drafted == [(name, int(width == 1)) for name in ("g0", "g0", "g1", "g1")]
