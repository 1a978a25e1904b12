"""On real graphs: whatever guesses, the text is the bundle's own plain text, token by token or in distribution."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.accept import EXACT, Accept
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.request import DecodeOptions
from edgespec.decoding.rows import Rows
from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.decoding.settings import Settings
from edgespec.decoding.target import Pass, SkipSet, Target
from edgespec.drafters.ar import Plain
from edgespec.drafters.self_spec import SelfSpec
from edgespec.drafters.skip_search.search import OnlineSearch
from edgespec.drafters.speculative import DraftModel
from edgespec.drafters.swift import StepCost, Swift
from edgespec.engine.engine import Engine
from edgespec.formulas.cost import CostModel
from edgespec.reports.proof import prove
from edgespec.runtimes.files.manifest import FORMATS, Operators
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, PROMPTS, TARGET, THREADS, Written, use_operators
from tests.support.reference import FunctionTarget
from tests.support.toy import chi_square

METHODS = ("ar", "ngram", "self-spec", "speculative", "swift", "medusa", "blockwise", "paradecode", "chain", "auto")
# chains instead of trees, and exits that are also wrong
CHAINS: dict[str, dict[str, Any]] = {
    "medusa": {"nodes": 1},
    "paradecode": {"threshold": 0.3},
    "chain": {"proposers": ("ngram", "self-spec", "speculative")},
    "auto": {"nodes": 1},
}
DRAFTING = METHODS[1:]
TOKENS = 200
STORIES = [f"{opening} {name}" for name in ("Tim", "a cat", "Lily and Ben", "the old tree", "Mum")
           for opening in ("Once upon a time,", "One day", "There was", "Look, said")]  # fmt: skip
STORY_MODELS = "stories260K", "draft-32x2-for-stories260K"

Greedy = Callable[..., list[list[int]]]


@pytest.fixture(params=OPERATORS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Everything here holds for both kinds."""
    return use_operators(request)


@pytest.fixture(scope="module")
def plainly(writer: Callable[..., Written]) -> Greedy:
    """Greedy texts one row at a time, on stock operators over a graph without gates: no loop, no drafter, no engine."""
    known: dict[tuple[Operators, str, str], list[list[int]]] = {}

    def decode_all(engine: Engine, target: str, prompts: Sequence[str], count: int) -> list[list[int]]:
        kind = engine.operators.kind
        key = kind, target, engine.bundle.manifest.target.format
        quantizer = engine.bundle.manifest.target.quantizer
        if key not in known:
            slot = writer(*key, quantizer).slot("native" if kind == "native" else "strict", THREADS)
            known[key] = [plain_greedy(slot, engine.codec.encode(prompt), count) for prompt in prompts]
        return known[key]

    return decode_all


