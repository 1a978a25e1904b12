"""Lossy acceptance: the tokens that each rule accepts, the rows that it reads, and that it is never called lossless."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import EMPTY, Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.settings import Settings
from edgespec.decoding.stats import Stats
from edgespec.decoding.target import BEST, Output, Pass
from edgespec.decoding.verify import EXACT, Accept, RowSampler, verify
from edgespec.drafters.plain import Plain
from edgespec.errors import EdgespecError, InvalidRequest
from edgespec.plugins.drawing.lantern import Lantern
from edgespec.plugins.lossy import All, Distance, TopK, Typical
from tests.decoding.test_verify import FixedRows
from tests.support.reference import FunctionTarget
from tests.support.toy import Scripted, chain, emitted, hash_logits, hash_target, random_tree

VOCAB = 11
P = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]]


def accepted(guesses: list[int], accept: Accept, p: list[list[float]] = P) -> tuple[int, int, set[int]]:
    """Return the number of accepted tokens of a chain, the token after them, and the rows that were read."""
    rows = FixedRows(p)
    verdict = verify(chain(guesses), rows, Noise(0), accept)
    assert list(verdict.path) == list(range(len(verdict.path)))
    return len(verdict.path), verdict.next_token, rows.read


def test_typical_acceptance_is_the_formula_of_the_paper() -> None:
    for row in P:
        entropy = -sum(p * math.log(p) for p in row)
        least = min(0.09, 0.3 * math.exp(-entropy))
        for token, p in enumerate(row):
            assert accepted([token], Typical(), [row, P[0]])[0] == (p > least)
    flat = [[0.94 / 6] * 6 + [0.06]] * 2  # the second threshold is the lower one here: .3 exp(-1.91) = .044
    assert accepted([6], Typical(), flat)[0] == 1
    assert accepted([6], Typical(delta=0.5), flat)[0] == 0  # .074
    # exactly at the threshold is not enough
    assert accepted([1], Typical(epsilon=0.25, delta=100.0), [P[2], P[0]])[0] == 0
    assert accepted([1], Typical(epsilon=0.2499, delta=100.0), [P[2], P[0]])[0] == 1
    # a token that cannot follow, among ones that can
    assert accepted([2], Typical(), [[0.5, 0.5, 0, 0], P[0]])[0] == 0


@pytest.mark.parametrize("k", range(1, 5))
def test_top_k_is_a_place_among_the_likeliest(k: int) -> None:
    for token in range(4):
        assert accepted([token], TopK(k=k))[0] == (token < k)
        assert accepted([token], TopK(k=k), [P[2], P[0]])[0] == (token < k)  # ties by id, like argmax


def test_a_guess_stands_for_what_is_most_like_it() -> None:
    """Of LANTERN's equations: the nearest codes lend a guess what they have together, up to delta."""
    near = {0: [1, 3], 1: [0, 2], 3: [2, 1, 0]}
    for guess, k, delta, stands in [(1, 1, 0.5, 1), (1, 1, 0.49, 0), (3, 2, 0.9, 0), (3, 3, 0.95, 1), (0, 1, 0.1, 1)]:
        rule = Lantern(k=k, delta=delta, near=lambda token: np.array(near[token]))
        assert accepted([guess], rule)[0] == stands, (guess, k, delta)  # code 0 is the likeliest
    read, q = Accept.parse("lantern:2,0.4"), np.array([0.1, 0.2, 0.0, 0.7])
    assert isinstance(read, Lantern)
    rule = read
    assert (rule.k, rule.delta, rule.lossless) == (2, 0.4, False)
    rule = replace(rule, near=lambda token: np.array(near[token]))
    drawn = Proposal(np.array([3]), None, q[None])
    verdicts = [verify(drawn, FixedRows(P), Noise(seed), rule) for seed in range(4000)]
    assert abs(np.mean([len(one.path) for one in verdicts]) - (P[0][3] + P[0][2]) / 0.7) < 0.03  # 1 would be too much
    refused = {one.next_token for one in verdicts if not one.path}
    assert refused == {0, 1}  # what was lent is gone


@pytest.mark.parametrize("distance", range(4))
def test_distance_is_from_the_likeliest(distance: int) -> None:
    for token in range(4):
        assert accepted([token], Distance(distance=distance))[0] == (token <= distance)
        assert accepted([token], Distance(distance=distance), [P[1], P[0]])[0] == (3 - token <= distance)


