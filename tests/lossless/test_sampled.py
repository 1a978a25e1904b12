"""On real graphs: sampled text is the bundle's own plain text, token by token or in distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.decoding.drafter import Drafter
from edgespec.decoding.loop import DecodeOptions, decode
from edgespec.decoding.noise import Noise
from edgespec.decoding.proposal import Proposal, Verdict
from edgespec.decoding.sampling import SamplingParams, distribution
from edgespec.decoding.target import Output, Pass, SkipSet, Target
from edgespec.decoding.verify import EXACT, Accept, RowSampler
from edgespec.drafters.plain import Plain
from edgespec.drafters.self_spec import SelfSpec, skip_set
from edgespec.drafters.speculative import Speculative
from edgespec.engine.engine import Engine
from edgespec.formulas.cost import CostModel
from edgespec.formulas.statistics import chi_square
from edgespec.plugins.swift.drafter import StepCost, Swift
from edgespec.plugins.swift.search import OnlineSearch
from edgespec.runtimes.files.formats import FORMATS
from edgespec.runtimes.files.manifest import SkipSetPart
from edgespec.runtimes.opening import open_slot
from edgespec.runtimes.slots.shared import Model
from edgespec.runtimes.slots.slot import Slot
from tests.conftest import OPERATORS, PROMPTS, THREADS
from tests.lossless.test_matrix import CHAINS
from tests.support.passes import run_draft
from tests.support.reference import FunctionTarget

# -- sampled: the same tokens where the rule promises them -------------------------------------------------------------


SEEDED = {
    "ngram": "rejection",
    "self-spec": "coupled",
    "speculative": "coupled",
    "swift": "coupled",
    "chain": "coupled",
    "medusa": "rejection",
    "blockwise": "rejection",
    "paradecode": "coupled",
}


# each method with both kinds of operators; formats in turn, each kind beginning with another one
@pytest.mark.parametrize(
    "operators, form, method",
    [
        (kind, FORMATS[(at + 2 * shift) % len(FORMATS)], method)
        for shift, kind in enumerate(OPERATORS)
        for at, method in enumerate(SEEDED)
    ],
    indirect=["operators"],
)
def test_seeded_sampling_equals_plain(engine: Callable[..., Engine], form: str, method: str) -> None:
    made = engine(form)
    accepted, texts = 0, set()
    for seed, prompt in enumerate(PROMPTS[:2]):
        settings: dict[str, Any] = {
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.95,
            "repetition_penalty": 1.05,
            "seed": seed,
            "max_new_tokens": 60,
            "ignore_eos": True,
            "acceptance": SEEDED[method],
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
    assert len(texts) == 2


def test_rejection_sampling_repeats_with_its_seed(engine: Callable[..., Engine]) -> None:
    made = engine("int4")
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_new_tokens": 60, "ignore_eos": True}
    for method in ("self-spec", "speculative", "paradecode", "swift"):
        first = made.generate(PROMPTS[0], method=method, **settings)
        made.generate(PROMPTS[1], method=method, temperature=1.0, seed=6)  # learned values must not matter
        assert made.generate(PROMPTS[0], method=method, **settings).tokens == first.tokens
        assert first.stats.drafted or method == "paradecode"  # its exits are seldom confident of sampled text
        assert first.exact == (first.stats.drafted == 0)
        assert first.lossless


# -- sampled: the same distribution ------------------------------------------------------------------------------------

DRAWS = 3000
ALTERNATIVES = 4  # top_k: two tokens have 4 x 4 texts


class RememberedTarget(FunctionTarget):
    """A target that caches logits: each different pass runs once on the real slot, and never again.

    The loop asks for the same few prefixes twenty thousand times.  Logits depend only on the prefix in strict mode, as
    the tests of the slot check bit for bit.  Those of a self-draft depend on the committed tokens and the draft's rows.
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

    def run(self, wanted: Pass) -> Output:
        if not wanted.draft:
            return super().run(wanted)
        assert wanted.tokens is not None
        self._draft_rows[wanted.offset :] = wanted.tokens.tolist()
        key = tuple(self.tokens), tuple(self._draft_rows)
        if key not in self.known_drafts:
            self._stand(self.tokens)
            rows = np.array(self._draft_rows, np.int64)
            self.known_drafts[key] = run_draft(self.slot, rows, 0, wanted.skip).logits.copy()
        return Output(self.known_drafts[key])


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
        drafter = Speculative(draft, target.vocab_size, branch=branch)
    elif method == "self-spec":
        skip = skip_set(manifest.methods["self-spec"].skip or SkipSetPart())
        drafter = SelfSpec(target, SkipSet.all_high(target.layers) if target.slot.planes else skip)
    elif method == "swift":
        step, costs = StepCost(0.1, 0.1), CostModel({1: 1.0, 2: 1.0})  # rows are free: siblings are worth it
        search = OnlineSearch(target.layers, SkipSet((1, 3), (1, 3)), step, costs.v)
        drafter = Swift(target, search, step, costs, branch=(3,))
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
    """Return the tokens that can follow ``prefix``, with their probabilities by the graph's own logits."""
    probs = distribution(target.function(tuple(prefix)), sampling(), prefix)
    return [(int(token), float(probs[token])) for token in np.flatnonzero(probs)]