def plain_greedy(slot: Slot, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding with nothing but passes of one row."""
    slot.follow([])
    slot.prefill(prompt[:-1])
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(slot.forward(np.array(tokens[-1:], np.int64)).logits[0].argmax()))
        slot.keep([0])
    return tokens[len(prompt) :]


def assert_equals_plain(
    engine: Engine, method: str, prompts: Sequence[str], expected: list[list[int]], **settings: Any
) -> None:
    """Every prompt's greedy tokens are the expected ones, and the method did draft, with and without success."""
    drafted = accepted = 0
    settings = CHAINS.get(method, {}) | settings
    for prompt, tokens in zip(prompts, expected, strict=True):
        result = engine.generate(prompt, method=method, max_new_tokens=len(tokens), ignore_eos=True, **settings)
        assert result.tokens == tokens, f"{method} differs from plain decoding after {prompt!r}"
        assert result.method_used == method or (method == "auto" and result.method_used in engine.methods)
        assert result.operators == engine.operators.kind
        assert result.stats.dropped_reason is None
        assert result.exact
        assert result.lossless
        assert result.stats.tokens == len(tokens)
        drafted, accepted = drafted + result.stats.drafted, accepted + result.stats.accepted
    if method == "ar":
        assert drafted == 0
    else:
        assert 0 < accepted < drafted


# -- greedy: the same tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMATS)
def test_greedy_equals_plain(engine: Callable[..., Engine], plainly: Greedy, form: str, method: str) -> None:
    made = engine(form)
    assert_equals_plain(made, method, PROMPTS, plainly(made, TARGET, PROMPTS, TOKENS), fallback=False)


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("form", FORMATS)
def test_greedy_equals_plain_at_fixed_gamma(
    engine: Callable[..., Engine], plainly: Greedy, form: str, gamma: int
) -> None:
    made = engine(form)
    expected = [tokens[:80] for tokens in plainly(made, TARGET, PROMPTS, TOKENS)[:4]]
    for method in DRAFTING:
        assert_equals_plain(made, method, PROMPTS[:4], expected, adaptive=False, gamma=gamma)


@pytest.mark.parametrize("branch", [(2,), (3, 2, 1)])
@pytest.mark.parametrize("form", ["int4", "fp32"])
def test_trees_differ_from_plain_decoding_at_near_ties_only(
    engine: Callable[..., Engine], form: str, branch: tuple[int, ...]
) -> None:
    """The rows of a tree stand elsewhere in the cache, and attention adds up in that order."""
    made = engine(form)
    for sampled in ({}, {"temperature": 0.8, "seed": 1, "acceptance": "coupled"}):
        settings = Settings(max_new_tokens=60, ignore_eos=True).changed(branch=branch, gamma=3, **sampled)
        (found,) = prove(made, PROMPTS[:6], settings, ["speculative"])
        assert found.lossless, found.differences
        assert found.equal >= 3
    result = made.generate(PROMPTS[0], settings, method="speculative", fallback=False)
    assert result.stats.dropped_reason is None
    assert 0 < result.stats.accepted < result.stats.drafted
    assert result.lossless
    assert not result.exact


@pytest.mark.parametrize("form", FORMATS)
def test_greedy_equals_plain_on_stories(
    engine: Callable[..., Engine], plainly: Greedy, shared: Path, form: str
) -> None:
    target, draft = (str(shared / "data" / "models" / name) for name in STORY_MODELS)
    made = engine(form, target, draft)
    expected = plainly(made, target, STORIES, TOKENS // 2)
    for method in made.methods:
        assert_equals_plain(made, method, STORIES, expected, fallback=False)


@pytest.mark.parametrize("nodes", [3, 12])
@pytest.mark.parametrize("form", FORMATS)
def test_trees_differ_only_at_near_ties(engine: Callable[..., Engine], form: str, nodes: int) -> None:
    made = engine(form)
    settings = Settings(max_new_tokens=100, ignore_eos=True, fallback=False).changed(nodes=nodes)
    (proof,) = prove(made, PROMPTS, settings, ["medusa"])
    assert proof.lossless, proof.differences
    assert proof.equal >= len(PROMPTS) * 3 // 4
    result = made.generate(PROMPTS[0], settings, method="medusa")
    assert result.lossless
    assert not result.exact
    assert result.stats.accepted > 0


@pytest.mark.parametrize("method", METHODS[:5])
def test_stories_equal_transformers(engine: Callable[..., Engine], shared: Path, method: str) -> None:
    known = json.loads((Path(__file__).parents[1] / "data" / "stories260k_greedy.json").read_text("utf-8"))
    made = engine("fp32", *(str(shared / "data" / "models" / name) for name in STORY_MODELS))
    assert made.codec.encode(known["prompt"]) == known["prompt_tokens"]
    settings = Settings(max_new_tokens=len(known["tokens"]), fallback=False).changed(**CHAINS.get(method, {}))
    result = made.generate(known["prompt"], settings, method=method)
    assert result.tokens == known["tokens"]


@pytest.mark.parametrize("form", FORMATS)
def test_greedy_equals_plain_while_swift_searches(
    engine: Callable[..., Engine], plainly: Greedy, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all the time it wants, also beside other proposers."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    made = engine(form)
    expected = plainly(made, TARGET, PROMPTS, TOKENS)[:4]
    more: dict[str, Any] = {"fallback": False, "search": 1.0, "kind": f"{form}-test"}
    assert_equals_plain(made, "swift", PROMPTS[:4], expected, **more)
    assert_equals_plain(made, "chain", PROMPTS[:4], expected, proposers=("ngram", "swift", "speculative"), **more)
    assert_equals_plain(made, "chain", PROMPTS[:4], expected, proposers=("swift", "self-spec"), adaptive=False, **more)
    result = made.generate(PROMPTS[0], method="swift", max_new_tokens=100, ignore_eos=True, **more)
    assert re.search(r"[1-9]\d* sets tried", result.reason), result.reason
    assert list((tmp_path / "swift").glob("*.json"))


# -- sampled: the same tokens where the rule promises them -------------------------------------------------------------


@pytest.mark.parametrize(
    "method, acceptance",
    [
        ("ngram", "rejection"),
        ("self-spec", "coupled"),
        ("speculative", "coupled"),
        ("swift", "coupled"),
        ("chain", "coupled"),
        ("medusa", "rejection"),
        ("blockwise", "rejection"),
        ("paradecode", "coupled"),
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_seeded_sampling_equals_plain(engine: Callable[..., Engine], form: str, method: str, acceptance: str) -> None:
    made = engine(form)
    accepted, texts = 0, set()
    for seed, prompt in enumerate(PROMPTS[:6]):
        settings: dict[str, Any] = {
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.95,
            "repetition_penalty": 1.05,
            "seed": seed,
            "max_new_tokens": 60,
            "ignore_eos": True,
            "acceptance": acceptance,
        }
        plain = made.generate(prompt, method="ar", **settings)
        result = made.generate(prompt, method=method, fallback=False, **settings, **CHAINS.get(method, {}))
        assert result.tokens == plain.tokens
        assert result.exact
        accepted += result.stats.accepted
        texts.add(tuple(result.tokens))
        other = made.generate(prompt, method="ar", **{**settings, "seed": seed + 100})
        assert other.tokens != plain.tokens, "the seed is not used"
    assert accepted > 0
    assert len(texts) == 6


def test_rejection_sampling_repeats_with_its_seed(engine: Callable[..., Engine]) -> None:
    made = engine("int4")
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_new_tokens": 60, "ignore_eos": True}
    for method in ("self-spec", "speculative", "paradecode", "swift"):
        first = made.generate(PROMPTS[0], method=method, **settings)
        made.generate(PROMPTS[1], method=method, temperature=1.0, seed=6)  # what was learned here must not matter
        assert made.generate(PROMPTS[0], method=method, **settings).tokens == first.tokens
        assert not first.exact
        assert first.lossless


# -- sampled: the same distribution ------------------------------------------------------------------------------------

DRAWS = 6000
ALTERNATIVES = 4  # top_k: two tokens have 4 x 4 texts


class RememberedTarget(FunctionTarget):
    """A graph whose logits are looked up: each different pass runs once on the real slot, and never again.

    The loop asks for the same few prefixes twenty thousand times.  Logits are functions of the prefix alone (in strict
    mode; the tests of the slot say so bit for bit), those of a self-draft of the committed tokens and of its own rows.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.known: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.known_drafts: dict[tuple[tuple[int, ...], tuple[int, ...]], NDArray[np.float32]] = {}
        super().__init__(self._logits, slot.vocab_size, slot.context)
        self.layers = slot.layers

    def _stand(self, tokens: Sequence[int]) -> None:
        same = self.slot.follow(tokens)
        if same < len(tokens):
            self.slot.prefill(tokens[same:])

    def _logits(self, prefix: tuple[int, ...]) -> NDArray[np.float32]:
        if prefix not in self.known:
            self._stand(prefix[:-1])
            self.known[prefix] = self.slot.forward(np.array(prefix[-1:], np.int64)).logits[0].copy()
        return self.known[prefix]

    def forward_skipped(self, tokens: NDArray[np.int64], offset: int, skip: SkipSet) -> Pass:
        self._draft_rows[offset:] = tokens.tolist()
        key = tuple(self.tokens), tuple(self._draft_rows)
        if key not in self.known_drafts:
            self._stand(self.tokens)
            self.known_drafts[key] = self.slot.forward_skipped(
                np.array(self._draft_rows, np.int64), 0, skip
            ).logits.copy()
        return Pass(self.known_drafts[key])


def sampling(seed: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=1.6, top_k=ALTERNATIVES, seed=seed)


def drafted_pairs(
    made: Engine, method: str, branch: tuple[int, ...] | None = None, block: bool = False
) -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int]:
    """First two tokens of many sampled texts, what the graph itself says they should be, and how many were guessed."""
    manifest = made.bundle.manifest
    prompt = made.codec.encode(PROMPTS[0])
    target = RememberedTarget(open_slot(made.model))
    expected: dict[tuple[int, ...], float] = {}
    for first, p in outcomes(target, prompt):
        for second, q in outcomes(target, [*prompt, first]):
            expected[first, second] = p * q
    assert len(expected) == ALTERNATIVES**2
    assert abs(sum(expected.values()) - 1) < 1e-9
    drafter: Drafter = Plain()
    if method == "speculative":
        assert manifest.draft is not None
        graph = made.operators.graph(manifest.draft, strict=False)
        draft: Target = RememberedTarget(open_slot(Model(made.bundle.path, manifest.draft, graph, THREADS)))
        drafter = DraftModel(draft, target.vocab_size, branch=branch)
    elif method == "self-spec":
        skip = manifest.methods["self-spec"].skip
        assert skip is not None
        drafter = SelfSpec(target, SkipSet(tuple(skip.attention), tuple(skip.mlp)), stop=0.0)
    elif method == "swift":
        step, costs = StepCost(0.1, 0.1), CostModel({1: 1.0, 2: 1.0})  # rows are free: siblings pay
        search = OnlineSearch(target.layers, SkipSet((1, 3), (1, 3)), step, costs.v)
        drafter = Swift(target, search, step, costs, branch=(3,))
        drafter._first_stop = 0.0
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(DRAWS):
        text: list[int] = []
        # three tokens asked for, two looked at: a round may then guess both of these two
        drawing = replace(sampling(seed), verification="block" if block else "token")
        for item in decode(target, drafter, prompt, DecodeOptions(3, 2, sampling=drawing)):
            text += item.tokens
            accepted += item.accepted
            if len(text) >= 2:
                break
        seen[text[0], text[1]] += 1
    return seen, expected, accepted


def outcomes(target: RememberedTarget, prefix: list[int]) -> list[tuple[int, float]]:
    """The tokens that can follow, with their probabilities by the graph's own logits."""
    probs = distribution(target.function(tuple(prefix)), sampling(), prefix)
    return [(int(token), float(probs[token])) for token in np.flatnonzero(probs)]


@pytest.mark.parametrize("method", ["self-spec", "speculative", "swift"])
@pytest.mark.parametrize("form", FORMATS)
def test_rejection_sampling_keeps_the_distribution(engine: Callable[..., Engine], form: str, method: str) -> None:
    seen, expected, accepted = drafted_pairs(engine(form), method)
    assert 0 < accepted < 2 * DRAWS  # guesses were accepted and refused
    assert chi_square(seen, expected) > 1e-3


@pytest.mark.parametrize("branch, block", [((2,), False), ((2, 2), False), (None, True)])
def test_trees_and_blocks_keep_the_distribution(
    engine: Callable[..., Engine], branch: tuple[int, ...] | None, block: bool
) -> None:
    seen, expected, accepted = drafted_pairs(engine("fp32"), "speculative", branch, block)
    assert 0 < accepted < 2 * DRAWS
    assert chi_square(seen, expected) > 1e-3


def accept_all(proposal: Proposal, rows: Rows, noise: Noise, accept: Accept = EXACT) -> Verdict:
    """Lossy: every guess the target could have made stands."""
    path = []
    for node, token in enumerate(proposal.tokens.tolist()):
        if rows.distribution(node)[token] == 0:
            break
        path.append(node)
    return Verdict(path, rows.choose(len(path)))


def forget_the_residual(proposal: Proposal, rows: Rows, noise: Noise, accept: Accept = EXACT) -> Verdict:
    """Lossy: after a refusal the token is drawn from p, not from what p has and q has not."""
    path = []
    for node, token in enumerate(proposal.tokens.tolist()):
        assert proposal.probs is not None
        if noise.uniform(rows.position(node), 1 << 20) * proposal.probs[node, token] >= rows.distribution(node)[token]:
            break
        path.append(node)
    return Verdict(path, rows.choose(len(path)))


@pytest.mark.parametrize("rule", [accept_all, forget_the_residual])
def test_a_lossy_rule_is_noticed(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, rule: Callable[[Proposal, Rows, Noise], Verdict]
) -> None:
    monkeypatch.setattr("edgespec.decoding.loop.verify", rule)
    seen, expected, _ = drafted_pairs(engine("fp32"), "speculative")
    assert chi_square(seen, expected) < 1e-9