def test_only_rows_of_what_stands_are_looked_at() -> None:
    assert accepted([3, 3, 3], All()) == (3, 0, {3})
    assert accepted([2, 0, 1], TopK(k=2)) == (0, 0, {0})
    assert accepted([1, 2, 3], TopK(k=2)) == (2, 0, {0, 1, 2})
    assert accepted([0, 3, 0], Typical()) == (3, 0, {0, 1, 2, 3})
    tree = Proposal(np.array([3, 0, 1, 2, 3]), np.array([-1, -1, 0, 1, 1]))
    rows = FixedRows([*P, P[0], P[0]])
    verify(tree, rows, Noise(0), TopK(k=2))
    assert rows.read == {0, 2}  # below node 0, which is refused, nothing is read
    nan = FixedRows([P[0], [math.nan] * 4])
    assert verify(chain([3]), nan, Noise(0), Typical()).next_token == 0


def test_the_longest_path_wins_then_the_likelier_then_the_first() -> None:
    #        0 (.5)   1 (.3)   2 (.15)   below 1: 0, below 0: 3 and 2
    tree = Proposal(np.array([0, 1, 2, 0, 3, 2]), np.array([-1, -1, -1, 1, 0, 0]))
    p = np.full((7, 4), 0.25)
    p[0], p[2] = P[0], [1, 0, 0, 0]
    found = verify(tree, FixedRows(p.tolist()), Noise(0), Typical())
    assert found.path == [1, 3]  # .3 * 1 beats .5 * .25
    p[2] = P[2]
    assert verify(tree, FixedRows(p.tolist()), Noise(0), Typical()).path == [0, 4]  # .5 * .25, the first such
    p[1] = [1, 0, 0, 0]
    assert verify(tree, FixedRows(p.tolist()), Noise(0), Typical()).path == [1, 3]  # the longer one
    assert verify(tree, FixedRows(p.tolist()), Noise(0), All()).path == [0, 4]
    assert verify(tree, FixedRows(p.tolist()), Noise(0), TopK(k=4)).path == [1, 3]


def test_of_guesses_within_a_distance_the_nearest_wins() -> None:
    tree = Proposal(np.array([0, 1, 3]), np.array([-1, -1, -1]))
    p = [[0.1, 0.2, 0.6, 0.1], *P]
    assert verify(tree, FixedRows(p), Noise(0), Distance(distance=2)).path == [1]
    assert verify(tree, FixedRows([P[0], *P]), Noise(0), Distance(distance=3)).path == [0]


def test_lossy_rules_do_not_look_at_q() -> None:
    q = np.tile([0.0, 0.0, 0.0, 1.0], (2, 1))
    found = verify(Proposal(np.array([1, 2]), None, q), FixedRows(P), Noise(0), TopK(k=2))
    assert list(found.path) == [0, 1]


def test_nothing_guessed_is_plain_decoding() -> None:
    for accept in (Typical(), All(), Accept(min_block=3)):
        assert verify(EMPTY, FixedRows(P), Noise(0), accept).next_token == 0


@pytest.mark.parametrize("rule", [Accept(), Typical(), TopK(k=1)])
def test_a_block_stands_whatever_the_model_says(rule: Accept) -> None:
    wrong = [3, 1, 1]
    for least in range(5):
        accept = replace(rule, min_block=least)
        q = np.tile(np.array([0.0, 0.5, 0.0, 0.5]), (3, 1))
        for proposal in (chain(wrong), Proposal(np.array(wrong), None, q)):
            for block in (False, True):
                rows = FixedRows([[1.0, 0, 0, 0]] * 4, block=block)
                found = verify(proposal, rows, Noise(0), accept)
                assert list(found.path) == list(range(min(least, 3)))
                assert rows.read == {min(least, 3)}
    tree = Proposal(np.array(wrong), np.array([-1, -1, -1]))
    assert not verify(tree, FixedRows([[1.0, 0, 0, 0]] * 4), Noise(0), Accept(min_block=2)).path


# -- through the loop --------------------------------------------------------------------------------------------------


class Guesses(Scripted):
    """Does not mind a pass without logits."""

    def observe(self, proposal: Proposal, verdict: Verdict, output: Output) -> None:
        pass


def wrong_tree(seed: int) -> Scripted:
    rng = np.random.default_rng(seed)
    return Guesses(lambda tokens, budget: random_tree(rng, 6, VOCAB, lambda path: int(rng.integers(VOCAB))))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.4, logit_bias={1: 1.0})])
@pytest.mark.parametrize("accept", [Typical(), TopK(k=1), Distance(distance=0)])
def test_greedy_text_is_plain_text_where_a_rule_leaves_only_the_likeliest(
    accept: Accept, params: SamplingParams
) -> None:
    for seed in range(40):
        options = DecodeOptions(15, 4, frozenset([3]), params, accept=accept)
        wanted = emitted(hash_target(seed), Plain(), [1, 2], options)
        assert emitted(hash_target(seed), wrong_tree(seed), [1, 2], options) == wanted


