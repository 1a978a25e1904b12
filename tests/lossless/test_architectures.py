"""Every architecture in int4, with every method: the text is plain decoding's, on stock and native operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.settings import Settings
from edgespec.engine.engine import Engine
from edgespec.engine.loading import load
from edgespec.export.architectures import ARCHITECTURES
from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import Exporter
from edgespec.reports.proof import prove
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.opening import open_slot
from tests.conftest import OPERATORS, THREADS, Written, fixed_skip_set, use_operators
from tests.lossless.test_matrix import CHAINS, plain_greedy
from tests.support import hf
from tests.support.heads import make_heads

PROMPTS = ("the boat that", "There was nothing left to do but wait. She had")
TOKENS = 48
HEADS = ("medusa", "blockwise", "paradecode")
METHODS = ("ngram", "self-spec", "swift", "speculative", *HEADS, "chain")
# one configuration of each, with windows, caps and the like where it has any; swift needs three layers
CASES = {
    config["model_type"]: name
    for name, config in reversed(hf.CONFIGS.items())
    if (config.get("num_hidden_layers") or config["n_layer"]) > 2
}
CASES["granitemoehybrid with state spaces"] = "granite_hybrid_experts"
LOSSLESS = CHAINS | {"paradecode": {"threshold": 0.05}}  # capped logits are never sure


@pytest.fixture
def operators(request: pytest.FixtureRequest) -> Operators:
    """Everything here holds for both kinds."""
    return use_operators(request)


PAIRS = [(kind, each) for kind in sorted(CASES) for each in OPERATORS]
EACH = pytest.mark.parametrize(
    "model_type, operators",
    [pair for pair in PAIRS if pair[1] == "native" or CASES[pair[0]] not in hf.NATIVE_ONLY],
    indirect=["operators"],
)


@pytest.fixture(scope="module")
def maker(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Operators, str], Engine]:
    """(operators, configuration) -> an engine; the draft is the model itself, so that much is accepted."""
    known: dict[tuple[Operators, str], Engine] = {}

    def get(operators: Operators, name: str) -> Engine:
        if (operators, name) not in known:
            folder, source = tmp_path_factory.mktemp("bundle"), str(checkpoint(name))
            options = ExportOptions(
                source,
                folder / "bundle",
                ["speculative", "self-spec", "swift", *HEADS],
                "int4",
                heads=[str(make_heads(folder / kind, kind, source)) for kind in HEADS],
                draft=source,
                context=hf.CONTEXTS.get(name),
                skip_set=fixed_skip_set(folder, source),
                threads=THREADS,
                operators=operators,
            )
            Exporter(options).run()
            known[operators, name] = load(options.output, threads=THREADS, operators=operators)
        return known[operators, name]

    return get


@pytest.fixture
def made(model_type: str, operators: Operators, maker: Callable[[Operators, str], Engine]) -> tuple[str, Engine]:
    """The name of a configuration, and its engine."""
    return CASES[model_type], maker(operators, CASES[model_type])


def test_every_architecture_is_here() -> None:
    assert {hf.CONFIGS[name]["model_type"] for name in CASES.values()} == set(ARCHITECTURES)


@EACH
def test_architectures_are_lossless_in_int4(
    made: tuple[str, Engine], writer: Callable[..., Written], operators: Operators
) -> None:
    name, engine = made
    quantizer = engine.bundle.manifest.target.quantizer
    slot = writer(operators, name, "int4", quantizer).slot("native" if operators == "native" else "strict", 2)
    expected = [plain_greedy(slot, engine.codec.encode(prompt), TOKENS) for prompt in PROMPTS]
    # where rows of a pass cost more, as with experts, control might never guess
    plain = engine.bundle.manifest.target.facts.experts is None
    settings = Settings(max_new_tokens=TOKENS, ignore_eos=True, fallback=False, adaptive=plain)
    drawn = settings.changed(temperature=0.8, seed=3, acceptance="coupled")
    sampled = [engine.generate(prompt, drawn, method="ar").tokens for prompt in PROMPTS]
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for method in METHODS:
        more: dict[str, Any] = LOSSLESS.get(method, {})
        for wanted, greedy in ((settings.changed(**more), True), (drawn.changed(**more), False)):
            for prompt, tokens in zip(PROMPTS, expected if greedy else sampled, strict=True):
                result = engine.generate(prompt, wanted, method=method)
                assert result.tokens == tokens, f"{method} differs from plain decoding after {prompt!r}"
                assert result.method_used == method
                assert result.lossless
                assert result.exact
                drafted[method] = drafted.get(method, 0) + result.stats.drafted
                accepted[method] = accepted.get(method, 0) + result.stats.accepted
    assert all(drafted.values())
    assert accepted["speculative"] > drafted["speculative"] // 2
    assert sum(accepted.values()) < sum(drafted.values())  # rows were rolled back, too


@EACH
def test_architectures_in_trees(made: tuple[str, Engine]) -> None:
    """Rows of a tree add up in another order: equal, or a near-tie."""
    _, engine = made
    settings = Settings(max_new_tokens=40, ignore_eos=True, fallback=False)
    for method, more in (("medusa", {"nodes": 8}), ("speculative", {"branch": (2,), "gamma": 3})):
        (proof,) = prove(engine, PROMPTS, settings.changed(**more), [method])
        assert proof.lossless, (method, proof.differences)


@EACH
def test_architectures_keep_their_cache(made: tuple[str, Engine]) -> None:
    """What a method leaves in the cache is what a fresh prefill of its text writes, every row of it."""
    _, engine = made
    fresh = open_slot(engine.model)
    for method in ("self-spec", "swift", "medusa", "blockwise", "paradecode"):
        result = engine.generate(PROMPTS[0], method=method, max_new_tokens=40, ignore_eos=True, fallback=False)
        tokens = engine.codec.encode(PROMPTS[0]) + result.tokens
        session = engine.sessions.take(tokens)
        try:
            assert session.target.tokens == tokens[:-1]
            held = session.target.snapshot()
        finally:
            engine.sessions.give_back(session)
        fresh.follow([])
        fresh.prefill(tokens[:-1])
        for key, expected in fresh.snapshot().items():  # [kv_heads, tokens, head_dim]
            wrong = np.linalg.norm(held[key] - expected, axis=(0, 2)) / np.linalg.norm(expected, axis=(0, 2))
            assert wrong.max() < 0.05, f"{method}: row {wrong.argmax()} of {key} differs by {wrong.max():.1%}"