# the rule knows no format, and neither do the drafters
@pytest.mark.parametrize(
    "operators, form, method",
    [
        ("stock", "int4", "self-spec"),
        ("stock", "w8a8", "swift"),
        ("native", "int4", "speculative"),
        ("native", "int8", "self-spec"),
    ],
    indirect=["operators"],
)
def test_rejection_sampling_keeps_the_distribution(engine: Callable[..., Engine], form: str, method: str) -> None:
    seen, expected, accepted = drafted_pairs(engine(form), method)
    assert 0 < accepted < 2 * DRAWS  # guesses were accepted and refused
    assert chi_square(seen, expected) > 1e-3


@pytest.mark.parametrize(
    "operators, branch, block",
    [("stock", (2,), False), ("native", (2, 2), False), ("native", None, True)],
    indirect=["operators"],
)
def test_trees_and_blocks_keep_the_distribution(
    engine: Callable[..., Engine], branch: tuple[int, ...] | None, block: bool
) -> None:
    seen, expected, accepted = drafted_pairs(engine("fp32"), "speculative", branch, block)
    assert 0 < accepted < 2 * DRAWS
    assert chi_square(seen, expected) > 1e-3


def accept_all(proposal: Proposal, rows: RowSampler, noise: Noise, accept: Accept = EXACT) -> Verdict:
    """Lossy: accepts every draft token with a nonzero probability."""
    path = []
    for node, token in enumerate(proposal.tokens.tolist()):
        if rows.distribution(node)[token] == 0:
            break
        path.append(node)
    return Verdict(path, rows.choose(len(path)))


def forget_the_residual(proposal: Proposal, rows: RowSampler, noise: Noise, accept: Accept = EXACT) -> Verdict:
    """Lossy: after a rejection the token is sampled from p, not from the residual of p and q."""
    path = []
    for node, token in enumerate(proposal.tokens.tolist()):
        assert proposal.probs is not None
        if noise.uniform(rows.position(node), 1 << 20) * proposal.probs[node, token] >= rows.distribution(node)[token]:
            break
        path.append(node)
    return Verdict(path, rows.choose(len(path)))


@pytest.mark.parametrize("operators", ["native"], indirect=True)
@pytest.mark.parametrize("rule", [accept_all, forget_the_residual])
def test_a_lossy_rule_is_noticed(
    engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    rule: Callable[[Proposal, RowSampler, Noise], Verdict],
) -> None:
    monkeypatch.setattr("edgespec.decoding.loop.verify", rule)
    seen, expected, _ = drafted_pairs(engine("fp32"), "speculative")
    assert chi_square(seen, expected) < 1e-9