class BestTarget(FunctionTarget):
    """A target that can return only the likeliest tokens."""

    can = FunctionTarget.can | {BEST}
    asked = 0

    def run(self, wanted: Pass) -> Output:
        output = super().run(wanted)
        if not wanted.top:
            return output
        self.asked += 1
        logits = output.logits
        ids = logits.argmax(1)
        return Output(np.empty((0, VOCAB), np.float32), best=(ids, logits[np.arange(len(ids)), ids]))


@pytest.mark.parametrize("rule", ["exact", "typical", "top-k:2", "distance:2", "all"])
def test_rules_work_without_all_logits_or_ask_for_them(rule: str) -> None:
    for seed in range(10):
        options = DecodeOptions(15, 4, accept=Accept.parse(rule))
        stats, target = Stats(), BestTarget(hash_logits(seed, VOCAB), VOCAB)
        text = [t for r in decode(target, wrong_tree(seed), [1, 2], options, stats) for t in r.tokens]
        assert text == emitted(hash_target(seed), wrong_tree(seed), [1, 2], options)
        assert (target.asked > 0) is (rule == "exact")
        assert stats.dropped_reason is None


def test_every_guess_stands_up_to_eos_and_the_length() -> None:
    cycle = Scripted(lambda tokens, budget: chain([1, 2, 7, 4][:budget]))
    options = DecodeOptions(9, 4, frozenset([99]), accept=All())
    rounds = list(decode(hash_target(1), cycle, [5], options))
    assert [r.accepted for r in rounds] == [4, 3]
    assert sum(len(r.tokens) for r in rounds) == 9
    ended = list(decode(hash_target(1), cycle, [5], DecodeOptions(9, 4, frozenset([7]), accept=All())))
    assert [r.tokens for r in ended] == [[1, 2, 7]]
    assert ended[-1].finish == "eos"


def test_the_rank_and_the_likeliest_are_of_adjusted_logits() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 0.5, -np.inf]], np.float32)
    rows = RowSampler(logits, [0], EMPTY, SamplingParams(1.0), Noise(0))
    assert [rows.rank(0, token) for token in range(5)] == [2, 0, 1, 3, 5]
    assert rows.likeliest(0) == 1
    shifted = RowSampler(logits, [0], EMPTY, SamplingParams(1.0, logit_bias={3: 9.0, 1: -math.inf}), Noise(0))
    assert [shifted.rank(0, token) for token in range(5)] == [2, 5, 1, 0, 5]
    assert shifted.likeliest(0) == 3
    damaged = RowSampler(np.full((1, 5), np.nan, np.float32), [0], EMPTY, SamplingParams(1.0), Noise(0))
    with pytest.raises(EdgespecError, match="finite"):
        damaged.rank(0, 1)
    with pytest.raises(EdgespecError, match="finite"):
        damaged.likeliest(0)


# -- how it is reported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, accept",
    [
        ("exact", EXACT),
        ("typical", Typical()),
        ("typical:0.2,0.5", Typical(epsilon=0.2, delta=0.5)),
        ("top-k:3", TopK(k=3)),
        ("distance:2", Distance(distance=2)),
        ("all", All()),
    ],
)
def test_rules_are_read(text: str, accept: Accept) -> None:
    assert Accept.parse(text) == accept
    assert Settings().changed(accept=text).accept == accept
    assert accept.lossless is (text == "exact")
    assert len(accept.approximations) == (text != "exact")
    both = Accept.parse(text, 2)
    assert not both.lossless
    assert len(both.approximations) == 1 + (text != "exact")


@pytest.mark.parametrize(
    "text",
    ["", "typcial", "top-k", "top-k:", "top-k:0", "top-k:x", "top-k:1,2", "distance", "distance:-1", "all:1",
     "exact:2", "typical:0.1", "typical:0,1", "typical:nan,1", "typical:1,2,3", "typical:a,b"],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"expected|unknown acceptance rule .*\n.*edgespec.acceptance_rules"):
        Accept.parse(text)


@pytest.mark.parametrize(
    "kind, bad",
    [(Typical, {"epsilon": 0}), (Typical, {"delta": math.inf}), (TopK, {"k": 0}), (Distance, {"distance": -1}),
     (Lantern, {"delta": -0.5}), (Accept, {"min_block": -1}), (Typical, {"min_block": 1.5})],
)  # fmt: skip
def test_values_out_of_range_are_refused(kind: type[Accept], bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="expected"):
        kind(**bad)  # type: ignore[arg-type]
